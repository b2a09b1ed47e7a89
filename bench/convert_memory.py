"""`python -m bench.convert_memory`: how much memory registering a large checkpoint takes.

Lives here: the checkpoint that is made for it, the registering process and a sampler beside it, the
result file. Does not: the conversion (`engine/packs/convert.py`).

A checkpoint of a true shape is written into a temporary folder, in shards, and `python -m
engine.register` makes a pack of it. Every few milliseconds its memory is read from /proc:

    anonymous      RssAnon: memory that is the process's own and cannot be given up. The figure that
                   counts, and what the goal is held against.
    proportional   Pss: anonymous memory and what it has mapped of files, each page divided by the
                   number of its users; file pages are page cache that the system may take back
    resident       VmHWM: the peak of all of it, as the system itself kept it

"Idle" is the same process after its imports. With `--sparse` the files are holes of the right
length: so that the widest layers fit on a small disk, `--layers` cuts their number.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine, shapes

SAMPLE_S = 0.005
SAMPLES_PER_PSS = 10  # walking the page tables takes longer than reading counters
GOAL_BYTES = 1 << 30
IDLE_CODE = "import engine.registration.main; print(open('/proc/self/status').read())"
FIELDS = ("RssAnon", "RssFile", "VmHWM", "Pss")


@dataclass(slots=True)
class Peaks:
    """The largest value of each field, in bytes, over the whole run and by phase."""

    whole: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIELDS, 0))
    anonymous_by_phase: dict[str, int] = field(default_factory=dict)
    num_samples: int = 0

    def add(self, phase: str, values: dict[str, int]) -> None:
        """One sample."""
        self.num_samples += 1
        for name, value in values.items():
            self.whole[name] = max(self.whole[name], value)
        anonymous = max(values.get("RssAnon", 0), self.anonymous_by_phase.get(phase, 0))
        self.anonymous_by_phase[phase] = anonymous


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.convert_memory",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size-gb", type=float, default=4.0, help="takes the nearest shape")
    parser.add_argument("--shape", help="a shape by name instead")
    parser.add_argument("--layers", type=int, default=0, help="this many layers only")
    parser.add_argument("--sparse", action="store_true", help="files of zeros, without blocks")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shapes", type=Path, default=shapes.DEFAULT_SHAPES)
    parser.add_argument("--work-dir", type=Path, help="where the temporary folder is made")
    parser.add_argument("--output", type=Path, help="else only printed")
    return parser.parse_args(argv)


def read_fields(text: str) -> dict[str, int]:
    """Bytes of FIELDS in a /proc text of "Name:  N kB" lines."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in FIELDS and value.endswith("kB"):
            found[name] = int(value.split()[0]) << 10
    return found


def idle_bytes() -> dict[str, int]:
    """What the registering process has after its imports."""
    run = subprocess.run(
        [sys.executable, "-c", IDLE_CODE], check=True, capture_output=True, text=True
    )
    return read_fields(run.stdout)


def watch(pid: int, phase: Callable[[], str], stop: threading.Event) -> Peaks:
    """Sample a process until `stop`, or until it is gone."""
    peaks = Peaks()
    while not stop.wait(SAMPLE_S):
        try:
            values = read_fields(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
            if peaks.num_samples % SAMPLES_PER_PSS == 0:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
                values |= read_fields(text)
        except (OSError, ProcessLookupError):
            break
        if not values:
            break
        peaks.add(phase(), values)
    return peaks


def register(folder: Path, dest: Path, dtype: str) -> tuple[Peaks, dict[str, Any], float]:
    """Run the registration; its peaks, its last event and its wall seconds."""
    phase = ["start"]
    stop = threading.Event()
    found: list[Peaks] = []
    command = [sys.executable, "-m", "engine.registration.main", "--source", str(folder)]
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, "--dest", str(dest), "--dtype", dtype], stdout=subprocess.PIPE, text=True
    ) as process:
        sampler = threading.Thread(
            target=lambda: found.append(watch(process.pid, lambda: phase[0], stop))
        )
        sampler.start()
        event: dict[str, Any] = {}
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            phase[0] = event.get("phase", phase[0])
        stop.set()
        sampler.join()
    wall_s = time.perf_counter() - start
    if event.get("event") != "ready":
        raise SystemExit(f"the registration failed: {event.get('message', 'no reason')}")
    return found[0], event, wall_s


def measure(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Make the checkpoint, register it, and say what it took."""
    known = dict(shapes.read_shapes(args.shapes))
    name = args.shape or shapes.nearest_shape(known, int(args.size_gb * 1e9))
    if args.layers:
        known[name] = dict(known[name]) | {"num_hidden_layers": args.layers}
    print(f"making {name}{' (sparse)' if args.sparse else ''}", file=sys.stderr)
    build = shapes.build_sparse if args.sparse else shapes.build
    built = build(known, name, work_dir / "model")
    idle = idle_bytes()
    print("registering it", file=sys.stderr)
    peaks, ready, wall_s = register(built.folder, work_dir / "packs", args.dtype)
    over = peaks.whole["RssAnon"] - idle["RssAnon"]
    return {
        "model": name,
        "num_layers": known[name]["num_hidden_layers"],
        "sparse": args.sparse,
        "dtype": args.dtype,
        "source_bytes": built.weight_bytes,
        "largest_tensor_bytes": built.largest_bytes,
        "pack_bytes": ready["weight_bytes"],
        "wall_s": wall_s,
        "num_samples": peaks.num_samples,
        "idle_bytes": idle,
        "peak_bytes": peaks.whole,
        "anonymous_by_phase": peaks.anonymous_by_phase,
        "anonymous_over_idle_bytes": over,
        "goal_bytes": GOAL_BYTES,
        "within_goal": over <= GOAL_BYTES,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0 where the goal is met."""
    args = parse(argv)
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="polyhost-convert-", dir=args.work_dir) as folder:
        result = measure(args, Path(folder))
    for name in ("source_bytes", "largest_tensor_bytes", "anonymous_over_idle_bytes"):
        print(f"{name:28} {result[name] / 1e9:8.3f} GB")
    for name in FIELDS:
        idle, peak = result["idle_bytes"].get(name, 0), result["peak_bytes"][name]
        print(f"peak {name:23} {peak / 1e9:8.3f} GB (idle {idle / 1e9:.3f})")
    for phase, value in result["anonymous_by_phase"].items():
        print(f"  anonymous in {phase:13} {value / 1e9:8.3f} GB")
    if args.output:
        content = {"benchmark": "convert_memory", "machine": facts, "results": [result]}
        if args.output.exists():  # several shapes in one file
            earlier = json.loads(args.output.read_text(encoding="utf-8"))
            content["results"] = [*earlier["results"], result]
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(args.output)
    return 0 if result["within_goal"] else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
