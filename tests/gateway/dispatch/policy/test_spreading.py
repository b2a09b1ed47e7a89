"""One more copy where the copies are busy and a worker rests."""

from gateway.dispatch.policy.fleet_view import Demand, ModelView, WorkerView
from gateway.dispatch.policy.spreading import (
    AGAIN_S,
    MIN_BUSY_S,
    MIN_RUNNING,
    BusyModel,
    Spread,
    Spreading,
)

WEIGHTS = 1000


def busy(name: str = "m", running: int = MIN_RUNNING, copies: int = 1) -> BusyModel:
    return BusyModel(Demand(name, 0, 0.0, False, WEIGHTS), running, copies)


def worker(name: str, free: int = 2 * WEIGHTS, **states: str) -> WorkerView:
    models = {m: ModelView(state, WEIGHTS, 0.5, idle=True) for m, state in states.items()}
    return WorkerView(name, free, 10 * WEIGHTS, models, cold_bytes_per_s=WEIGHTS / 10)


def resting(*workers: WorkerView) -> dict[str, WorkerView]:
    return {view.worker_id: view for view in workers}


def after(seconds: float, models: list[BusyModel], where: dict[str, WorkerView]) -> list[Spread]:
    """What is decided once the models have been busy for so long."""
    spreading = Spreading()
    assert spreading.decide(100.0, models, where) == []
    return spreading.decide(100.0 + seconds, models, where)


def test_a_worker_that_rests_loads_what_keeps_others_busy_for_as_long_as_the_load_takes() -> None:
    warm, cold = worker("warm", m="warm"), worker("cold")
    assert after(MIN_BUSY_S, [busy()], resting(warm, cold)) == [Spread("m", "warm", 0.5)]
    assert after(9.0, [busy()], resting(cold)) == []
    assert after(10.0, [busy()], resting(cold)) == [Spread("m", "cold", 10.0)]


def test_few_requests_and_too_little_room_are_no_reason() -> None:
    there = resting(worker("w", m="warm"))
    assert after(60.0, [busy(running=MIN_RUNNING - 1)], there) == []
    assert after(60.0, [busy(running=2 * MIN_RUNNING - 1, copies=2)], there) == []
    assert after(60.0, [busy(running=2 * MIN_RUNNING, copies=2)], there) != []
    assert after(60.0, [busy()], resting(worker("w", free=WEIGHTS, m="warm"))) == []
    for state in ("resident", "loading", "draining", "failed"):
        assert after(60.0, [busy()], resting(worker("w", m=state))) == []


def test_one_load_a_worker_the_busiest_model_first_and_not_again_at_once() -> None:
    models = [busy("few"), busy("many", running=3 * MIN_RUNNING)]
    one = resting(worker("w", few="warm", many="warm"))
    spreading = Spreading()
    spreading.decide(0.0, models, one)
    assert [s.model_id for s in spreading.decide(5.0, models, one)] == ["many"]
    assert [s.model_id for s in spreading.decide(6.0, models, one)] == ["few"]
    assert spreading.decide(7.0, models, one) == []  # the worker has not done either
    assert [s.model_id for s in spreading.decide(6.0 + AGAIN_S, models, one)] == ["many"]


def test_a_model_that_was_idle_between_begins_anew() -> None:
    there = resting(worker("w", m="warm"))
    spreading = Spreading()
    spreading.decide(0.0, [busy()], there)
    spreading.decide(1.0, [], there)
    assert spreading.decide(3.0, [busy()], there) == []
