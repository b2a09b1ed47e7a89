"""Rates, gaps and windows of the sources."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from bench.sim.batches import Batch, join
from bench.sim.casting import Cast, Habits
from bench.sim.random_lengths import DISTRIBUTIONS
from bench.sim.sources import BLOCK_SPACE, Renewal, Replay, Source, UnitGaps
from bench.sim.traces import Table


def table(number: int = 1000, gap_s: float = 1.0) -> Table:
    """Even gaps; lengths that tell the row."""
    rows = np.arange(number)
    return Table((rows * gap_s).astype(np.float64), 1 + rows, 1 + rows % 7, rows, number * gap_s)


def replay(source: Table, **options: float) -> Replay:
    """A replay of `source` by seed 3."""
    return Replay(source, Cast(5, 5, 3, Habits()), 3, **options)


def run(source: Source, end_s: float, window_s: float) -> Batch:
    """All of a source's windows to the end."""
    edges = np.append(np.arange(0.0, end_s, window_s), end_s)
    return join([source.between(a, b) for a, b in itertools.pairwise(edges)])


def test_at_its_own_pace_a_trace_comes_out_as_it_is() -> None:
    batch = run(replay(table()), 1000.0, 77.0)
    assert batch.at_s.tolist() == list(map(float, range(1000)))
    assert batch.prompt_tokens.tolist() == list(range(1, 1001))


def test_laps_follow_each_other_and_share_nothing() -> None:
    source = replay(table(10))
    batch = run(source, 25.0, 4.0)
    assert batch.at_s.tolist() == list(map(float, range(25)))
    assert batch.prompt_tokens.tolist() == [1 + row % 10 for row in range(25)]
    assert len(set(batch.group.tolist())) == 25


def test_speed_compresses() -> None:
    batch = run(replay(table(), speed=4.0), 250.0, 9.0)
    assert batch.at_s.tolist() == [place / 4 for place in range(1000)]


def test_start_lies_in_the_trace() -> None:
    batch = replay(table(), start_s=500.0).between(0.0, 3.0)
    assert batch.prompt_tokens.tolist() == [501, 502, 503]


@pytest.mark.parametrize("rate", [0.2, 0.9, 1.0, 3.7, 40.0])
def test_a_rate_is_met_by_thinning_and_by_copies(rate: float) -> None:
    source = replay(table(), rate=rate)
    batch = run(source, 2000.0, 100.0)
    assert source.rate == rate
    assert len(batch) == pytest.approx(2000 * rate, abs=4 * (2000 * rate) ** 0.5)
    assert (np.diff(batch.at_s) >= 0).all()
    assert len(set(batch.key.tolist())) == len(batch)


def test_copies_begin_elsewhere_and_do_not_run_faster() -> None:
    """A second of silence between bursts is filled by other copies, not shortened."""
    rows = np.arange(100)
    bursts = Table((rows // 10 * 10.0).astype(np.float64), 1 + rows, 1 + rows, rows, 100.0)
    times = run(replay(bursts, rate=10.0), 100.0, 10.0).at_s
    assert np.unique(times).size > 50
    compressed = run(replay(bursts, speed=10.0), 100.0, 10.0).at_s
    assert np.unique(compressed).size == 100
    assert np.bincount(compressed.astype(int)).tolist() == [10] * 100


def test_thinning_takes_whole_conversations() -> None:
    rows = np.arange(3000)
    source = Table(rows.astype(np.float64), 1 + rows, 1 + rows, rows // 3, 3000.0)
    batch = run(replay(source, rate=0.5), 3000.0, 500.0)
    turns = np.unique((batch.prompt_tokens - 1) // 3, return_counts=True)[1]
    assert set(turns.tolist()) == {3}


def test_copies_and_laps_share_no_block() -> None:
    blocks = np.empty(10, np.object_)
    for place in range(10):
        blocks[place] = (7,)
    rows = np.arange(10)
    source = Table(rows.astype(np.float64), 1 + rows, 1 + rows, rows, 10.0, blocks=blocks)
    batch = run(replay(source, rate=3.0), 30.0, 3.0)
    assert len(batch) == 90
    # Three copies, begun somewhere in a lap: each meets three laps or a piece of a fourth.
    assert 9 <= len(set(batch.base.tolist())) <= 12
    assert all(base % BLOCK_SPACE == 0 and base > 0 for base in batch.base.tolist())


def test_no_copy_without_bound() -> None:
    with pytest.raises(ValueError, match="copies"):
        replay(table(), rate=1e9)


@pytest.mark.parametrize("make", [lambda: replay(table(), rate=2.5), lambda: renewal(3.0)])
def test_windows_leave_no_mark(make: Callable[[], Source]) -> None:
    whole, parts = run(make(), 500.0, 500.0), run(make(), 500.0, 500.0 / 64)
    assert len(whole) == len(parts) > 900
    assert np.allclose(whole.at_s, parts.at_s)
    assert (whole.key == parts.key).all()


def renewal(cv: float, rate: float = 2.0, seed: int = 5) -> Renewal:
    """Gamma arrivals with chat lengths."""
    return Renewal(rate, cv, DISTRIBUTIONS["chat"], seed)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_deviation(cv: float) -> None:
    at_s = run(renewal(cv), 20_000.0, 1000.0).at_s
    gaps = np.diff(at_s)
    assert gaps.mean() == pytest.approx(0.5, rel=4 * cv / len(gaps) ** 0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_weibull_gaps_have_a_mean_of_one() -> None:
    times = UnitGaps("test").pass_by(50_000.0, weibull=0.5)
    assert np.diff(times).mean() == pytest.approx(1.0, rel=0.05)
    # A Weibull gap of shape 0.5 has a deviation of sqrt(5) means.
    assert np.diff(times).std() == pytest.approx(5**0.5, rel=0.15)


def test_a_run_begins_at_a_moment_like_any_other() -> None:
    """A bursty process begun with a gap of its own would begin with a burst."""
    firsts = [len(UnitGaps(seed).pass_by(1.0, gamma=0.1)) for seed in range(3000)]
    assert np.mean(firsts) == pytest.approx(1.0, abs=0.2)


def test_lengths_have_their_median() -> None:
    batch = run(renewal(1.0, rate=100.0), 200.0, 50.0)
    assert np.median(batch.prompt_tokens) == pytest.approx(1020, rel=0.05)
    assert np.median(batch.output_tokens) == pytest.approx(129, rel=0.05)
    assert batch.prompt_tokens.min() >= 1
    assert batch.prompt_tokens.max() <= 8192
