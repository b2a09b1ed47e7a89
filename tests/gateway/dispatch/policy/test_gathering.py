"""Loads against models in demand: gathering until they pay, the bound, the budget, outlooks."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch.policy.fleet_sight import AllWorkers
from gateway.dispatch.policy.fleet_view import Demand, LoadDecision, ModelView, WorkerView
from gateway.dispatch.policy.load_budget import (
    BURST_S,
    MIN_TIMED,
    UNTIMED_S,
    Bucket,
    LoadBudget,
)
from gateway.dispatch.policy.placement import Placement

MB = 1 << 20


def view(
    name: str = "w", free_mb: int = 0, *, idle: bool = False, load_s: float = 1.0, **states: str
) -> WorkerView:
    """A worker; its models have 10 MB each. `idle`: nothing runs there."""
    models = {
        model: ModelView(state, 10 * MB, load_s, idle, -10.0) for model, state in states.items()
    }
    return WorkerView(name, free_mb * MB, 100 * MB, models)


def waits(
    name: str, now_s: float, *arrivals_s: float, backlog_s: float = 0.1, load_mb: int = 10
) -> Demand:
    """Tickets that came then."""
    return Demand(
        name,
        len(arrivals_s),
        backlog_s,
        pinned=False,
        weight_bytes=load_mb * MB,
        oldest_s=min(arrivals_s),
        waited_s=sum(now_s - arrival_s for arrival_s in arrivals_s),
    )


def asks(rates: Mapping[str, float]) -> "Rates":
    """An AskRate."""
    return Rates(rates)


class Rates:
    def __init__(self, rates: Mapping[str, float]) -> None:
        self._rates = rates

    def __call__(self, model_id: str, /) -> float:
        return self._rates.get(model_id, 0.0)


def timed(placement: Placement, worker_id: str) -> None:
    """Loads have ended there before, so estimates are no guesses."""
    for _ in range(MIN_TIMED):
        placement.loaded(worker_id, "earlier", 1.0, 0.0)


def first(found: list[LoadDecision]) -> tuple[str, bool] | None:
    """Reason of the only decision, and whether it is forced."""
    assert len(found) < 2
    return (found[0].reason, found[0].forced) if found else None


def test_a_model_that_is_seldom_asked_for_is_no_reason_to_wait() -> None:
    # Out and in again takes 2 s: at less than one ask in ten seconds that is within 20 %.
    idle = view(idle=True, a="cold", b="resident")
    placement = Placement(0.2, 5.0)
    found = placement.decide(
        0.0, [waits("a", 0.0, 0.0)], AllWorkers([idle]), asks_s=asks({"b": 0.099})
    )
    assert first(found) == ("idle models evicted", False)
    placement = Placement(0.2, 5.0)
    found = placement.decide(
        0.0, [waits("a", 0.0, 0.0)], AllWorkers([idle]), asks_s=asks({"b": 0.101})
    )
    assert first(found) == ("inactive models evicted", True), "and the budget pays for it"


def test_nobody_gathers_while_what_gives_way_is_at_rest() -> None:
    often = asks({"b": 1.0})
    placement = Placement(0.2, 5.0)
    timed(placement, "w")
    at_work = view(load_s=3.0, a="cold", b="resident", c="cold")
    assert not placement.decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([at_work]), asks_s=often)
    assert placement.outlooks["a"].reason == "too few requests waiting"
    resting = view(idle=True, load_s=3.0, a="cold", b="resident", c="cold")
    line = [waits("a", 0.1, 0.0)]
    assert not placement.decide(0.1, line, AllWorkers([resting]), wanted={"b"}, asks_s=often), (
        "b is waited for"
    )
    found = placement.decide(0.1, line, AllWorkers([resting]), asks_s=often)
    assert first(found) == ("inactive models evicted", True)
    placement.drop_claims(3.1, lambda worker_id, model_id: "resident")
    placement.loaded("w", "a", 3.0, 3.1)


def test_the_budget_holds_while_what_gives_way_is_at_rest() -> None:
    """What is told is when the bucket is full, and it begins then and not before."""
    often = asks({"b": 1.0})
    placement = Placement(0.2, 5.0)
    timed(placement, "w")
    placement._budget.take("w", "before", 2.0, 0.0)
    resting = view(idle=True, load_s=1.0, a="cold", b="resident")
    for now_s in (0.0, 2.5, 4.9):
        assert not placement.decide(
            now_s, [waits("a", now_s, 0.0)], AllWorkers([resting]), asks_s=often
        )
        assert placement.outlooks["a"].reason == "load budget used up"
        assert placement.outlooks["a"].at_s == pytest.approx(6.0)
    found = placement.decide(5.0, [waits("a", 5.0, 0.0)], AllWorkers([resting]), asks_s=often)
    assert first(found) == ("inactive models evicted", True)


def test_the_load_begins_when_the_waiting_has_cost_what_the_swap_costs() -> None:
    busy = view(a="warm", b="resident")  # 1 s for a, 1 s for b to come back
    placement = Placement(0.2, 60.0)
    assert not placement.decide(1.9, [waits("a", 1.9, 0.0)], AllWorkers([busy]))
    assert placement.outlooks["a"].until_s == pytest.approx(2.0)
    assert placement.outlooks["a"].at_s == pytest.approx(3.0)
    assert first(placement.decide(2.0, [waits("a", 2.0, 0.0)], AllWorkers([busy]))) == (
        "enough requests waiting",
        True,
    )
    # Ten that wait pay ten times as soon.
    placement = Placement(0.2, 60.0)
    many = [0.0] * 10
    assert not placement.decide(0.19, [waits("a", 0.19, *many)], AllWorkers([busy]))
    assert first(placement.decide(0.2, [waits("a", 0.2, *many)], AllWorkers([busy]))) == (
        "enough requests waiting",
        True,
    )


def test_nobody_gathers_beyond_the_bound() -> None:
    busy = view(a="warm", b="resident", load_s=4.0)  # the swap takes 8 s
    placement = Placement(0.2, 3.0)
    assert not placement.decide(2.9, [waits("a", 2.9, 0.0)], AllWorkers([busy]))
    assert placement.outlooks["a"].until_s == pytest.approx(3.0)
    assert first(placement.decide(3.0, [waits("a", 3.0, 0.0)], AllWorkers([busy]))) == (
        "maximum wait reached",
        True,
    )


def test_0_switches_gathering_off() -> None:
    busy = view(a="warm", b="resident")
    assert first(Placement(0.2).decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([busy]))) == (
        "next in line",
        True,
    )


def test_the_less_wanted_of_two_is_taken_for_what_goes() -> None:
    idle = view(idle=True, a="cold", b="resident", c="resident")
    placement = Placement(0.2, 5.0)
    placement._budget.take("w", "before", 5.0, 0.0)
    found = placement.decide(
        0.0, [waits("a", 0.0, 0.0)], AllWorkers([idle]), asks_s=asks({"b": 3.0, "c": 0.01})
    )
    assert first(found) == ("idle models evicted", False)
    # c is promised to a: d would push out b.
    assert not placement.decide(
        0.1, [waits("d", 0.1, 0.1)], AllWorkers([idle]), asks_s=asks({"b": 3.0, "c": 0.01})
    )
    assert placement.outlooks["d"].reason == "load budget used up"


def test_a_load_that_has_its_pages_is_not_counted_twice() -> None:
    placement = Placement(0.2, 5.0)
    assert placement.decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([view(free_mb=20, a="cold")]))
    models = {"a": ModelView("loading", 10 * MB, 1.0, False, held_bytes=10 * MB)}
    loading = WorkerView("w", 10 * MB, 100 * MB, models)
    found = placement.decide(0.1, [waits("d", 0.1, 0.1)], AllWorkers([loading]))
    assert first(found) == ("free memory", False)


def test_what_is_due_keeps_its_place_in_the_budget() -> None:
    def at(placement: Placement, now_s: float) -> list[str]:
        busy = WorkerView(
            "w",
            0,
            100 * MB,
            {
                "long": ModelView("warm", 10 * MB, 2.0, False),
                "short": ModelView("warm", 10 * MB, 0.1, False),
                "x": ModelView("warm", 10 * MB, 2.0, False),
                "b": ModelView("resident", 10 * MB, 1.0, False),
            },
        )
        both = [waits("long", now_s, -9.0), waits("short", now_s, -9.0)]
        demands = both if now_s else [waits("x", now_s, -9.0)]
        return [d.model_id for d in placement.decide(now_s, demands, AllWorkers([busy]))]

    placement = Placement(0.2, 2.0)
    timed(placement, "w")
    assert at(placement, 0.0) == ["x"], "the bucket is full: 2 s"
    placement.loaded("w", "x", 2.0, 0.1)
    placement.drop_claims(0.1, lambda w, m: "resident")
    # `short` could afford its load soon: it stands behind `long`, which needs 2 s of budget.
    assert at(placement, 5.0) == []
    assert placement.outlooks["long"].reason == "load budget used up"
    assert placement.outlooks["long"].until_s == pytest.approx(10.0)
    assert placement.outlooks["short"].until_s == pytest.approx(10.5)
    assert placement.outlooks["short"].at_s == pytest.approx(10.6)
    assert at(placement, 10.0) == ["long"]


def test_the_worker_that_can_begin_first_is_taken() -> None:
    placement = Placement(0.2, 1.0)
    one, two = view("one", a="warm", b="resident"), view("two", a="warm", c="resident")
    found = placement.decide(9.0, [waits("a", 9.0, 0.0)], AllWorkers([one]))
    assert found[0].worker_id == "one"
    placement.drop_claims(9.1, lambda w, m: "resident")
    for _ in range(2):  # 2 s in the bucket of each
        (decision,) = placement.decide(9.1, [waits("a", 9.1, 0.0)], AllWorkers([one, two]))
        placement.drop_claims(9.1, lambda w, m: "resident")
    assert decision.worker_id == "two"


def test_first_estimates_are_guesses_that_refuse_nobody() -> None:
    budget = LoadBudget(0.2)
    assert (budget.is_sure("w"), budget.charge_s("w", 30.0)) == (False, UNTIMED_S)
    for _ in range(MIN_TIMED):
        budget.settle("w", "a", 1.0, 0.0)
    assert (budget.is_sure("w"), budget.charge_s("w", 30.0)) == (True, 30.0)
    placement, busy = Placement(0.2, 5.0), view(a="warm", b="resident")
    placement.decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([busy]))
    assert not placement.outlooks["a"].sure
    timed(placement, "w")
    placement.decide(0.1, [waits("a", 0.1, 0.0)], AllWorkers([busy]))
    assert placement.outlooks["a"].sure


def test_what_is_worth_more_by_a_margin_does_not_wait_for_its_turn() -> None:
    busy = view(a="warm", b="resident")
    rates = {"a": 0.9, "b": 0.61}
    placement = Placement(0.2, 5.0)
    assert not placement.decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([busy]), asks_s=asks(rates))
    rates["b"] = 0.59
    found = placement.decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([busy]), asks_s=asks(rates))
    assert first(found) == ("higher value", False)


@pytest.mark.parametrize("came", [True, False])
def test_a_load_that_comes_to_nothing_gives_its_share_back(came: bool) -> None:
    placement = Placement(0.2, 0.0)
    timed(placement, "w")
    busy = view(a="warm", b="resident", load_s=2.0)
    assert placement.decide(0.0, [waits("a", 0.0, -1.0)], AllWorkers([busy]))
    placement.drop_claims(8.5, lambda w, m: "resident" if came else "warm")
    level_s = placement._budget.bucket("w", 0.0).level(0.0)
    assert level_s == pytest.approx(0.0 if came else BURST_S * 0.2)


def test_a_replica_costs_nobody_anything() -> None:
    there, idle = view("one", a="resident"), view("two", idle=True, a="cold", b="resident")
    queue = waits("a", 9.0, *[0.0] * 9, backlog_s=50.0)
    placement = Placement(0.2, 1.0)
    assert not placement.decide(9.0, [queue], AllWorkers([there, idle]), asks_s=asks({"b": 1.0}))
    assert not placement.outlooks, "it is there: nobody waits for a load"
    (decision,) = placement.decide(9.0, [queue], AllWorkers([there, idle]))
    assert (decision.worker_id, decision.reason, decision.forced) == ("two", "replica", False)


def test_a_pinned_model_is_never_what_goes() -> None:
    models = {"b": ModelView("resident", 10 * MB, 1.0, False, pinned=True)}
    placement = Placement(0.2, 2.0)
    wait = waits("a", 0.0, 0.0)
    placement.decide(0.0, [wait], AllWorkers([WorkerView("w", 0, 100 * MB, models)]))
    # Nothing that may go would do: only the worker knows whether its KV would.
    assert placement.outlooks["a"].until_s == pytest.approx(2.0)


def test_decisions_say_what_they_were_based_on() -> None:
    busy = view(a="warm", b="resident")
    (decision,) = Placement(0.2, 2.0).decide(5.0, [waits("a", 5.0, 1.0, 2.0)], AllWorkers([busy]))
    assert (decision.waited_s, decision.load_s, decision.num_waiting) == (4.0, 1.0, 2)


def test_a_claim_says_when_the_load_is_expected_to_end() -> None:
    placement = Placement(0.2, 2.0)
    free = view(free_mb=50, a="cold", c="cold", load_s=3.0)
    placement.decide(1.0, [waits("a", 1.0, 1.0), waits("c", 1.0, 1.0)], AllWorkers([free]))
    at_s = [there.at_s for name in "ac" if (there := placement.claimed(name, 1.0)) is not None]
    assert at_s == [4.0, 7.0]
    assert placement.claimed("nobody", 1.0) is None
    assert placement.is_busy


def test_without_a_worker_there_is_no_outlook() -> None:
    placement = Placement(0.2, 2.0)
    assert not placement.decide(0.0, [waits("a", 0.0, 0.0)], AllWorkers([]))
    assert placement.outlooks["a"].reason == "no worker connected"
    assert placement.outlooks["a"].at_s == math.inf


def test_a_load_larger_than_the_bucket_waits_for_a_full_one_and_leaves_a_debt() -> None:
    budget = LoadBudget(0.2)
    assert budget.bucket("w", 0.0).ready_s(30.0, 0.0) == 0.0
    budget.take("w", "a", 30.0, 0.0)
    assert budget.bucket("w", 0.0).level(0.0) == pytest.approx(-28.0)
    assert budget.bucket("w", 50.0).ready_s(0.5, 50.0) == pytest.approx(142.5)
    budget.settle("w", "a", 10.0, 50.0)  # it took a third of that
    assert budget.bucket("w", 50.0).ready_s(0.5, 50.0) == pytest.approx(50.0)
    budget.settle("w", "never charged", 10.0, 50.0)
    budget.forget(["w"])
    assert budget.bucket("w", 51.0).level(51.0) == 0.2 * BURST_S


loads = st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 8.0)), min_size=1, max_size=40)


@given(loads, st.sampled_from([0.05, 0.2, 1.0]))
@settings(max_examples=150, deadline=None)
def test_the_budget_holds_over_every_window(asked: list[tuple[float, float]], share: float) -> None:
    bucket, now_s, begun = Bucket(share, share * BURST_S, 0.0), 0.0, []
    for pause_s, load_s in asked:
        now_s = bucket.ready_s(load_s, now_s + pause_s)
        bucket = bucket.taken(load_s, now_s)
        begun.append((now_s, load_s))
    most_s = max(share * BURST_S, max(load_s for _, load_s in begun))
    for n, (from_s, _) in enumerate(begun):
        total_s = 0.0
        for to_s, load_s in begun[n:]:
            total_s += load_s
            assert total_s <= share * (to_s - from_s) + most_s + 1e-6


class Life:
    """A random life of two workers with one model each beyond their pins, for the property."""

    NAMES = "abcde"

    def __init__(self, share: float, gather_s: float) -> None:
        self.placement = Placement(share, gather_s)
        self.now_s = 0.0
        self.on: dict[str, str] = {"v": "a", "w": "b"}
        self.ends: dict[str, tuple[float, str]] = {}
        self.waiting: dict[str, list[float]] = {}
        self.begun: dict[str, list[tuple[float, float]]] = {"v": [], "w": []}
        self.said: dict[str, float] = {}

    def views(self) -> list[WorkerView]:
        return [
            WorkerView(
                worker,
                0,
                100 * MB,
                {
                    name: ModelView(self.state(worker, name), 10 * MB, 0.7, False)
                    for name in self.NAMES
                },
            )
            for worker in self.on
        ]

    def state(self, worker: str, name: str) -> str:
        if worker in self.ends:
            return "loading" if self.ends[worker][1] == name else "cold"
        return "resident" if self.on[worker] == name else "cold"

    def step(self, step_s: float, arrivals: list[str]) -> None:
        self.now_s += step_s
        for worker, (end_s, name) in list(self.ends.items()):
            if self.now_s >= end_s:
                del self.ends[worker]
                self.on[worker] = name
                self.placement.loaded(worker, name, 0.7, self.now_s)
        for name in arrivals:
            self.waiting.setdefault(name, []).append(self.now_s)
        there = {self.on[w] for w in self.on if w not in self.ends}
        self.waiting = {n: t for n, t in self.waiting.items() if n not in there}
        demands = [
            waits(name, self.now_s, *times)
            for name, times in sorted(self.waiting.items(), key=lambda item: item[1])
        ]
        for decision in self.placement.decide(self.now_s, demands, AllWorkers(self.views())):
            assert decision.worker_id not in self.ends, "one forced load at a time"
            loading = [name for _, name in self.ends.values()]
            assert decision.model_id not in [*loading, *there], "no herd"
            self.ends[decision.worker_id] = (self.now_s + 0.7, decision.model_id)
            self.begun[decision.worker_id].append((self.now_s, 0.7))


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1.0), st.lists(st.sampled_from(Life.NAMES), max_size=2)),
        max_size=60,
    ),
    st.sampled_from([0.1, 0.5]),
    st.sampled_from([0.0, 1.5]),
)
@settings(max_examples=80, deadline=None)
def test_claims_never_herd_and_who_waits_beyond_the_bound_waits_for_the_budget(
    life: list[tuple[float, list[str]]], share: float, gather_s: float
) -> None:
    world = Life(share, gather_s)
    for step_s, arrivals in life:
        world.step(step_s, arrivals)
        for name, times in world.waiting.items():
            outlook = world.placement.outlooks.get(name)
            if outlook is None:
                assert world.placement.num_claims(name) == 1
            elif world.now_s - min(times) > gather_s:
                assert outlook.reason in ("load budget used up", "other loads in progress")
                assert outlook.at_s > world.now_s
    for begun in world.begun.values():
        most_s = max(share * BURST_S, 0.7)
        for n, (from_s, _) in enumerate(begun):
            for m in range(n, len(begun)):
                total_s = 0.7 * (m - n + 1)
                assert total_s <= share * (begun[m][0] - from_s) + most_s + 1e-6
