"""The GPU's figures, part by part: parity, decode, profiles, serving, swaps, prefill, peers.

    python -m bench.gpu [--out bench/results/gpu] [--only TEXT...] [--minutes 9] [--wheels FOLDER]
                        [--work-dir gpu-work]
    python -m bench.gpu --dry-run

For machines that are lent by the minute: a part takes at most eight and runs in a process of its
own; this one starts no part that would not end in time, and goes on with the rest when it is run
again, what has failed last. Exit status 0: all parts are done; 3: some are left; 1: one failed; 2:
no GPU. What stands in gpu.json and gpu.md comes from a real GPU only: a dry run sends every part's
plumbing over the fake device at tiny shapes and writes nothing there.

Packages that a bare image lacks are brought along: `--wheels` names a folder filled beforehand
(docs/cuda.md has the command), from which they are installed, without an index, into the work
folder. Standard library only, for that very reason.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import command

HERE = Path(__file__).resolve().parent
DEFAULT_OUT = HERE / "results" / "gpu"
REQUIREMENTS = HERE / "requirements-gpu.txt"
LEFT = 3
NO_GPU = 2
PART_LIMIT_S = 480.0
SHM = Path("/dev/shm")
SHM_PREFIX = "gpu-bench-"
"""Of the host tier's files; the number of the part's process follows."""
# Minutes that a part takes on an H200, about; the order they run in.
MINUTES: Mapping[str, float] = {
    "device": 0.7,
    "checks": 0.7,
    "parity": 2,
    "decode 0.5B": 1.5,
    "profile 0.5B": 1,
    "decode 8B": 2.5,
    "decode 8B fp8": 3,
    "profile 8B": 1.5,
    "serve 8B": 2,
    "serve 8B fp8": 2,
    "swap 8B": 2,
    "swap under load": 4,
    "arena against static": 4,
    "prefill 8B": 1,
    "decode 30B-A3B": 2,
    "profile 30B-A3B": 1.5,
    "many models": 6,
    "decode 1.7B": 2,
    "prefill 0.5B": 1,
    "prefill 1.7B": 1,
    "chunk sizes": 5,
    "peers": 3,
}
Results = dict[str, dict[str, Any]]
RunParts = Callable[[Sequence[str], Path, float], int]
"""(names, results file, seconds) -> exit status of the process that ran them."""


def read(out: Path) -> Results:
    """What earlier runs found, by part."""
    try:
        found: Results = json.loads((out / "gpu.json").read_text(encoding="utf-8"))["parts"]
    except FileNotFoundError:
        return {}
    return found


def write(out: Path, results: Results) -> None:
    """Both files."""
    text = json.dumps({"parts": results}, indent=1) + "\n"
    command.write_whole(out, {"gpu.json": text, "gpu.md": table(results)})


def table(results: Results) -> str:
    """Goals first, then the figures of each part."""
    devices = sorted({row["device"] for row in results.values()})
    lines = [f"Measured on {', '.join(devices)} by `python -m bench.gpu`.", ""]
    lines += ["| goal | reached | wanted | |", "|---|---|---|---|"]
    for part, row in results.items():
        for name, goal in row.get("figures", {}).get("goals", {}).items():
            word = "met" if goal["met"] else "**missed**"
            lines.append(
                f"| {part}: {name} | {_number(goal['reached'])} | {goal['wanted']} | {word} |"
            )
    for part, row in results.items():
        lines += ["", f"## {part}", ""]
        if "failure" in row:
            lines.append(f"**failed**: {row['failure']}")
            continue
        lines += ["| figure | value |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _flat("", row["figures"])]
    return "\n".join(lines) + "\n"


def run(
    wanted: Sequence[str],
    results: Results,
    run_parts: RunParts,
    save: Callable[[Results], None],
    seconds: float,
    now: Callable[[], float],
) -> int:
    """Parts that are not done, one process each, until no other would end in time."""
    begin = now()
    waiting = [name for name in wanted if "figures" not in results.get(name, {})]
    # What has failed may fail again after minutes: the others come first.
    waiting.sort(key=lambda name: name in results)
    for name in waiting:
        left = seconds - (now() - begin)
        if MINUTES[name] * 60 > left:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results"
            status = run_parts([name], file, min(PART_LIMIT_S, left))
            if status == NO_GPU:
                return NO_GPU
            rows = read_lines(file)
        row = rows.get(name, {"failure": f"ended with {status}", "device": "unknown"})
        results[name] = row
        save(results)
        print(line(name, row), flush=True)
    if any("failure" in results.get(name, {}) for name in wanted):
        return 1
    return LEFT if any(name not in results for name in wanted) else 0


def line(name: str, row: Mapping[str, Any]) -> str:
    """One part in a terminal: a machine may be gone before its files are."""
    if "failure" in row:
        return f"{name}: {row['failure']}"
    goals = row["figures"].get("goals", {}).items()
    reached = [f"{goal}: {_number(one['reached'])} ({one['wanted']})" for goal, one in goals]
    return "; ".join([f"{name}: done in {row['figures'].get('wall_s', 0):.0f} s", *reached])


def read_lines(file: Path) -> Results:
    """What a process of parts has written, by part."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row.pop("part"): row for row in rows}


def missing_packages(requirements: str) -> list[str]:
    """Of the lines `name==version  # module`, those whose module cannot be imported."""
    found = []
    for line in requirements.splitlines():
        requirement, _, module = line.partition("#")
        if requirement.strip() and importlib.util.find_spec(module.strip()) is None:
            found.append(requirement.strip())
    return found


def bring_packages(wheels: Path | None, target: Path) -> Path | None:
    """Install what is missing into `target`; the folder to be put on the path, None: nothing is.

    Raises RuntimeError, in one line, where something is missing and there are no wheels.
    """
    missing = missing_packages(REQUIREMENTS.read_text(encoding="utf-8"))
    if not missing:
        return None
    if wheels is None:
        raise RuntimeError(f"missing: {', '.join(missing)}; fill a folder and pass --wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--find-links", str(wheels), "--target", str(target), *missing]
    subprocess.run(command, check=True)
    return target


def clear_shared(folder: Path) -> None:
    """Remove what parts that were killed have left in shared memory: a host tier is gigabytes."""
    for path in folder.glob(f"{SHM_PREFIX}*"):
        owner = path.name.removeprefix(SHM_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)


def runner(work_dir: Path, dry: bool, packages: Path | None) -> RunParts:
    """Runs parts as `python -m bench.gpu_part`."""
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if packages is not None:
        paths = [str(packages), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)

    def run_parts(names: Sequence[str], file: Path, seconds: float) -> int:
        command = [sys.executable, "-m", "bench.gpu_part", *names, "--results", str(file)]
        command += ["--work-dir", str(work_dir), *(["--dry-run"] if dry else [])]
        clear_shared(SHM)
        try:
            return subprocess.run(
                command, cwd=HERE.parent, env=environment, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 124

    return run_parts


def dry_run(wanted: Sequence[str], run_parts: RunParts) -> int:
    """All parts over the fake device, in one process; only told, never kept."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results"
        status = run_parts(wanted, file, PART_LIMIT_S)
        for name, row in read_lines(file).items():
            print(f"{name}: {row.get('failure') or 'runs'}")
    return status


def named(text: str, part: str) -> bool:
    """Whether `--only text` means that part: by its name, or by some of it."""
    return text == part or (text not in MINUTES and text in part)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--only", nargs="*", default=[""], help="parts whose name contains one")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this run")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for what is missing")
    parser.add_argument("--work-dir", type=Path, default=Path("gpu-work"), help="packs lie here")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(argv)
    wanted = [name for name in MINUTES if any(named(text, name) for text in options.only)]
    begin = time.monotonic()
    if options.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            return dry_run(wanted, runner(Path(folder), True, None))
    work_dir = options.work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    try:
        packages = bring_packages(options.wheels, work_dir / "packages")
    except RuntimeError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 1
    seconds = options.minutes * 60 - (time.monotonic() - begin)
    status = run(
        wanted,
        read(options.out),
        runner(work_dir, False, packages),
        lambda found: write(options.out, found),
        seconds,
        time.monotonic,
    )
    if status == LEFT:
        print("parts are left: run this again")
    return status


def _flat(prefix: str, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested figures as lines."""
    lines: list[tuple[str, str]] = []
    for name, value in figures.items():
        label = f"{prefix}{name}"
        if name == "goals":
            continue
        if isinstance(value, dict):
            lines += _flat(f"{label}, ", value)
        else:
            lines.append((label, _number(value)))
    return lines


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_number(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
