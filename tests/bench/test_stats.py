"""Percentiles against numpy, spreads, arrivals, and the comparison table."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import arrivals, report, stats
from bench.client import RequestResult
from bench.load import LoadRun

FLOATS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert stats.percentile(values, q) == pytest.approx(float(np.quantile(values, q)), abs=1e-6)


def test_nothing_measured_is_none_not_zero() -> None:
    assert stats.spread([]) is None
    assert stats.repeated([None, None]) is None
    assert stats.ratio(None, stats.repeated([1.0])) is None
    with pytest.raises(ValueError, match="needs values"):
        stats.percentile([], 0.5)


def test_repeated_is_a_median_with_its_bounds() -> None:
    figure = stats.repeated([3.0, None, 1.0, 2.0])
    assert figure == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}


def test_the_bootstrap_puts_the_true_ratio_inside_and_narrows_with_pairs() -> None:
    generator = np.random.default_rng(0)
    machine = generator.normal(1.0, 0.1, 400)  # what both sides of a pair share
    theirs = machine * generator.normal(1.0, 0.02, 400)
    ours = machine * 1.05 * generator.normal(1.0, 0.02, 400)
    few = stats.bootstrap_ratio(ours[:20].tolist(), theirs[:20].tolist())
    many = stats.bootstrap_ratio(ours.tolist(), theirs.tolist())
    assert few["low"] < 1.05 < few["high"]
    assert many["low"] < 1.05 < many["high"]
    assert many["high"] - many["low"] < 0.5 * (few["high"] - few["low"])
    assert stats.bootstrap_ratio([1.0, 2.0], [2.0, 4.0])["low"] == 0.5
    with pytest.raises(ValueError, match="two pairs"):
        stats.bootstrap_ratio([1.0], [1.0])


def test_poisson_keeps_its_rate_and_its_seed() -> None:
    times = [item.at_s for item in arrivals.poisson(5.0, 2000, 10, 20, seed=1)]
    assert times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(5.0, rel=0.1)
    assert times == [item.at_s for item in arrivals.poisson(5.0, 2000, 10, 20, seed=1)]
    with pytest.raises(ValueError, match="more than 0"):
        arrivals.poisson(0.0, 1, 1, 1, seed=1)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_traces_are_cut_and_sped_up(tmp_path: Path, name: str) -> None:
    text = "t_s,in_tokens,out_tokens\n0.0,374,44\n4.0,396,109\n8.0,1,1\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    rows = arrivals.trace(path, 2, speed=4.0, max_prompt_tokens=380, max_output_tokens=100)
    assert rows == [arrivals.Arrival(0.0, 374, 44), arrivals.Arrival(1.0, 380, 100)]
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="column"):
        arrivals.trace(path.rename(tmp_path / "bad.csv"), 1)


def result(
    index: int, tokens: int, first_s: float, last_s: float, error: str = ""
) -> RequestResult:
    return RequestResult(
        index,
        due_s=0.0,
        sent_s=0.0,
        first_s=first_s,
        last_s=last_s,
        done_s=last_s,
        completion_tokens=tokens,
        token_source="usage",
        finish_reason="length",
        error=error,
    )


def test_a_rounds_rate_counts_completed_tokens_over_wall_time() -> None:
    run = LoadRun([result(0, 11, 1.0, 2.0), result(1, 99, 1.0, 9.0, "boom")], 4.0, 0.4)
    summary = report.summarise(run, {0: 11, 1: 99})
    assert summary["output_tok_s"] == pytest.approx(11 / 4)
    assert summary["itl_s"] is not None
    assert summary["itl_s"]["p50"] == pytest.approx(0.1)
    assert summary["client_cpu_share"] == pytest.approx(0.1)


def test_table_shows_medians_errors_and_the_ratio() -> None:
    good = report.summarise(LoadRun([result(0, 20, 1.0, 2.0)], 1.0, 0.0), {0: 20})
    half = report.summarise(LoadRun([result(0, 10, 1.0, 2.0)], 1.0, 0.0), {0: 20})
    dead = report.summarise(LoadRun([result(0, 0, 1.0, 2.0, "boom")], 1.0, 0.0), {0: 20})
    loads = {"c=1": {"polyhost": report.compare([good]), "peer": report.compare([half, dead])}}
    text = report.table(loads, "polyhost")
    ours, peer = text.splitlines()[2:]
    assert ours.split()[:4] == ["c=1", "polyhost", "20.0", "(20.0-20.0)"]
    assert peer.split()[-2:] == ["1", "2.00"]
    assert loads["c=1"]["peer"]["num_short"] == 1
