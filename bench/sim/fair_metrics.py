"""How fair a run was between tenants, from its samples.

Lives here: Jain's index in windows, the error against the weights, the largest gap in service
between two tenants that wait all the while. Does not: latencies (columns.py).

A tenant counts in a window if each sample of it found a ticket of that tenant waiting: only who
wants more can be treated unfairly. What is compared is service over weight. Between two samples
anything may have happened, so a gap is known to within the service of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.sim.batches import Bools, Floats, Ints
from bench.sim.columns import Columns
from bench.sim.types import Run, Sample, Swap

WINDOW_S = 10.0
MOST_CONTENDERS = 64
"""Tenants whose pairs are looked at for the largest gap: those that waited longest."""
LEAST_DUE = 0.01
"""A tenant with less of the service due than this share is not in the worst weight error."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference in service over weight that grew between two waiting tenants."""

    gap_s: float
    ahead: int
    behind: int
    at_s: float
    bound_s: float
    num_tenants: int


@dataclass(frozen=True, slots=True)
class Fairness:
    """Figures of a run; None where no two tenants ever waited at once.

    jain          of each window with two tenants at least that waited all through it
    window_end_s  when those windows ended
    misdirected   share of the contended service that went to others than the weights say
    worst_error   largest |got / due - 1| of a tenant
    got, due      by tenant, service in those windows
    """

    jain: Floats
    window_end_s: Floats
    misdirected: float | None
    worst_error: float | None
    got: Floats
    due: Floats
    gap: Gap | None

    @property
    def jain_mean(self) -> float | None:
        """Mean over the windows."""
        return float(self.jain.mean()) if len(self.jain) else None

    @property
    def jain_p5(self) -> float | None:
        """What 95 % of the windows reach."""
        return float(np.quantile(self.jain, 0.05)) if len(self.jain) else None


def fairness(run: Run, rows: Columns) -> Fairness:
    """All figures of fairness of a run."""
    weights = np.array([tenant.weight for tenant in run.world.tenants])
    jain, ends, got, due = _windows(run, weights)
    total = due.sum()
    misdirected = worst = None
    if total > 0:
        misdirected = float(np.abs(got - due).sum() / (2 * total))
        large = due >= LEAST_DUE * total
        worst = float(np.abs(got[large] / due[large] - 1).max()) if large.any() else None
    return Fairness(jain, ends, misdirected, worst, got, due, largest_gap(run, weights, rows))


def jain_index(shares: Floats) -> float:
    """(sum x)^2 / (n sum x^2): 1 where all have the same, 1/n where one has all (Jain, 1984)."""
    return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum()))


def _windows(run: Run, weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    each = max(1, round(WINDOW_S / run.sample_s))
    served = np.zeros(len(weights))
    before = served.copy()
    waited = np.zeros(len(weights), np.int64)
    got, due = np.zeros(len(weights)), np.zeros(len(weights))
    jain, ends = [], []
    for number, sample in enumerate(run.samples):
        follow(served, sample)
        _count(waited, sample)
        if number == 0 or number % each:
            if number == 0:
                before[:] = served
            continue
        # Both edges of a window are samples: each + 1 of them.
        there = waited == each + 1
        gained = np.where(there, served - before, 0.0)
        total = gained.sum()
        if there.sum() >= 2 and total > 0:
            jain.append(jain_index(gained[there] / weights[there]))
            ends.append(sample.at_s)
            got += gained
            due += np.where(there, weights, 0.0) / weights[there].sum() * total
        before[:] = served
        waited[:] = 0
        _count(waited, sample)
    return np.array(jain), np.array(ends), got, due


def largest_gap(run: Run, weights: Floats, rows: Columns) -> Gap | None:
    """Over pairs that wait at the same time and were served by one worker at least both.

    Within a stretch in which both wait all the time, the gap is the most by which the difference
    of their service over weight changed, from any moment of it to any later one.
    """
    chosen = _contenders(run.samples, len(weights))
    if len(chosen) < 2:
        return None
    served, waits = _histories(run.samples, chosen, weights)
    first, second = np.triu_indices(len(chosen), 1)
    met = _met_on_a_worker(rows, chosen, run.world.workers)[first, second]
    first, second = first[met], second[met]
    if not len(first):
        return None
    low = high = np.zeros(len(first))
    low_later = np.zeros(len(first), np.bool_)
    together = np.zeros(len(first), np.bool_)
    best = np.zeros(len(first))
    best_at = np.zeros(len(first))
    best_second = np.zeros(len(first), np.bool_)
    for number, sample in enumerate(run.samples):
        apart = served[number, first] - served[number, second]
        both = waits[number, first] & waits[number, second]
        goes_on = both & together
        low_later = np.where(goes_on & (apart < low), True, low_later & goes_on)
        low_later &= ~(goes_on & (apart > high))
        low = np.where(goes_on, np.minimum(low, apart), apart)
        high = np.where(goes_on, np.maximum(high, apart), apart)
        grown = goes_on & (high - low > best)
        best = np.where(grown, high - low, best)
        best_at = np.where(grown, sample.at_s, best_at)
        best_second = np.where(grown, low_later, best_second)
        together = both
    if not best.any():
        return None
    worst = int(best.argmax())
    one, other = int(chosen[first[worst]]), int(chosen[second[worst]])
    ahead, behind = (other, one) if best_second[worst] else (one, other)
    bound = gap_bound_s(rows, run.swaps, chosen, weights)
    return Gap(float(best[worst]), ahead, behind, float(best_at[worst]), bound, len(chosen))


def follow(served: Floats, sample: Sample) -> None:
    """Bring service so far, by tenant, up to a sample."""
    if sample.service_s:
        places = np.fromiter(sample.service_s.keys(), np.int64, len(sample.service_s))
        served[places] = np.fromiter(sample.service_s.values(), np.float64, len(places))


def _count(waited: Ints, sample: Sample) -> None:
    if sample.backlogged:
        waited[np.fromiter(sample.backlogged, np.int64, len(sample.backlogged))] += 1


def _contenders(samples: Sequence[Sample], num_tenants: int) -> Ints:
    """The tenants that waited in most samples; two samples at least."""
    waited = np.zeros(num_tenants, np.int64)
    for sample in samples:
        _count(waited, sample)
    order = np.argsort(-waited, kind="stable")[:MOST_CONTENDERS]
    return np.sort(order[waited[order] >= 2])


def _histories(samples: Sequence[Sample], chosen: Ints, weights: Floats) -> tuple[Floats, Bools]:
    """[samples, chosen]: service over weight so far, and who waits."""
    column = {int(tenant): place for place, tenant in enumerate(chosen)}
    served = np.zeros((len(samples), len(chosen)))
    waits = np.zeros((len(samples), len(chosen)), np.bool_)
    for number, sample in enumerate(samples):
        if number:
            served[number] = served[number - 1]
        # Either side may be the long one: walk over the shorter.
        for tenant in column.keys() & sample.service_s.keys():
            served[number, column[tenant]] = sample.service_s[tenant] / weights[tenant]
        for tenant in column.keys() & set(sample.backlogged):
            waits[number, column[tenant]] = True
    return served, waits


def _met_on_a_worker(rows: Columns, chosen: Ints, num_workers: int) -> Bools:
    """[chosen, chosen]: whether some worker served both."""
    place = np.full(int(max(chosen.max(), rows.tenant.max(initial=0))) + 1, -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    there = (rows.worker >= 0) & (place[rows.tenant] >= 0)
    on = np.zeros((len(chosen), max(num_workers, int(rows.worker.max(initial=0)) + 1)), np.bool_)
    on[place[rows.tenant[there]], rows.worker[there]] = True
    counts = on.astype(np.int64)
    return np.asarray(counts @ counts.T > 0)


def gap_bound_s(rows: Columns, swaps: list[Swap], tenants: Ints, weights: Floats) -> float:
    """The bound that the design claims for a gap, from what a run really had; a conjecture.

        gap <= 2 (U + quantum + load)          docs/architecture.md, 4.6

    U        service that grants already made go on to cost: the largest sum, at any moment, of the
             service of one tenant's granted requests that have not ended. Prompt chunks under way
             are part of it
    quantum  the largest service of one request: what one grant decides
    load     the longest load: its time is charged to those who wait for it

    All three are over weight and over the `tenants` that are compared; `weights` are all tenants'.
    """
    lightest = float(weights[tenants].min())
    load_s = max((swap.duration_s for swap in swaps if swap.kind == "load"), default=0.0)
    outstanding = quantum = 0.0
    for tenant in tenants:
        own = (rows.tenant == tenant) & np.isfinite(rows.queue_s) & (rows.service_s > 0)
        if not own.any():
            continue
        service = rows.service_s[own] / weights[tenant]
        granted_s = rows.arrival_s[own] + rows.queue_s[own]
        outstanding = max(outstanding, _most_at_once(granted_s, rows.ended_s[own], service))
        quantum = max(quantum, float(service.max()))
    return 2 * (outstanding + quantum + load_s / lightest)


def _most_at_once(begin_s: Floats, end_s: Floats, amount: Floats) -> float:
    """The largest sum of amounts of intervals that overlap; those that only touch do not."""
    times = np.concatenate([begin_s, end_s])
    steps = np.concatenate([amount, -amount])
    order = np.lexsort((steps, times))  # at one moment ends come first
    return float(np.cumsum(steps[order]).max(initial=0.0))
