"""Percentiles and spreads: the arithmetic under every benchmark's table. Pure.

Lives here: what a list of measurements is reduced to. Does not: clocks, servers, printing.
Percentiles interpolate linearly between the two nearest ranks (numpy's default), and a figure over
no measurements is None, never 0, so that a run in which everything failed shows no latency.
"""

import statistics
from collections.abc import Sequence
from typing import TypedDict


class Spread(TypedDict):
    """Percentiles of one quantity over the requests of a round."""

    n: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class Repeated(TypedDict):
    """One figure over interleaved repeats: the median is the result, min and max its spread."""

    median: float
    min: float
    max: float
    values: list[float]


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1) of at least one value. Raises ValueError otherwise."""
    if not values or not 0.0 <= q <= 1.0:
        raise ValueError("a percentile needs values and 0 <= q <= 1")
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float]) -> Spread | None:
    """Percentiles of `values`; None where there are none."""
    if not values:
        return None
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "p50": percentile(values, 0.50),
        "p95": percentile(values, 0.95),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def repeated(values: Sequence[float | None]) -> Repeated | None:
    """Median, minimum and maximum of the repeats that gave a figure; None where none did."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return {
        "median": statistics.median(present),
        "min": min(present),
        "max": max(present),
        "values": present,
    }


def ratio(ours: Repeated | None, theirs: Repeated | None) -> float | None:
    """Ours over theirs, of the medians; None where either is missing or theirs is zero."""
    if ours is None or theirs is None or theirs["median"] == 0:
        return None
    return ours["median"] / theirs["median"]
