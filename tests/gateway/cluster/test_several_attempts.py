"""Attempts with several gateway processes: losses, moves, and all that may cross them."""

import pytest

from engine.protocol import Abort, Refused, TokenDelta, ToWorker
from gateway.errors import ApiError, WorkerLost
from gateway.settings.settings import Settings
from tests.gateway.cluster.several_kit import Peer, Several
from tests.gateway.cluster.test_several_gateways import ended, rest, tokens_of
from tests.gateway.scripted_worker import ScriptedWorker


@pytest.mark.parametrize("first", ["gateway-0", "dispatcher"])
async def test_a_stream_that_two_workers_died_with_ends(first: str) -> None:
    several = Several()
    one, _ = several.gateways
    stream = several.ask(one, "r")
    for attempt in (1, 2):
        several.worker.tokens("r", attempt)
        several.worker.die(first)
        several.deliver()
        several.worker.start()
        several.deliver()
    assert several.worker.submitted == [("r", 1), ("r", 2)]
    with pytest.raises(WorkerLost):
        await rest(stream)
    snapshot = several.dispatcher.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)


async def test_a_worker_is_emptied_without_a_loss_however_often() -> None:
    several = Several()
    one, two = several.gateways
    streams = several.ask(one, "begun"), several.ask(two, "fresh")
    several.worker.tokens("begun")
    several.deliver()
    for attempt in range(2, 6):
        assert several.dispatcher.move_off("w") == 2
        several.settle()
        assert sorted(several.worker.running) == [("begun", attempt), ("fresh", attempt)]
        several.worker.tokens("begun", attempt)
        several.deliver()
    several.worker.die()
    several.worker.start()
    several.settle()  # the first loss
    assert several.worker.submits["begun", 6].generated == [7, 8, 9, 10, 11]
    for name in ("begun", "fresh"):
        several.worker.finish(name, 6)
    several.deliver()
    assert tokens_of(await rest(streams[0])) == [7, 8, 9, 10, 11, 12]
    assert tokens_of(await rest(streams[1])) == [7]
    snapshot = several.dispatcher.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
    assert snapshot.quarantined == {}


@pytest.mark.parametrize("crossing", ["end", "abort", "loss", "refusal", "dispatcher"])
async def test_what_crosses_a_move(crossing: str) -> None:
    several = Several()
    one, _ = several.gateways
    stream = several.ask(one, "r")
    if crossing != "refusal":
        several.worker.tokens("r")
        several.deliver()
    several.dispatcher.move_off("w")  # of which its gateway has not heard
    if crossing == "end":
        several.worker.finish("r")
    elif crossing == "abort":
        stream.abort()
    elif crossing == "loss":
        several.worker.die("gateway-0")
        several.worker.start()
    elif crossing == "refusal":
        peer = several.worker.running.pop(("r", 1))
        peer.heard.on_refused("w", Refused(several.worker.epoch, "r", 1, "draining", "", True))
    else:
        several.kill_dispatcher()
        several.take_over()
    several.deliver()
    several.settle()
    for request_id, attempt in list(several.worker.running):
        several.worker.finish(request_id, attempt)
    several.deliver()
    wanted = {"abort": [7], "refusal": [7]}.get(crossing, [7, 8])
    assert tokens_of(await rest(stream)) == wanted
    # It was granted to the same worker again, which the dispatcher saw die after that.
    assert stream.attempt == {"refusal": 2, "loss": 3}.get(crossing, 1)
    snapshot = several.dispatcher.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)


async def test_a_loss_that_only_the_dispatcher_saw_is_one_for_all() -> None:
    several = Several()
    stream = several.ask(several.gateways[0], "r")
    several.worker.tokens("r")
    several.deliver()
    several.dispatcher.on_lost("w", several.worker.epoch, "silent", "silence")
    several.dispatcher.on_connected("w", several.worker.epoch)
    several.settle()
    assert list(several.worker.running) == [("r", 2)]
    several.kill_dispatcher()
    several.take_over()  # which knows of it by the gateway, which knows of it by the grant
    assert several.dispatcher._running.live["r"].num_losses == 1
    several.worker.die()
    several.worker.start()
    several.settle()
    assert several.worker.submitted[-1] == ("r", 2)
    with pytest.raises(WorkerLost):
        await rest(stream)


async def test_a_loss_that_only_the_gateway_saw_is_one_for_all() -> None:
    several = Several(num_requests=1)
    several.ask(several.gateways[0], "r")
    several.worker.tokens("r")
    several.settle()
    several.dispatcher.move_off("w")  # there is no room for it anywhere
    several.worker.die("gateway-0")  # before its gateway hears of that
    several.deliver()
    ticket = several.dispatcher._running.live["r"]
    assert (ticket.state, ticket.attempt, ticket.num_losses) == ("waiting", 2, 1)
    assert ticket.num_before == 1


async def test_what_is_being_aborted_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several()
    stream = several.ask(several.gateways[0], "r")
    several.worker.tokens("r")
    receive = several.worker.receive

    def no_abort(peer: Peer, message: ToWorker) -> None:
        if not isinstance(message, Abort):
            receive(peer, message)

    monkeypatch.setattr(several.worker, "receive", no_abort)
    stream.abort()
    several.dispatcher.move_off("w")
    several.settle()
    assert not ended(stream)
    several.worker.finish("r", reason="abort", generated=0)
    several.deliver()
    assert tokens_of(await rest(stream)) == [7]
    assert several.worker.submitted == [("r", 1)]
    assert several.dispatcher.snapshot().num_waiting == 0


async def test_a_client_that_leaves_between_attempts_is_told_what_was_used() -> None:
    several = Several()
    stream = several.ask(several.gateways[0], "r")
    several.worker.tokens("r")
    several.worker.die()
    several.deliver()
    stream.abort()
    several.deliver()
    events = await rest(stream)
    assert events[-1].finish is not None
    assert events[-1].finish.reason == "abort"
    assert events[-1].finish.usage.generated_tokens == 1
    several.worker.start()
    several.settle()
    assert several.worker.submitted == [("r", 1)]


async def test_another_dispatcher_knows_what_was_lost_before() -> None:
    several = Several()
    one, _ = several.gateways
    stream = several.ask(one, "r")
    several.worker.tokens("r")
    several.worker.die()
    several.deliver()
    several.kill_dispatcher()
    several.worker.start()
    several.take_over()
    several.settle()
    assert several.worker.submits["r", 2].generated == [7]
    several.worker.die("dispatcher")
    several.deliver()
    several.worker.start()
    several.settle()
    assert several.worker.submitted[-1] == ("r", 2)
    with pytest.raises(WorkerLost):
        await rest(stream)


async def test_what_a_worker_refuses_half_way_goes_to_another() -> None:
    several = Several()
    one = several.gateways[0]
    stream = several.ask(one, "r")
    several.worker.tokens("r")
    several.deliver()
    several.worker.die()
    several.worker.start()
    several.settle()
    peer = several.worker.running.pop(("r", 2))
    other = ScriptedWorker("v", states={"m": "resident"})
    several.dispatcher.add_worker(other.observing)
    one.dispatcher.add_worker(other)
    other.connect()
    refused = Refused(several.worker.epoch, "r", 2, "context_length_exceeded", "too long", False)
    peer.heard.on_refused("w", refused)
    several.deliver()
    several.advance(0.05)
    assert other.submitted == ["r/2"]
    other.tokens("r", 8, attempt=2)
    other.finish("r", attempt=2, generated=2)
    several.deliver()
    assert tokens_of(await rest(stream)) == [7, 8]


async def test_a_second_silence_that_only_the_dispatcher_hears_ends_nothing() -> None:
    several = Several()
    stream = several.ask(several.gateways[0], "r")
    for attempt in (1, 2, 3):
        several.worker.tokens("r", attempt)
        several.deliver()
        several.dispatcher.on_lost("w", several.worker.epoch, "silent", "silence")
        several.dispatcher.on_connected("w", several.worker.epoch)
        several.settle()
        assert list(several.worker.running) == [("r", attempt + 1)]
        assert list(several.dispatcher._running.live) == ["r"]
    several.worker.die()
    several.worker.start()
    several.settle()
    with pytest.raises(WorkerLost):
        await rest(stream)
    assert list(several.dispatcher._running.live) == []


async def test_token_ids_that_cannot_be_end_their_request_alone() -> None:
    several = Several()
    one = several.gateways[0]
    streams = [several.ask(one, name) for name in ("bad", "good")]
    deltas = [TokenDelta("bad", 1, [7, 1 << 32]), TokenDelta("good", 1, [7])]
    several.worker.running["bad", 1].heard.on_deltas("w", several.worker.epoch, deltas)
    several.deliver()
    assert list(several.worker.running) == [("good", 1)]
    with pytest.raises(ApiError, match="failed while processing"):
        await rest(streams[0])
    assert streams[1].has_event
    assert list(several.dispatcher._running.live) == ["good"]


async def test_the_queue_of_a_gateway_is_as_long_as_its_workers_allow() -> None:
    several = Several(settings=Settings(max_queue_total=2, max_queue_per_tenant=2), num_requests=1)
    gateway = several.gateways[0]
    for number in range(3):
        worker = ScriptedWorker(f"v{number}", num_requests=0, states={"m": "resident"})
        gateway.dispatcher.add_worker(worker)
        worker.connect()
    for number in range(8):
        gateway.ask(f"r{number}", f"t{number}")
    with pytest.raises(ApiError, match="the queue of this server is full"):
        gateway.ask("last", "t")
