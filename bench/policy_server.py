"""`python -m bench.policy_server [--evict N] [--place N] [--share N] serve ...`: other policies.

The product's own `polyhost serve` with policies of bench/sim/baselines in place of ours: its
dispatcher is made with another order of tenants or another placement, its worker is
bench.policy_worker. For measuring ours beside them on the real server; the product itself has no
such options.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from unittest import mock

from bench.sim.baselines.choose import NAMES, OURS, DispatchPolicies
from gateway.cli import main as cli
from gateway.cli import serve
from gateway.dispatch.dispatcher import Dispatcher
from gateway.server import supervisor

WORKER_MODULE = "bench.policy_worker"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the server."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy_server")
    parser.add_argument("--evict", choices=NAMES["evict"], default=OURS)
    parser.add_argument("--place", choices=(OURS, "eager"), default=OURS)
    parser.add_argument("--share", choices=NAMES["share"], default=OURS)
    args, rest = parser.parse_known_args(argv)
    chosen = DispatchPolicies({"place": args.place, "share": args.share}, {})
    dispatcher = functools.partial(Dispatcher, share=chosen.share(), placement=chosen.placement())
    command = (sys.executable, "-m", WORKER_MODULE, "--evict", args.evict, "--config")
    with (
        mock.patch.object(supervisor, "Dispatcher", dispatcher),
        mock.patch.object(serve, "WORKER_COMMAND", command),
    ):
        return cli.main(rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
