"""Workers that die: requeueing, fencing, ends, quarantine."""

import pytest

from engine.protocol import Finish, TokenDelta, Usage
from gateway.errors import MODEL_FAILED, UNAVAILABLE, ApiError, WorkerLost
from gateway.settings.settings import Settings
from gateway.workers.worker_client import LossCause
from tests.gateway.scripted_worker import Rig, hosted, served


async def test_without_a_token_it_is_sent_again_once_at_its_old_place() -> None:
    rig, worker = served(num_requests=2)
    streams = {name: rig.ask(name) for name in "abc"}
    assert worker.submitted == ["a", "b"]
    worker.die()
    rig.dispatcher.check_integrity()
    assert not rig.dispatcher.ready
    worker.connect()
    assert worker.submitted == ["a", "b", "a/2", "b/2"]
    assert streams["a"].attempt == 2
    worker.die()
    for name in "ab":
        with pytest.raises(ApiError) as caught:
            await anext(streams[name])
        assert caught.value.kind is UNAVAILABLE
        assert caught.value.retry_after_s is not None
    assert rig.dispatcher.snapshot().num_retries == 2
    with pytest.raises(ApiError) as caught:  # never sent, but two deaths in a row are enough
        await anext(streams["c"])
    assert caught.value.kind == MODEL_FAILED


async def test_with_tokens_it_goes_on_behind_them() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    worker.step(TokenDelta("a", 1, [1, 2], cached_tokens=3))
    worker.step(TokenDelta("a", 1, [3]))
    worker.die()
    rig.dispatcher.check_integrity()
    worker.connect()
    submit = worker.running["a", 2]
    assert (submit.generated, submit.cached_tokens) == ([1, 2, 3], 3)
    worker.step(TokenDelta("a", 2, [4], cached_tokens=1))
    worker.finish("a", attempt=2, token_ids=(5,), generated=5)
    events = [event async for event in stream]
    assert [token for event in events for token in event.token_ids] == [1, 2, 3, 4, 5]
    assert stream.attempt == 2
    rig.dispatcher.ack_usage(["a"])
    assert worker.acked == [("a", 2)]
    snapshot = rig.dispatcher.snapshot()
    assert (snapshot.num_retries, snapshot.num_resumed) == (0, 1)
    assert snapshot.service_s_by_tenant == {"t": 0.1}


async def test_with_tokens_a_second_death_ends_it_as_lost() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    worker.tokens("a", 1, 2)
    worker.die()
    worker.connect()  # before another token
    worker.die("killed by signal 9")
    assert (await anext(stream)).token_ids == [1, 2]
    with pytest.raises(WorkerLost, match="signal 9"):
        await anext(stream)


async def test_an_end_before_another_token_is_one_after_tokens() -> None:
    """What the first attempt has made is billed: the worker's word waits for its posting."""
    rig, worker = served()
    stream = rig.ask("a")
    worker.tokens("a", 1)
    worker.die()
    worker.connect()
    worker.finish("a", "error", attempt=2, generated=1)
    assert (await anext(stream)).finish is not None
    assert worker.acked == []
    rig.dispatcher.ack_usage(["a"])
    assert worker.acked == [("a", 2)]


@pytest.mark.parametrize("moment", ["waits", "dies", "refused"])
async def test_a_client_that_leaves_between_attempts_is_told_what_was_used(moment: str) -> None:
    rig, worker = served()
    stream = rig.ask("a")
    worker.step(TokenDelta("a", 1, [1, 2], cached_tokens=3))
    if moment == "dies":
        stream.abort()
    worker.die()
    if moment == "waits":
        stream.abort()
    elif moment == "refused":
        worker.connect()
        stream.abort()
        worker.refuse("a", "draining", retryable=True)
    events = [event async for event in stream]
    assert events[-1].finish == Finish("abort", Usage(4, 3, 2, 0.0))
    assert rig.dispatcher.snapshot().num_running == 0


async def test_a_worker_that_wakes_up_finds_its_attempts_given_up() -> None:
    """It was stopped for a while: what it says of attempt 1 is acknowledged and nobody's."""
    rig, worker = served()
    stream = rig.ask("a")
    worker.tokens("a", 1)
    epoch = worker.epoch
    worker.die("silent for 5.0 s")
    worker.reachable, worker.epoch = True, epoch
    worker.greet(epoch)
    worker.status()
    assert worker.submitted == ["a", "a/2"]
    assert worker.running["a", 2].generated == [1]
    worker.tokens("a", 66, attempt=1)
    worker.finish("a", "length", attempt=1, token_ids=(67,), generated=3, service_s=7.0)
    assert worker.acked == [("a", 1)]
    worker.finish("a", attempt=2, token_ids=(2,), generated=2)
    events = [event async for event in stream]
    assert [token for event in events for token in event.token_ids] == [1, 2]
    assert events[-1].finish is not None
    assert events[-1].finish.usage.generated_tokens == 2
    assert [name for name, _ in rig.orphans] == ["a"]
    assert rig.dispatcher.snapshot().service_s_by_tenant == {"t": 0.1}


async def test_a_worker_is_emptied_without_a_loss() -> None:
    rig = Rig()
    one = rig.worker("one")
    streams = {name: rig.ask(name) for name in ("begun", "fresh", "leaves")}
    one.tokens("begun", 1, 2)
    streams["leaves"].abort()
    two = rig.worker("two")
    one.states = {"m": "draining"}
    one.status()
    assert rig.dispatcher.move_off("one") == 2
    rig.dispatcher.check_integrity()
    assert one.aborted == ["leaves", "begun", "fresh"]
    assert two.submitted == ["begun/2", "fresh/2"]
    assert two.running["begun", 2].generated == [1, 2]
    for name in one.aborted:  # their ends, of which one is awaited
        one.finish(name, "abort", generated=2 if name == "begun" else 0)
    assert set(one.acked) == {("leaves", 1), ("begun", 1), ("fresh", 1)}
    # Neither a strike of its model nor a loss of its own: a death is survived after that.
    two.die()
    two.connect()
    assert two.submitted[-2:] == ["begun/3", "fresh/3"]
    assert rig.dispatcher.snapshot().quarantined == {}
    assert rig.dispatcher.snapshot().num_resumed == 2
    assert rig.dispatcher.move_off("one") == 0


async def test_time_in_the_queue_is_what_was_waited_and_not_what_was_streamed() -> None:
    rig, worker = served(Settings(queue_timeout_s=10.0))
    stream = rig.ask("a")
    worker.tokens("a", 1)
    rig.clock.now_s += 300.0
    worker.status()
    worker.die()
    rig.advance(4.0)
    assert rig.dispatcher.explain("a")[0].waited_s == 4.0
    worker.connect()
    rig.clock.now_s += 50.0
    assert stream.queue_s == 4.0
    rig.dispatcher.move_off("w")  # which has not been heard of for a while
    rig.clock.now_s += 3.0
    assert stream.queue_s == 7.0
    worker.status()
    assert worker.submitted[-1] == "a/3"
    worker.states = {"m": "draining"}
    worker.status()
    rig.dispatcher.move_off("w")
    rig.advance(9.0)
    assert rig.dispatcher.snapshot().num_waiting == 1
    rig.advance(1.0)
    assert stream.take() is not None
    with pytest.raises(ApiError, match="waited 10 s in the queue"):
        stream.take()


async def test_an_aborted_request_is_not_sent_again() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    stream.abort()
    worker.die()
    worker.connect()
    assert worker.submitted == ["a"]
    event = await anext(stream)
    assert event.finish is not None
    assert event.finish.reason == "abort"


async def test_messages_of_an_earlier_attempt_or_epoch_are_dropped() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    old_epoch = worker.epoch
    worker.die()
    worker.connect()
    worker.tokens("a", 66)  # attempt 1, said by the new process
    new_epoch, worker.epoch = worker.epoch, old_epoch
    worker.tokens("a", 67, attempt=2)
    worker.status()  # of a process that is gone
    worker.epoch = new_epoch
    worker.tokens("a", 1, attempt=2)
    worker.finish("a", attempt=2)
    events = [event async for event in stream]
    assert [token for event in events for token in event.token_ids] == [1]
    assert rig.dispatcher.snapshot().num_late_messages == 2
    rig.dispatcher.ack_usage(["a"])
    assert worker.acked == [("a", 2)]


async def test_a_finish_of_the_lost_attempt_is_acknowledged_and_not_billed() -> None:
    """The connection broke but the worker lives: it aborts attempt 1 and tells its end."""
    rig, worker = served()
    stream = rig.ask("a")
    worker.die("silent")
    worker.connect()
    worker.finish("a", "abort", generated=3, attempt=1)
    assert worker.acked == [("a", 1)]
    worker.tokens("a", 1, attempt=2)
    worker.finish("a", attempt=2, generated=1)
    events = [event async for event in stream]
    assert events[-1].finish is not None
    assert events[-1].finish.usage.generated_tokens == 1


async def test_service_of_lost_work_is_not_charged() -> None:
    rig, worker = served(num_requests=1)
    rig.ask("a", "a")
    worker.tokens("a", 1)
    rig.ask("b", "b")
    rig.ask("a2", "a")
    worker.die()
    worker.connect()
    assert worker.submitted == ["a", "a/2"]
    worker.finish("a", "abort", attempt=2, service_s=0.0)
    worker.status()
    worker.finish("b", service_s=5.0)
    worker.status()
    assert worker.submitted == ["a", "a/2", "b", "a2"]
    assert rig.dispatcher.snapshot().service_s_by_tenant == {"a": 0.0, "b": 5.0}


async def test_waiting_starts_anew_after_a_death() -> None:
    rig, worker = served(Settings(queue_timeout_s=10.0))
    rig.ask("a")
    rig.advance(9.0)
    worker.die()
    rig.advance(9.0)
    assert rig.dispatcher.snapshot().num_waiting == 1
    rig.advance(1.0)
    assert rig.dispatcher.snapshot().num_waiting == 0


async def test_another_worker_takes_over() -> None:
    rig = Rig()
    one = rig.worker("one")
    rig.ask("a")
    two = rig.worker("two")
    one.die()
    assert two.submitted == ["a/2"]


async def test_a_model_that_kills_two_workers_in_a_row_is_quarantined() -> None:
    rig, worker = served(states={"m": "resident", "n": "resident"})
    killer = rig.ask("a")
    worker.die("killed by signal 11")
    worker.connect()
    waiting = rig.ask("n1", model="n")
    worker.die("killed by signal 11")
    behind = rig.dispatcher.snapshot()
    assert set(behind.quarantined) == {"m"}
    assert waiting.attempt == 2  # the other model has one strike and goes on
    with pytest.raises(ApiError):
        await anext(killer)
    with pytest.raises(ApiError, match="signal 11") as caught:
        rig.ask("b")
    assert caught.value.kind == MODEL_FAILED
    worker.connect()
    rig.dispatcher.load_model("m")
    rig.ask("c")
    assert worker.submitted[-1] == "c"


async def test_a_request_that_kills_two_workers_at_once_is_no_accident() -> None:
    rig = Rig()
    workers = [rig.worker(f"worker-{number}") for number in range(3)]
    rig.ask("a")
    for _ in range(2):
        (busy,) = [worker for worker in workers if worker.running and worker.reachable]
        busy.die("killed by signal 11")
        rig.advance(0.1)
    assert set(rig.dispatcher.snapshot().quarantined) == {"m"}


async def test_two_workers_that_die_together_are_one_strike() -> None:
    rig = Rig()
    workers = [rig.worker(f"worker-{number}", num_requests=1) for number in range(2)]
    for number in range(2):
        rig.ask(f"a{number}")
    for worker in workers:
        worker.die("killed by signal 9")
    assert rig.dispatcher.snapshot().quarantined == {}


@pytest.mark.parametrize("cause", ["silence", "planned"])
async def test_only_a_process_that_ended_by_itself_is_a_strike(cause: LossCause) -> None:
    rig, worker = served()
    for number in range(3):
        rig.ask(f"a{number}")
        worker.die("gone", cause)
        worker.connect()
    assert rig.dispatcher.snapshot().quarantined == {}
    worker.die("killed by signal 11")
    assert rig.dispatcher.snapshot().quarantined == {}, "the first strike"


async def test_work_done_between_two_kills_clears_the_strike() -> None:
    rig, worker = served()
    for i in range(4):
        rig.ask(f"a{i}")
        worker.die()
        worker.connect()
        worker.finish(f"a{i}", attempt=2)
        worker.status()
    assert rig.dispatcher.snapshot().quarantined == {}


async def test_a_new_revision_lifts_the_quarantine() -> None:
    rig, worker = served()
    rig.ask("a")
    for _ in range(2):
        worker.die()
        worker.connect()
    assert "m" in rig.dispatcher.snapshot().quarantined
    rig.dispatcher.set_catalog([hosted("m", "r2")])
    rig.ask("b", revision="r2")
    assert worker.submitted[-1] == "b"


async def test_a_model_that_left_the_catalog_is_not_sent_again() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    rig.dispatcher.set_catalog([hosted("n")])
    worker.die()
    with pytest.raises(ApiError, match="no longer available"):
        await anext(stream)


async def test_claims_of_a_dead_worker_are_void() -> None:
    rig, worker = served(states={"m": "cold"})
    rig.ask("a")
    assert worker.loads == ["m"]
    worker.die()
    worker.connect()
    assert worker.loads == ["m", "m"]


async def test_a_gateway_that_comes_back_counts_submits_from_where_the_worker_is() -> None:
    rig, worker = served(num_requests=2)
    worker.die("the connection broke")
    worker.connect(status=False)
    worker.status(num_received=7)  # of an earlier connection
    for name in "abc":
        rig.ask(name)
    assert worker.submitted == ["a", "b"]


async def test_what_has_tokens_goes_on_where_a_refusal_is_for_good() -> None:
    rig, worker = served()
    stream = rig.ask("a", max_tokens=50)
    worker.tokens("a", 7)
    worker.die()
    worker.connect()
    assert "a/2" in worker.submitted
    other = rig.worker("other")
    worker.refuse("a", "context_length_exceeded", retryable=False)
    rig.advance(0.05)
    rig.dispatcher.check_integrity()
    assert other.submitted == ["a/2"], "at once, and not to the same again"
    worker.status()
    assert other.running["a", 2].generated == [7]
    other.refuse("a", "context_length_exceeded", retryable=False)
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(ApiError, match="does not fit the model"):  # nobody is left
        await anext(stream)


async def test_what_every_worker_left_has_refused_is_refused_again() -> None:
    rig, worker = served()
    stream = rig.ask("a", max_tokens=50)
    worker.tokens("a", 7)
    worker.die()
    worker.connect()
    other = rig.worker("other", num_requests=0)
    worker.refuse("a", "context_length_exceeded", retryable=False)
    other.die()
    for _ in range(3):
        worker.status()
        rig.advance(0.05)
    assert ("a", 2) in worker.running, "nobody else can say"
    worker.refuse("a", "context_length_exceeded", retryable=False)
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(ApiError, match="does not fit the model"):
        await anext(stream)


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
async def test_token_ids_that_cannot_be_end_their_request_alone(token_id: int) -> None:
    rig, worker = served()
    bad, good = rig.ask("bad"), rig.ask("good")
    deltas = [TokenDelta("bad", 1, [7, token_id]), TokenDelta("good", 1, [8])]
    worker.step(*deltas)
    assert (await anext(good)).token_ids == [8]
    with pytest.raises(ApiError, match="failed while processing"):
        await anext(bad)
    assert worker.aborted == ["bad"]
    worker.finish("bad", "abort")
    worker.status()
    rig.dispatcher.check_integrity()
