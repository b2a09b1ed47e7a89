"""A device's figures from measured steps and loads, by least absolute errors. Pure.

Lives here: which figure explains which part of a step, the fit, its errors. Does not: measuring.

A step's time is a sum of what it has of each kind, times that kind's price (`Roofline.step_s`), and
no price is negative. Errors count relative to the step, or the long ones would decide alone, and
by their size and not its square, so that a step that somebody disturbed is left aside. What
may hide behind what (`exposed`) is tried at both ends: arithmetic after memory, and the longer of
both; with the latter the prices and which is longer are found in turns.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import stats
from bench.sim.device import ModelCost, Roofline, StepLoad

Matrix = npt.NDArray[np.float64]
TURNS = 12
REWEIGHTS = 30
SMALL_ERROR = 0.01
"""Errors below it count by their square."""
UNBOUND = 1e18
"""A rate for what was never seen to cost anything."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One step. `host_s`: its part outside the forward pass."""

    cost: ModelCost
    load: StepLoad
    seconds: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a model."""

    size_bytes: int
    tier: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Errors:
    """|fitted / measured - 1| by kind of step: median, 90th percentile, and how many."""

    by_kind: dict[str, tuple[float, float, int]]

    def in_words(self) -> str:
        """One line."""
        parts = [
            f"{kind} {middle:.0%} (p90 {high:.0%}, {count} steps)"
            for kind, (middle, high, count) in self.by_kind.items()
        ]
        return "error of the fit, median: " + ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return {
            kind: {"median": middle, "p90": high, "steps": count}
            for kind, (middle, high, count) in self.by_kind.items()
        }


def fit_steps(steps: Sequence[Observation]) -> dict[str, Any]:
    """The figures of `DeviceFigures` that say what a step costs."""
    host = _solve(np.array([[1.0, step.load.num_rows] for step in steps]), _array(steps, "host_s"))
    # In turns one may end up where it began, so the second is begun at several places.
    starts = [(1.0, 0.5), *((0.0, quantile) for quantile in (0.25, 0.5, 0.75))]
    fits = [_fit_passes(steps, float(host[1]), *start) for start in starts]
    _, found = min(fits, key=lambda fit: fit[0])
    return {"step_overhead_s": float(host[0]), **found}


def fit_loads(loads: Sequence[Load]) -> tuple[float, float, float]:
    """Bytes a second from the disk and from the host tier, and seconds beside."""
    rows = [
        [1.0, *(load.size_bytes * (load.tier == tier) for tier in ("disk", "host"))]
        for load in loads
    ]
    price = _solve(np.array(rows), np.array([load.seconds for load in loads]))
    return _rate(price[1]), _rate(price[2]), float(price[0])


def step_errors(device: Roofline, steps: Sequence[Observation]) -> Errors:
    """How far the figures are from what they were fitted to."""
    kinds: dict[str, list[float]] = {"decode": [], "prompt": [], "mixed": []}
    for step in steps:
        error = abs(device.step_s(step.cost, step.load) / step.seconds - 1.0)
        kinds[_kind(step.load)].append(error)
    return Errors(
        {
            kind: (statistics.median(errors), stats.percentile(errors, 0.9), len(errors))
            for kind, errors in kinds.items()
            if errors
        }
    )


def _kind(load: StepLoad) -> str:
    if not load.num_chunks:
        return "decode"
    return "prompt" if load.num_chunks == load.num_rows else "mixed"


def _fit_passes(
    steps: Sequence[Observation], row_host_s: float, exposed: float, memory_share: float
) -> tuple[float, dict[str, Any]]:
    """Forward passes: the sum of relative errors, and the figures.

    `memory_share` of the steps, those with the least arithmetic a byte, wait for memory at first.
    """
    seconds = _array(steps, "seconds") - _array(steps, "host_s")
    dtypes = sorted({step.cost.dtype for step in steps})
    plain, arithmetic, memory = _columns(steps, dtypes)
    num_plain = plain.shape[1]
    intensity = arithmetic.sum(axis=1) / memory
    is_arithmetic = intensity > np.quantile(intensity, memory_share)
    for _ in range(TURNS if exposed < 1.0 else 1):
        flops_weight = np.where(is_arithmetic, 1.0, exposed)
        memory_weight = np.where(is_arithmetic, exposed, 1.0)
        weighted = np.column_stack(
            [plain, arithmetic * flops_weight[:, None], memory * memory_weight]
        )
        price = _solve(weighted, seconds)
        is_arithmetic = arithmetic @ price[num_plain:-1] >= memory * price[-1]
    flops_s, memory_s = arithmetic @ price[num_plain:-1], memory * price[-1]
    busy_s = np.maximum(flops_s, memory_s) + exposed * np.minimum(flops_s, memory_s)
    error = float(np.abs((plain @ price[:num_plain] + busy_s) / seconds - 1.0).sum())
    rates = {dtype: _rate(each) for dtype, each in zip(dtypes, price[num_plain:-1], strict=True)}
    return error, {
        "row_overhead_s": float(row_host_s + price[0]),
        "layer_overhead_s": float(price[1]),
        "chunk_overhead_s": float(price[2]),
        "attention_flops_per_s": _rate(price[3]),
        "attention_bytes_per_s": _rate(price[4]),
        "packing_bytes_per_s": _rate(price[5]),
        "flops_per_s": rates[dtypes[0]],
        "flops_by_dtype": rates,
        "memory_bytes_per_s": _rate(price[-1]),
        "exposed": exposed,
    }


def _columns(steps: Sequence[Observation], dtypes: Sequence[str]) -> tuple[Matrix, Matrix, Matrix]:
    """What each step has of each kind: overheads and attention; flops by dtype; weights' bytes."""
    plain, arithmetic, memory = [], [], []
    for step in steps:
        cost, load = step.cost, step.load
        groups = list(zip(cost.attention, load.pairs, load.positions, strict=True))
        plain.append(
            [
                load.num_rows,
                cost.num_layers,
                cost.num_layers * load.num_chunks,
                sum(group.flops_per_pair * pairs for group, pairs, _ in groups),
                sum(group.bytes_per_position * positions for group, _, positions in groups),
                cost.weight_bytes * (load.num_tokens > 1),
            ]
        )
        flops = cost.flops_per_token * load.num_tokens + cost.flops_per_row * load.num_sampling
        arithmetic.append([flops * (cost.dtype == dtype) for dtype in dtypes])
        memory.append(cost.weight_bytes)
    return np.array(plain, float), np.array(arithmetic, float), np.array(memory, float)


def _array(steps: Sequence[Observation], name: str) -> Matrix:
    return np.array([getattr(step, name) for step in steps])


def _rate(price: float) -> float:
    return 1.0 / float(price) if price > 1.0 / UNBOUND else UNBOUND


def _solve(columns: Matrix, seconds: Matrix) -> Matrix:
    """Prices >= 0 with the least sum of relative errors: squares, weighted again and again."""
    scaled = columns / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0.0] = 1.0
    matrix, ones = scaled / norms, np.ones(len(seconds))
    price = _least_squares(matrix, ones)
    for _ in range(REWEIGHTS):
        weight = 1.0 / np.sqrt(np.maximum(np.abs(ones - matrix @ price), SMALL_ERROR))
        price = _least_squares(matrix * weight[:, None], weight)
    return np.asarray(price / norms)


def _least_squares(matrix: Matrix, wanted: Matrix) -> Matrix:
    """Of numbers >= 0, by Lawson and Hanson's active sets."""
    price = np.zeros(matrix.shape[1])
    used = np.zeros(matrix.shape[1], bool)
    for _ in range(10 * matrix.shape[1]):
        slope = matrix.T @ (wanted - matrix @ price)
        slope[used] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= 1e-9:
            break
        used[best] = True
        while used.any():
            free = np.zeros_like(price)
            free[used] = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)[0]
            below = used & (free <= 0.0)
            if not below.any():
                price = free
                break
            # As far towards it as none becomes negative; whoever reaches zero is left out.
            share = np.min(price[below] / (price[below] - free[below]))
            price = price + share * (free - price)
            used &= price > 1e-15
            price[~used] = 0.0
    return np.asarray(price)
