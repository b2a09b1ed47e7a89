"""`python -m bench.pack_load`: a pack from the page cache, beside `dd` and safetensors' own loader.

Lives here: one comparison, its command line and result file. Does not: cold and warm loads
(`swap.py`), the loading itself.

In each repeat, one after the other, all over the same bytes in the page cache:

    dd        `dd if=weights.bin of=/dev/null bs=8M`: one process copies the page cache into one
              buffer of 8 MiB again and again, which stays in the core's cache: it reads memory once
              and writes none
    preadv    one thread copies the page cache into the arena: what loading costs at least
    load      our load, from the request until the model is resident: into the arena by
              `--load-threads` threads, every byte checked against its checksum
    touch     safetensors' `load_file` of the model's own files, then a sum over every tensor
              reads each byte once; nothing is copied
    copy      `load_file`, then every tensor is copied into memory that was touched before, as
              a model's own parameters are

A share of 1 means: as fast as `dd`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench import files, machine, processes, shapes, stats, swap
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig
from engine.packs import convert
from engine.packs.pack import BLOB_NAME

WAYS = ("dd", "preadv", "load", "touch", "copy")
READ_BYTES = 8 << 20


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pack_load", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=2.0, help="takes the nearest shape")
    parser.add_argument("--shape", help="a shape by name instead")
    parser.add_argument("--shapes", type=Path, default=shapes.DEFAULT_SHAPES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="dd goes always")
    parser.add_argument("--load-threads", type=int, default=2)
    parser.add_argument("--no-verify", action="store_true", help="load without checksums")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="model and pack; else a temporary one")
    parser.add_argument("--output", type=Path, help="else only printed")
    return parser.parse_args(argv)


class PlainRead:
    """One thread's preadv of a file into memory that was touched before."""

    def __init__(self, path: Path, target: memoryview) -> None:
        self._path = path
        self._target = target

    def seconds(self) -> float:
        """Wall seconds of one pass."""
        descriptor = os.open(self._path, os.O_RDONLY)
        size = self._path.stat().st_size
        start = time.perf_counter()
        try:
            done = 0
            while done < size:
                block = self._target[done : min(done + READ_BYTES, size)]
                done += os.preadv(descriptor, [block], done)
        finally:
            os.close(descriptor)
        return time.perf_counter() - start


def touch_seconds(paths: Sequence[Path]) -> float:
    """safetensors' loader; each byte read once."""
    start = time.perf_counter()
    for path in paths:
        for tensor in load_file(path).values():
            words = tensor.view(-1).view(torch.uint8)
            words[: len(words) // 8 * 8].view(torch.int64).sum()
    return time.perf_counter() - start


def copy_seconds(paths: Sequence[Path], own: dict[str, torch.Tensor]) -> float:
    """safetensors' loader; each tensor copied into memory of its own."""
    start = time.perf_counter()
    for path in paths:
        for name, tensor in load_file(path).items():
            own[name].copy_(tensor)
    return time.perf_counter() - start


def measure(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """All ways in turn; a first, untimed round warms everything up."""
    name, folder = swap.model_folder(args, work_dir)
    print("writing its checkpoint pack", file=sys.stderr)
    pack_dir, index = convert.write_pack(
        convert.inspect(folder), work_dir / "packs", "auto", lambda phase, done, total: None
    )
    config = EngineConfig(
        arena_bytes=index.total_bytes + (len(index.segments) + 1) * (2 << 20) + swap.KV_ROOM_BYTES,
        shm_prefix=f"polyhost-bench-{os.getpid()}",
        load_threads=args.load_threads,
        verify_packs=not args.no_verify,
    )
    backend = CpuBackend(config.arena_bytes)
    backend.arena.zero_()  # touched once, as a running worker's arena is
    device = swap.Device(config, backend, pack_dir)
    blob, sources = pack_dir / BLOB_NAME, sorted(folder.glob("*.safetensors"))
    own = {key: torch.clone(tensor) for path in sources for key, tensor in load_file(path).items()}
    plain = PlainRead(blob, backend.host_view(0, index.total_bytes))

    def load() -> float:
        record, wall_s = device.load()
        if record.tier != "disk":
            raise processes.ServerFailed("a load did not come from the file")
        device.evict()
        return wall_s

    ways: dict[str, Callable[[], float]] = {
        "dd": lambda: files.dd_seconds(blob),
        "preadv": plain.seconds,
        "load": load,
        "touch": lambda: touch_seconds(sources),
        "copy": lambda: copy_seconds(sources, own),
    }
    rounds: list[dict[str, float]] = []
    try:
        for repeat in range(args.repeats + 1):
            row = {way: ways[way]() for way in WAYS if way in {"dd", *args.ways}}
            if repeat:
                rounds.append(row)
    finally:
        device.close()
    return {
        "model": name,
        "size_bytes": index.total_bytes,
        "verify": not args.no_verify,
        "load_threads": args.load_threads,
        "cores": sorted(os.sched_getaffinity(0)),
        "cached_share": files.cached_share(blob),
        "summary": _summary(rounds, index.total_bytes),
        "rounds": rounds,
    }


def _summary(rounds: list[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    """GB/s by way, and each way's speed over `dd`'s in the same round."""
    summary: dict[str, Any] = {}
    for way in rounds[0]:
        seconds = [row[way] for row in rounds]
        summary[way] = {
            "gb_s": num_bytes / statistics.median(seconds) / 1e9,
            "seconds": stats.repeated(seconds),
            "share_of_dd": stats.repeated([row["dd"] / row[way] for row in rounds]),
        }
    return summary


def table(result: dict[str, Any]) -> str:
    """Rows by way: GB/s, seconds (median, min-max), share of dd (median, min-max)."""
    lines = [f"{'way':<8}{'GB/s':>7}{'seconds':>10}{'(min-max)':>16}{'of dd':>8}{'(min-max)':>14}"]
    for way, row in result["summary"].items():
        seconds, share = row["seconds"], row["share_of_dd"]
        lines.append(
            f"{way:<8}{row['gb_s']:>7.2f}{seconds['median']:>10.3f}"
            f"{seconds['min']:>9.3f}-{seconds['max']:.3f}{share['median']:>8.2f}"
            f"{share['min']:>9.2f}-{share['max']:.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write down."""
    args = parse(argv)
    facts = machine.facts()
    if args.work_dir:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        result = measure(args, args.work_dir)
    else:
        with tempfile.TemporaryDirectory(prefix="polyhost-load-") as folder:
            result = measure(args, Path(folder))
    print(f"{result['model']}, {result['size_bytes'] / 1e9:.2f} GB, cores {result['cores']}")
    print(table(result))
    if args.output:
        content: dict[str, Any] = {"benchmark": "pack_load", "machine": facts, "results": [result]}
        if args.output.exists():  # other cores or threads in one file
            earlier = json.loads(args.output.read_text(encoding="utf-8"))
            content["results"] = [*earlier["results"], result]
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(args.output)


if __name__ == "__main__":
    main()
