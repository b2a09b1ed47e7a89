"""The bound that the design claims for a service gap, from what a run really had.

    gap <= 2 (U + quantum + load)          docs/architecture.md, 4.6: a conjecture

    U        service that grants already made go on to cost: the largest sum, at any moment, of the
             service of one tenant's granted requests that have not ended, over its weight. Prompt
             chunks under way are part of it
    quantum  the largest service of one request over its tenant's weight: what one grant decides
    load     the longest load: its time is charged to those who wait for it

All three are taken over the tenants that are compared, in seconds of service over weight.
"""

import numpy as np

from bench.sim.batches import Floats, Ints
from bench.sim.columns import Columns
from bench.sim.types import Swap


def gap_bound_s(rows: Columns, swaps: list[Swap], tenants: Ints, weights: Floats) -> float:
    """Seconds of service over weight; `tenants` are those compared, `weights` all tenants'."""
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
