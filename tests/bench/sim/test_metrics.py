"""The summary of a run and its series, against runs whose figures are known."""

import numpy as np
import pytest

from bench.sim.columns import Slo
from bench.sim.metrics import MOST_ROWS, measure
from bench.sim.timelines import NUM_BINS
from bench.sim.types import Run
from tests.bench.sim.some_runs import a_run, a_world, add_record, add_sample

SLO = Slo(ttft_s=1.6, tpot_s=0.06)


def test_figures_of_a_known_run() -> None:
    tree, _ = measure(a_run(), SLO)
    # First tokens after 0.5, 1, 1.5 and 2 s in turn: the last of four is late.
    assert tree["requests"]["num"] == tree["requests"]["finished"] == 200
    assert tree["requests"]["good_share"] == 0.75
    assert tree["latency_s"]["ttft"]["p50"] == 1.25
    assert tree["latency_s"]["tpot"]["p50"] == pytest.approx(0.05)
    assert tree["latency_s"]["queue"]["max"] == pytest.approx(0.1)
    assert tree["throughput"]["output_tok_s"] == 40.0
    assert tree["throughput"]["goodput_tok_s"] == 30.0
    assert tree["device"]["utilisation"] == 0.75
    assert (tree["device"]["accounted"], tree["device"]["system_share"]) == (1.0, 0.02)
    assert tree["prefix"] == {"cached_share": 0.4, "cached_tokens": 8000}
    assert tree["fairness"]["jain_mean"] == 1.0
    assert tree["device"]["pages_mean"]["weights"] == 30


def test_reloads_are_of_what_the_worker_had() -> None:
    swaps = measure(a_run(), SLO)[0]["swaps"]
    assert (swaps["loads"], swaps["evictions"], swaps["reloads"]) == (3, 1, 1)
    assert (swaps["load_s"], swaps["reload_s"]) == (4.0, 0.5)
    assert swaps["by_tier"]["disk"] == {"num": 2, "seconds": 3.5, "bytes": 2000}


def test_cost_is_that_of_all_devices_all_the_time() -> None:
    device = measure(a_run(), SLO)[0]["device"]
    cost = 2 * 100 / 3600 * 3.0
    assert device["cost"] == pytest.approx(cost, rel=1e-5)
    assert device["cost_per_million_output_tokens"] == pytest.approx(cost / 4000 * 1e6, rel=1e-5)
    assert device["cost_per_million_good_tokens"] == pytest.approx(cost / 3000 * 1e6, rel=1e-5)


def test_tenants_and_models_add_up() -> None:
    tree, _ = measure(a_run(), SLO)
    for what in ("tenants", "models"):
        rows = tree[what]["rows"]
        assert sum(row["requests"] for row in rows) == 200
        assert sum(row["service_share"] for row in rows) == pytest.approx(1.0)
        assert sum(row["output_tokens"] for row in rows) == 4000
    first, second = tree["tenants"]["rows"]
    assert (first["ttft_p50_s"], second["ttft_p50_s"]) in ((1.0, 1.5), (1.5, 1.0))
    assert {first["weight"], second["weight"]} == {1.0, 3.0}
    assert {row["name"]: row["loads"] for row in tree["models"]["rows"]} == {
        "model0": 3,
        "model1": 0,
    }


def test_refusals_by_reason() -> None:
    run = Run(a_world(), simulated_s=1.0)
    add_record(run, outcome="refused")
    add_record(run, outcome="refused", worker=-1)
    run.counters |= {"refused:queue_full": 1.0, "refused:rate_limit": 1.0, "steps": 4.0}
    tree, _ = measure(run, SLO)
    assert tree["refused"] == {"num": 2, "by_reason": {"queue_full": 1, "rate_limit": 1}}
    assert tree["requests"]["good_share"] == 0.0
    assert tree["counters"]["steps"] == 4.0


def test_an_empty_run_has_no_figures_and_breaks_nothing() -> None:
    tree, series = measure(Run(a_world()), SLO)
    assert tree["latency_s"] == {"ttft": None, "tpot": None, "queue": None, "e2e": None}
    assert tree["requests"]["good_share"] is None
    assert tree["device"]["utilisation"] is None
    assert tree["fairness"]["jain_mean"] is None
    assert series.service == {}


def test_tables_are_bounded_and_hold_the_most_served() -> None:
    run = Run(a_world((1.0,) * 150), simulated_s=1.0)
    for tenant in range(150):
        add_record(run, tenant=tenant, service_s=float(tenant))
    tenants = measure(run, SLO)[0]["tenants"]
    assert (tenants["num"], tenants["omitted"]) == (150, 150 - MOST_ROWS)
    assert [row["name"] for row in tenants["rows"][:2]] == ["tenant149", "tenant148"]


def test_tokens_over_time_add_up_to_all_tokens() -> None:
    rng = np.random.default_rng(0)
    run = Run(a_world(), simulated_s=300.0)
    for _ in range(500):
        at_s = float(rng.uniform(0, 250))
        tokens = int(rng.integers(1, 300))
        ended_s = at_s + 1.0 + float(rng.uniform(0, 40))
        add_record(run, arrival_s=at_s, ttft_s=1.0, ended_s=ended_s, output=tokens)
    _, series = measure(run, SLO)
    times, rates = series.output_tok_s
    assert len(times) == NUM_BINS
    assert rates.sum() * (times[1] - times[0]) == pytest.approx(sum(run.records.output_tokens))


def test_series_are_rates_between_samples() -> None:
    _, series = measure(a_run(), SLO)
    assert series.utilisation[1] == pytest.approx(np.full(100, 0.75))
    assert series.arrivals[1].mean() == pytest.approx(2.0)
    assert series.service["tenant1"] == pytest.approx(np.full(100, 0.75))
    assert list(series.service) == ["tenant1", "tenant0"]
    assert list(series.pages) == ["weights", "kv", "cached", "free"]
    assert series.load_s[1].sum() * 100 / NUM_BINS * 2 == pytest.approx(4.0)


def test_long_runs_are_thinned_out_to_a_few_hundred_points() -> None:
    run = Run(a_world((1.0,) * 9), simulated_s=5000.0)
    for second in range(5001):
        add_sample(run, float(second), {t: (1.0 + t) * second for t in range(9)}, (), second / 2)
    _, series = measure(run, SLO)
    assert len(series.at_s) == NUM_BINS
    assert (series.at_s[0], series.at_s[-1]) == (0.0, 5000.0)
    assert series.utilisation[1] == pytest.approx(np.full(NUM_BINS - 1, 0.5))
    assert series.service["tenant8"] == pytest.approx(np.full(NUM_BINS - 1, 9.0))
    assert series.service["others"] == pytest.approx(np.full(NUM_BINS - 1, 1.0 + 2.0 + 3.0))
