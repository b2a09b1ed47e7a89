"""Fairness from samples: Jain's index, misdirected service, the largest gap."""

import itertools

import numpy as np
import pytest

from bench.sim.columns import Slo, columns
from bench.sim.fair_metrics import Fairness, fairness, jain_index
from bench.sim.types import Run, Swap
from tests.bench.sim.some_runs import a_world, add_record, add_sample


def judged(run: Run) -> Fairness:
    """The figures of a run; every tenant was served by worker 0 unless records say more."""
    if not len(run.records):
        for tenant in range(len(run.world.tenants)):
            add_record(run, tenant=tenant)
    return fairness(run, columns(run.records, Slo()))


def steady(rates: tuple[float, ...], weights: tuple[float, ...], waiting: tuple[int, ...]) -> Run:
    """Fifty seconds in which each tenant gets its rate and these wait."""
    run = Run(a_world(weights))
    for second in range(51):
        add_sample(run, float(second), {t: r * second for t, r in enumerate(rates)}, waiting)
    return run


def test_jain_index() -> None:
    assert jain_index(np.array([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert jain_index(np.array([3.0, 0.0, 0.0])) == pytest.approx(1 / 3)


def test_equal_shares_are_fair() -> None:
    fair = judged(steady((1.0, 1.0), (1.0, 1.0), (0, 1)))
    assert fair.jain.tolist() == pytest.approx([1.0] * 5)
    assert fair.window_end_s.tolist() == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert fair.misdirected == 0.0
    assert fair.worst_error == 0.0
    assert fair.gap is None


def test_shares_are_by_weight() -> None:
    fair = judged(steady((1.0, 3.0), (1.0, 3.0), (0, 1)))
    assert fair.jain_mean == pytest.approx(1.0)
    assert fair.worst_error == pytest.approx(0.0)
    unfair = judged(steady((3.0, 1.0), (1.0, 3.0), (0, 1)))
    # Due are 1 and 3, got are 3 and 1: half of all went to the wrong one.
    assert unfair.misdirected == pytest.approx(0.5)
    assert unfair.worst_error == pytest.approx(2.0)
    assert unfair.jain_mean == pytest.approx(jain_index(np.array([3.0, 1 / 3])))


def test_who_does_not_wait_is_not_treated_unfairly() -> None:
    fair = judged(steady((1.0, 1.0, 0.0), (1.0, 1.0, 1.0), (0, 1)))
    assert fair.jain_mean == pytest.approx(1.0)
    assert judged(steady((1.0, 0.0), (1.0, 1.0), (0,))).jain_mean is None


def test_one_moment_without_waiting_takes_a_tenant_out_of_the_window() -> None:
    run = Run(a_world((1.0, 1.0)))
    for second in range(31):
        waiting = (0,) if second == 15 else (0, 1)
        add_sample(run, float(second), {0: 2.0 * second, 1: 0.0}, waiting)
    assert judged(run).window_end_s.tolist() == [10.0, 30.0]


def test_the_gap_is_what_grew_while_both_waited() -> None:
    run = Run(a_world((1.0, 2.0)))
    # Tenant 0 has two requests under way at once, tenant 1 one; both are served by one worker.
    add_record(run, tenant=0, ended_s=4.0, service_s=2.0)
    add_record(run, tenant=0, arrival_s=1.0, queue_s=1.0, ended_s=5.0, service_s=1.0)
    add_record(run, tenant=0, arrival_s=5.0, ended_s=9.0, service_s=2.5)
    add_record(run, tenant=1, ended_s=30.0, service_s=4.0)
    run.swaps.append(Swap(3.0, 0, 0, "load", "disk", 1.5, 1))
    # Tenant 0 gets 1 a second for 10 s, then tenant 1 gets 2 (its weight is 2) for 4 s.
    for second in range(31):
        one = float(min(second, 10))
        other = 2.0 * max(0, min(second, 14) - 10)
        add_sample(run, float(second), {0: one, 1: other}, (0, 1))
    gap = judged(run).gap
    assert gap is not None
    assert (gap.gap_s, gap.ahead, gap.behind, gap.at_s) == (10.0, 0, 1, 10.0)
    # 2 (U + quantum + load), over weight: 2 + 1 at once, 2.5 the largest, a load of 1.5.
    assert gap.bound_s == 2 * (3.0 + 2.5 + 1.5)


def test_who_comes_back_later_is_named_ahead() -> None:
    run = Run(a_world((1.0, 1.0)))
    for second in range(31):
        one = float(min(second, 3))
        other = float(max(0, second - 3))
        add_sample(run, float(second), {0: one, 1: other}, (0, 1))
    gap = judged(run).gap
    assert gap is not None
    assert (gap.gap_s, gap.ahead, gap.behind, gap.at_s) == (27.0, 1, 0, 30.0)


def test_a_pause_begins_the_gap_anew() -> None:
    run = Run(a_world((1.0, 1.0)))
    for second in range(31):
        waiting = (0,) if second == 20 else (0, 1)
        add_sample(run, float(second), {0: float(second)}, waiting)
    gap = judged(run).gap
    assert gap is not None
    assert (gap.gap_s, gap.at_s) == (19.0, 19.0)


def test_only_who_shares_a_worker_contends() -> None:
    run = steady((1.0, 0.0), (1.0, 1.0), (0, 1))
    add_record(run, tenant=0, worker=0)
    add_record(run, tenant=1, worker=1)
    assert judged(run).gap is None


def test_the_gap_is_that_of_all_pairs_and_moments() -> None:
    """Against the definition, in four nested loops."""
    rng = np.random.default_rng(3)
    weights = (1.0, 2.0, 4.0, 1.0)
    run = Run(a_world(weights))
    so_far = np.zeros(4)
    history, waits = [], []
    for second in range(60):
        so_far = so_far + rng.exponential(1.0, 4) * (rng.random(4) < 0.7)
        waiting = tuple(np.flatnonzero(rng.random(4) < 0.9).tolist())
        add_sample(run, float(second), dict(enumerate(so_far.tolist())), waiting)
        history.append(so_far / np.array(weights))
        waits.append(waiting)
    best = 0.0
    for a, b in itertools.combinations(range(4), 2):
        for start in range(60):
            for end in range(start, 60):
                if not {a, b} <= set(waits[end]):
                    break
                grown = history[end] - history[start]
                best = max(best, abs(float(grown[a] - grown[b])))
    gap = judged(run).gap
    assert gap is not None
    assert gap.gap_s == pytest.approx(best)


def test_samples_further_apart_than_a_window_make_windows_of_one() -> None:
    run = Run(a_world((1.0, 1.0)), sample_s=30.0)
    for number in range(4):
        add_sample(run, 30.0 * number, {0: 1.0 * number, 1: 1.0 * number}, (0, 1))
    assert judged(run).window_end_s.tolist() == [30.0, 60.0, 90.0]
