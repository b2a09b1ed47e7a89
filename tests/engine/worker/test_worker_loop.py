"""The worker's loop over a real ipc socket, with a scripted engine behind it."""

from itertools import pairwise

import pytest

from engine.errors import IntegrityError
from engine.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Abort,
    AckUsage,
    CheckIntegrity,
    Hello,
    LoadModel,
    ModelSpec,
    Refused,
    Restart,
    SetCatalog,
    StepOutput,
    SwapChoice,
    UnloadModel,
    WarmModel,
    Welcome,
    WorkerStatus,
    common_version,
    encode,
)
from engine.residency.loaded_models import LoadRequest
from tests.engine.scripted_engine import ScriptedEngine
from tests.engine.worker_rig import EPOCH, Gateway, Rig, rig, submit


def ended(gateway: Gateway, request_id: str, times: int = 1) -> bool:
    return len(gateway.finishes(request_id)) >= times


def counter(gateway: Gateway, name: str) -> float:
    return gateway.status.counters[name]


def test_hello_is_answered_by_welcome_then_status() -> None:
    with rig() as r:
        gateway = r.connect("g")
        assert gateway.received[0] == Welcome(PROTOCOL_VERSION, "w0", EPOCH, "scripted")
        assert isinstance(gateway.received[1], WorkerStatus)
        assert gateway.status.epoch == EPOCH
        assert gateway.status.leases[0].model_id == "m"


def test_a_request_streams_to_the_gateway_that_asked() -> None:
    with rig() as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(submit("a", max_tokens=4))
        two.send(submit("b", max_tokens=2))
        r.until(lambda: ended(one, "a") and ended(two, "b"))
        assert one.tokens("a") == [1, 2, 3, 4]
        assert two.tokens("b") == [1, 2]
        assert one.tokens("b") == two.tokens("a") == []
        (finish,) = one.finishes("a")
        assert finish.reason == "length"
        assert finish.usage.generated_tokens == 4
        assert all(output.epoch == EPOCH for output in one.all(StepOutput))


def test_one_step_output_a_peer_a_step() -> None:
    with rig() as r:
        r.engine.paused = True
        gateway = r.connect("g")
        for name in "abcd":
            gateway.send(submit(name, max_tokens=2))
        r.until(lambda: len(r.engine.running) == 4)
        r.engine.paused = False
        r.until(lambda: ended(gateway, "d"))
        assert [len(output.deltas) for output in gateway.all(StepOutput)] == [4, 4]


def test_status_follows_a_finish_at_once() -> None:
    with rig(status_interval_s=0.4) as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(submit("a"))
        one.send(submit("b"))
        two.send(submit("c"))
        r.until(lambda: ended(one, "a") and ended(one, "b") and ended(two, "c"))
        before = len(one.all(WorkerStatus))
        r.worker.tick()
        r.until(lambda: len(one.all(WorkerStatus)) > before)
        assert len(one.all(WorkerStatus)) <= before + 2
        assert one.status.free_requests == r.engine.max_requests


def test_status_heartbeat_when_idle() -> None:
    with rig() as r:
        gateway = r.connect("g")
        before = len(gateway.all(WorkerStatus))
        r.until(lambda: len(gateway.all(WorkerStatus)) >= before + 3)


def test_the_engines_status_is_not_asked_for_in_every_step() -> None:
    with rig(status_interval_s=0.4) as r:
        gateway = r.connect("g")
        asked = r.engine.num_status
        gateway.send(submit("a", max_tokens=200))
        r.until(lambda: ended(gateway, "a"))
        assert r.engine.num_status - asked <= 6


def test_a_load_is_told_in_steps_and_its_swap_once_to_each() -> None:
    with rig(ScriptedEngine(load_steps=3), status_interval_s=0.4) as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(SetCatalog([ModelSpec("m", "/nowhere")]))
        one.send(LoadModel("m"))
        r.until(lambda: bool(two.status.leases))
        three = r.connect("g3")
        one.send(UnloadModel("m"))
        r.until(lambda: not one.status.leases and not two.status.leases and not three.status.leases)
        for gateway, kinds in (
            (one, ["load", "evict"]),
            (two, ["load", "evict"]),
            (three, ["evict"]),
        ):
            swaps = [swap.kind for status in gateway.all(WorkerStatus) for swap in status.swaps]
            assert swaps == kinds
        states = [s.models[0].state for s in two.all(WorkerStatus) if s.models]
        assert states[0] in {"cold", "loading"}
        assert "loading" in states
        assert "resident" in states


def test_grown_capacity_is_told_before_the_interval() -> None:
    engine = ScriptedEngine(states={"m": "resident", "x": "loading"}, paused=True)
    with rig(engine, status_interval_s=0.4) as r:
        gateway = r.connect("g")
        r.until(lambda: len(gateway.all(WorkerStatus)) >= 2)
        engine.free_kv_bytes *= 2
        r.until(lambda: gateway.status.free_kv_bytes == engine.free_kv_bytes)
        engine.free_kv_bytes += 1  # 1/8 is the least that counts
        told = len(gateway.all(WorkerStatus))
        for _ in range(20):
            r.worker.tick()
        gateway.pump()
        assert len(gateway.all(WorkerStatus)) == told


def test_refusals_name_code_and_whether_to_come_again() -> None:
    with rig(
        ScriptedEngine(max_requests=1, paused=True, states={"m": "resident", "c": "cold"})
    ) as r:
        gateway = r.connect("g")
        gateway.send(submit("a"))
        gateway.send(submit("b"))
        gateway.send(submit("c", model="c"))
        gateway.send(submit("d", model="nope"))
        r.until(lambda: len(gateway.all(Refused)) == 3)
        told = [(x.request_id, x.code, x.retryable) for x in gateway.all(Refused)]
        assert told == [
            ("b", "overloaded", True),
            ("c", "not_resident", True),
            ("d", "unknown_model", False),
        ]
        r.until(lambda: "worker_submits_refused" in gateway.status.counters)
        assert counter(gateway, "worker_submits_refused") == 3
        # Nothing ran, so the same attempt may be sent again.
        r.engine.paused = False
        r.until(lambda: ended(gateway, "a"))
        gateway.send(submit("b"))
        r.until(lambda: ended(gateway, "b"))


def test_a_refused_load_leaves_the_worker_alive() -> None:
    with rig() as r:
        gateway = r.connect("g")
        gateway.send(LoadModel("nope"))
        r.until(lambda: counter(gateway, "worker_controls_refused") == 1)


def test_how_a_load_is_wanted_reaches_the_engine_and_choices_reach_everybody() -> None:
    with rig(ScriptedEngine(states={"m": "resident", "n": "cold"})) as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(LoadModel("n", 1.5, 0.5, prefetch=False, forced=True))
        one.send(WarmModel("m"))
        r.until(lambda: len(r.engine.load_requests) == 2)
        assert r.engine.load_requests == [
            ("n", LoadRequest(1.5, 0.5, forced=True)),
            ("m", LoadRequest(to_host_tier=True)),
        ]
        choice = SwapChoice("n", "load", 3, 1.5, 0.25, [])
        r.engine.choices.append(choice)
        r.until(lambda: all(any(s.choices for s in g.all(WorkerStatus)) for g in (one, two)))
        for gateway in (one, two):
            told = [c for status in gateway.all(WorkerStatus) for c in status.choices]
            assert told == [choice]


def test_duplicate_submits_run_once() -> None:
    with rig() as r:
        gateway = r.connect("g")
        gateway.send(submit("a", max_tokens=2))
        gateway.send(submit("a", max_tokens=2))
        r.until(lambda: ended(gateway, "a"))
        gateway.send(submit("a", max_tokens=2))  # ended, not yet acknowledged
        gateway.send(submit("a", max_tokens=2, attempt=2))
        r.until(lambda: ended(gateway, "a", 2))
        assert gateway.tokens("a") == [1, 2, 1, 2]
        r.until(lambda: counter(gateway, "worker_submits_duplicate") == 2)


def test_a_duplicate_of_another_gateway_is_refused() -> None:
    with rig() as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(submit("a", max_tokens=10**6))
        r.until(lambda: len(one.tokens("a")) > 3)
        two.send(submit("a", max_tokens=2))
        r.until(lambda: len(two.all(Refused)) == 1)
        one.send(Abort("a", 1))
        r.until(lambda: ended(one, "a"))
        two.send(submit("a", max_tokens=2))  # its end is not acknowledged yet
        r.until(lambda: len(two.all(Refused)) == 2)
        assert {(each.code, each.retryable) for each in two.all(Refused)} == {("overloaded", False)}
        assert two.tokens("a") == []
        assert one.all(Refused) == []


def test_abort_ends_within_one_step_and_only_for_its_owner() -> None:
    with rig() as r:
        one, two = r.connect("g1"), r.connect("g2")
        one.send(submit("a", max_tokens=10**6))
        r.until(lambda: len(one.tokens("a")) > 3)
        two.send(Abort("a", 1))
        two.send(Abort("never", 1))
        r.until(lambda: len(one.tokens("a")) > 50)
        one.send(Abort("a", 1))
        r.until(lambda: ended(one, "a"))
        (finish,) = one.finishes("a")
        assert finish.reason == "abort"
        assert finish.usage.generated_tokens == len(one.tokens("a"))
        one.send(Abort("a", 1))
        r.until(lambda: two.status.counters["steps"] > 0)
        assert one.finishes("a") == [finish]


def test_garbage_is_counted_and_dropped() -> None:
    with rig() as r:
        gateway = r.connect("g")
        nested = b"\x94\xa5Hello\x01\xa1g" + b"\x91" * 100_000 + b"\xc0"
        for frame in (b"", b"\xff" * 64, b"\x93\xa5Hello\x01\xa2\xff\xfe", nested, b"\x91\xa4Nope"):
            gateway.socket.send(frame)
        gateway.socket.send_multipart([b"", encode(submit("a"))])  # as a REQ socket would
        gateway.socket.send(encode(Welcome(1, "w", "e", "d")))  # the wrong way round
        r.until(lambda: counter(gateway, "worker_frames_malformed") == 7)
        gateway.send(submit("a"))
        r.until(lambda: ended(gateway, "a"))


def test_before_hello_only_a_submit_is_answered() -> None:
    with rig() as r:
        gateway = r.connect("g", hello=False)
        gateway.send(AckUsage([("a", 1)]))
        gateway.send(submit("a"))
        r.until(lambda: bool(gateway.received))
        (refused,) = gateway.all(Refused)
        assert (refused.code, refused.retryable, refused.epoch) == ("not_resident", True, EPOCH)
        assert r.engine.running == {}
        assert r.worker.counters.messages_without_hello == 2


def test_another_protocol_version_is_told_ours_and_not_served() -> None:
    with rig() as r:
        gateway = r.connect("g", hello=False)
        gateway.send(Hello(PROTOCOL_VERSION + 1, "g"))
        gateway.send(submit("a"))
        r.until(lambda: len(gateway.received) == 2)
        assert isinstance(gateway.received[0], Welcome)
        assert isinstance(gateway.received[1], Refused)


def test_peers_are_bounded() -> None:
    with rig(max_peers=1) as r:
        r.connect("g1")
        r.connect("g2", hello=False).hello()
        r.until(lambda: r.worker.counters.peers_refused == 1)


def test_messages_between_two_steps_are_bounded() -> None:
    with rig(max_messages_per_tick=3) as r:
        r.engine.paused = True
        gateway = r.connect("g")
        for number in range(7):
            gateway.send(submit(str(number)))
        counts: list[int] = []

        def all_in() -> bool:
            counts.append(len(r.engine.running))
            return counts[-1] == 7

        r.until(all_in)
        assert max(after - before for before, after in pairwise(counts)) <= 3


def test_an_idle_worker_checks_integrity_now_and_then() -> None:
    with rig(integrity_interval_s=0.03) as r:
        r.until(lambda: r.engine.num_integrity >= 3)
    with rig(integrity_interval_s=0.0) as r:
        for _ in range(5):
            r.worker.tick()
        assert r.engine.num_integrity == 0


def test_a_worker_checks_itself_when_asked_also_while_it_works() -> None:
    with rig(integrity_interval_s=0.0) as r:
        gateway, other = r.connect("g"), r.connect("h")
        gateway.send(submit("a", max_tokens=1000))
        r.until(lambda: bool(gateway.tokens("a")))
        gateway.send(CheckIntegrity(7))
        r.until(lambda: gateway.status.checked == (7, ""))
        assert not gateway.finishes("a")
        r.until(lambda: len(other.all(WorkerStatus)) > 3)
        assert other.status.checked is None, "another peer has not asked"
        r.engine.broken = True
        gateway.send(CheckIntegrity(8))
        with pytest.raises(IntegrityError, match="scripted"):
            r.until(lambda: False)
        gateway.socket.poll(1000)
        gateway.pump()
        assert gateway.status.checked == (8, "scripted"), "what was found is told before the end"


def drained(r: Rig) -> bool:
    return r.worker.finished()


def test_drain_refuses_finishes_and_waits_for_the_acknowledgement() -> None:
    with rig(shutdown_timeout_s=5.0) as r:
        gateway = r.connect("g")
        gateway.send(submit("a", max_tokens=20))
        r.until(lambda: bool(gateway.tokens("a")))
        r.worker.drain()
        gateway.send(submit("late"))
        r.until(lambda: ended(gateway, "a") and bool(gateway.all(Refused)))
        assert gateway.finishes("a")[0].reason == "length"
        assert gateway.all(Refused)[0].code == "draining"
        r.until(lambda: counter(gateway, "worker_draining") == 1)
        assert gateway.status.leases == []
        assert gateway.status.free_requests == 0
        assert not drained(r)
        gateway.send(AckUsage([("a", 1)]))
        r.until(lambda: drained(r))


def test_drain_aborts_what_outlasts_the_bound() -> None:
    with rig(shutdown_timeout_s=0.05) as r:
        gateway = r.connect("g")
        gateway.send(submit("a", max_tokens=10**6))
        r.until(lambda: bool(gateway.tokens("a")))
        r.worker.drain()
        r.until(lambda: ended(gateway, "a"))
        assert gateway.finishes("a")[0].reason == "abort"
        r.until(lambda: drained(r))  # the grace runs out: no acknowledgement comes


def test_stop_ends_the_run() -> None:
    with rig() as r:
        r.worker.stop()
        r.worker.run()
        assert r.engine.num_steps == 0


def test_the_highest_epoch_is_obeyed_and_nobody_else() -> None:
    with rig() as r:
        first = r.connect("one/dispatcher", hello=False)
        first.hello(observes=True, epoch=7)
        r.until(lambda: bool(first.all(WorkerStatus)))
        second = r.connect("two/dispatcher", hello=False)
        second.hello(observes=True, epoch=8)
        r.until(lambda: bool(second.all(WorkerStatus)))
        assert r.worker.counters.peers_lost == 1

        first.received.clear()
        first.send(SetCatalog([ModelSpec("other", "/p")]))
        first.hello(observes=True, epoch=7)
        r.until(lambda: r.worker.counters.dispatchers_refused == 1)
        gateway = r.connect("one/gateway-0")
        gateway.send(SetCatalog([]))
        r.until(lambda: r.worker.counters.controls_refused == 1)
        assert (first.received, r.engine.catalog) == ([], None)

        second.send(SetCatalog([ModelSpec("m", "/p")]))
        r.until(lambda: r.engine.catalog is not None)


def test_a_dispatcher_has_it_drain_and_a_gateway_does_not() -> None:
    with rig() as r:
        gateway, dispatcher = r.connect("g"), r.connect("d", hello=False)
        dispatcher.hello(observes=True, epoch=1)
        gateway.send(Restart())
        gateway.send(submit("a"))
        r.until(lambda: ended(gateway, "a"))
        assert not r.worker.finished()
        gateway.send(AckUsage([("a", 1)]))
        dispatcher.send(Restart())
        r.until(r.worker.finished)


def test_a_pack_lies_where_this_machine_has_it() -> None:
    with rig(packs_dir="/far") as r:
        gateway = r.connect("g")
        gateway.send(SetCatalog([ModelSpec("m", "/data/packs/0a1b"), ModelSpec("n", "/x/../etc")]))
        r.until(lambda: r.engine.catalog is not None)
        assert [spec.pack_dir for spec in r.engine.catalog or ()] == ["/far/0a1b", "/far/etc"]


@pytest.mark.parametrize(
    ("newest", "oldest", "common"),
    [
        (PROTOCOL_VERSION, 0, PROTOCOL_VERSION),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION, PROTOCOL_VERSION),
        (PROTOCOL_VERSION + 1, 0, 0),
        (PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1, 0),
        (OLDEST_PROTOCOL_VERSION - 1, 1, 0),
        (OLDEST_PROTOCOL_VERSION, 1, OLDEST_PROTOCOL_VERSION),
    ],
)
def test_the_highest_version_that_both_know_is_spoken(
    newest: int, oldest: int, common: int
) -> None:
    assert common_version(newest, oldest) == common
    with rig() as r:
        gateway = r.connect("g", hello=False)
        gateway.send(Hello(newest, "g", oldest_version=oldest))
        r.until(lambda: bool(gateway.received))
        assert gateway.all(Welcome)[0].protocol_version == (common or PROTOCOL_VERSION)
        assert bool(r.worker._peers) == bool(common)
