"""`python -m bench.swap`: how fast a model comes onto the device and leaves it.

Lives here: the command line, the in-process measurement on the engine's own residency, pool and CPU
backend, the result file. Does not: swaps under HTTP load (`swap_load.py`), the loading itself.

One pack of a true-shape model is brought in by three ways, each next to what reading the same bytes
costs at least, all in turn within each repeat:

    cold      the file's pages dropped, disk -> arena      beside `dd` of the file, pages dropped
    cached    the file in the page cache -> arena          beside `dd` of the cached file
    warm      host tier -> arena                           beside one memcpy of as many bytes

A share of 1 means: as fast as the plain read. Loads verify every chunk's checksum, as the product
does, unless --no-verify. `--under-load` does it through the server instead.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import command, files, machine, processes, shapes, stats, swap_load
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig
from engine.dependencies import real_weight_store
from engine.memory.kv_memory import KvMemory
from engine.memory.page_pool import PagePool
from engine.pack import BLOB_NAME, PackIndex
from engine.packs.weights import DiskPacks
from engine.protocol import ModelSpec, SwapRecord
from engine.registration import convert
from engine.residency.residency import Residency

MODEL = "big"
LOAD_TIMEOUT_S = 600.0
POLL_S = 0.0005
TIERS: tuple[swap_load.Tier, ...] = ("warm", "cold")
KV_ROOM_BYTES = 256 << 20


class Device:
    """A residency over an arena, stepped by hand: the engine's part without requests."""

    def __init__(self, config: EngineConfig, backend: CpuBackend, pack_dir: Path) -> None:
        self._pool = PagePool(config.num_pages, config.resolved_page_bytes)
        self._backend = backend
        self._residency = Residency(
            config,
            self._pool,
            backend,
            DiskPacks(),
            real_weight_store(backend, config),
            KvMemory(self._pool, backend),
        )
        self._residency.set_catalog([ModelSpec(MODEL, str(pack_dir))])
        self._step = 0

    def load(self) -> tuple[SwapRecord, float]:
        """Bring the model in; its record and the wall time a caller waited."""
        start = time.perf_counter()
        self._residency.request_load(MODEL, time.monotonic())
        record = self._until("load", "resident")
        return record, time.perf_counter() - start

    def evict(self) -> float:
        """Take the model off again; wall seconds until its pages are free."""
        start = time.perf_counter()
        self._residency.begin_drain(MODEL, time.monotonic(), "benchmark")
        self._until("evict", "cold", "warm")
        self._pass_fence()
        return time.perf_counter() - start

    def wait_warm(self) -> None:
        """Wait until the host tier holds the pack. Raises TimeoutError."""
        self._poll_until(lambda: self._residency.state(MODEL) == "warm")

    def close(self) -> None:
        """Check that nothing leaked, stop the loaders, drop the host tier."""
        self._residency.check_integrity()
        self._pool.check_integrity()
        self._residency.close(keep_host_tier=False)

    def _until(self, kind: str, *states: str) -> SwapRecord:
        self._poll_until(lambda: self._residency.state(MODEL) in (*states, "failed"))
        records = [swap for swap in self._residency.take_swaps() if swap.kind == kind]
        if len(records) != 1:
            reason = self._residency.status_rows({})[0].reason
            raise processes.ServerFailed(f"no {kind}: {self._residency.state(MODEL)} ({reason})")
        return records[0]

    def _poll_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{MODEL} is still {self._residency.state(MODEL)}")
            self._residency.poll(time.monotonic(), lambda _: False, lambda _: None)
            time.sleep(POLL_S)

    def _pass_fence(self) -> None:
        self._step += 1
        self._pool.begin_step(self._step)
        self._backend.launched(self._step)
        self._pool.retire(self._backend.last_done())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.swap", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=1.0, help="takes the nearest shape")
    parser.add_argument("--shape", help="a shape by name instead")
    parser.add_argument("--shapes", type=Path, default=shapes.DEFAULT_SHAPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load-threads", type=int, default=2)
    parser.add_argument("--no-verify", action="store_true", help="load without checksums")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under-load", action="store_true", help="through the HTTP server")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS, help="under load")
    parser.add_argument("--swaps", type=int, default=5, help="under load: times it comes in")
    parser.add_argument("--seconds", type=float, default=20.0, help="under load: of the baseline")
    command.add_options(parser)
    return parser.parse_args(argv)


def model_folder(args: argparse.Namespace, work_dir: Path) -> tuple[str, Path]:
    """The shape's name and its folder, made on first use."""
    known = shapes.read_shapes(args.shapes)
    name = args.shape or shapes.nearest_shape(known, int(args.size_gb * 1e9))
    folder = work_dir / f"model-{name.replace('/', '-')}-{args.seed}"
    shapes.build_once(name, folder, args.seed, args.shapes)
    return name, folder


def in_process(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """All three ways in, beside their floors."""
    name, folder = model_folder(args, work_dir)
    print("writing its checkpoint pack", file=sys.stderr)
    pack_dir, index = convert.write_pack(
        convert.inspect(folder), work_dir / "packs", "auto", lambda phase, done, total: None
    )
    prefix = f"polyhost-bench-{os.getpid()}"
    cold_config = _config(args, index, prefix, host_tier_bytes=0)
    warm_config = _config(args, index, prefix, host_tier_bytes=index.total_bytes + (64 << 20))
    backend = CpuBackend(cold_config.arena_bytes)
    backend.arena.zero_()  # touched once, as a running worker's arena is
    devices: list[Device] = []
    try:
        devices.append(Device(cold_config, backend, pack_dir))
        devices.append(Device(warm_config, backend, pack_dir))
        blob = pack_dir / BLOB_NAME
        rounds = _measure(args.repeats, devices[0], devices[1], blob, index.total_bytes)
    finally:
        for device in devices:
            device.close()
    return {
        "model": name,
        "size_bytes": index.total_bytes,
        "num_segments": len(index.segments),
        "verify": not args.no_verify,
        "load_threads": args.load_threads,
        "summary": _summary(rounds, index.total_bytes),
        "rounds": rounds,
    }


def _config(
    args: argparse.Namespace, index: PackIndex, prefix: str, host_tier_bytes: int
) -> EngineConfig:
    slack = (len(index.segments) + 1) * (2 << 20)
    return EngineConfig(
        arena_bytes=index.total_bytes + slack + KV_ROOM_BYTES,
        host_tier_bytes=host_tier_bytes,
        shm_dir=str(args.shm_dir),
        shm_prefix=f"{prefix}-{host_tier_bytes}",
        load_threads=args.load_threads,
        verify_packs=not args.no_verify,
    )


def _measure(
    repeats: int, direct: Device, tiered: Device, blob: Path, num_bytes: int
) -> list[dict[str, float]]:
    """One row of seconds for each repeat; a first, untimed round warms everything up."""
    tiered.load()
    tiered.evict()
    tiered.wait_warm()
    rounds: list[dict[str, float]] = []
    for repeat in range(repeats + 1):
        row: dict[str, float] = {}
        row["cached_share_before_dd"] = files.drop_pages(blob)
        row["dd_cold_s"] = files.dd_seconds(blob)
        row["cached_share_before_load"] = files.drop_pages(blob)
        cold, row["cold_wall_s"] = direct.load()
        row["cold_s"] = cold.duration_s
        row["evict_s"] = direct.evict()
        files.dd_seconds(blob)  # whatever the load left out of the cache is read in
        row["dd_cached_s"] = files.dd_seconds(blob)
        cached, row["cached_wall_s"] = direct.load()
        row["cached_s"] = cached.duration_s
        direct.evict()
        row["memcpy_s"] = machine.memcpy_seconds(num_bytes, repeats=1)
        warm, row["warm_wall_s"] = tiered.load()
        row["warm_s"] = warm.duration_s
        tiered.evict()
        if (cold.tier, cached.tier, warm.tier) != ("disk", "disk", "host"):
            raise processes.ServerFailed("a load did not come from the tier it was meant to")
        if repeat:
            rounds.append(row)
            print(_progress(repeat, row, num_bytes), file=sys.stderr)
    return rounds


def _summary(rounds: list[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    """Medians, GB/s, and each load's speed as a share of its floor's (1: as fast)."""
    summary: dict[str, Any] = {
        key: stats.repeated([row[key] for row in rounds]) for key in rounds[0]
    }
    for load, floor in (("cold", "dd_cold_s"), ("cached", "dd_cached_s"), ("warm", "memcpy_s")):
        shares = [row[floor] / row[f"{load}_wall_s"] for row in rounds]
        summary[f"{load}_share"] = stats.repeated(shares)
        walls = [row[f"{load}_wall_s"] for row in rounds]
        summary[f"{load}_gb_s"] = num_bytes / statistics.median(walls) / 1e9
        floors = [row[floor] for row in rounds]
        summary[f"{floor.removesuffix('_s')}_gb_s"] = num_bytes / statistics.median(floors) / 1e9
    return summary


def _progress(repeat: int, row: dict[str, float], num_bytes: int) -> str:
    rates = "  ".join(
        f"{key.removesuffix('_s')} {num_bytes / row[key] / 1e9:.2f}"
        for key in ("dd_cold_s", "cold_wall_s", "dd_cached_s", "cached_wall_s", "memcpy_s")
    )
    return f"repeat {repeat}, GB/s: {rates}  warm_wall {num_bytes / row['warm_wall_s'] / 1e9:.2f}"


def table(result: dict[str, Any]) -> str:
    """The three ways in: seconds, GB/s, share of the floor."""
    summary = result["summary"]
    lines = [
        f"{result['model']}, {result['size_bytes'] / 1e9:.2f} GB in {result['num_segments']} "
        f"segments, checksums {'on' if result['verify'] else 'off'}",
        f"{'way':<9}{'load s':>9}{'(min-max)':>18}{'GB/s':>8}{'floor':>14}{'GB/s':>8}{'share':>8}",
    ]
    floors = {"cold": "dd_cold", "cached": "dd_cached", "warm": "memcpy"}
    for way, floor in floors.items():
        wall = summary[f"{way}_wall_s"]
        bounds = f"({wall['min']:.3f}-{wall['max']:.3f})"
        lines.append(
            f"{way:<9}{wall['median']:>9.3f}{bounds:>18}"
            f"{summary[f'{way}_gb_s']:>8.2f}{floor:>14}{summary[f'{floor}_gb_s']:>8.2f}"
            f"{summary[f'{way}_share']['median']:>8.2f}"
        )
    lines.append(f"evict: {summary['evict_s']['median'] * 1e3:.1f} ms")
    return "\n".join(lines)


def _under_load(
    args: argparse.Namespace, name: str, folder: Path, work_dir: Path
) -> dict[str, Any]:
    runs = {}
    for tier in args.tiers:
        plan = swap_load.Plan(name, folder, tier, args.swaps, args.seconds, args.setting)
        runs[tier] = swap_load.run(plan, work_dir)
    return {"runs": runs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the result."""
    args = parse(argv)
    kind = "swap-load" if args.under_load else "swap"
    with command.working_in(args.work_dir) as work_dir:
        if shutil.which("dd") is None:
            print("bench.swap: needs dd", file=sys.stderr)
            return 1
        facts = machine.facts()
        try:
            if args.under_load:
                name, folder = model_folder(args, work_dir)
                result = _under_load(args, name, folder, work_dir)
            else:
                result = in_process(args, work_dir)
        except (processes.ServerFailed, TimeoutError) as error:
            print(f"bench.swap: {error}", file=sys.stderr)
            return 1
    result = {"benchmark": kind, "machine": facts} | result
    for item in result["runs"].values() if args.under_load else ():
        print(swap_load.table(item) + "\n")
    if not args.under_load:
        print(table(result))
    command.keep(result, args.output, kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
