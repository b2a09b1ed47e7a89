"""Percentiles against numpy, spreads, and the comparison table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import report, stats
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


def result(
    index: int, tokens: int, first_s: float, last_s: float, error: str = ""
) -> RequestResult:
    return RequestResult(
        index,
        due_s=0.0,
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
