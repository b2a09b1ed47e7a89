"""Where else a load could have gone: the record of a decision says why it did not go there."""

from gateway.dispatch.policy.fleet_sight import AllWorkers
from gateway.dispatch.policy.fleet_view import LoadDecision, WorkerView
from gateway.dispatch.policy.load_options import MAX_OTHERS
from gateway.dispatch.policy.placement import Placement
from tests.gateway.dispatch.policy.test_placement import MB, demand, model, worker


def loaded(placement: Placement, *workers: WorkerView, waiting: int = 1) -> LoadDecision:
    decision: LoadDecision
    (decision,) = placement.decide(0.0, [demand("a", waiting)], AllWorkers(workers))
    return decision


def outcomes(decision: LoadDecision) -> dict[str, str]:
    return {option.worker_id: option.outcome for option in decision.options}


def test_free_memory_host_memory_first_and_then_the_emptier() -> None:
    decision = loaded(
        Placement(0.2),
        worker("cold", 90, a=model("cold", load_s=3.0)),
        worker("warm", 50, a=model("warm", load_s=1.0)),
        worker("less", 40, a=model("warm", load_s=1.0)),
        worker("full", 0, a=model("warm", load_s=1.0), b=model("resident", 90, idle=True)),
    )
    assert decision.reason == "free memory"
    assert outcomes(decision) == {
        "warm": "chosen",
        "less": "less free memory",
        "cold": "loads from disk",
        "full": "models would have to leave",
    }
    chosen, *_, cold = decision.options
    assert (chosen.worker_id, chosen.load_s, chosen.wait_s, chosen.loss_s) == ("warm", 1.0, 0, 0)
    assert (cold.load_s, cold.is_warm, cold.free_bytes) == (3.0, False, 90 * MB)


def test_idle_models_leave_before_those_in_demand() -> None:
    decision = loaded(
        Placement(0.2),
        worker("busy", 5, a=model("warm"), b=model("resident", 90)),
        worker("idle", 0, a=model("cold"), b=model("resident", 90, idle=True)),
        worker("stuck", 0, a=model("warm"), b=model("draining", 90)),
    )
    assert decision.reason == "idle models evicted"
    assert outcomes(decision) == {
        "idle": "chosen",
        "busy": "models in demand would have to leave",
        "stuck": "not enough memory",
    }
    assert decision.options[1].loss_s > 0


def test_of_loads_that_push_models_in_demand_out_the_first_and_least() -> None:
    small = model("resident", 5)
    placement = Placement(0.2)
    decision = loaded(
        placement,
        worker("more", 0, a=model("cold"), b=small, c=small, d=model("resident", 85)),
        worker("one", 0, a=model("cold"), b=model("resident", 95)),
    )
    assert decision.reason == "next in line"
    assert outcomes(decision) == {"one": "chosen", "more": "pushes more out"}
    placement.lose_worker("more")
    placement._budget.take("later", "x", 100.0, 0.0)
    decision = loaded(
        placement,
        worker("later", 0, a=model("cold"), b=model("resident", 95)),
        worker("now", 0, a=model("cold"), b=model("resident", 95)),
        waiting=2,
    )
    assert outcomes(decision) == {"now": "chosen", "later": "begins later"}
    assert decision.options[1].wait_s > 0


def test_one_worker_has_no_options_and_many_are_cut() -> None:
    assert loaded(Placement(0.2), worker("w", 50, a=model("cold"))).options == ()
    many = [worker(f"w{n}", 50 + n, a=model("cold")) for n in range(9)]
    decision = loaded(Placement(0.2), *many)
    assert [option.worker_id for option in decision.options] == ["w8", "w7", "w6", "w5"]
    assert len(decision.options) == 1 + MAX_OTHERS


def test_the_record_changes_no_decision() -> None:
    """The figures of others are worked out after the decision, on rooms that it still uses."""
    workers = [
        worker("one", 12, a=model("cold"), b=model("cold")),
        worker("two", 11, a=model("cold"), b=model("cold")),
    ]
    found = Placement(0.2).decide(0.0, [demand("a"), demand("b")], AllWorkers(workers))
    assert [(d.model_id, d.worker_id) for d in found] == [("a", "one"), ("b", "two")]
    assert outcomes(found[1]) == {"two": "chosen", "one": "not enough memory"}
