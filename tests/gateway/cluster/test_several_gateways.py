"""One fair queue for several gateway processes: grants, and everything that may cross them."""

from collections.abc import Iterator

import msgspec
import pytest

from engine.protocol import Refused, RequestService
from gateway.cluster.dispatcher_protocol import Granted, Leave, Returned
from gateway.cluster.dispatcher_proxy import DispatcherProxy
from gateway.cluster.dispatcher_server import MEET_S
from gateway.dispatch.tickets import IntegrityError, RequestStream, Ticket
from gateway.errors import (
    MODEL_NOT_FOUND,
    QUEUE_FULL,
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
)
from gateway.settings.settings import Settings
from gateway.types import TokenEvent
from tests.gateway.cluster.several_kit import Several
from tests.gateway.scripted_worker import hosted, prepared, principal


async def rest(stream: RequestStream) -> list[TokenEvent]:
    """All that is left; raises what ended it."""
    return [event async for event in stream]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def ended(stream: RequestStream) -> bool:
    return stream._end is not None


async def test_a_request_goes_its_way_and_everybody_knows() -> None:
    several = Several()
    one, two = several.gateways
    stream = several.ask(one, "r1")
    assert several.worker.submitted == [("r1", 1)]
    assert several.dispatcher.snapshot().num_running == 1
    several.worker.tokens("r1")
    several.worker.finish("r1")
    several.deliver()
    events = await rest(stream)
    assert [token for event in events for token in event.token_ids] == [7, 8]
    snapshot = several.dispatcher.snapshot()
    assert snapshot.num_running == snapshot.num_waiting == 0
    assert snapshot.service_s_by_tenant == {"a": pytest.approx(0.1)}
    assert two.dispatcher.ready is False  # no heartbeat has told it yet
    several.advance(1.0)
    assert one.dispatcher.ready
    assert two.dispatcher.ready


async def test_turns_go_by_service_and_not_by_gateway() -> None:
    several = Several(num_requests=1)
    one, two = several.gateways
    for number in range(3):
        several.ask(one, f"flood{number}", "flood")
    several.ask(two, "seldom", "seldom")
    several.worker.finish("flood0", service_s=5.0)
    several.settle()
    assert several.worker.submitted == [("flood0", 1), ("seldom", 1)]


async def test_no_more_is_granted_than_the_worker_offers() -> None:
    several = Several(num_requests=2)
    for number in range(6):
        several.ask(several.gateways[number % 2], f"r{number}", f"tenant{number}")
    assert len(several.worker.submitted) == 2
    several.settle()  # which says that both have come
    assert len(several.worker.submitted) == 2
    for key in list(several.worker.running):
        several.worker.finish(*key)
    several.settle()
    assert len(several.worker.submitted) == 4
    assert several.worker.num_refused == 0


async def test_a_refusal_of_the_queue_comes_as_the_first_event() -> None:
    settings = Settings(max_queue_per_tenant=1, max_queue_total=8)
    several = Several(num_requests=1, settings=settings)
    one, two = several.gateways
    several.ask(one, "runs")
    several.ask(one, "waits")
    stream = several.ask(two, "too many")
    with pytest.raises(ApiError) as refused:
        await rest(stream)
    assert refused.value.kind == QUEUE_FULL
    assert refused.value.retry_after_s is not None


async def test_a_flood_on_a_full_queue_is_refused_without_a_walk_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(max_queue_per_tenant=2, max_queue_total=2)
    several = Several(num_requests=1, settings=settings)
    one, _ = several.gateways
    for name in ("runs", "waits", "waits too"):
        several.ask(one, name)

    def walked(dispatcher: DispatcherProxy) -> Iterator[Ticket]:
        raise AssertionError("all live requests were looked at for one that is refused")

    monkeypatch.setattr(DispatcherProxy, "__iter__", walked)
    with pytest.raises(ApiError) as refused:
        one.ask("too many")
    assert refused.value.kind == QUEUE_FULL
    assert "(2 requests wait)" in refused.value.message


async def test_who_leaves_while_waiting_is_never_run() -> None:
    several = Several(num_requests=1)
    one, _ = several.gateways
    several.ask(one, "runs")
    stream = several.ask(one, "leaves")
    stream.abort()
    assert (await rest(stream))[-1].finish is not None
    several.deliver()
    several.worker.finish("runs")
    several.settle()
    assert several.worker.submitted == [("runs", 1)]
    assert several.dispatcher.snapshot().num_waiting == 0


async def test_a_grant_that_finds_nobody_takes_no_place() -> None:
    several = Several(num_requests=1)
    one, two = several.gateways
    stream = one.ask("leaves")
    one.link.deliver_out()  # granted, and on its way back
    stream.abort()
    several.deliver()
    assert several.worker.submitted == []
    several.ask(two, "next")
    assert several.worker.submitted == [("next", 1)]


async def test_a_worker_that_dies_before_the_submit_loses_nothing() -> None:
    several = Several(num_requests=1)
    one, _ = several.gateways
    stream = one.ask("r")
    one.link.deliver_out()
    several.worker.die("gateway-0")
    several.deliver()
    several.worker.start()
    several.deliver()
    assert [name for name, _ in several.worker.submitted] == ["r"]
    several.worker.finish(*several.worker.submitted[0])
    several.deliver()
    await rest(stream)


@pytest.mark.parametrize("first", ["gateway-0", "dispatcher"])
async def test_a_dead_worker_s_requests_are_tried_once_more(first: str) -> None:
    several = Several(num_requests=2)
    one, two = several.gateways
    fresh, begun = one.ask("fresh"), two.ask("begun", "b")
    several.deliver()
    several.worker.tokens("begun")
    several.deliver()
    several.worker.die(first)
    several.deliver()
    several.worker.start()
    several.deliver()
    before = [("fresh", 1), ("begun", 1)]
    assert several.worker.submitted == [*before, ("fresh", 2), ("begun", 2)]
    assert several.worker.submits["begun", 2].generated == [7]
    for name in ("fresh", "begun"):
        several.worker.finish(name, 2)
    several.deliver()
    assert tokens_of(await rest(fresh)) == [7]
    assert tokens_of(await rest(begun)) == [7, 8]
    assert fresh.attempt == begun.attempt == 2
    snapshot = several.dispatcher.snapshot()
    assert (snapshot.num_running, snapshot.num_retries, snapshot.num_resumed) == (0, 1, 1)


async def test_models_of_a_worker_that_dies_twice_are_quarantined_whoever_sees_it_first() -> None:
    several = Several(num_requests=2)
    one, _ = several.gateways
    for attempt in (1, 2):
        if attempt == 1:
            several.ask(one, "r")
        assert several.worker.submitted[-1] == ("r", attempt)
        if attempt == 2:
            several.worker.tokens("r", attempt)
        several.worker.die("gateway-0")
        several.deliver()
        several.worker.start()
        several.deliver()
    assert "m" in several.dispatcher.snapshot().quarantined
    several.advance(1.0)
    assert one.dispatcher.model_failure("m") is not None


async def test_a_second_grant_while_the_first_runs_takes_its_place() -> None:
    """The dispatcher saw a worker die that its gateway is still connected to."""
    several = Several(num_requests=2)
    one, _ = several.gateways
    several.ask(one, "r")
    several.dispatcher.on_lost("w", several.worker.epoch, "silent", "silence")
    several.dispatcher.on_connected("w", several.worker.epoch)
    several.settle()
    assert several.worker.submitted == [("r", 1), ("r", 2)]
    assert list(several.worker.running) == [("r", 2)]


async def test_a_second_grant_of_what_streams_takes_its_place_too() -> None:
    several = Several(num_requests=2)
    one, _ = several.gateways
    stream = several.ask(one, "r")
    several.worker.tokens("r")  # the dispatcher has not heard of it yet
    several.dispatcher.on_lost("w", several.worker.epoch, "silent", "silence")
    several.worker.tokens("r")  # nor will it
    several.dispatcher.on_connected("w", several.worker.epoch)
    several.settle()
    assert several.worker.submitted == [("r", 1), ("r", 2)]
    assert list(several.worker.running) == [("r", 2)], "the first is aborted"
    assert several.worker.submits["r", 2].generated == [7, 8]
    several.worker.finish("r", 2)
    several.deliver()
    events = await rest(stream)
    assert tokens_of(events) == [7, 8, 9]
    assert events[-1].finish is not None
    assert events[-1].finish.usage.generated_tokens == 3
    assert several.dispatcher.snapshot().num_running == 0


async def test_a_grant_for_a_worker_that_is_not_reached_is_given_back() -> None:
    several = Several(num_requests=2)
    one, _ = several.gateways
    one.ask("r")
    several.worker.leave(one.peer)
    several.deliver()
    assert several.worker.submitted == []
    one.peer.start(one.peer.heard)
    several.worker.greet(one.peer)
    several.settle()
    assert several.worker.submitted == [("r", 1)]


async def test_another_dispatcher_takes_over_what_waits_runs_and_is_on_its_way() -> None:
    several = Several(num_requests=3)
    one, two = several.gateways
    streams = several.ask(one, "streams"), two.ask("granted", "b")
    several.worker.tokens("streams")
    lost = two.ask("lost grant", "c")
    two.link.deliver_out()  # granted; its Granted dies with the dispatcher
    waits = [one.ask(f"waits{n}", "d") for n in range(3)]
    several.kill_dispatcher()
    assert not one.dispatcher.ready
    several.worker.tokens("streams")
    several.worker.finish("streams")
    late = two.ask("asked of nobody", "e")
    assert [token for event in await rest(streams[0]) for token in event.token_ids] == [7, 8, 9]
    several.take_over()
    several.settle()
    assert several.worker.num_refused == 0
    assert several.worker.most_running == 3
    while several.worker.running:
        several.worker.finish(*next(iter(several.worker.running)))
        several.settle()
    for stream in (streams[1], lost, *waits, late):
        await rest(stream)
    assert len(several.worker.submitted) == len(set(several.worker.submitted)) == 7
    assert several.dispatcher.snapshot().num_running == 0


async def test_what_a_new_dispatcher_does_not_know_to_run_waits_again_when_it_comes_back() -> None:
    several = Several(num_requests=2)
    one, two = several.gateways
    streams = [one.ask("lost"), two.ask("refused", "b")]
    several.deliver()
    several.kill_dispatcher()
    epoch, several.worker.epoch = several.worker.epoch, ""  # not connected to the worker yet
    several.take_over()
    several.worker.epoch = epoch
    assert several.dispatcher.snapshot().num_running == 0
    refused = Refused(epoch, "refused", 1, "draining", "", True)
    two.peer.heard.on_refused("w", refused)
    several.deliver()
    assert several.dispatcher.snapshot().num_waiting == 1
    one.peer.heard.on_lost("w", epoch, "killed", "process")
    two.peer.heard.on_lost("w", epoch, "killed", "process")
    several.worker.running.clear()
    several.worker.start()
    several.deliver()
    assert sorted(several.worker.running) == [("lost", 2), ("refused", 1)]
    for key in list(several.worker.running):
        several.worker.finish(*key)
    several.deliver()
    for stream in streams:
        await rest(stream)


async def test_waiting_requests_keep_their_places_over_a_change() -> None:
    several = Several(num_requests=1)
    one, two = several.gateways
    several.ask(one, "runs")
    for number, gateway in enumerate((two, one, two)):
        several.clock.now_s += 0.001
        gateway.ask(f"r{number}")
    several.kill_dispatcher()
    several.take_over()
    several.worker.finish("runs")
    several.settle()
    for number in range(3):
        assert several.worker.submitted[-1] == (f"r{number}", 1)
        several.worker.finish(f"r{number}")
        several.settle()


async def test_service_that_was_charged_is_not_charged_again() -> None:
    several = Several(num_requests=2)
    several.ask(several.gateways[0], "r")
    several.worker.tokens("r")
    several.kill_dispatcher()
    several.take_over()
    before = several.share.counter("a")
    status = several.worker.make_status(several.worker.peers["dispatcher"])
    had = RequestService("r", 1, 8.0, 8.0)
    several.dispatcher.on_status("w", msgspec.structs.replace(status, service=[had]))
    assert several.share.counter("a") == pytest.approx(before)
    more = RequestService("r", 1, 9.0, 9.0)
    several.dispatcher.on_status("w", msgspec.structs.replace(status, service=[more]))
    several.worker.finish("r", service_s=9.0)
    several.deliver()
    assert several.share.leads().get("a", 0.0) <= 1.0 + 1e-6


async def test_a_gateway_that_dies_frees_all_it_had() -> None:
    several = Several(num_requests=2)
    one, two = several.gateways
    for number in range(4):
        several.ask(one, f"r{number}")
    assert len(several.worker.running) == 2
    several.kill_gateway(0)
    several.settle()
    snapshot = several.dispatcher.snapshot()
    assert snapshot.num_running == snapshot.num_waiting == 0
    for number in range(2):
        two.ask(f"s{number}", "b")
    several.settle()
    assert sorted(several.worker.running) == [("s0", 1), ("s1", 1)]


async def test_a_model_that_only_the_gateway_knows_of_is_looked_up_before_it_is_refused() -> None:
    several = Several()
    one, _ = several.gateways
    several.dispatcher.set_catalog([])
    stream, gone = one.ask("r"), one.ask("gone")
    several.deliver()
    assert several.num_behind == 2
    assert several.worker.submitted == []
    gone.abort()
    several.deliver()
    several.dispatcher.set_catalog([hosted("m")])
    several.server.caught_up(several.server.num_behind)
    several.settle()
    assert several.worker.submitted == [("r", 1)]
    several.dispatcher.set_catalog([])
    before = several.server.num_behind
    late = several.ask(one, "late")
    several.server.caught_up(before)  # of a look that began before: it cannot know
    several.deliver()
    assert several.server.num_held == 1
    assert not ended(late)
    several.server.caught_up(several.server.num_behind)
    several.deliver()
    with pytest.raises(ApiError) as refused:
        await rest(late)
    assert refused.value.kind == MODEL_NOT_FOUND
    assert not ended(stream)


async def test_without_any_dispatcher_time_runs_out_here() -> None:
    several = Several(settings=Settings(queue_timeout_s=5.0))
    one, _ = several.gateways
    several.kill_dispatcher()
    stream = one.ask("r")
    for _ in range(2):
        several.clock.now_s += 4.0
        one.dispatcher.tick()
    with pytest.raises(ApiError) as refused:
        await rest(stream)
    assert refused.value.kind == UNAVAILABLE


async def test_odd_messages_change_nothing() -> None:
    several = Several()
    one, two = several.gateways
    several.ask(one, "r")
    two.link.send(Leave("r"))  # not its own
    (spec,) = one.dispatcher.running_specs()
    two.link.send(Returned("r", 1, None, spec.ticket))
    one.link.send(Leave("unknown"))
    several.deliver()
    assert several.dispatcher.snapshot().num_running == 1
    one.link.inbox.append(b"\x91" + _encoded(Granted("r", 1, "w", several.worker.epoch)))
    several.deliver()  # said twice
    assert several.worker.submitted == [("r", 1)]


def _encoded(message: Granted) -> bytes:
    return msgspec.msgpack.encode(message)


async def test_a_request_that_no_message_can_hold_ends_alone() -> None:
    several = Several(num_requests=1)
    one = several.gateways[0]
    bad = msgspec.structs.replace(prepared("bad"), stop_token_ids=[10**30])
    stream = one.dispatcher.run(bad, principal("a"))
    several.deliver()
    assert ended(stream)
    with pytest.raises(ApiError) as caught:
        await rest(stream)
    assert caught.value.kind == SERVER_ERROR
    several.settle()
    served = several.ask(one, "r1")
    several.worker.tokens("r1")
    several.worker.finish("r1")
    several.settle()
    assert await rest(served)
    assert several.dispatcher.snapshot().num_running == 0


async def test_an_id_that_lives_at_another_gateway_is_denied() -> None:
    """As a batch's line that is taken over from a process that is not dead."""
    several = Several()
    one, two = several.gateways
    first, second = several.ask(one, "r"), several.ask(two, "r")
    assert several.worker.submitted == [("r", 1)]
    with pytest.raises(ApiError) as denied:
        await rest(second)
    assert denied.value.kind == UNAVAILABLE
    several.worker.tokens("r")
    several.worker.finish("r")
    several.deliver()
    assert tokens_of(await rest(first)) == [7, 8]


async def test_a_ticket_that_is_nobodys_is_found() -> None:
    several = Several()
    several.ask(several.gateways[0], "r")
    peer = several.dispatcher._peers.pop("r")
    with pytest.raises(IntegrityError, match="0 peers' tickets, 1 live"):
        several.dispatcher.check_integrity()
    several.dispatcher._peers["r"] = peer


async def test_a_request_that_cannot_be_taken_in_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several()
    monkeypatch.setattr(several.dispatcher, "_predict", lambda *about: 1 // 0)
    stream = several.gateways[0].ask("r")
    several.deliver()
    with pytest.raises(ApiError, match="could not be queued"):
        await rest(stream)


async def test_a_dispatcher_that_does_not_know_whether_it_is_the_one_grants_nothing() -> None:
    several = Several()
    one, two = several.gateways
    several.dispatcher.may_grant = lambda: False
    streams = [several.ask(one, "r1"), several.ask(two, "r2")]
    several.settle()
    several.advance(1.0)
    assert several.worker.submitted == []
    several.dispatcher.may_grant = lambda: True
    several.advance(1.0)
    assert sorted(several.worker.submitted) == [("r1", 1), ("r2", 1)]
    assert not any(map(ended, streams))


async def test_a_wait_is_as_long_whatever_clock_the_next_dispatcher_has() -> None:
    several = Several(num_requests=1, settings=Settings(queue_timeout_s=10.0))
    one, two = several.gateways
    several.ask(one, "busy")
    late = several.ask(two, "late")
    for _ in range(3):
        several.advance(3.0)
        several.kill_dispatcher()
        several.take_over()
        several.settle()
        assert several.dispatcher.snapshot().num_waiting == 1
    several.advance(1.5)
    with pytest.raises(ApiError, match=r"waited 1[01] s"):
        await rest(late)


async def test_gateways_hear_who_is_connected_once_a_dispatcher_has_met_everybody() -> None:
    several = Several()
    one, two = several.gateways
    several.advance(1.0)
    assert not one.dispatcher.is_gone("nobody")  # it is new: others may be on their way
    several.advance(MEET_S)
    assert one.dispatcher.is_gone("nobody")
    assert not one.dispatcher.is_gone("gateway-1")
    two.link.cut()
    several.advance(1.0)
    assert one.dispatcher.is_gone("gateway-1")
    several.kill_dispatcher()
    assert not one.dispatcher.is_gone("gateway-1")  # nobody says so any more


async def test_a_dispatcher_hears_of_a_later_epoch_from_gateways() -> None:
    several = Several()
    heard: list[int] = []
    several.server.on_later = heard.append
    one, two = several.gateways
    one.link.connect(several.server)
    two.link.epoch = several.epoch + 5
    two.link.connect(several.server)
    several.deliver()
    assert heard == [several.epoch + 5]
