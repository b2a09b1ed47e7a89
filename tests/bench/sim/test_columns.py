"""What follows from one request, and percentiles by group against a loop over groups."""

import math

import numpy as np
import pytest

from bench import stats
from bench.sim.columns import Slo, columns, percentiles_by, spread, sums_by
from bench.sim.types import Records, Run
from tests.bench.sim.some_runs import a_world, add_record


def a_few() -> Run:
    """One request of every kind."""
    run = Run(a_world())
    add_record(run, arrival_s=1.0, queue_s=0.5, ttft_s=1.0, ended_s=4.0, output=21)
    add_record(run, arrival_s=1.0, ttft_s=3.0, ended_s=5.0, output=21)
    add_record(run, arrival_s=1.0, ttft_s=1.0, ended_s=8.0, output=21)
    add_record(run, arrival_s=1.0, ttft_s=1.0, ended_s=2.0, output=1, outcome="length")
    add_record(run, arrival_s=1.0, ttft_s=1.0, ended_s=3.0, output=5, outcome="abort")
    add_record(run, arrival_s=1.0, queue_s=math.nan, ended_s=1.5, outcome="refused")
    return run


def test_times_of_a_request() -> None:
    rows = columns(a_few().records, Slo(ttft_s=2.0, tpot_s=0.11))
    assert rows.ttft_s[:5].tolist() == [1.0, 3.0, 1.0, 1.0, 1.0]
    assert rows.tpot_s[0] == pytest.approx(2.0 / 20)
    assert np.isnan(rows.tpot_s[3:]).all()
    assert rows.queue_s[0] == 0.5
    assert math.isnan(rows.queue_s[5])
    assert rows.e2e_s[0] == 3.0
    assert np.isnan(rows.e2e_s[4:]).all()


def test_good_is_finished_in_time_and_at_pace() -> None:
    rows = columns(a_few().records, Slo(ttft_s=2.0, tpot_s=0.11))
    #                           in time  late  slow  one token  left  refused
    assert rows.good.tolist() == [True, False, False, True, False, False]
    assert rows.counted.tolist() == [True, True, True, True, False, True]


def test_nothing_is_no_figure() -> None:
    rows = columns(Records(), Slo())
    assert len(rows.ttft_s) == 0
    assert spread(rows.ttft_s) is None
    assert spread(np.array([math.nan])) is None
    assert np.isnan(percentiles_by(rows.tenant, rows.ttft_s, 3, (0.5,))).all()


def test_spread_is_that_of_the_benchmarks() -> None:
    values = np.random.default_rng(0).exponential(1.0, 999)
    assert spread(values) == pytest.approx(stats.spread(values.tolist()))


def test_percentiles_of_groups_are_those_of_each_group_alone() -> None:
    rng = np.random.default_rng(1)
    groups = rng.zipf(1.5, 5000) % 40 - 1  # -1: belongs to none
    values = rng.exponential(1.0, 5000)
    values[rng.random(5000) < 0.1] = math.nan
    found = percentiles_by(groups, values, 45, (0.0, 0.5, 0.95, 1.0))
    for group in range(45):
        alone = values[(groups == group) & np.isfinite(values)].tolist()
        for place, quantile in enumerate((0.0, 0.5, 0.95, 1.0)):
            if alone:
                assert found[group, place] == pytest.approx(stats.percentile(alone, quantile))
            else:
                assert math.isnan(found[group, place])


def test_sums_leave_out_what_belongs_to_none() -> None:
    sums = sums_by(np.array([0, 2, -1, 2]), np.array([1.0, 2.0, 4.0, 8.0]), 4)
    assert sums.tolist() == [1.0, 0.0, 10.0, 0.0]
