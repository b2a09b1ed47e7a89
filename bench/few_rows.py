"""Which shape of launch suits each product of few rows on this GPU, and what a layer of them takes.

    python -m bench.few_rows [--rows 1 2 4] [--only 8B] [--seconds 60]

For each product the shapes of launch from the fastest on, as GB/s and as a share of the copy
bandwidth measured in the same run, beside the separate launches, and at the end lines for
`kernels.few_rows.TUNED`. Then all products of a layer of 8B one after the other, over as many sets
of weights as the second-level cache cannot hold, as one CUDA graph: separate, together, and
together with dependent launches. Shapes are compiled beforehand by as many processes as there are
processors. A product whose turn comes after --seconds is left out. Needs a CUDA device.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context

import torch

from bench.few_rows_cases import PRODUCTS, Inputs, Product, inputs_of
from bench.gpu_compile import compiling
from bench.kernel_cases import Rig
from bench.kernel_timing import Ceilings, ceilings, measure
from kernels import dependent, few_rows
from kernels.few_rows import LaunchShape, shape_for
from kernels.triton_api import HAS_TRITON, next_power_of_2

WARP = 32
REPEATS = 15
SHOWN = 3
CHAIN = ("8B qkv", "8B out", "8B gate_up", "8B down")
CHAIN_LAYERS = 4


def shapes(product: Product, rows: int) -> list[LaunchShape]:
    """Worth a trial: 16 to 128 weights a thread and tile, fewer where rows take registers."""
    parts = 1 + product.gated
    most = 128 // (1 if rows < few_rows.MAX_ROWS else 2)
    found = [
        LaunchShape(block_n, block_k, warps)
        for warps in (2, 4, 8)
        for block_k in (256, 512, 1024, 2048)
        for block_n in (1, 2, 4, 8, 16)
        if 16 <= parts * block_n * block_k // (WARP * warps) <= most
        and block_k <= next_power_of_2(product.k)
        and product.n // block_n >= 200
    ]
    usual = shape_for(rows, product.n, product.k, product.gated)
    return found if usual in found else [usual, *found]


def compile_one(task: tuple[Product, int, LaunchShape], arch: int) -> str:
    """In a process of its own, into Triton's cache. The fault in words, or nothing."""
    product, rows, shape = task
    rig = Rig(torch.device("cpu"), torch.bfloat16, torch.Generator())
    try:
        with compiling(arch) as taken:
            inputs_of(replace(product, n=32), rows, rig).together(shape=shape)
            faults = [fault for made in taken("") for fault in made.faults()]
    except Exception as error:  # noqa: BLE001 - any shape the compiler refuses is left out
        faults = [f"{type(error).__name__}: {error}"]
    return "; ".join(faults)


def compile_all(
    tasks: Sequence[tuple[Product, int, LaunchShape]], arch: int, processes: int
) -> list[tuple[Product, int, LaunchShape]]:
    """Those that can be used."""
    forms = {_form(task): task for task in tasks}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        faults = dict(zip(forms, pool.map(compile_one, forms.values(), repeat(arch)), strict=True))
    return [task for task in tasks if not faults[_form(task)]]


def _form(task: tuple[Product, int, LaunchShape]) -> tuple[object, ...]:
    """What the compiler sees of it."""
    product, rows, shape = task
    norm = product.k if product.normed else 0
    return norm, product.gated, product.bias, rows, shape


def sweep(
    product: Product,
    rows: int,
    tried: Sequence[LaunchShape],
    rig: Rig,
    limits: Ceilings,
    timer: Callable[[Callable[[], object]], float],
) -> LaunchShape:
    """Print the fastest and the separate launches; the fastest."""
    made = inputs_of(product, rows, rig)
    size = product.num_weights * rig.dtype.itemsize
    wanted = made.exact()

    def line(name: str, us: float) -> str:
        rate = size / us / 1e3
        return f"    {name:34} {us:9.1f} us {rate:8.0f} GB/s {rate / limits['copy_gb_s']:6.1%}"

    times: dict[LaunchShape, float] = {}
    for shape in tried:
        off = (made.together(shape=shape).double() - wanted).norm() / wanted.norm()
        if not float(off) < 0.02:
            print(f"    {shape} is WRONG by {float(off):.1e}")
            continue
        times[shape] = timer(lambda shape=shape: made.together(shape=shape))  # type: ignore[misc]
    usual = shape_for(rows, product.n, product.k, product.gated)
    print(f"{product.name} rows={rows}: {product.n} x {product.k}")
    print(line("separate", timer(made.separate)))
    if usual in times:
        print(line(f"as it is {tuple(usual)}", times[usual]))
    order = sorted(times, key=times.__getitem__)
    for shape in order[:SHOWN]:
        print(line(str(tuple(shape)), times[shape]), flush=True)
    return order[0] if order else usual


def chain(rows: int, rig: Rig, limits: Ceilings, num_layers: int, repeats: int) -> None:
    """All products of layers, as they follow one another, but for attention."""
    products = [product for product in PRODUCTS if product.name in CHAIN]
    made = [inputs_of(product, rows, rig) for _ in range(num_layers) for product in products]
    size = sum(one.product.num_weights for one in made) * rig.dtype.itemsize

    def run(call: Callable[[Inputs], object]) -> Callable[[], None]:
        def all_of_them() -> None:
            for one in made:
                call(one)

        return all_of_them

    was = dependent.DEPENDENT_LAUNCH
    for name, on, call in (
        ("separate", False, Inputs.separate),
        ("together", False, Inputs.together),
        ("together, dependent", True, Inputs.together),
    ):
        dependent.DEPENDENT_LAUNCH = on
        us = measure(run(call), repeats)["median_us"]
        share = size / us / 1e3 / limits["copy_gb_s"]
        print(f"layer of 8B rows={rows} {name:22} {us / num_layers:8.1f} us {share:6.1%}")
    dependent.DEPENDENT_LAUNCH = was


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1], choices=(1, 2, 4))
    parser.add_argument("--only", default="8B", help="products whose name contains this")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    if not (HAS_TRITON and torch.cuda.is_available()):
        print("bench.few_rows needs a CUDA device and Triton")
        return 2
    begin = time.monotonic()
    major, minor = torch.cuda.get_device_capability()
    chosen = [
        (product, rows)
        for rows in options.rows
        for product in PRODUCTS
        if options.only in product.name
    ]
    tasks = [(product, rows, shape) for product, rows in chosen for shape in shapes(product, rows)]
    usable = compile_all(tasks, 10 * major + minor, os.cpu_count() or 1)
    print(f"{len(usable)} of {len(tasks)} shapes compiled in {time.monotonic() - begin:.0f} s")
    rig = Rig(torch.device("cuda"), torch.bfloat16, torch.Generator("cuda").manual_seed(0))
    best: dict[tuple[int, int, int, bool], LaunchShape] = {}
    with torch.inference_mode():
        limits = ceilings()
        print(f"{torch.cuda.get_device_name()}: copy {limits['copy_gb_s']:.0f} GB/s")
        for rows in options.rows if options.only in CHAIN[0] else ():
            chain(rows, rig, limits, CHAIN_LAYERS, REPEATS)
        for product, rows in chosen:
            if time.monotonic() - begin > options.seconds:
                print(f"{product.name} rows={rows}: no time left")
                continue
            tried = [shape for other, m, shape in usable if (other, m) == (product, rows)]
            timer = lambda call: measure(call, REPEATS)["median_us"]  # noqa: E731
            key = (rows, product.n, product.k, product.gated)
            best[key] = sweep(product, rows, tried, rig, limits, timer)
        few_rows.TUNED |= best
        for rows in options.rows if options.only in CHAIN[0] else ():
            print("with the fastest shapes:")
            chain(rows, rig, limits, CHAIN_LAYERS, REPEATS)
    print("\n".join(f"    {key}: LaunchShape{tuple(shape)}," for key, shape in best.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
