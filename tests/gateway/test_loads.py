"""Loads as the dispatcher asks for them: gathering, early refusals, expected times, prefetching."""

import pytest

from engine.protocol import LoadModel, SwapRecord, WarmModel
from gateway.errors import UNAVAILABLE, ApiError
from gateway.policy.load_budget import MIN_TIMED
from gateway.settings import Settings
from tests.gateway.scripted_worker import Rig, ScriptedWorker, hosted, prepared, principal

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
        rig.dispatcher.run(prepared(f"a{number}"), principal("t"))
    worker.status()
    return rig, worker


def test_requests_gather_and_the_load_says_what_waits() -> None:
    rig, worker = busy_rig(gather_wait_s=2.0)
    rig.dispatcher.run(prepared("b", "n"), principal("t"))
    rig.advance(0.45)
    rig.dispatcher.run(prepared("c", "n"), principal("u"))
    # 0.5 s for n and 0.5 s for m to come back: two that wait need 1 s together.
    assert rig.dispatcher.model_outlook("n").load_eta_s == pytest.approx(0.55 + 0.5)
    assert rig.dispatcher.snapshot().load_eta_s == {"n": pytest.approx(1.05)}
    rig.advance(0.25)
    assert messages(worker) == []
    rig.advance(0.05)
    (load,) = messages(worker)
    assert (load.model_id, load.forced, load.prefetch) == ("n", True, False)
    assert load.waited_s == pytest.approx(0.75)
    assert load.backlog_s > 0.0
    reasons = [(r.kind, r.reason) for r in rig.dispatcher.decisions.recent("n")]
    assert ("load", "gathered") in reasons
    assert ("held", "gathering") in reasons


def test_free_pages_are_taken_at_once_and_unforced() -> None:
    rig = Rig()
    worker = rig.worker()
    rig.dispatcher.run(prepared("b", "n"), principal("t"))
    assert [(load.model_id, load.forced) for load in messages(worker)] == [("n", False)]
    assert rig.dispatcher.model_outlook("m").residency == "resident"
    assert rig.dispatcher.model_outlook("m").load_eta_s == 0.0
    assert rig.dispatcher.model_outlook("n").load_eta_s == pytest.approx(0.5)


async def test_who_cannot_be_served_in_time_is_told_when_to_come_again() -> None:
    rig, worker = busy_rig(gather_wait_s=0.0, queue_timeout_s=5.0, max_load_share=0.1)
    took(worker, "m", *[0.5] * MIN_TIMED)
    rig.dispatcher.run(prepared("b", "n"), principal("t"))
    assert worker.loads == ["n"]
    worker.states = {"m": "resident", "n": "resident", "x": "cold"}
    took(worker, "n", 3.0)  # longer than expected: the budget is 2 s in debt
    assert "b" in worker.submitted
    worker.status()
    stream = rig.dispatcher.run(prepared("d", "x"), principal("t"))
    with pytest.raises(ApiError) as caught:
        await anext(stream)
    assert caught.value.kind == UNAVAILABLE
    # 2.5 s of budget lack at 0.1 a second, and the load takes 0.5 s.
    assert caught.value.retry_after_s == pytest.approx(25.5)
    assert "in 26 s" in caught.value.message or "in 25 s" in caught.value.message
    assert rig.dispatcher.snapshot().num_load_refusals == 1
    assert rig.dispatcher.snapshot().num_waiting == 0
    rig.dispatcher.check_integrity()


def test_nobody_is_refused_for_a_guess() -> None:
    rig, worker = busy_rig(gather_wait_s=0.0, queue_timeout_s=5.0, max_load_share=0.1)
    rig.dispatcher.run(prepared("b", "n"), principal("t"))
    worker.states = {"m": "resident", "n": "resident", "x": "cold"}
    took(worker, "n", 3.0)  # the first load that has ended there
    rig.dispatcher.run(prepared("d", "x"), principal("t"))
    assert rig.dispatcher.snapshot().num_load_refusals == 0
    assert rig.dispatcher.snapshot().num_waiting == 1


def test_what_was_popular_is_fetched_when_a_worker_is_back() -> None:
    rig = Rig()
    worker = rig.worker(arena_bytes=20_000)
    for number in range(10):
        rig.dispatcher.run(prepared(f"a{number}"), principal("t"))
        worker.tokens(f"a{number}", 7)
        worker.finish(f"a{number}")
        worker.status()
    worker.die()
    worker.states = {"m": "cold", "n": "cold"}
    worker.connect()
    rig.advance(1.1)
    (load,) = messages(worker)
    assert (load.model_id, load.prefetch, load.forced) == ("m", True, False)
    assert not [m for m in worker.sent if isinstance(m, WarmModel)], "n was never asked for"


def test_nothing_is_fetched_while_somebody_waits_for_a_load() -> None:
    rig, worker = busy_rig(gather_wait_s=60.0)
    rig.dispatcher.run(prepared("b", "n"), principal("t"))
    for _ in range(3):
        rig.advance(0.1)
    assert not [m for m in worker.sent if isinstance(m, WarmModel | LoadModel)]
