"""What a run did over time, in a few hundred points however long it was.

Lives here: series for the plots. Does not: percentiles of the whole (metrics.py), drawing
(plots.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bench.sim.batches import Floats, Ints
from bench.sim.columns import Columns, percentiles_by
from bench.sim.fair_metrics import Fairness, follow
from bench.sim.types import OUTCOMES, Run, Sample

NUM_BINS = 120
NUM_CDF_POINTS = 120
TOP_TENANTS = 6
PAGE_OWNERS = ("weights", "kv", "cached", "free")
Line = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True)
class Timelines:
    """Series as (x, y).

    at_s         times of `pages`; `service` is that of the spans between them
    tenants_cdf  of each tenant's p95 of the time to first token
    """

    end_s: float
    at_s: Floats
    arrivals: Line
    refused: Line
    output_tok_s: Line
    ttft_p50: Line
    ttft_p95: Line
    waiting: Line
    running: Line
    utilisation: Line
    jain: Line
    load_s: Line
    ttft_cdf: Line
    tpot_cdf: Line
    tenants_cdf: Line
    pages: Mapping[str, Floats]
    service: Mapping[str, Floats]


def timelines(run: Run, rows: Columns, fair: Fairness) -> Timelines:
    """All series of a run."""
    edges = np.linspace(0.0, max(run.simulated_s, 1e-9), NUM_BINS + 1)
    middle, width = (edges[:-1] + edges[1:]) / 2, edges[1]
    arrived = np.histogram(rows.arrival_s, edges)[0] / width
    refused = rows.outcome == OUTCOMES.index("refused")
    bins = np.clip(np.searchsorted(edges, rows.arrival_s, side="right") - 1, 0, NUM_BINS - 1)
    ttft = percentiles_by(bins, rows.ttft_s, NUM_BINS, (0.50, 0.95))
    by_tenant = percentiles_by(rows.tenant, rows.ttft_s, len(run.world.tenants), (0.95,))
    loads = [swap for swap in run.swaps if swap.kind == "load"]
    load_s = np.histogram(
        [swap.at_s for swap in loads], edges, weights=[swap.duration_s for swap in loads]
    )[0]
    picked = _picked(run.samples)
    at_s = np.array([sample.at_s for sample in picked])
    # Means between samples, not values at them: the figures go between the times.
    busy = np.array([sample.busy_s for sample in picked])
    span = np.maximum(np.diff(at_s), 1e-9)
    return Timelines(
        end_s=run.simulated_s,
        at_s=at_s,
        arrivals=(middle, arrived),
        refused=(middle, np.histogram(rows.arrival_s[refused], edges)[0] / width),
        output_tok_s=(middle, _token_rate(rows, edges)),
        ttft_p50=(middle, ttft[:, 0]),
        ttft_p95=(middle, ttft[:, 1]),
        waiting=(at_s, np.array([float(sample.waiting) for sample in picked])),
        running=(at_s, np.array([float(sample.running) for sample in picked])),
        utilisation=(at_s[1:], np.diff(busy) / span / max(1, run.world.workers)),
        jain=(fair.window_end_s, fair.jain),
        load_s=(middle, load_s / width / max(1, run.world.workers)),
        ttft_cdf=cdf(rows.ttft_s),
        tpot_cdf=cdf(rows.tpot_s),
        tenants_cdf=cdf(by_tenant[:, 0]),
        pages=_pages(picked),
        service=_service(run, picked),
    )


def cdf(values: Floats) -> Line:
    """(value, share of the values that are no larger)."""
    values = values[np.isfinite(values)]
    if not len(values):
        return np.zeros(0), np.zeros(0)
    shares = np.linspace(0.0, 1.0, NUM_CDF_POINTS)
    return np.quantile(values, shares), shares


def _token_rate(rows: Columns, edges: Floats) -> Floats:
    """Output tokens a second in each bin, an answer's spread evenly from its first to its end.

    An answer's tokens up to t grow straight from its first token on and stop at its end, so their
    sum at the edges is a sum of ramps: sorted starts less sorted ends.
    """
    there = np.isfinite(rows.first_token_s) & (rows.output_tokens > 0)
    start = rows.first_token_s[there]
    end = np.maximum(rows.ended_s[there], start + 1e-9)
    rate = rows.output_tokens[there] / (end - start)
    so_far = _ramps(start, rate, edges) - _ramps(end, rate, edges)
    return np.asarray(np.maximum(0.0, np.diff(so_far)) / np.diff(edges))


def _ramps(start: Floats, rate: Floats, edges: Floats) -> Floats:
    order = np.argsort(start)
    rates = np.concatenate([[0.0], np.cumsum(rate[order])])
    # Behind the middle of the run, so that large numbers do not cancel.
    origin = float(edges[-1]) / 2
    moments = np.concatenate([[0.0], np.cumsum((rate * (start - origin))[order])])
    begun = np.searchsorted(start[order], edges, side="right")
    return np.asarray((edges - origin) * rates[begun] - moments[begun])


def _picked(samples: list[Sample]) -> list[Sample]:
    """As many as there are bins, evenly, the first and the last among them."""
    if len(samples) <= NUM_BINS:
        return samples
    places = np.linspace(0, len(samples) - 1, NUM_BINS).round().astype(np.int64)
    return [samples[place] for place in places]


def _pages(picked: list[Sample]) -> dict[str, Floats]:
    known = {owner for sample in picked for owner in sample.pages}
    owners = [owner for owner in PAGE_OWNERS if owner in known] + sorted(known - {*PAGE_OWNERS})
    return {
        owner: np.array([float(sample.pages.get(owner, 0)) for sample in picked])
        for owner in owners
    }


def _service(run: Run, picked: list[Sample]) -> dict[str, Floats]:
    """Device seconds a second by tenant between the picked samples: the largest, and the others."""
    top = _most_served(run)
    wanted = {sample.at_s for sample in picked}
    so_far = np.zeros(len(run.world.tenants))
    rows, times = [], []
    for sample in run.samples:
        follow(so_far, sample)
        if sample.at_s in wanted:
            rows.append([*so_far[top], so_far.sum() - so_far[top].sum()])
            times.append(sample.at_s)
    if len(rows) < 2:
        return {}
    rates = np.diff(np.array(rows), axis=0) / np.maximum(np.diff(np.array(times)), 1e-9)[:, None]
    found = {run.world.tenants[tenant].name: rates[:, place] for place, tenant in enumerate(top)}
    if len(so_far) > len(top):
        found["others"] = rates[:, -1]
    return found


def _most_served(run: Run) -> Ints:
    served = np.zeros(len(run.world.tenants))
    for sample in run.samples:
        follow(served, sample)
    order = np.argsort(-served, kind="stable")[:TOP_TENANTS]
    return order[served[order] > 0]
