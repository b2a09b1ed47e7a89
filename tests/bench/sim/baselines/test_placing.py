"""A static split: homes by size, loads only there."""

from bench.sim.baselines.placing import StaticSplit, deal_homes
from gateway.dispatch.policy.fleet_sight import AllWorkers
from gateway.dispatch.policy.fleet_view import Demand, ModelView, WorkerView

BYTES = {"a": 50, "b": 40, "c": 30, "d": 20}


def view(worker_id: str, free: int = 100, **states: str) -> WorkerView:
    """A worker with these models in these states."""
    models = {name: ModelView(states.get(name, "cold"), BYTES[name], 1.0, False) for name in BYTES}
    return WorkerView(worker_id, free, 1000, models)


def demand(name: str, backlog_s: float = 100.0) -> Demand:
    """A long queue, for which ours would have a second copy made."""
    return Demand(name, 50, backlog_s, pinned=False)


def split() -> StaticSplit:
    """Two workers."""
    return StaticSplit(deal_homes(BYTES, ["w0", "w1"]))


def test_homes_are_even_in_bytes() -> None:
    assert deal_homes(BYTES, ["w0", "w1"]) == {"a": "w0", "b": "w1", "c": "w1", "d": "w0"}


def test_loads_are_at_home_only() -> None:
    placer = split()
    found = placer.decide(
        0.0, [demand(name) for name in "abcd"], AllWorkers([view("w1"), view("w0")])
    )
    assert {(d.model_id, d.worker_id) for d in found} == {
        ("a", "w0"),
        ("b", "w1"),
        ("c", "w1"),
        ("d", "w0"),
    }
    assert placer.num_claims("a") == 1
    assert not placer.decide(0.1, [demand("a")], AllWorkers([view("w0"), view("w1")]))


def test_there_is_no_second_copy_and_no_help() -> None:
    placer = split()
    assert not placer.decide(0.0, [demand("a")], AllWorkers([view("w0", a="resident"), view("w1")]))
    assert not placer.decide(0.0, [demand("a")], AllWorkers([view("w1")]))


def test_a_busy_home_makes_room_without_a_bound() -> None:
    placer = split()
    full = view("w0", free=0, a="resident")
    assert [d.model_id for d in placer.decide(0.0, [demand("d")], AllWorkers([full]))] == ["d"]


def test_claims_end() -> None:
    placer = split()
    placer.decide(0.0, [demand("a"), demand("b")], AllWorkers([view("w0"), view("w1")]))
    placer.drop_claims(0.1, lambda worker, model: "resident" if model == "a" else "cold")
    assert (placer.num_claims("a"), placer.num_claims("b")) == (0, 1)
    placer.lose_worker("w1")
    placer.lose_worker("elsewhere")
    assert placer.num_claims("b") == 0


def test_an_operators_wish_is_granted_at_home() -> None:
    found = split().claim(0.0, demand("c"), AllWorkers([view("w0"), view("w1")]))
    assert found is not None
    assert found.worker_id == "w1"
