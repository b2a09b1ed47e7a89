"""Kernels on a GPU: first correct in bf16, then how fast, beside what else there is.

    python -m bench.kernels [--out bench/results/gpu] [--only TEXT] [--part-s 450] [--repeats 60]
        [--no-flex] [--no-dependent]
    python -m bench.kernels --dry-run

Every case runs on fresh random inputs against an exact reference; one that is off is reported and
not timed. Times are per call (a CUDA graph's replay, second-level cache overwritten before each),
as GB/s or TFLOP/s and as a share of the copy bandwidth or the matmul rate measured in the same part
(bench/kernel_timing.py). What is written: kernels.json after every case, and kernels.md.

A part ends after --part-s seconds, for machines that are lent by the minute: exit status 3 says
that cases are left, and the same command goes on with them. 1: a case is wrong; 2: no CUDA device.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import (
    command,
    expert_cases,
    few_rows_cases,
    kernel_attention_cases,
    kernel_cases,
    recurrent_cases,
)
from bench.kernel_cases import Call, Case, Prepared, Rig
from bench.kernel_timing import Ceilings, Timing, ceilings, measure
from bench.machine import git_revision, versions
from kernels import dependent
from kernels.triton_api import HAS_TRITON

DEFAULT_OUT = Path(__file__).with_name("results") / "gpu"
CASES: tuple[Case, ...] = (
    *kernel_attention_cases.CASES,
    *few_rows_cases.CASES,
    *expert_cases.CASES,
    *recurrent_cases.CASES,
    *kernel_cases.CASES,
)
LEFT = 3
FLEX = "flex"
Results = dict[str, dict[str, Any]]
Measure = Callable[[Call, int, bool], Timing]


def error_of(prepared: Prepared) -> float:
    """Root mean square of the difference, relative to the exact result's; the worst tensor's."""
    worst = 0.0
    for got, wanted in zip(prepared.result(), prepared.exact(), strict=True):
        wide = wanted.double()
        size = float(wide.square().mean().sqrt())
        error = float((got.double() - wide).square().mean().sqrt()) / (size or 1.0)
        worst = math.inf if math.isnan(error) else max(worst, error)
    return worst


def run_case(
    case: Case,
    rig: Rig,
    tiny: bool,
    limits: Ceilings,
    timer: Measure,
    repeats: int,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Check, then time. A wrong one has an `error` above its `tolerance` and no time.

    `without`: peers that are left out.
    """
    prepared = case.build(rig, tiny)
    error = error_of(prepared)
    row: dict[str, Any] = {"error": error, "tolerance": prepared.tolerance}
    row["correct"] = error <= prepared.tolerance
    if not row["correct"]:
        return row
    row["time"] = timer(prepared.run, repeats, prepared.can_capture)
    rate, ceiling = _rate(case, prepared, row["time"]["median_us"], limits)
    row |= {"rate": rate, "unit": "GB/s" if case.bound == "bytes" else "TFLOP/s"}
    row |= {"of_ceiling": rate / ceiling, "ceilings": limits}
    row["peers"] = {}
    for name, call in (*prepared.peers.items(), *prepared.cuda_peers.items()):
        if name in without:
            continue
        try:
            timing = timer(call, repeats, name not in prepared.waiting)
        except Exception as error:  # noqa: BLE001 - a peer that cannot is no reason to stop
            row.setdefault("failed_peers", {})[name] = _words(error)
            continue
        row["peers"][name] = timing | {"times": timing["median_us"] / row["time"]["median_us"]}
    if case.target is not None:
        of = case.target.of
        reached = row["of_ceiling"] if of == "ceiling" else row["peers"][of]["times"]
        row["target"] = {"least": case.target.least, "of": of, "reached": reached}
        row["target"]["met"] = reached >= case.target.least
    return row


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _rate(case: Case, prepared: Prepared, us: float, limits: Ceilings) -> tuple[float, float]:
    if case.bound == "bytes":
        return prepared.num_bytes / us / 1e3, limits["copy_gb_s"]
    return prepared.num_flops / us / 1e6, limits["matmul_tflop_s"]


def run_part(
    cases: Sequence[Case],
    done: Results,
    run: Callable[[Case], dict[str, Any]],
    save: Callable[[Results], None],
    seconds: float,
    now: Callable[[], float],
) -> int:
    """Cases that are not done, until the part's time is over. How many are left."""
    begin = now()
    waiting = [case for case in cases if case.name not in done]
    for number, case in enumerate(waiting):
        if now() - begin >= seconds:
            return len(waiting) - number
        try:
            done[case.name] = run(case)
        except Exception as error:  # noqa: BLE001 - what a case raises is its result
            failure = {"error": math.inf, "tolerance": 0.0, "failure": _words(error)}
            done[case.name] = {"correct": False} | failure
        save(done)
        print(line(case.name, done[case.name]), flush=True)
    return 0


def line(name: str, row: Mapping[str, Any]) -> str:
    """One case in a terminal."""
    if not row["correct"]:
        text = row.get("failure", f"error {row['error']:.2e} > {row['tolerance']:.0e}")
        return f"{name:44} WRONG: {text}"
    peers = "  ".join(f"{peer} {one['times']:.2f}x" for peer, one in row["peers"].items())
    return (
        f"{name:44} {row['time']['median_us']:10.1f} us {row['rate']:9.1f} {row['unit']:8} "
        f"{row['of_ceiling']:6.1%}  {peers}"
    )


def table(results: Results) -> str:
    """The page beside the JSON."""
    out = [
        "| case | error | us (p10-p90) | rate | of ceiling | peers: us (times ours) | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        if not row["correct"]:
            out.append(f"| {name} | **{row['error']:.1e}** | wrong, not timed | | | | |")
            continue
        time_, target = row["time"], row.get("target")
        peers = "; ".join(
            f"{peer} {one['median_us']:.1f} ({one['times']:.2f}x)"
            for peer, one in row["peers"].items()
        )
        wanted = ""
        if target:
            share = f"{target['reached']:.2f} of {target['of']}, wanted {target['least']}"
            wanted = f"{'met' if target['met'] else '**missed**'}: {share}"
        us = f"{time_['median_us']:.1f} ({time_['p10_us']:.1f}-{time_['p90_us']:.1f})"
        us += "" if time_["captured"] else " launched"
        rate = f"{row['rate']:.1f} {row['unit']} | {row['of_ceiling']:.1%}"
        out.append(f"| {name} | {row['error']:.1e} | {us} | {rate} | {peers} | {wanted} |")
    return "\n".join(out) + "\n"


def write(folder: Path, device: str, results: Results) -> None:
    """Both files."""
    report = {
        "device": device,
        "packages": versions(("torch", "triton", "transformers")),
        "revision": git_revision(Path(__file__).resolve().parent.parent),
        "cases": results,
    }
    text = json.dumps(report, indent=1) + "\n"
    page = f"Kernels on {device}\n\n{table(results)}"
    command.write_whole(folder, {"kernels.json": text, "kernels.md": page})


def read(folder: Path, device: str) -> Results:
    """What earlier parts on such a device found; wrong cases are tried again."""
    try:
        report = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if report["device"] != device:
        return {}
    return {name: row for name, row in report["cases"].items() if row["correct"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--part-s", type=float, default=450.0, help="seconds of a part")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument(
        "--no-flex", action="store_true", help="without flex attention, which compiles for long"
    )
    parser.add_argument(
        "--no-dependent", action="store_true", help="start no kernel before the last has ended"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the cases")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.only in case.name]
    if options.dry_run:
        for case in chosen:
            wanted = f"  wanted: {case.target.least} of {case.target.of}" if case.target else ""
            print(f"{case.name:44} {case.bound}{wanted}")
        return 0
    if not (HAS_TRITON and torch.cuda.is_available()):
        print("bench.kernels needs a CUDA device and Triton; --dry-run lists the cases")
        return 2
    return _on_device(chosen, options)


def _on_device(chosen: Sequence[Case], options: argparse.Namespace) -> int:
    device = torch.cuda.get_device_name()
    results, limits = read(options.out, device), ceilings()
    print(f"{device}: copy {limits['copy_gb_s']:.0f} GB/s, {limits['matmul_tflop_s']:.0f} TFLOP/s")

    def run(case: Case) -> dict[str, Any]:
        gc.collect()
        torch.cuda.empty_cache()
        generator = torch.Generator("cuda").manual_seed(time.time_ns() % (1 << 31))
        rig = Rig(torch.device("cuda"), torch.bfloat16, generator)
        without = (FLEX,) if options.no_flex else ()
        return run_case(case, rig, False, limits, measure, options.repeats, without)

    def save(found: Results) -> None:
        write(options.out, device, found)

    dependent.DEPENDENT_LAUNCH &= not options.no_dependent
    with torch.inference_mode():
        left = run_part(chosen, results, run, save, options.part_s, time.monotonic)
    if left:
        print(f"{left} cases left: run this again")
        return LEFT
    return 0 if all(row["correct"] for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
