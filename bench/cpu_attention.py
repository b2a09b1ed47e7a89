"""`python -m bench.cpu_attention`: decode attention on a processor against the memory it reads.

Lives here: paged KV of a model's shape, one call of the C++ kernel a layer, how many bytes of KV
that is a second, and beside it, in the same repeat, how fast this machine reads memory with as many
threads. Does not: the rest of a layer (`cpu.py`).

Blocks lie scattered over an arena that is larger than any cache, and a pass goes over all layers,
so that a layer's KV comes from memory as it does in a step. A repeat is one pass of every case and
one reading of the same amount of memory by `torch.sum`; a share is of the same repeat. Where others
use the machine only `cpu` says something: bytes a CPU second of all threads together.

    .venv/bin/python -m bench.cpu_attention [--model Qwen/Qwen2.5-0.5B] [--contexts 192 1024 4096]
        [--rows 1 4 16] [--threads N] [--build avx512] [--output FILE]
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import machine, shapes, stats
from engine.backend.cpu import CpuBackend
from kernels.native_calls import AttentionForm, Cache, NativeLibrary, Rows, find, library
from kernels.paged_attention import BlockGeometry, LayerGeometry

BLOCK_TOKENS = 16
# More than the caches of any processor this is run on.
LEAST_BYTES = 640 << 20
MOST_LAYERS = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one layer."""

    heads: int
    kv_heads: int
    dim: int
    layers: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one position of one layer."""
        return self.kv_heads * self.dim * 2 * 2


def shape_of(model: str) -> Shape:
    """From the file of shapes. Raises KeyError."""
    entry = shapes.read_shapes()[model]
    return Shape(
        entry["num_attention_heads"],
        entry["num_key_value_heads"],
        entry["head_dim"],
        entry["num_hidden_layers"],
    )


def arena_of(values: torch.Tensor, size: int) -> torch.Tensor:
    """`size` elements of a worker's arena, `values` over and over: with the pages it has there."""
    arena = CpuBackend(size * values.itemsize).arena.view(values.dtype)
    for start in range(0, size, len(values)):
        piece = arena[start : start + len(values)]
        piece.copy_(values[: len(piece)])
    return arena


class Case:
    """So many sequences of one length, over as many layers as exceed the caches."""

    def __init__(self, shape: Shape, rows: int, context: int) -> None:
        """Fills the arena with random K and V."""
        blocks = -(-context // BLOCK_TOKENS)
        per_layer = rows * context * shape.bytes_per_token
        self.layers = max(shape.layers, min(MOST_LAYERS, -(-LEAST_BYTES // per_layer)))
        geometry = BlockGeometry(
            LayerGeometry(shape.kv_heads, shape.dim, shape.dim),
            BLOCK_TOKENS,
            torch.bfloat16,
            shape.dim * 2,
        )
        generator = torch.Generator().manual_seed(context * 100 + rows)
        count = self.layers * rows * blocks
        size = count * geometry.block_units * geometry.unit_bytes // 2
        self._arena = arena_of(torch.randn(1 << 20, generator=generator).bfloat16(), size)
        self._tables = torch.randperm(count, generator=generator) * geometry.block_units
        self._index = [
            torch.arange(rows).view(rows, 1),
            torch.arange(rows * blocks).view(rows, blocks),
            torch.zeros(rows, blocks, dtype=torch.int64),
            torch.full((rows,), context),
            torch.zeros(rows, dtype=torch.int64),
        ]
        self._calls = (Rows * 1)(Rows(*(t.data_ptr() for t in self._index), rows, 1, blocks))
        self._form = AttentionForm(shape.heads, shape.dim**-0.5, 0.0)
        self._query = torch.randn(rows, shape.heads * shape.dim, generator=generator).bfloat16()
        self._out = torch.empty_like(self._query)
        self._caches = [
            Cache(
                arena=self._arena.data_ptr(),
                table=self._tables.data_ptr() + 8 * layer * rows * blocks,
                unit_bytes=geometry.unit_bytes,
                block_units=geometry.block_units,
                v_start_units=geometry.v_start_units,
                block_tokens=BLOCK_TOKENS,
                num_kv_heads=shape.kv_heads,
                dim=shape.dim,
                window=0,
            )
            for layer in range(self.layers)
        ]
        self.num_bytes = self.layers * per_layer

    def run(self, native: NativeLibrary) -> None:
        """Every layer once."""
        for cache in self._caches:
            native.attention(cache, self._form, self._calls, self._query, self._out)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall and of CPU."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    native: NativeLibrary, case: Case, memory: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Medians of the repeats; the first only warms up."""
    found: dict[str, list[float]] = {
        name: [] for name in ("gb_s", "cpu_gb_s", "layer_us", "read_gb_s", "share")
    }
    for repeat in range(repeats + 1):
        wall, cpu = timed(lambda: case.run(native))
        read, _ = timed(memory.sum)
        if not repeat:
            continue
        speed, reading = case.num_bytes / wall / 1e9, memory.nbytes / read / 1e9
        found["gb_s"].append(speed)
        found["cpu_gb_s"].append(case.num_bytes / cpu / 1e9)
        found["layer_us"].append(wall / case.layers * 1e6)
        found["read_gb_s"].append(reading)
        found["share"].append(speed / reading)
    return {name: stats.repeated(values) for name, values in found.items()}


def table(done: dict[str, dict[str, Any]]) -> str:
    """Medians, a row a case."""
    head = "| rows x context | us a layer | KV GB/s | reading GB/s | share | GB a CPU second |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, row in done.items():
        at = {key: value["median"] for key, value in row.items()}
        lines.append(
            f"| {name} | {at['layer_us']:,.0f} | {at['gb_s']:.1f} | {at['read_gb_s']:.1f} "
            f"| {at['share']:.0%} | {at['cpu_gb_s']:.2f} |"
        )
    return "\n".join(lines)


def chosen(build: str | None) -> NativeLibrary:
    """The library of that name or file, or the best one. Raises SystemExit where there is none."""
    if build is None:
        native = library()
    else:
        path = Path(build) if build.endswith(".so") else find(f"_native_{build}")
        native = None if path is None else NativeLibrary(path)
    if native is None:
        raise SystemExit("no such build of the C++ kernels is installed")
    return native


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_attention", description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument("--contexts", type=int, nargs="+", default=[192, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--build", help="avx512_bf16, avx512, avx2, or a file; else the best")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    native = chosen(args.build)
    native.set_threads(args.threads)
    shape = shape_of(args.model)
    memory = arena_of(torch.ones(1 << 20), LEAST_BYTES // 4)
    done = {}
    for context in args.contexts:
        for rows in args.rows:
            case = Case(shape, rows, context)
            done[f"{rows} x {context}"] = measure(native, case, memory, args.repeats)
            del case
    print(f"{args.model}, {args.threads} threads, {native.name}")
    print(table(done))
    if args.output:
        document = {
            "benchmark": "cpu-attention",
            "model": args.model,
            "threads": args.threads,
            "build": native.name,
            "machine": machine.facts(),
            "cases": done,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
