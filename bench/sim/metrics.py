"""What a run comes to: the figures of the report, as a tree of plain values.

Lives here: the summary, whose keys are stable and whose values say the same on every machine (no
wall time, six digits). Does not: series over time (timelines.py), pages (report.py).

Percentiles interpolate between ranks, and a figure over nothing is None, as in `bench/stats.py`.
Rates are over the simulated time of the whole run, its end included.
"""

import math
from collections import Counter
from typing import Any

import numpy as np

from bench.sim.batches import Ints
from bench.sim.columns import Columns, Slo, columns, percentiles_by, spread, sums_by
from bench.sim.fair_metrics import Fairness, fairness
from bench.sim.timelines import Timelines, timelines
from bench.sim.types import OUTCOMES, REFUSED_COUNTER, Run

MOST_ROWS = 100
"""Tenants or models in a table: those with most service."""
DIGITS = 6
HOUR_S = 3600.0
Tree = dict[str, Any]


def measure(run: Run, slo: Slo) -> tuple[Tree, Timelines]:
    """The summary of a run and its series."""
    rows = columns(run.records, slo)
    fair = fairness(run, rows)
    span_s = run.simulated_s
    tree: Tree = {
        "world": _world(run),
        "requests": _requests(rows),
        "latency_s": {
            "ttft": spread(rows.ttft_s),
            "tpot": spread(rows.tpot_s),
            "queue": spread(rows.queue_s),
            "e2e": spread(rows.e2e_s),
        },
        "throughput": _throughput(rows, span_s),
        "refused": _refusals(run, rows),
        "swaps": _swaps(run),
        "device": _device(run, rows),
        "prefix": _prefix(rows),
        "fairness": _fairness(run, fair),
        "tenants": _groups(run, rows, "tenant"),
        "models": _groups(run, rows, "model"),
        "counters": dict(run.counters),
        "simulated_s": span_s,
    }
    rounded = _rounded(tree)
    assert isinstance(rounded, dict)
    return rounded, timelines(run, rows, fair)


def _world(run: Run) -> Tree:
    world = run.world
    return {
        "workers": world.workers,
        "device": world.device.name,
        "device_source": world.device.source,
        "cost_per_hour": world.device.cost_per_hour,
        "num_models": len(world.models),
        "num_tenants": len(world.tenants),
        "shapes": dict(Counter(model.shape for model in world.models)),
        "seed": world.seed,
        "settings": {key: str(value) for key, value in world.settings.items()},
        "policies": dict(world.policies),
    }


def _requests(rows: Columns) -> Tree:
    counts = np.bincount(rows.outcome, minlength=len(OUTCOMES))
    num_counted = int(rows.counted.sum())
    return {
        "num": len(rows.outcome),
        "by_outcome": {name: int(count) for name, count in zip(OUTCOMES, counts, strict=True)},
        "finished": int(rows.finished.sum()),
        "good": int(rows.good.sum()),
        "good_share": _over(float(rows.good.sum()), num_counted),
    }


def _throughput(rows: Columns, span_s: float) -> Tree:
    finished = rows.finished
    return {
        "requests_s": _over(float(finished.sum()), span_s),
        "output_tok_s": _over(float(rows.output_tokens.sum()), span_s),
        "prompt_tok_s": _over(float(rows.prompt_tokens[finished].sum()), span_s),
        "goodput_tok_s": _over(float(rows.output_tokens[rows.good].sum()), span_s),
        "goodput_requests_s": _over(float(rows.good.sum()), span_s),
        "output_tokens": int(rows.output_tokens.sum()),
        "prompt_tokens": int(rows.prompt_tokens[finished].sum()),
    }


def _refusals(run: Run, rows: Columns) -> Tree:
    by_reason = {
        key.removeprefix(REFUSED_COUNTER): int(value)
        for key, value in run.counters.items()
        if key.startswith(REFUSED_COUNTER)
    }
    return {"num": int((rows.outcome == OUTCOMES.index("refused")).sum()), "by_reason": by_reason}


def _swaps(run: Run) -> Tree:
    """A reload is a load of what its worker had before."""
    by_tier: dict[str, Tree] = {}
    had: set[tuple[int, int]] = set()
    num_evictions = num_reloads = 0
    reload_s = 0.0
    for swap in run.swaps:
        if swap.kind == "evict":
            num_evictions += 1
            continue
        row = by_tier.setdefault(swap.tier, {"num": 0, "seconds": 0.0, "bytes": 0})
        row["num"] += 1
        row["seconds"] += swap.duration_s
        row["bytes"] += swap.size_bytes
        if (swap.worker, swap.model) in had:
            num_reloads += 1
            reload_s += swap.duration_s
        had.add((swap.worker, swap.model))
    loads = np.array([swap.duration_s for swap in run.swaps if swap.kind == "load"])
    return {
        "loads": len(loads),
        "load_s": float(loads.sum()),
        "reloads": num_reloads,
        "reload_s": reload_s,
        "evictions": num_evictions,
        "loads_per_minute": _over(len(loads) * 60.0, run.simulated_s),
        "by_tier": by_tier,
        "duration_s": spread(loads),
    }


def _device(run: Run, rows: Columns) -> Tree:
    workers = run.world.workers
    total_s = workers * run.simulated_s
    busy_s = run.samples[-1].busy_s if run.samples else 0.0
    cost = run.world.device.cost_per_hour * total_s / HOUR_S
    output = float(rows.output_tokens.sum())
    good = float(rows.output_tokens[rows.good].sum())
    both = output + float(rows.prompt_tokens[rows.finished].sum())
    counters = run.counters
    used_s, system_s = (counters.get(f"{n}_seconds", 0.0) for n in ("busy", "system_device"))
    return {
        "busy_s": busy_s,
        "accounted": _over(counters.get("tenant_device_seconds", 0.0) + system_s, used_s),
        "system_share": _over(system_s, used_s),
        "utilisation": _over(busy_s, total_s),
        "busiest_over_mean": _over(counters.get("busiest_seconds", 0.0) * workers, used_s),
        "cost": cost,
        "cost_per_million_output_tokens": _over(cost * 1e6, output),
        "cost_per_million_good_tokens": _over(cost * 1e6, good),
        "cost_per_million_tokens": _over(cost * 1e6, both),
        "pages_mean": _mean_pages(run),
    }


def _mean_pages(run: Run) -> Tree:
    owners = sorted({owner for sample in run.samples for owner in sample.pages})
    return {
        owner: float(np.mean([sample.pages.get(owner, 0) for sample in run.samples]))
        for owner in owners
    }


def _prefix(rows: Columns) -> Tree:
    """Prompts of requests that were let in."""
    asked = float(rows.prompt_tokens[np.isfinite(rows.ttft_s)].sum())
    cached = float(rows.cached_tokens.sum())
    return {"cached_tokens": int(cached), "cached_share": _over(cached, asked)}


def _fairness(run: Run, fair: Fairness) -> Tree:
    gap: Tree | None = None
    if fair.gap is not None:
        found = fair.gap
        gap = {
            "gap_s": found.gap_s,
            "bound_s": found.bound_s,
            "of_bound": found.gap_s / found.bound_s if found.bound_s else None,
            "ahead": run.world.tenants[found.ahead].name,
            "behind": run.world.tenants[found.behind].name,
            "at_s": found.at_s,
            "num_tenants": found.num_tenants,
        }
    return {
        "jain_mean": fair.jain_mean,
        "jain_p5": fair.jain_p5,
        "num_windows": len(fair.jain),
        "misdirected_share": fair.misdirected,
        "worst_weight_error": fair.worst_error,
        "largest_gap": gap,
    }


def _groups(run: Run, rows: Columns, what: str) -> Tree:
    """Rows of the tenants or models with most service, and how the others add up."""
    groups = rows.tenant if what == "tenant" else rows.model
    places = run.world.tenants if what == "tenant" else run.world.models
    num = len(places)
    service = sums_by(groups, rows.service_s, num)
    requests = sums_by(groups, np.ones(len(groups)), num)
    order = np.lexsort((np.arange(num), -requests, -service))
    order = order[requests[order] > 0]
    sums = {
        "requests": requests,
        "finished": sums_by(groups, rows.finished, num),
        "refused": sums_by(groups, rows.outcome == OUTCOMES.index("refused"), num),
        "good": sums_by(groups, rows.good, num),
        "counted": sums_by(groups, rows.counted, num),
        "output_tokens": sums_by(groups, rows.output_tokens, num),
        "prompt_tokens": sums_by(groups, rows.prompt_tokens, num),
    }
    timings = {
        f"{name}_{label}": column
        for name, values in (("ttft", rows.ttft_s), ("tpot", rows.tpot_s), ("queue", rows.queue_s))
        for label, column in zip(
            ("p50_s", "p95_s"), percentiles_by(groups, values, num, (0.50, 0.95)).T, strict=True
        )
    }
    loads = _loads_of_models(run, num) if what == "model" else None
    table = []
    for place in order[:MOST_ROWS].tolist():
        row: Tree = {"name": places[place].name, "service_s": float(service[place])}
        row["service_share"] = _over(float(service[place]), float(service.sum()))
        row |= {key: int(values[place]) for key, values in sums.items()}
        row["good_share"] = _over(row["good"], row.pop("counted"))
        row |= {key: float(values[place]) for key, values in timings.items()}
        if loads is None:
            row["weight"] = run.world.tenants[place].weight
        else:
            row["shape"] = run.world.models[place].shape
            row["loads"] = int(loads[place])
        table.append(row)
    p95 = timings["ttft_p95_s"][np.isfinite(timings["ttft_p95_s"])]
    return {
        "num": len(order),
        "rows": table,
        "omitted": max(0, len(order) - MOST_ROWS),
        "ttft_p95_s": spread(p95),
    }


def _loads_of_models(run: Run, num: int) -> Ints:
    models = [swap.model for swap in run.swaps if swap.kind == "load"]
    return np.bincount(np.array(models, np.int64), minlength=num)


def _over(value: float, by: float) -> float | None:
    return value / by if by > 0 else None


def _rounded(value: Any) -> Any:
    """Floats to six digits, NaN to None: the last digits differ between machines."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
