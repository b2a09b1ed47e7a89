"""`python -m bench.gateway_server serve ...`: the product's own server, with bench.gateway_worker.

For measuring the gateway alone; the product has no such option.
"""

import sys
from collections.abc import Sequence
from unittest import mock

from admin.cli import main as cli
from admin.cli import server as serve

WORKER_MODULE = "bench.gateway_worker"


def main(argv: Sequence[str]) -> int:
    """The exit status of the server."""
    command = (sys.executable, "-m", WORKER_MODULE, "--config")
    with mock.patch.object(serve, "WORKER_COMMAND", command):
        return cli.main(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
