"""`python -m bench.soak --minutes 30`: does the real server stay the same for as long as it runs?
With `--memory`: does one engine, whose models are of every kind of memory?

The drills are those of tests/e2e/soak.py and tests/engine/memory_soak.py; here are their command
and their result files.
"""

import argparse
from collections.abc import Sequence

from bench import command
from tests.e2e.soak import run
from tests.engine import memory_soak


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the result, print the verdict. Returns 1 where the verdict is no."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=10)
    parser.add_argument("--max-growth-mib", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--memory", action="store_true", help="an engine alone, with models of every kind of memory"
    )
    command.add_options(parser)
    args = parser.parse_args(argv)
    if args.memory:
        return _soak_memory(args)
    with command.working_in(args.work_dir) as work_dir:
        result = run(
            work_dir,
            args.minutes,
            concurrency=args.callers,
            max_growth_mib=args.max_growth_mib,
            settings=command.settings_of(args),
            seed=args.seed,
        )
    print(
        f"{result['num_requests']} requests {result['outcomes']}, "
        f"{result['swaps']:.0f} swaps, {result['breaths']} breaths, "
        f"{result['worker_restarts']:.0f} restarts, {result['cached_tokens']} cached tokens"
    )
    for who, row in result["memory"].items():
        print(f"{who}: {row['last_mib']:.1f}, {row['slope_mib_per_hour']:+.2f} MiB/h")
    print(*(result["problems"] or ["nothing wrong"]), sep="\n")
    command.keep(result, args.output, "soak")
    return 0 if result["ok"] else 1


def _soak_memory(args: argparse.Namespace) -> int:
    with command.working_in(args.work_dir) as work_dir:
        result = memory_soak.soak(work_dir, args.minutes, args.seed)
    events, memory = result["events"], result["memory"]
    print(*(f"{name}: {count}" for name, count in events.items()), sep=", ")
    print(f"memory: {memory['middle']:.1f} MiB, at last {memory['last']:.1f} ({memory['ratio']})")
    print(*(result["problems"] or ["nothing wrong"]), sep="\n")
    command.keep(result, args.output, "memory-soak")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
