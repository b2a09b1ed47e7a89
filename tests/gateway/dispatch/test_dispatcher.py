"""The dispatcher's queue: order, bounds, leases, loads, aborts, catalog."""

import msgspec
import pytest

from engine.protocol import (
    Constraint,
    Finish,
    RefusalCode,
    Submit,
    SwapRecord,
    TokenLogprobs,
)
from gateway.dispatch.tickets import RequestStream
from gateway.errors import (
    CONTEXT_LENGTH,
    INVALID_CONSTRAINT,
    INVALID_REQUEST,
    MODEL_FAILED,
    MODEL_NOT_FOUND,
    QUEUE_FULL,
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
    ErrorKind,
)
from gateway.settings.settings import Settings
from tests.gateway.scripted_worker import (
    KV_BYTES,
    Rig,
    hosted,
    prepared,
    principal,
    served,
)


async def end_of(stream: RequestStream) -> Finish:
    """Reads to the finish."""
    events = [event async for event in stream]
    finish = events[-1].finish
    assert finish is not None
    return finish


async def error_of(stream: RequestStream) -> ErrorKind:
    with pytest.raises(ApiError) as caught:
        await anext(stream)
    return caught.value.kind


async def test_a_request_is_granted_at_once_and_its_events_come_back() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    assert worker.submitted == ["a"]
    worker.tokens("a", 7)
    worker.finish("a", token_ids=(8,), generated=2)
    events = [event async for event in stream]
    assert [token for event in events for token in event.token_ids] == [7, 8]
    assert events[-1].finish is not None
    rig.dispatcher.check_integrity()
    assert rig.dispatcher.snapshot().service_s_by_tenant == {"t": 0.1}


async def test_all_a_worker_has_to_know_is_in_the_submit() -> None:
    rig, worker = served()
    constraint = Constraint("regex", "a+")
    request = msgspec.structs.replace(
        prepared("a"), logprobs=3, prompt_logprobs=2, constraint=constraint, num_choices=1
    )
    stream = rig.dispatcher.run(request, principal("t"))
    (submit,) = worker.running.values()
    assert (submit.logprobs, submit.prompt_logprobs, submit.constraint) == (3, 2, constraint)
    scores = [TokenLogprobs(-0.5, [(7, -0.5)]), TokenLogprobs(-1.5, [])]
    worker.tokens("a", 7, logprobs=scores[:1], prompt_logprobs=scores)
    worker.tokens("a", 8, logprobs=scores[1:])
    event = await anext(stream)
    assert (event.token_ids, list(event.logprobs)) == ([7, 8], scores)
    assert list(event.prompt_logprobs) == scores
    worker.tokens("a", 9)
    assert not (await anext(stream)).prompt_logprobs


async def test_the_usage_of_choices_is_acknowledged_together() -> None:
    rig, worker = served()
    for name in ("a#0", "a#1", "b"):
        rig.ask(name)
        worker.tokens(name, 7)
        worker.finish(name)
    assert worker.acked == []
    rig.dispatcher.ack_usage(["a"])
    assert worker.acked == [("a#0", 1), ("a#1", 1)]
    rig.dispatcher.ack_usage(["b", "a"])
    assert worker.acked[2:] == [("b", 1)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("invalid_constraint", INVALID_CONSTRAINT), ("invalid_sampling", INVALID_REQUEST)],
)
async def test_what_a_worker_cannot_do_is_the_callers_to_change(
    code: RefusalCode, kind: ErrorKind
) -> None:
    rig, worker = served()
    stream = rig.ask("a")
    worker.refuse("a", code, retryable=False)
    assert await error_of(stream) == kind


async def test_a_constraint_may_be_refused_after_the_request_was_taken() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    worker.finish("a", "refused", error="no such keyword")
    with pytest.raises(ApiError, match="cannot be enforced: no such keyword") as caught:
        await anext(aiter(stream))
    assert caught.value.kind == INVALID_CONSTRAINT
    assert worker.acked == [("a", 1)]


async def test_the_tenant_with_less_service_goes_first() -> None:
    rig, worker = served(num_requests=1)
    for i in range(4):
        rig.ask(f"a{i}", "a")
    for i in range(4):
        rig.ask(f"b{i}", "b")
    for _ in range(8):
        worker.finish(worker.submitted[-1].split("/")[0], service_s=1.0)
        worker.status()
        rig.dispatcher.check_integrity()
    assert worker.submitted == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


async def test_weights_share_service() -> None:
    rig, worker = served(num_requests=1)
    rig.ask("first", "x")
    for i in range(20):
        rig.ask(f"heavy{i}", "heavy", weight=3.0)
        rig.ask(f"light{i}", "light")
    for _ in range(16):
        worker.finish(worker.submitted[-1], service_s=1.0)
        worker.status()
    heavy = sum(name.startswith("heavy") for name in worker.submitted)
    assert heavy == 12


async def test_grants_under_way_are_subtracted_from_the_lease() -> None:
    rig, worker = served(num_requests=2)
    for name in "abcd":
        rig.ask(name)
    assert worker.submitted == ["a", "b"]
    worker.status(num_received=0)  # a status from before they arrived frees nothing
    worker.status(num_received=1)
    assert worker.submitted == ["a", "b"]
    worker.finish("a")
    worker.status()
    assert worker.submitted == ["a", "b", "c"]


async def test_memory_shared_by_models_is_granted_once() -> None:
    rig, worker = served(kv_tokens=25, states={"m": "resident", "n": "resident"})
    # The first of each model goes whatever the figures say; 2 x 10 tokens of 25 are then taken.
    for name, model in (("a", "m"), ("b", "n"), ("c", "m"), ("d", "n")):
        rig.ask(name, f"t-{name}", model)
    assert worker.submitted == ["a", "b"]


async def test_a_head_that_does_not_fit_is_waited_for() -> None:
    rig, worker = served(kv_tokens=50)
    rig.ask("small0", "s")
    large = rig.ask("large", "l", prompt=30, max_tokens=12)
    rig.ask("small1", "s")
    worker.status()
    # 40 tokens are free: small1 would fit, but the large one is before it.
    assert worker.submitted == ["small0"]
    worker.finish("small0")
    worker.status()
    assert worker.submitted == ["small0", "large"]
    assert large.queue_s == 0.0


async def test_other_workers_go_on_beside_a_head_that_waits() -> None:
    rig = Rig()
    one = rig.worker("one", num_requests=1)
    two = rig.worker("two", states={"n": "resident"})
    rig.ask("a0", "a")
    rig.ask("a1", "a")
    rig.ask("b", "b", "n")
    assert (one.submitted, two.submitted) == (["a0"], ["b"])


async def test_a_model_that_is_nowhere_blocks_nobody_and_is_loaded() -> None:
    rig, worker = served()
    cold = rig.ask("cold", model="n")
    rig.ask("warm")
    assert worker.loads == ["n"]
    assert worker.submitted == ["warm"]
    rig.advance(0.1)
    assert worker.loads == ["n"]  # claimed once
    worker.states["n"] = "resident"
    worker.status()
    assert worker.submitted == ["warm", "cold"]
    assert cold.queue_s == pytest.approx(0.1)


async def test_an_old_lease_offers_nothing() -> None:
    rig, worker = served()
    rig.advance(2.5)
    rig.ask("a")
    assert worker.submitted == []
    worker.status()
    assert worker.submitted == ["a"]


async def test_full_queues_are_refused_with_a_wait() -> None:
    rig = Rig(Settings(max_queue_per_tenant=2, max_queue_total=3))
    for i in range(2):
        rig.ask(f"a{i}", "a")
    with pytest.raises(ApiError) as mine:
        rig.ask("a2", "a")
    rig.ask("b0", "b")
    with pytest.raises(ApiError) as everyone:
        rig.ask("b1", "b")
    for caught in (mine, everyone):
        assert caught.value.kind == QUEUE_FULL
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1.0
    assert rig.dispatcher.snapshot().num_queue_rejections == 2


async def test_waiting_ends_at_the_bound() -> None:
    rig = Rig(Settings(queue_timeout_s=5.0))
    stream = rig.ask("a")
    rig.advance(4.9)
    assert rig.dispatcher.snapshot().num_waiting == 1
    rig.advance(0.2)
    assert await error_of(stream) == UNAVAILABLE
    assert rig.dispatcher.snapshot().num_queue_timeouts == 1


async def test_abort_of_a_waiting_request_ends_it_at_once() -> None:
    rig = Rig()
    stream = rig.ask("a")
    stream.abort()
    finish = await end_of(stream)
    assert (finish.reason, finish.usage.prompt_tokens) == ("abort", 0)


async def test_abort_of_a_running_request_goes_to_the_worker_once() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    stream.abort()
    stream.abort()
    assert worker.aborted == ["a"]
    worker.finish("a", "abort", generated=0)
    assert (await end_of(stream)).reason == "abort"
    assert worker.acked == [("a", 1)]  # no token was delivered: nothing is owed


async def test_a_client_that_does_not_read_is_aborted_and_still_gets_the_end() -> None:
    rig, worker = served(Settings(max_stream_buffer_tokens=2))
    stream = rig.ask("a")
    for token in range(5):
        worker.tokens("a", token)
    assert worker.aborted == ["a"]
    worker.finish("a", "abort", generated=5)
    events = [event async for event in stream]
    assert events[0].token_ids == [0, 1]
    assert stream.overflowed
    assert rig.dispatcher.snapshot().num_clients_too_slow == 1


async def test_usage_with_tokens_is_acknowledged_when_the_ledger_says_so() -> None:
    rig, worker = served()
    rig.ask("a")
    worker.tokens("a", 1)
    worker.finish("a")
    assert worker.acked == []
    worker.finish("a")  # told again after a Hello
    assert worker.acked == []
    rig.dispatcher.ack_usage(["a", "unknown"])
    assert worker.acked == [("a", 1)]


async def test_finishes_nobody_waits_for_go_to_the_ledger_or_are_acknowledged() -> None:
    rig, worker = served()
    worker.finish("old")
    assert rig.orphans[0][0] == "old"
    assert worker.acked == [("old", 1)]
    rig.claims = True
    worker.finish("older")
    assert worker.acked == [("old", 1)]
    rig.dispatcher.ack_usage(["older"])
    assert worker.acked == [("old", 1), ("older", 1)]
    assert rig.dispatcher.snapshot().num_late_messages == 2


@pytest.mark.parametrize("attempts", [(1, 2), (2, 1)])
async def test_of_several_attempts_that_nobody_waits_for_the_last_is_kept(
    attempts: tuple[int, int],
) -> None:
    rig, worker = served()
    rig.claims = True
    for attempt in attempts:
        worker.finish("old", attempt=attempt)
    assert worker.acked == [("old", 1)]
    rig.dispatcher.ack_usage(["old"])
    assert worker.acked == [("old", 1), ("old", 2)]


async def test_an_engine_failure_before_tokens_is_an_error_and_after_them_an_end() -> None:
    rig, worker = served()
    early = rig.ask("a")
    late = rig.ask("b")
    worker.finish("a", "error", generated=0, error="boom")
    assert (await error_of(early)).status == 500
    worker.tokens("b", 5)
    worker.finish("b", "error", error="boom")
    assert (await end_of(late)).reason == "error"


async def test_refused_for_now_waits_at_its_old_place() -> None:
    rig, worker = served(num_requests=2)
    for name in "abc":
        rig.ask(name)
    worker.refuse("a", "overloaded", retryable=True)
    rig.advance(0.1)
    assert worker.submitted == ["a", "b"]  # not asked again before the next status
    worker.status()
    assert worker.submitted == ["a", "b", "a"]


async def test_refused_for_good_is_an_error() -> None:
    rig, worker = served()
    long = rig.ask("a")
    gone = rig.ask("b")
    worker.refuse("a", "context_length_exceeded", retryable=False)
    worker.refuse("b", "unknown_model", retryable=False)
    assert await error_of(long) == CONTEXT_LENGTH
    assert await error_of(gone) == MODEL_NOT_FOUND


async def test_refused_after_an_abort_just_ends() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    stream.abort()
    worker.refuse("a", "overloaded", retryable=True)
    assert (await end_of(stream)).reason == "abort"


async def test_a_full_pipe_leaves_the_ticket_waiting() -> None:
    rig, worker = served()
    worker.reachable = False
    rig.ask("a")
    rig.dispatcher.check_integrity()
    assert rig.dispatcher.snapshot().num_waiting == 1


async def test_catalog_changes_reach_workers_and_end_what_they_must() -> None:
    rig = Rig()
    gone = rig.ask("gone", model="n")
    replaced = rig.ask("replaced", model="m")
    worker = rig.worker(states={"m": "cold"})
    assert worker.catalog == ["m", "n"]
    rig.dispatcher.set_catalog([hosted("m", "r2")])
    assert worker.catalog == ["m"]
    assert await error_of(gone) == MODEL_NOT_FOUND
    assert await error_of(replaced) == UNAVAILABLE
    with pytest.raises(ApiError) as caught:
        rig.ask("again", model="n")
    assert caught.value.kind == MODEL_NOT_FOUND


async def test_a_model_that_fails_to_load_fails_its_requests_with_the_reason() -> None:
    rig, worker = served()
    stream = rig.ask("a", model="n")
    worker.states["n"], worker.reasons["n"] = "failed", "checksum of chunk 3 differs"
    worker.status()
    with pytest.raises(ApiError, match="checksum of chunk 3") as caught:
        await anext(stream)
    assert caught.value.kind == MODEL_FAILED
    with pytest.raises(ApiError, match="checksum"):
        rig.ask("b", model="n")
    rig.dispatcher.load_model("n")
    assert worker.loads == ["n", "n"]


async def test_tenants_are_not_told_where_files_are(caplog: pytest.LogCaptureFixture) -> None:
    """The operator is: in the log once, and wherever the dispatcher says why."""
    reason = "/srv/my data/packs/p1/weights.bin has 1000000 bytes, not 2000000"
    rig, worker = served()
    stream = rig.ask("a", model="n")
    worker.states["n"], worker.reasons["n"] = "failed", reason
    worker.status()
    worker.status()
    with pytest.raises(ApiError, match="is damaged or cannot be read") as caught:
        await anext(stream)
    assert "/" not in caught.value.message
    assert rig.dispatcher.model_failure("n") == reason
    assert caplog.text.count(reason) == 1
    stream = rig.ask("b", model="m")
    worker.refuse("b", "not_resident", retryable=False, message=f"model 'm' failed: {reason}")
    with pytest.raises(ApiError, match="is damaged or cannot be read") as caught:
        await anext(stream)
    assert "/srv" not in caught.value.message


async def test_pinned_models_are_loaded_unasked_and_wishes_are_obeyed() -> None:
    rig, worker = served(states={"m": "cold", "n": "cold"})
    rig.dispatcher.set_catalog([hosted("m", pinned=True), hosted("n")])
    assert worker.loads == ["m"]
    worker.states["m"] = "resident"
    worker.status()
    rig.dispatcher.load_model("n")
    assert worker.loads == ["m", "n"]
    rig.dispatcher.unload_model("m")
    assert worker.unloads == ["m"]


async def test_idle_models_make_room_for_kv() -> None:
    rig, worker = served(kv_tokens=5, states={"m": "resident", "n": "resident"})
    rig.advance(1.5)
    worker.status()
    rig.ask("a")  # larger than what is free
    assert worker.submitted == ["a"]
    assert worker.unloads == ["n"]


async def test_models_of_one_pack_make_room_only_together() -> None:
    rig, worker = served(kv_tokens=12, states={"m": "resident", "n": "resident", "o": "resident"})
    rig.dispatcher.set_catalog([hosted("m"), hosted("n", pack="p"), hosted("o", pack="p")])
    rig.ask("n1", model="n")
    rig.advance(1.5)
    worker.status()
    rig.ask("a")
    assert worker.unloads == []  # `o` is idle, but `n` has its weights
    worker.finish("n1")
    worker.status()
    rig.advance(1.5)
    worker.status()
    rig.ask("b")
    assert worker.unloads == ["n"]


async def test_a_lease_is_used_up_in_whole_blocks() -> None:
    rig, worker = served(kv_tokens=48, block_tokens=16)
    for name in "abc":
        rig.ask(name, prompt=10, max_tokens=7)
    assert worker.submitted == ["a"]  # 32 positions of 48 are gone


async def test_a_submit_says_how_much_time_is_left() -> None:
    rig, worker = served(Settings(queue_timeout_s=60.0, request_timeout_s=10.0), num_requests=1)
    rig.ask("a")
    late = rig.ask("b")
    rig.advance(4.0)
    worker.finish("a")
    worker.status()
    first, second = (m for m in worker.sent if isinstance(m, Submit))
    assert (first.timeout_s, second.timeout_s) == (10.0, 6.0)
    worker.finish("b", "timeout", generated=0)
    assert (await end_of(late)).reason == "timeout"
    worker.num_requests = 0
    worker.status()
    last = rig.ask("c")
    rig.advance(20.0)
    worker.num_requests = 1
    worker.status()
    assert [m.timeout_s for m in worker.sent if isinstance(m, Submit)][2] == -1.0
    last.abort()


async def test_swaps_are_told_once() -> None:
    rig = Rig()
    heard: list[tuple[str, SwapRecord]] = []
    rig.dispatcher.add_swap_listener(lambda worker_id, swap: heard.append((worker_id, swap)))
    worker = rig.worker()
    swap = SwapRecord("m", "load", "disk", 10, 0.5)
    worker.status(swaps=[swap])
    worker.status()
    assert heard == [("w", swap)]


async def test_ready_means_a_worker_speaks_and_the_server_is_not_stopping() -> None:
    rig = Rig()
    assert not rig.dispatcher.ready
    worker = rig.worker()
    assert rig.dispatcher.ready
    stream = rig.ask("a")
    rig.dispatcher.begin_drain()
    assert not rig.dispatcher.ready
    with pytest.raises(ApiError) as caught:
        rig.ask("b")
    assert caught.value.kind == UNAVAILABLE
    rig.dispatcher.abort_all()
    assert worker.aborted == ["a"]
    worker.finish("a", "abort", generated=0)
    assert (await end_of(stream)).reason == "abort"
    rig.dispatcher.close()


async def test_a_request_id_is_used_once_at_a_time() -> None:
    rig, worker = served()
    stream = rig.ask("a")
    with pytest.raises(ValueError, match="in use"):
        rig.ask("a")
    worker.tokens("a", 1)
    worker.finish("a")
    assert (await end_of(stream)).reason == "stop"
    rig.ask("a")


async def test_a_request_that_no_message_can_hold_ends_alone() -> None:
    """It raised inside the round of grants: it hung, and so did whoever came behind it."""
    rig, worker = served(num_requests=1)
    rig.ask("first")
    bad = msgspec.structs.replace(prepared("bad"), stop_token_ids=[10**30])
    waiting = rig.dispatcher.run(bad, principal("t"))
    behind = rig.ask("behind")
    worker.finish("first", generated=1)
    worker.status()
    worker.status()
    assert waiting._end is not None
    assert await error_of(waiting) == SERVER_ERROR
    assert "behind" in worker.submitted
    worker.finish("behind", token_ids=(7,), generated=1)
    assert (await end_of(behind)).reason == "stop"
    worker.status()
    with pytest.raises(ApiError) as caught:
        rig.dispatcher.run(msgspec.structs.replace(bad, request_id="bad2"), principal("t"))
    assert caught.value.kind == SERVER_ERROR
    rig.dispatcher.check_integrity()
    assert rig.dispatcher.snapshot().num_waiting == rig.dispatcher.snapshot().num_running == 0


async def test_a_short_request_with_a_large_state_is_not_cheap() -> None:
    rig, worker = served(num_requests=8)
    whole = worker.kv_tokens * KV_BYTES
    worker.sequence_bytes = whole * 2 // 5
    worker.status()
    for name in "abc":
        rig.ask(name)
    assert worker.submitted == ["a", "b"], "a third one's state has no room"
    worker.status()
    rig.dispatcher.check_integrity()
    assert worker.submitted == ["a", "b"]
    worker.finish("a")
    worker.status()
    assert worker.submitted == ["a", "b", "c"]


async def test_the_bound_of_the_queue_is_for_each_worker() -> None:
    rig = Rig(Settings(max_queue_total=2, max_queue_per_tenant=2))
    for name in ("one", "two", "three"):
        rig.worker(name, num_requests=0)
    for number in range(6):
        rig.ask(f"r{number}", f"t{number}")
    with pytest.raises(ApiError, match="6 in total") as caught:
        rig.ask("r6", "t6")
    assert caught.value.kind == QUEUE_FULL


async def test_the_expected_wait_is_by_the_workers_that_offer_the_model() -> None:
    rig = Rig(Settings(max_queue_total=3, max_queue_per_tenant=3, queue_timeout_s=600.0))
    for name, model in (("one", "m"), ("two", "n"), ("three", "n")):
        rig.worker(name, num_requests=0, states={model: "resident"})
    waits_s: dict[str, float] = {}
    for number in range(9):
        rig.ask(f"m{number}", f"t{number}", prompt=4, max_tokens=10_000)
    for model in "mn":
        with pytest.raises(ApiError) as caught:
            rig.ask("one more", "late", model)
        waits_s[model] = caught.value.retry_after_s or 0.0
    assert waits_s["m"] == pytest.approx(3 * waits_s["n"])
