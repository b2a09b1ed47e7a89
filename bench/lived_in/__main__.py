"""`python -m bench.lived_in DATADIR`: 45 days of data that lives, for a look at the pages.

    python -m bench.lived_in DATADIR              then: polyhost serve --data-dir DATADIR
    python -m bench.lived_in DATADIR --shoot      makes it where it is missing, serves it under
                                                  load, and looks at every page (shots.py)

13 tenants with plans, limits and budgets, 23 keys, 11 models, prices with history, some 10,500
postings, invoices, exports, alerts, users, and the audit log of all of it, by the product's own
functions under a shifted clock. One seed gives one history (ids and secrets are drawn anew).
DATADIR/lived-in.json has the keys' secrets and the users' password.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from admin.context.operator_context import OperatorContext, open_context
from admin.operations import export_jobs, usage
from bench.lived_in.history import PER_DAY, write_history
from bench.lived_in.packs import write_packs
from bench.lived_in.shots import shoot
from bench.lived_in.world import DAY_S, NUM_DAYS, PASSWORD
from gateway.settings.settings import PACKS_FOLDER, Settings
from registry.base import new_id
from registry.money.exports import Scope
from registry.schema import upgrade
from tests.admin.browser import WIDTHS

MANIFEST = "lived-in.json"
EXPORTS = (("csv", 30), ("parquet", 45), ("focus", 30), ("jsonl", 1), ("invoices", 90))
EXPORT_TIMEOUT_S = 120.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lived_in", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--days", type=float, default=NUM_DAYS)
    parser.add_argument("--per-day", type=float, default=PER_DAY, help="postings, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shoot", action="store_true", help="pictures of every page")
    parser.add_argument("--only", nargs="*", default=(), metavar="PATH", help="parts of paths")
    parser.add_argument("--widths", nargs="*", type=int, choices=WIDTHS, default=tuple(WIDTHS))
    return parser.parse_args(argv)


def make(data_dir: Path, num_days: float, per_day: float, seed: int) -> None:
    """A new data folder. Ends the program where there is one with data."""
    settings = Settings(data_dir=str(data_dir))
    if (data_dir / MANIFEST).exists():
        sys.exit(f"{data_dir} has a history: remove the folder, or choose another")
    data_dir.mkdir(parents=True, exist_ok=True)
    upgrade(settings.registry_url)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lived-in-") as work_dir:
        packs = write_packs(Path(work_dir), settings.data_path / PACKS_FOLDER)
    print(f"{len(packs)} packs after {time.monotonic() - began_s:.0f} s", flush=True)
    with open_context(settings, "bench") as context:
        world = write_history(
            context,
            packs,
            ends_at=time.time(),
            num_days=num_days,
            per_day=per_day,
            seed=seed,
        )
        num = usage.newest_seq(context)
        print(f"{num} postings after {time.monotonic() - began_s:.0f} s", flush=True)
        _export(context, world.ends_at)
    told = {"users": ["admin", "vera", "otto", "anna"], "password": PASSWORD}
    (data_dir / MANIFEST).write_text(json.dumps(told | {"keys": world.secrets}, indent=1))
    print(f"done after {time.monotonic() - began_s:.0f} s: polyhost serve --data-dir {data_dir}")


def _export(context: OperatorContext, ends_at: float) -> None:
    """Exports in the background, until they are done."""
    for format_name, num_days in EXPORTS:
        scope = Scope(ends_at - num_days * DAY_S, ends_at)
        export_jobs.ask_export(context, format_name, scope, new_id("exp"))
    deadline_s = time.monotonic() + EXPORT_TIMEOUT_S
    while any(job.is_going_on for job in export_jobs.list_exports(context).jobs):
        if time.monotonic() > deadline_s:
            sys.exit("the exports do not end: see logs/ in the data folder")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = parse(argv)
    if not args.shoot or not (args.data_dir / MANIFEST).exists():
        make(args.data_dir, args.days, args.per_day, args.seed)
    if args.shoot:
        return int(shoot(args.data_dir, args.only, args.widths) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
