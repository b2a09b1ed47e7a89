"""Service while it is used: true-up, failed attempts, loads, reserved places; by the dispatcher."""

import msgspec
import pytest

from engine.protocol import RequestService, Submit, SwapRecord, Usage
from gateway.dispatch.policy.fair_share import FairShare
from tests.gateway.scripted_worker import Rig, ScriptedWorker, served


def share_of(rig: Rig) -> FairShare:
    share = rig.dispatcher._lanes.live.share
    assert isinstance(share, FairShare)
    return share


def tell(
    worker: ScriptedWorker, *service: RequestService, swaps: tuple[SwapRecord, ...] = ()
) -> None:
    """One status with all of this."""
    worker.num_received = sum(isinstance(message, Submit) for message in worker.sent)
    told = msgspec.structs.replace(worker.make_status(list(swaps)), service=list(service))
    worker.say(told)


def load_of(model: str, seconds: float) -> SwapRecord:
    return SwapRecord(model, "load", "disk", 1000, seconds)


async def test_service_counts_while_it_runs_in_place_of_the_prediction() -> None:
    rig, worker = served()
    rig.ask("long")
    share = share_of(rig)
    predicted = share.counter("t")
    assert predicted > 0
    tell(worker, RequestService("long", 1, predicted / 2, predicted / 4))
    assert share.counter("t") == pytest.approx(predicted), "of it a half is charged"
    tell(worker, RequestService("long", 1, 50.0, 25.0))
    assert share.counter("t") == pytest.approx(50.0)
    tell(worker, RequestService("long", 1, 50.0, 25.0), RequestService("unknown", 1, 9.0, 9.0))
    assert share.counter("t") == pytest.approx(50.0), "what was told is not charged again"
    worker.tokens("long", 7)
    worker.finish("long", service_s=60.0)
    assert share.counter("t") == pytest.approx(60.0)


async def test_what_a_lost_worker_did_is_given_back() -> None:
    rig, worker = served()
    rig.ask("a")
    tell(worker, RequestService("a", 1, 5.0, 4.0))
    worker.die("it died")
    share = share_of(rig)
    assert share.counter("t") == pytest.approx(0.0)
    accounts = rig.dispatcher.snapshot().accounts
    assert accounts.failed_s == 4.0
    assert accounts.device_s == {}


async def test_a_request_that_failed_on_the_worker_costs_its_tenant_nothing() -> None:
    rig, worker = served()
    rig.ask("a")
    tell(worker, RequestService("a", 1, 5.0, 4.0))
    worker.finish("a", "error", service_s=7.0)
    assert share_of(rig).counter("t") == pytest.approx(0.0)
    assert rig.dispatcher.snapshot().service_s_by_tenant == {}
    assert rig.dispatcher.snapshot().accounts.failed_s >= 4.0


async def test_a_load_is_paid_by_those_who_waited_and_paid_back_by_users() -> None:
    rig, worker = served()
    worker.states["n"] = "cold"
    for number in range(3):
        rig.ask(f"x{number}", "x", "n")
    running = rig.ask("y", "y", "n")
    worker.states["n"] = "loading"
    tell(worker)
    worker.states["n"] = "resident"
    tell(worker, swaps=(load_of("n", 8.0),))
    accounts = rig.dispatcher.snapshot().accounts
    assert accounts.load_s == pytest.approx({"x": 6.0, "y": 2.0})
    rig.ask("z", "z", "m")
    worker.finish("z", service_s=3.0)
    assert rig.dispatcher.snapshot().accounts.load_s == pytest.approx({"x": 6.0, "y": 2.0})
    worker.finish("y", service_s=4.0, token_ids=(7,))
    after = rig.dispatcher.snapshot().accounts.load_s
    assert after == pytest.approx({"x": 3.0, "y": 5.0})
    ends = [event.finish async for event in running if event.finish is not None]
    assert [end.usage.load_s for end in ends] == [4.0]


async def test_what_a_lost_attempt_paid_of_a_load_is_on_no_bill() -> None:
    rig, worker = served()
    worker.states["n"] = "cold"
    running = rig.ask("x", "x", "n")
    worker.states["n"] = "loading"
    tell(worker)
    worker.states["n"] = "resident"
    tell(worker, swaps=(load_of("n", 8.0),))
    tell(worker, RequestService("x", 1, 3.0, 3.0))
    worker.die()
    other = rig.worker("w2")
    other.states["n"] = "resident"
    other.status()
    assert ("x", 2) in other.running
    other.finish("x", attempt=2, service_s=1.0, token_ids=(1,))
    ends = [event.finish async for event in running if event.finish is not None]
    assert [end.usage.load_s for end in ends] == [0.0], "nobody's load brought it there"


async def test_a_load_that_nobody_waited_for_is_the_systems() -> None:
    rig, worker = served()
    worker.states["n"] = "loading"
    tell(worker)
    worker.states["n"] = "resident"
    tell(worker, swaps=(load_of("n", 8.0),))
    accounts = rig.dispatcher.snapshot().accounts
    assert (dict(accounts.load_s), accounts.system_load_s) == ({}, 8.0)


async def test_usage_that_nobody_waits_for_is_the_systems() -> None:
    rig = Rig()
    rig.worker()
    rig.dispatcher._book.late(("gone", 1), Usage(1, 0, 1, 3.0, 2.0))
    assert rig.dispatcher.snapshot().accounts.failed_s == 2.0


async def test_reserved_places_wait_for_their_tenant() -> None:
    rig = Rig()
    rig.dispatcher.set_reserved_shares({"gold": 0.5})
    worker = rig.worker(num_requests=9)
    for number in range(9):
        rig.ask(f"f{number}", "flood")
    worker.status()
    assert len(worker.submitted) == 4, "of nine places eight are rows, and half of these are kept"
    for number in range(5):
        rig.ask(f"g{number}", "gold")
    worker.status()
    assert sum(name.startswith("g") for name in worker.submitted) == 4
    assert len(worker.submitted) == 8, "what is left beyond is for who has little there"
    rig.ask("q", "quiet")
    assert worker.submitted[-1] == "q"


async def test_what_was_booked_of_a_lost_attempt_is_not_booked_again_when_its_end_is_told() -> None:
    rig, worker = served()
    rig.ask("a")
    worker.tokens("a", 1)
    tell(worker, RequestService("a", 1, 5.0, 4.0))
    worker.die()
    book = rig.dispatcher._book
    assert book.failed_s == 4.0
    for _ in range(2):  # the connection broke, the worker lives and says what it did meanwhile
        book.late(("a", 1), Usage(1, 0, 1, 6.0, 4.5))
        assert book.failed_s == 4.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
async def test_figures_that_are_no_times_change_no_counter_and_are_counted(bad: float) -> None:
    rig, worker = served()
    share = share_of(rig)
    rig.ask("a")
    tell(worker, RequestService("a", 1, 5.0, 4.0))
    tell(worker, RequestService("a", 1, bad, bad), swaps=(load_of("m", bad),))
    assert share.counter("t") == pytest.approx(5.0)
    worker.tokens("a", 7)
    worker.finish("a", service_s=bad)
    assert share.counter("t") == pytest.approx(5.0)
    accounts = rig.dispatcher.snapshot().accounts
    assert accounts.num_unsound >= 4
    assert rig.dispatcher._book.service_s["t"] == 5.0
    assert accounts.system_load_s == 0.0
    prediction = rig.dispatcher._estimators[0].predict("t", "m", 10, 10)
    assert 0 < prediction.service_s < 100
