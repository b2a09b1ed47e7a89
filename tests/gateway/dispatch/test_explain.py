"""Why a ticket waits: every reason, and the same figures as the round of grants goes by."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SwapCandidate, SwapChoice
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.decisions import DecisionRecord, of_choice
from gateway.dispatch.explain import MAX_TENANTS, WaitReason
from gateway.dispatch.policy.reasons import DecisionFigures, Reason, WaitCode
from gateway.dispatch.policy.service_costs import Prediction
from gateway.dispatch.tickets import RequestStream, Ticket
from gateway.dispatch.worker_room import lacks
from tests.gateway.scripted_worker import Rig, ScriptedWorker, prepared, served


def why(rig: Rig, request_id: str) -> WaitReason:
    """Of a request with one choice."""
    reason: WaitReason
    (reason,) = rig.dispatcher.explain(request_id)
    return reason


async def test_a_full_worker_is_named_with_what_it_has() -> None:
    rig = Rig()
    rig.worker(num_requests=1)
    rig.ask("a")
    rig.clock.now_s += 1.5
    rig.ask("b", "u")
    rig.clock.now_s += 0.5
    reason = why(rig, "b")
    assert (reason.code, reason.worker, reason.waited_s) == ("worker full", "w", 0.5)
    assert "it runs 1 requests and has capacity for 0 more" in reason.text
    (room,) = reason.rooms
    assert (room.running, room.free_requests, room.wanted_tokens) == (1, 0, 10)
    assert reason.left_s == pytest.approx(rig.settings.queue_timeout_s - 0.5)
    running = why(rig, "a")
    assert (running.code, running.worker, running.waited_s) == ("running", "w", 0.0)
    assert "for 2.0 s, 0 tokens generated so far" in running.text
    assert rig.dispatcher.explain("nobody") == []


async def test_memory_that_lacks_is_said_in_tokens_and_bytes() -> None:
    rig = Rig()
    rig.worker(kv_tokens=20)
    rig.ask("a")
    rig.ask("b", prompt=6)
    reason = why(rig, "b")
    assert reason.code == "not enough KV memory"
    assert "may need 12 tokens (120 bytes), and 10 tokens of m's lease and 100" in reason.text


async def test_a_worker_kept_for_an_earlier_head_names_it() -> None:
    rig = Rig()
    rig.worker(kv_tokens=20, states={"m": "resident", "n": "resident"})
    rig.ask("a", "t")
    rig.ask("large", "u", prompt=12)
    rig.ask("small", "v", "n")
    assert why(rig, "large").code == "not enough KV memory"
    reason = why(rig, "small")
    assert (reason.code, reason.held_by) == ("worker held", "large")
    assert reason.num_tenants_ahead == 1
    assert [one.tenant_id for one in reason.tenants_ahead] == ["u"]


async def test_room_that_is_kept_for_others_is_not_called_full() -> None:
    rig = Rig()
    rig.worker(num_requests=9)
    rig.dispatcher.set_reserved_shares({"vip": 0.9})
    rig.ask("vip", "vip")
    rig.ask("a", "t")
    reason = why(rig, "a")
    assert (reason.code, reason.worker) == ("capacity reserved", "w")
    assert reason.rooms[0].free_requests == 8


async def test_a_tenants_own_older_requests_go_first() -> None:
    rig = Rig()
    rig.worker(num_requests=1)
    for name in ("a", "b", "c"):
        rig.ask(name)
    reason = why(rig, "c")
    assert (reason.code, reason.own_ahead) == ("behind older requests", 1)
    assert "1 older requests of the same tenant for m go first; w is full" in reason.text


async def test_tenants_before_it_come_with_their_counters() -> None:
    rig = Rig()
    rig.worker(num_requests=1)
    rig.ask("a", "first")
    for number in range(MAX_TENANTS + 2):
        rig.ask(f"b{number}", f"t{number:02}")
    reason = why(rig, f"b{MAX_TENANTS + 1}")
    assert reason.num_tenants_ahead == MAX_TENANTS + 1
    assert len(reason.tenants_ahead) == MAX_TENANTS
    assert reason.tenants_ahead[0].tenant_id == f"t{MAX_TENANTS:02}", "the nearest first"
    assert all(one.counter <= reason.counter for one in reason.tenants_ahead)


async def test_a_model_that_is_being_loaded_says_where_and_how_long_yet() -> None:
    rig, worker = served()
    rig.ask("a", model="n")
    assert worker.loads == ["n"]
    rig.clock.now_s += 0.2
    reason = why(rig, "a")
    assert (reason.code, reason.worker) == ("loading", "w")
    assert reason.eta_s == pytest.approx(0.3)
    assert "0.3 s left" in reason.text


async def test_no_worker_and_a_silent_one() -> None:
    rig = Rig()
    rig.ask("a")
    assert why(rig, "a").code == "no worker connected"
    worker = rig.worker(num_requests=0)
    assert why(rig, "a").code == "worker full"
    rig.clock.now_s += 5.0
    reason = why(rig, "a")
    assert (reason.code, reason.worker) == ("worker not responding", "w")
    worker.die()
    assert why(rig, "a").code == "no worker connected"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("not enough memory", "not enough memory"),
        ("load budget used up", "load budget used up"),
        ("too few requests waiting", "too few requests waiting"),
    ],
)
async def test_what_placement_said_last_is_the_reason(said: Reason, code: WaitCode) -> None:
    rig = Rig()
    rig.worker(states={"m": "resident", "n": "draining"})
    rig.ask("a", model="n")
    rig.clock.now_s += 0.01
    now_s = rig.clock.now_s
    rig.dispatcher.decisions.add(
        DecisionRecord(
            now_s, "held", said, "n", "w", DecisionFigures(until_s=now_s + 2.0, eta_s=3.0)
        )
    )
    rig.clock.now_s += 0.5
    reason = why(rig, "a")
    assert (reason.code, reason.worker) == (code, "w")
    assert reason.until_s == pytest.approx(1.5)
    assert reason.eta_s == pytest.approx(2.5)
    rig.clock.now_s += 10.0
    assert why(rig, "a").code != code, "what was said long ago holds no more"


async def test_a_load_that_finds_no_room_on_the_worker_says_so() -> None:
    rig, worker = served()
    rig.ask("a", model="n")
    kept = SwapCandidate("m", "kept: residence", 1.0, 1.0, 1.0, 1.0, 1, 1)
    choice = SwapChoice("n", "load", 3, 0.0, 0.5, [kept])
    worker.states["n"] = "loading"
    worker.status()
    assert why(rig, "a").code == "loading"
    rig.clock.now_s += 0.1
    rig.dispatcher.decisions.add(of_choice("w", choice, rig.clock.now_s))
    rig.clock.now_s += 3.0
    reason = why(rig, "a")
    assert reason.code == "no model can be evicted"
    assert "m (loaded too recently)" in reason.text


async def test_a_failed_load_is_told_in_the_groups_of_all_that_waits() -> None:
    rig, worker = served(num_requests=1)
    for name in ("a", "b", "c"):
        rig.ask(name)
    rig.ask("d", "u", "n")
    look = rig.dispatcher.look()
    found = [(g.head.tenant_id, g.head.model, g.num_waiting, g.head.code) for g in look.groups()]
    assert sorted(found) == [("t", "m", 2, "worker full"), ("u", "n", 1, "loading")]
    assert [g.head.tenant_id for g in look.groups(model="n")] == ["u"]
    assert [g.head.model for g in look.groups(tenant_id="t")] == ["m"]
    assert look.groups(model="n", tenant_id="t") == []
    rig.dispatcher.check_integrity()
    assert worker.submitted == ["a"], "looking grants nothing"


@given(
    free_requests=st.integers(0, 3),
    used=st.integers(0, 60),
    wanted=st.integers(1, 60),
    under_way=st.lists(st.sampled_from(["m", "n"]), max_size=3),
    late_s=st.sampled_from([0.0, 5.0]),
    block=st.sampled_from([1, 16]),
)
def test_lacks_and_the_grants_agree(
    free_requests: int, used: int, wanted: int, under_way: list[str], late_s: float, block: int
) -> None:
    played = ScriptedWorker(
        num_requests=free_requests,
        kv_tokens=max(0, 64 - used),
        states={"m": "resident", "n": "resident"},
        block_tokens=block,
    )
    worker = WorkerCapacity("w", "", 0.0)
    worker.update(played.make_status([]), 0.0)
    for number, model in enumerate(under_way):
        worker.grant(ticket(f"g{number}", model, 7))
    asked = ticket("a", "m", wanted)
    room = worker.room(asked, late_s)
    assert room is not None
    assert (lacks(room) is None) == worker.fits(asked, late_s)


def ticket(request_id: str, model: str, tokens: int) -> Ticket:
    request = msgspec.structs.replace(
        prepared(request_id, model), prompt_token_ids=[1], max_tokens=tokens - 1
    )
    stream = RequestStream(10, lambda: None, lambda: 0.0)
    return Ticket(request, "t", 1.0, 1, 0.0, 9.0, Prediction(1, 0.1), stream)


async def test_a_look_at_very_many_goes_no_further_than_it_is_asked() -> None:
    rig = Rig()
    rig.worker(num_requests=1)
    rig.ask("running")
    for number in range(200):
        rig.ask(f"r{number}", f"t{number:03}")
    look = rig.dispatcher.look()
    assert [group.head.request_id for group in look.groups(most=3)] == ["r0", "r1", "r2"]
    assert look.num_waiting() == 200
    assert len(look._causes) == 3
    last = look.groups(tenant_id="t199")
    assert (last[0].head.code, last[0].head.num_tenants_ahead) == ("worker held", 199)
    assert len(look._causes) == 4, "the worker is kept: nobody in between matters"
