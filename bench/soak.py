"""`python -m bench.soak --minutes 30`: does the real server stay the same for as long as it runs?

The drill is that of tests/e2e/soak.py; here are its command and its result file.
"""

import argparse
from collections.abc import Sequence

from bench import command
from tests.e2e.soak import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the result, print the verdict. Returns 1 where the verdict is no."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=10)
    parser.add_argument("--max-growth-mib", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    command.add_options(parser)
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    raise SystemExit(main())
