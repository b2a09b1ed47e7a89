"""Devices that a world can be built of, in the figures of a roofline, with where each comes from.

Lives here: the figures, and the files of devices that were measured (bench/sim_calibrate.py writes
them). Does not: what a step costs (bench/sim/device.py), prices of a provider.

Vendors' data sheets give peaks. What a well-made engine gets of them is less, so the figures here
are peak times ACHIEVED_*: assumptions, in the range that published kernels and engines reach, until
a device has been measured. The CPU's figures are what was measured, taken whole. Overheads and
prices of the GPUs are assumptions too (a price is an order of magnitude: give your own).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.sim.types import DeviceFigures

ACHIEVED_FLOPS = 0.6
ACHIEVED_MEMORY = 0.8
ACHIEVED_LINK = 0.85
GIB = 1 << 30
GPU_STEP_S = 300e-6
GPU_ROW_S = 5e-6
GPU_LOAD_S = 20e-3
DISK_PEAK = 6.8e9
USABLE_MEMORY = 0.9
"""Of a GPU's memory; the rest is the framework's, activations and graphs."""


def _gpu(
    name: str,
    tflops: float,
    memory_gb_s: float,
    link_gb_s: float,
    memory_gb: float,
    host_gib: int,
    cost_per_hour: float,
    sheet: str,
) -> DeviceFigures:
    memory = memory_gb_s * 1e9 * ACHIEVED_MEMORY
    return DeviceFigures(
        name=name,
        flops_per_s=tflops * 1e12 * ACHIEVED_FLOPS,
        memory_bytes_per_s=memory,
        copy_bytes_per_s=memory / 2,  # each byte is read and written
        host_bytes_per_s=link_gb_s * 1e9 * ACHIEVED_LINK,
        disk_bytes_per_s=DISK_PEAK * ACHIEVED_LINK,
        step_overhead_s=GPU_STEP_S,
        row_overhead_s=GPU_ROW_S,
        load_overhead_s=GPU_LOAD_S,
        memory_bytes=int(memory_gb * 1e9 * USABLE_MEMORY),
        host_bytes=host_gib * GIB,
        cost_per_hour=cost_per_hour,
        source=(
            f"{sheet}: {tflops:g} TFLOP/s bf16 dense, {memory_gb_s:g} GB/s, link "
            f"{link_gb_s:g} GB/s each way, {memory_gb:g} GB; peaks x {ACHIEVED_FLOPS}, "
            f"{ACHIEVED_MEMORY}, {ACHIEVED_LINK}; disk: 6.8 GB/s of a PCIe 4 NVMe "
            "drive; overheads and price assumed"
        ),
    )


_CPU_SOURCE = (
    "measured, bench/results: cpu-serve-two-threads.json (8 prompts of 128 tokens in 1.8 s, decode "
    "steps of 71 ms at 8 rows, Qwen2.5-0.5B in bf16), cpu-swap.json (0.99 GB: cold 0.45 s, warm "
    "0.060 s, memcpy 0.058 s; evict 1.3 ms); overheads and price assumed"
)

DEVICES: dict[str, DeviceFigures] = {
    device.name: device
    for device in (
        _gpu("h200", 989.5, 4800, 64, 141, 256, 4.0, "NVIDIA H200 SXM data sheet"),
        _gpu("h100", 989.5, 3350, 64, 80, 256, 3.0, "NVIDIA H100 SXM data sheet"),
        _gpu("a100-80g", 312, 2039, 32, 80, 128, 1.8, "NVIDIA A100 80GB SXM data sheet"),
        _gpu("l4", 121, 300, 32, 24, 64, 0.7, "NVIDIA L4 data sheet"),
        DeviceFigures(
            name="cpu-2",
            flops_per_s=430e9,
            memory_bytes_per_s=16e9,
            copy_bytes_per_s=8.7e9,
            host_bytes_per_s=16.4e9,
            disk_bytes_per_s=2.2e9,
            step_overhead_s=1e-3,
            row_overhead_s=50e-6,
            load_overhead_s=5e-3,
            memory_bytes=4 * GIB,
            host_bytes=4 * GIB,
            cost_per_hour=0.1,
            source=_CPU_SOURCE,
        ),
    )
}


def slowed(device: DeviceFigures, share: float) -> DeviceFigures:
    """The device where something else has it for the rest of the time, in slices."""
    changed: dict[str, Any] = {}
    for item in fields(device):
        value = getattr(device, item.name)
        if item.name.endswith("_per_s"):
            changed[item.name] = value * share
        elif item.name.endswith("_overhead_s"):
            changed[item.name] = value / share
    rates = {dtype: rate * share for dtype, rate in device.flops_by_dtype.items()}
    return replace(device, flops_by_dtype=rates, **changed)


@dataclass(frozen=True, slots=True)
class Device:
    """A device and the simulation's own settings that were measured with it (world.py)."""

    figures: DeviceFigures
    settings: Mapping[str, float]


def find_device(name: str) -> Device:
    """By name, or from a file. Raises ValueError for one that is neither or makes no sense."""
    if name in DEVICES:
        return Device(DEVICES[name], {})
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"there is no device {name!r}: write one of {', '.join(DEVICES)}, or the path of a "
            "file that `python -m bench.sim_calibrate --output FILE` has written"
        )
    return read_device(path)


def read_device(path: Path) -> Device:
    """Raises ValueError, naming the figure that is missing or none, or OSError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        given, settings = dict(content["device"]), dict(content.get("settings", {}))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no device file: {error}") from error
    known = {item.name: item for item in fields(DeviceFigures)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{path}: a device has no figure {unknown[0]!r}")
    by_dtype = given.get("flops_by_dtype", {})
    if not isinstance(by_dtype, dict) or not all(_is_number(v) and v for v in by_dtype.values()):
        raise ValueError(f"{path}: flops_by_dtype is no object of numbers above 0: {by_dtype!r}")
    for name, value in {**given, **settings}.items():
        if name not in ("name", "source", "flops_by_dtype") and not _is_number(value):
            raise ValueError(f"{path}: {name} is no number that is 0 or more: {value!r}")
    try:
        figures = DeviceFigures(**given)
    except TypeError as error:  # a figure without a default is missing
        raise ValueError(f"{path} is no device file: {error}") from error
    rates = ("flops_per_s", "memory_bytes_per_s", "copy_bytes_per_s", "host_bytes_per_s")
    for name in (*rates, "disk_bytes_per_s", "memory_bytes"):
        if not given[name] > 0:
            raise ValueError(f"{path}: {name} must be above 0")
    return Device(figures, settings)


def write_device(
    path: Path, figures: DeviceFigures, settings: Mapping[str, float], more: Mapping[str, Any]
) -> None:
    """`more`: what is said of the measurement; nobody reads it back."""
    content = {"device": asdict(figures), "settings": dict(settings), **more}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30
