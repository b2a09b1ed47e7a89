"""A measured device's figures: what each of them costs, and that stretches cost what steps do."""

from dataclasses import replace
from typing import Any

import pytest

from bench.sim.device import ModelCost, StepLoad
from bench.sim.devices import DEVICES
from bench.sim.packs import SimPacks
from bench.sim.types import DeviceFigures, SimModel
from bench.sim.world import roofline

MEASURED = replace(
    DEVICES["cpu-2"],
    flops_by_dtype={"float32": 70e9},
    exposed=0.7,
    attention_flops_per_s=20e9,
    attention_bytes_per_s=2e9,
    packing_bytes_per_s=18e9,
    layer_overhead_s=2e-4,
    chunk_overhead_s=7e-5,
)


def cost(shape: str = "HuggingFaceTB/SmolLM2-135M", dtype: str = "float32") -> ModelCost:
    return SimPacks([SimModel("m", shape, dtype)]).pack(0).cost


@pytest.mark.parametrize("device", [*DEVICES.values(), MEASURED])
@pytest.mark.parametrize("shape", ["HuggingFaceTB/SmolLM2-135M", "google/gemma-3-1b-it"])
@pytest.mark.parametrize("contexts", [[17], [3, 700, 4090]])
def test_steps_in_a_row_cost_what_single_steps_cost(
    device: DeviceFigures, shape: str, contexts: list[int]
) -> None:
    line, model = roofline(device), cost(shape)
    single = [
        line.step_s(model, StepLoad.of(model, [(c + n - 1, 1, True) for c in contexts]))
        for n in range(20)
    ]
    assert line.decode_steps_s(model, contexts, 20) == single


def step_s(device: DeviceFigures, rows: list[tuple[int, int, bool]], dtype: str) -> float:
    model = cost(dtype=dtype)
    return roofline(device).step_s(model, StepLoad.of(model, rows))


def test_a_plain_device_pays_for_the_longer_of_both_and_overheads() -> None:
    device, model = DEVICES["cpu-2"], cost()
    load = StepLoad.of(model, [(0, 100, True)])
    (group,) = model.attention
    flops = 100 * model.flops_per_token + model.flops_per_row + 5050 * group.flops_per_pair
    assert step_s(device, [(0, 100, True)], "float32") == pytest.approx(
        flops / device.flops_per_s + device.step_overhead_s + device.row_overhead_s
    )
    assert (load.num_rows, load.num_chunks, load.num_tokens) == (1, 1, 100)


def test_each_figure_of_a_measured_device_costs_its_own() -> None:
    decode, chunk = [(200, 1, True)], [(0, 64, True)]
    model = cost()

    def more(name: str, rows: list[tuple[int, int, bool]], value: float = 0.0) -> float:
        """What the figure adds to such a step."""
        changed: dict[str, Any] = {name: value}
        plain = replace(MEASURED, **changed)
        return step_s(MEASURED, rows, "float32") - step_s(plain, rows, "float32")

    assert more("packing_bytes_per_s", decode) == 0.0
    assert more("packing_bytes_per_s", chunk) == pytest.approx(model.weight_bytes / 18e9)
    assert more("layer_overhead_s", decode) == pytest.approx(30 * 2e-4)
    assert more("chunk_overhead_s", decode) == 0.0
    assert more("chunk_overhead_s", [*chunk, *chunk]) == pytest.approx(2 * 30 * 7e-5)
    (group,) = model.attention
    assert more("attention_flops_per_s", decode) == pytest.approx(201 * group.flops_per_pair / 20e9)
    shorter_s = (model.flops_per_token + model.flops_per_row) / 70e9
    assert more("exposed", decode) == pytest.approx(0.7 * shorter_s)


def test_a_dtype_without_a_figure_of_its_own_has_the_devices() -> None:
    other = replace(MEASURED, flops_by_dtype={"bfloat16": 1e9})
    long = [(0, 512, True)]
    assert step_s(other, long, "float32") < step_s(MEASURED, long, "float32")
    assert step_s(other, long, "bfloat16") > 10 * step_s(MEASURED, long, "bfloat16")
