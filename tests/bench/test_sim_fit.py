"""The fit: figures come back from the steps that they make, disturbed steps or not."""

import random
from dataclasses import replace

import pytest

from bench.sim.device import ModelCost, Roofline, StepLoad
from bench.sim.packs import SimPacks
from bench.sim.types import SimModel
from bench.sim_fit import Load, Observation, fit_loads, fit_steps, step_errors

SHAPES = ("karpathy/tinyllamas-42M", "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B")
DEVICE = Roofline(
    flops_per_s=70e9,
    memory_bytes_per_s=8e9,
    copy_bytes_per_s=1e9,
    step_overhead_s=1e-3,
    row_overhead_s=9e-4,
    flops_by_dtype={"float32": 70e9},
    exposed=1.0,
    attention_flops_per_s=22e9,
    attention_bytes_per_s=2.3e9,
    packing_bytes_per_s=18e9,
    layer_overhead_s=2e-4,
    chunk_overhead_s=6e-5,
)
ROWS: list[list[tuple[int, int, bool]]] = [
    *([(context, 1, True)] * width for context in (10, 300, 900) for width in (1, 2, 5, 16)),
    *([(0, length, True)] for length in (8, 40, 200, 512)),
    [(0, 30, True)] * 6,
    [(300, 1, True)] * 4 + [(128, 200, False)],
    [(0, 100, False), (700, 150, True)],
]


def costs() -> list[ModelCost]:
    return [SimPacks([SimModel("m", shape, "float32")]).pack(0).cost for shape in SHAPES]


def steps(device: Roofline) -> list[Observation]:
    found = []
    for cost in costs():
        for rows in ROWS:
            load = StepLoad.of(cost, rows)
            found.append(Observation(cost, load, device.step_s(cost, load), 1e-3))
    return found


def check(device: Roofline, figures: dict[str, object], rel: float) -> None:
    for name, value in figures.items():
        wanted = getattr(device, name)
        assert value == pytest.approx(wanted, rel=rel), name


def test_figures_come_back_from_their_own_steps() -> None:
    check(DEVICE, fit_steps(steps(DEVICE)), 1e-3)


def test_overlap_is_found() -> None:
    device = replace(DEVICE, exposed=0.0)
    observed = steps(device)
    figures = fit_steps(observed)
    assert figures["exposed"] == 0.0
    fitted = replace(device, **figures)
    assert all(error[0] < 0.03 for error in step_errors(fitted, observed).by_kind.values())


def test_disturbed_steps_are_left_aside() -> None:
    rng = random.Random(1)
    observed = [
        replace(step, seconds=step.seconds * rng.choice([1.0, 1.0, 1.0, 1.0, 2.0, 3.0]))
        for step in steps(DEVICE)
    ]
    fitted = replace(DEVICE, **fit_steps(observed))
    errors = step_errors(fitted, steps(DEVICE)).by_kind
    assert {kind: count for kind, (_, _, count) in errors.items()} == {
        "decode": 36,
        "prompt": 18,
        "mixed": 3,
    }
    assert all(middle < 0.03 for middle, _, _ in errors.values())


def test_no_price_is_negative() -> None:
    rng = random.Random(2)
    observed = [replace(step, seconds=rng.uniform(0.01, 1.0)) for step in steps(DEVICE)]
    figures = fit_steps(observed)
    assert figures.pop("flops_by_dtype")["float32"] > 0
    assert all(value >= 0 for value in figures.values())


def test_loads_have_rates_by_tier() -> None:
    loads = [
        Load(size, tier, 0.02 + size / rate)
        for size in (100 << 20, 500 << 20)
        for tier, rate in (("disk", 2e9), ("host", 8e9))
    ]
    assert fit_loads(loads) == pytest.approx((2e9, 8e9, 0.02), rel=1e-3)
