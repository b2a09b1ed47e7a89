"""Loads as the dispatcher asks for them: gathering, early refusals, expected times, prefetching."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import LoadModel, SwapRecord, WarmModel
from gateway.dispatch.policy.fleet_view import Demand
from gateway.dispatch.policy.load_budget import MIN_TIMED
from gateway.errors import UNAVAILABLE
from gateway.settings.settings import Settings
from registry.models.worker_orders import WorkerOrder
from tests.gateway.scripted_worker import Rig, ScriptedWorker, hosted, served

TIGHT = 50
"""KV tokens: less memory than a model's weights take, so that a load pushes one out."""


def messages(worker: ScriptedWorker) -> list[LoadModel]:
    return [m for m in worker.sent if isinstance(m, LoadModel)]


def took(worker: ScriptedWorker, model: str, *seconds: float) -> None:
    """Loads have ended there."""
    worker.status(swaps=[SwapRecord(model, "load", "disk", 1000, s) for s in seconds])


def busy_rig(**settings: float) -> tuple[Rig, ScriptedWorker]:
    """`m` runs three requests, `n` does not fit beside it."""
    rig = Rig(Settings(**settings))  # type: ignore[arg-type]
    rig.dispatcher.set_catalog([hosted(name) for name in "mnx"])
    worker = rig.worker(kv_tokens=TIGHT, states={"m": "resident", "n": "cold", "x": "cold"})
    for number in range(3):
        rig.ask(f"a{number}")
    worker.status()
    return rig, worker


def popular_rig() -> tuple[Rig, ScriptedWorker]:
    """`m` was asked for ten times."""
    rig, worker = served(arena_bytes=20_000)
    for number in range(10):
        rig.ask(f"a{number}")
        worker.tokens(f"a{number}", 7)
        worker.finish(f"a{number}")
        worker.status()
    return rig, worker


def test_requests_gather_and_the_load_says_what_waits() -> None:
    rig, worker = busy_rig(gather_wait_s=2.0)
    rig.ask("b", model="n")
    rig.advance(0.45)
    rig.ask("c", "u", "n")
    # 0.5 s for n and 0.5 s for m to come back: two that wait need 1 s together, 0.45 have passed.
    load_eta_s = (1 - 0.45) / 2 + 0.5
    assert rig.dispatcher.model_outlook("n").load_eta_s == pytest.approx(load_eta_s)
    assert rig.dispatcher.snapshot().load_eta_s == {"n": pytest.approx(load_eta_s)}
    rig.advance(0.25)
    assert messages(worker) == []
    rig.advance(0.05)
    (load,) = messages(worker)
    assert (load.model_id, load.forced, load.prefetch) == ("n", True, False)
    assert load.waited_s == pytest.approx(0.75)
    assert load.backlog_s > 0.0
    reasons = [(r.kind, r.reason) for r in rig.dispatcher.decisions.recent("n")]
    assert ("load", "enough requests waiting") in reasons
    assert ("held", "too few requests waiting") in reasons


def test_free_pages_are_taken_at_once_and_unforced() -> None:
    rig, worker = served()
    rig.ask("b", model="n")
    assert [(load.model_id, load.forced) for load in messages(worker)] == [("n", False)]
    assert rig.dispatcher.model_outlook("m").residency == "resident"
    assert rig.dispatcher.model_outlook("m").load_eta_s == 0.0
    assert rig.dispatcher.model_outlook("n").load_eta_s == pytest.approx(0.5)


async def test_who_cannot_be_served_in_time_is_told_when_to_come_again() -> None:
    rig, worker = busy_rig(gather_wait_s=0.0, queue_timeout_s=5.0, max_load_share=0.1)
    took(worker, "m", *[0.5] * MIN_TIMED)
    rig.ask("b", model="n")
    assert worker.loads == ["n"]
    worker.states = {"m": "resident", "n": "resident", "x": "cold"}
    took(worker, "n", 3.0)  # longer than expected: the budget is 2 s in debt
    assert "b" in worker.submitted
    worker.status()
    error = rig.refused("d", "t", "x")
    assert error.kind == UNAVAILABLE
    # 2.5 s of budget lack at 0.1 a second, and the load takes 0.5 s.
    # It comes again half of its time before its load's turn.
    assert error.retry_after_s == pytest.approx(25.0 - 2.5)
    assert "in about 26 s" in error.message or "in about 25 s" in error.message
    assert rig.dispatcher.snapshot().num_load_refusals == 1
    assert rig.dispatcher.snapshot().num_waiting == 0


async def test_who_comes_when_told_is_served_before_who_never_went_away() -> None:
    rig, worker = busy_rig(gather_wait_s=0.0, queue_timeout_s=5.0, max_load_share=0.1)
    rig.dispatcher.set_catalog([hosted(name) for name in "mnxy"])
    took(worker, "m", *[0.5] * MIN_TIMED)
    rig.ask("b", model="n")
    worker.states = {"m": "resident", "n": "resident", "x": "cold", "y": "cold"}
    took(worker, "n", 3.0)
    assert rig.refused("p1", "p", "x").retry_after_s == pytest.approx(22.5)
    rig.advance(20.5)
    for number in range(9):  # both that are there stay in demand
        rig.ask(f"c{number}", model="mn"[number % 2])
    rig.ask("q", "q", "y")
    rig.advance(2.0)
    rig.ask("p2", "p", "x")
    assert worker.loads == ["n"]
    rig.advance(2.5)
    assert worker.loads == ["n", "x"]
    assert rig.dispatcher.snapshot().num_load_refusals == 2, "y has to come again, and is told"


def test_a_place_is_not_kept_for_ever() -> None:
    rig, worker = busy_rig(gather_wait_s=0.0, queue_timeout_s=5.0, max_load_share=0.1)
    took(worker, "m", *[0.5] * MIN_TIMED)
    rig.ask("b", model="n")
    worker.states = {"m": "resident", "n": "resident", "x": "cold"}
    took(worker, "n", 3.0)
    rig.refused("p", "p", "x")
    loads, now_s = rig.dispatcher._loads, rig.clock.now_s
    assert list(loads._kept_places(now_s + 27.4)) == ["x"]
    assert list(loads._kept_places(now_s + 27.6)) == []
    assert loads._places == {}


def test_a_spray_of_cold_models_does_not_take_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, worker = busy_rig(max_queue_per_tenant=1000.0, max_queue_total=1000.0)
    names = [f"c{number}" for number in range(400)]
    models = [replace(hosted(name), weight_bytes=1000) for name in ("m", *names)]
    rig.dispatcher.set_catalog(models)
    num_looked_at = 0
    place = rig.dispatcher._fleet.place

    def counted(now_s: float, demands: Sequence[Demand], *rest: Any) -> bool:
        nonlocal num_looked_at
        num_looked_at += len(demands)
        return bool(place(now_s, demands, *rest))

    monkeypatch.setattr(rig.dispatcher._fleet, "place", counted)
    for name in names:
        rig.ask(f"r-{name}", "spray", name)
    assert num_looked_at < 6000, "400 looks would have been at 80,000"
    num_looked_at = 0
    for _ in range(20):
        rig.advance(0.05)
    assert 0 < num_looked_at < 2500, "20 ticks, and not 8,000"
    rig.advance(0.5)
    assert worker.loads, "what is due is loaded all the same"


def test_nobody_is_refused_for_a_guess() -> None:
    rig, worker = busy_rig(gather_wait_s=0.0, queue_timeout_s=5.0, max_load_share=0.1)
    rig.ask("b", model="n")
    worker.states = {"m": "resident", "n": "resident", "x": "cold"}
    took(worker, "n", 3.0)  # the first load that has ended there
    rig.ask("d", model="x")
    assert rig.dispatcher.snapshot().num_load_refusals == 0
    assert rig.dispatcher.snapshot().num_waiting == 1


def test_what_was_popular_is_fetched_when_a_worker_is_back() -> None:
    rig, worker = popular_rig()
    worker.die()
    worker.states = {"m": "cold", "n": "cold"}
    worker.connect()
    rig.advance(1.1)
    (load,) = messages(worker)
    assert (load.model_id, load.prefetch, load.forced) == ("m", True, False)
    assert not [m for m in worker.sent if isinstance(m, WarmModel)], "n was never asked for"


def test_what_an_operator_unloads_is_not_fetched_back() -> None:
    rig, worker = popular_rig()
    rig.dispatcher.unload_model("m")
    worker.states = {"m": "cold", "n": "cold"}
    worker.status()
    for _ in range(3):
        rig.advance(1.1)
    assert messages(worker) == []
    rig.ask("b")
    assert [load.model_id for load in messages(worker)] == ["m"], "who asks for it gets it"


def test_nothing_is_fetched_while_somebody_waits_for_a_load() -> None:
    rig, worker = busy_rig(gather_wait_s=60.0)
    rig.ask("b", model="n")
    for _ in range(3):
        rig.advance(0.1)
    assert not [m for m in worker.sent if isinstance(m, WarmModel | LoadModel)]


async def test_a_busy_model_gets_a_copy_on_a_worker_that_rests() -> None:
    rig = Rig()
    one = rig.worker("one", num_requests=16, kv_tokens=10_000)
    other = rig.worker("other", states={"m": "warm", "n": "cold"})
    for number in range(8):
        rig.ask(f"r{number}")
    assert len(one.submitted) == 8
    for _ in range(5):
        rig.advance(1.0)
        one.status()
        other.status()
    assert other.loads == ["m"]
    record = rig.dispatcher.decisions.last("load", "m")[0]
    assert (record.reason, record.worker) == ("replica", "other")


async def test_a_busy_model_gets_none_on_a_worker_that_leaves() -> None:
    rig = Rig()
    one = rig.worker("one", num_requests=16, kv_tokens=10_000)
    other = rig.worker("other", states={"m": "warm", "n": "cold"})
    rig.dispatcher.drains.set_orders({"other": WorkerOrder(drained=True)})
    for number in range(8):
        rig.ask(f"r{number}")
    for _ in range(5):
        rig.advance(1.0)
        one.status()
        other.status()
    assert other.loads == []
