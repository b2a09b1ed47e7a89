"""`python -m bench.ab`: is a program slower here than in another tree? By CPU seconds.

    python -m bench.ab --old DIR [--pairs 20] [--work-dir DIR] [--figure KEY] -- MODULE ARGUMENTS

runs `python -m MODULE ARGUMENTS` in both trees by turns (old new, new old, old new, ...), each in
its tree with that tree first on the path, with one interpreter for both. A run costs the user and
system seconds of its process and of all that it started and waited for; with `--figure` what the
program itself measured. `{work}` in an argument is a folder of the tree's own that lasts over all
runs: what a program prepares once lies there. Each tree has one run before, which does not count.

A pair is a run of each tree next to each other: its ratio is new over old. Between the pairs two
runs of one tree lie next to each other: the later over the earlier is the A/A ratio, which must be
1 but for noise. Printed are both medians with the 95 % interval of a bootstrap. Exit status 1
where the upper end for the trees is over `--limit`.
"""

import argparse
import functools
import itertools
import json
import operator
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import command

OLD, NEW = "old", "new"
NUM_RESAMPLES = 10_000
LOG_TAIL_CHARS = 3000
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} (95 %: {self.low:.4f} to {self.high:.4f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 not slower, 1 slower, or not known well enough."""
    args = _parser().parse_args(argv)
    trees = {OLD: args.old.resolve(), NEW: Path.cwd()}
    with command.working_in(args.work_dir) as work:
        for name, tree in trees.items():
            run_once(tree, work / name, args.command)
        runs = []
        for number, name in enumerate(order(args.pairs)):
            cost = run_once(trees[name], work / name, args.command)
            if args.figure:
                cost = figure(work / name / RESULT, args.figure)
            runs.append((name, cost))
            print(f"{number + 1:>4} {name} {cost:.3f}", file=sys.stderr, flush=True)
    costs = {tree: [cost for name, cost in runs if name == tree] for tree in trees}
    between, same = interval(ratios(runs)), interval(same_tree_ratios(runs))
    unit = " + ".join(args.figure) or "s of CPU"
    for name, values in costs.items():
        print(f"{name}: median {statistics.median(values):.3f} {unit}, {len(values)} runs")
    print(f"new over old: {between}\nA/A:          {same}")
    if args.output:
        found = {"command": args.command, "unit": unit, "costs": costs, "between": str(between)}
        args.output.write_text(json.dumps({**found, "same": str(same)}, indent=1) + "\n", "utf-8")
    return 0 if between.high <= args.limit else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.ab", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--old", type=Path, required=True, help="the tree to compare with")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--limit", type=float, default=1.03, help="of the ratio's upper end")
    parser.add_argument("--work-dir", type=Path, help="else a temporary one")
    parser.add_argument("--output", type=Path, help="every run's cost, as JSON")
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="KEY",
        help=f"of {{work}}/{RESULT} that the program writes, as a.b.c; several are added",
    )
    parser.add_argument("command", nargs="+", metavar="MODULE ARGUMENTS", help="after --")
    return parser


def order(pairs: int) -> list[str]:
    """old new, new old, old new, ...: no tree is always first."""
    return [name for pair in range(pairs) for name in ((OLD, NEW) if pair % 2 == 0 else (NEW, OLD))]


def ratios(runs: Sequence[tuple[str, float]]) -> list[float]:
    """New over old of each pair."""
    pairs = [dict(pair) for pair in zip(runs[::2], runs[1::2], strict=True)]
    return [pair[NEW] / pair[OLD] for pair in pairs]


def same_tree_ratios(runs: Sequence[tuple[str, float]]) -> list[float]:
    """Later over earlier where two runs of one tree lie next to each other."""
    neighbours = itertools.pairwise(runs)
    return [later / earlier for (one, earlier), (other, later) in neighbours if one == other]


def interval(values: Sequence[float]) -> Interval:
    """The median, and where it lies in 95 % of samples drawn from the values with replacement."""
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"))
    rng = random.Random(0)
    drawn = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
    )
    low, high = drawn[NUM_RESAMPLES // 40], drawn[-NUM_RESAMPLES // 40]
    return Interval(statistics.median(values), low, high)


def run_once(tree: Path, work: Path, words: Sequence[str]) -> float:
    """CPU seconds of one run. Raises SystemExit with the end of its log where it broke."""
    work.mkdir(parents=True, exist_ok=True)
    log = work / "log.txt"
    module, *rest = (word.replace("{work}", str(work)) for word in words)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *rest],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tree,
            env=_environment(tree, work),
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(encoding="utf-8", errors="replace")
    # 1 without a traceback is a program's way to say that a goal was missed.
    if process.returncode not in (0, 1) or "Traceback (most recent call last)" in text:
        raise SystemExit(f"{module} in {tree} broke:\n{text[-LOG_TAIL_CHARS:]}")
    return usage.ru_utime + usage.ru_stime


def figure(result: Path, keys: Sequence[str]) -> float:
    """The sum of these figures of a program's result file."""
    found = json.loads(result.read_text(encoding="utf-8"))
    return sum(float(functools.reduce(operator.getitem, key.split("."), found)) for key in keys)


def _environment(tree: Path, work: Path) -> Mapping[str, str]:
    """Compiled files lie in `work`: a tree may be read-only."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(work / "pycache"),
        "PYTHONHASHSEED": "0",
    }


if __name__ == "__main__":
    raise SystemExit(main())
