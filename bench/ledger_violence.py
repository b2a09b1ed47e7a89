"""Exactly once, by violence: requests while everything they need is killed with -9.

    python -m bench.ledger_violence --database postgresql --requests 2000 --kills 100

The drill is that of tests/e2e/violence.py; tests run it with each kind of kill, and with a hundred.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.e2e.violence import run


def main() -> int:
    """Prints what is wrong and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.ledger_violence")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1, help="gateways")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong, told = run(
            Path(folder),
            options.database,
            options.requests,
            options.kills,
            processes=options.processes,
            seed=options.seed,
        )
    print(*wrong[:50], json.dumps(told), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
