"""Two servers with one dispatcher: it, or its whole server, killed or stopped, round after round.

    python -m bench.server_drill --rounds 20 [--output FILE]

Two servers on loopback, a PostgreSQL and two one-thread workers elsewhere, with the demo's models.
In each round twelve greedy streams run through one server, most of them waiting; meanwhile the
other server's active dispatcher or all of its processes get SIGKILL or SIGSTOP in turn. A round is
good if every text is the undisturbed one and every answer is billed once, with the tokens that its
client was told of. Said is how long the server under load had no dispatcher. Exit status 1: a round
was not good. The kit is that of tests/e2e/test_servers.py.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from bench import command
from bench.servers import Polyhost
from bench.stats import spread
from bench.worker_drill import DEMO, register
from tests.e2e.two_servers import NAMES, Pair, check, disturb, two_servers, undisturbed

EVENTS = (
    ("dispatcher killed", signal.SIGKILL, False),
    ("dispatcher stopped", signal.SIGSTOP, False),
    ("server killed", signal.SIGKILL, True),
    ("server stopped", signal.SIGSTOP, True),
)
TENANT = "drill"


async def drill(pair: Pair, key: str, num_rounds: int) -> dict[str, Any]:
    """All rounds; what was wrong ends none of them."""
    await undisturbed(pair, key)
    took: dict[str, list[float]] = {name: [] for name, _, _ in EVENTS}
    findings = []
    for index in range(num_rounds):
        name, number, whole = EVENTS[index % len(EVENTS)]
        try:
            took_s, seen = await disturb(pair, number, key, whole=whole)
            check(pair, TENANT, seen)
        except AssertionError as error:
            findings.append(f"round {index}, {name}: {error}"[:500])
        else:
            took[name].append(took_s)
            print(f"round {index}: {name}, a dispatcher again after {took_s:.2f} s", flush=True)
    return {
        "rounds": num_rounds,
        "without_a_dispatcher_s": {name: spread(found) for name, found in took.items() if found},
        "open_records": pair.open_records(),
        "findings": findings,
    }


def prepare(folder: Path) -> tuple[dict[str, Path], str]:
    """Data folders of both servers, and a key."""
    first = folder / "prepared"
    register(first, {path.name: path for path in sorted(DEMO.iterdir()) if path.is_dir()})
    key = Polyhost(first).new_key(TENANT)
    folders = {name: folder / name / "data" for name in NAMES}
    for path in folders.values():
        shutil.copytree(first, path)
    return folders, key


def main() -> int:
    """Prints and keeps what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.server_drill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    command.add_options(parser)
    args = parser.parse_args()
    with command.working_in(args.work_dir) as folder:
        folders, key = prepare(folder)
        with two_servers(folder, folders) as pair:
            found = asyncio.run(drill(pair, key, args.rounds))
    print(json.dumps(found, indent=1))
    command.keep(found, args.output, "server-drill")
    return 1 if found["findings"] or found["open_records"] else 0


if __name__ == "__main__":
    sys.exit(main())
