"""The records of a run as numpy columns, and percentiles by group without a loop over groups.

Lives here: what follows from one request (waiting, first token, pace, whether it was good). Does
not: sums over time (timelines.py), shares between tenants (fair_metrics.py).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.sim.batches import Bools, Floats, Ints
from bench.sim.types import OUTCOMES, Records
from bench.stats import Spread

FINISHED = tuple(OUTCOMES.index(outcome) for outcome in ("stop", "length"))
ABORT = OUTCOMES.index("abort")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is: the first token within, and a token every so often at the slowest."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Columns:
    """A row per ended request; times that did not come are NaN.

    tpot_s    mean time between tokens, of finished requests with two tokens or more
    good      finished within the SLO; an answer of one token has no pace to miss
    counted   all but those whose client left: nobody knows what would have come of them
    """

    tenant: Ints
    model: Ints
    worker: Ints
    outcome: Ints
    arrival_s: Floats
    first_token_s: Floats
    ended_s: Floats
    queue_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    service_s: Floats
    finished: Bools
    good: Bools
    counted: Bools


def columns(records: Records, slo: Slo) -> Columns:
    """Views of the records and what follows from them."""
    outcome = np.asarray(records.outcome).astype(np.int64)
    arrival = np.asarray(records.arrival_s)
    first, ended = np.asarray(records.first_token_s), np.asarray(records.ended_s)
    granted = np.asarray(records.granted_s)
    output = np.asarray(records.output_tokens).astype(np.int64)
    finished = np.isin(outcome, FINISHED)
    ttft = first - arrival
    paced = finished & (output > 1) & np.isfinite(first)
    tpot = np.where(paced, (ended - first) / np.maximum(1, output - 1), np.nan)
    with np.errstate(invalid="ignore"):
        good = finished & (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
        # A grant that never came is NaN, or a moment before the request.
        queue = np.where(granted >= arrival, granted - arrival, np.nan)
    return Columns(
        tenant=np.asarray(records.tenant).astype(np.int64),
        model=np.asarray(records.model).astype(np.int64),
        worker=np.asarray(records.worker).astype(np.int64),
        outcome=outcome,
        arrival_s=arrival,
        first_token_s=first,
        ended_s=ended,
        queue_s=queue,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=np.where(finished, ended - arrival, np.nan),
        prompt_tokens=np.asarray(records.prompt_tokens).astype(np.int64),
        cached_tokens=np.asarray(records.cached_tokens).astype(np.int64),
        output_tokens=output,
        service_s=np.asarray(records.service_s),
        finished=finished,
        good=good,
        counted=outcome != ABORT,
    )


def spread(values: Floats) -> Spread | None:
    """Percentiles of what is a number; None where nothing is."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    p50, p95, p99 = (float(value) for value in np.quantile(values, (0.50, 0.95, 0.99)))
    return {
        "n": len(values),
        "mean": float(values.mean()),
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "max": float(values.max()),
    }


def percentiles_by(
    groups: Ints, values: Floats, num_groups: int, quantiles: tuple[float, ...]
) -> Floats:
    """[num_groups, quantiles], between the two nearest ranks; NaN where a group has no values."""
    there = np.isfinite(values) & (groups >= 0)
    groups, values = groups[there], values[there]
    found = np.full((num_groups, len(quantiles)), np.nan)
    if not len(values):
        return found
    values = values[np.lexsort((values, groups))]
    counts = np.bincount(groups, minlength=num_groups)
    first = np.cumsum(counts) - counts
    filled = counts > 0
    for place, quantile in enumerate(quantiles):
        rank = quantile * (counts[filled] - 1)
        low = rank.astype(np.int64)
        high = np.minimum(low + 1, counts[filled] - 1)
        a, b = values[first[filled] + low], values[first[filled] + high]
        found[filled, place] = a + (b - a) * (rank - low)
    return found


def sums_by(groups: Ints, values: npt.NDArray[np.generic], num_groups: int) -> Floats:
    """Sum of the values of each group."""
    there = groups >= 0
    weights = np.asarray(values[there], np.float64)
    return np.bincount(groups[there], weights, num_groups).astype(np.float64)
