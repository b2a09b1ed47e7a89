"""`polyhost serve`: runs the gateway in this process until it is told to stop.

The only command that imports the server, and only once the worker's process is under way: it takes
its own seconds to import, on another core. Options here are those one tries out; every other
setting is in polyhost.toml or POLYHOST_* (gateway/config.py).
"""

import argparse
import asyncio
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import uvloop

from gateway.cli.common import add_common_options, parse_size, settings_of
from gateway.config import worker_environment
from gateway.server import interpreter
from gateway.server.worker_process import WORKER_COMMAND, EarlyWorker, start_early
from gateway.settings import Settings


class _Supervisor(Protocol):
    """What is used of gateway/server/supervisor.py."""

    async def serve(
        self, settings: Settings, worker_command: Sequence[str], early: EarlyWorker
    ) -> None:
        """Run until a signal."""


class _Provider(Protocol):
    """What is used of admin/oidc/provider.py."""

    def require_joserfc(self) -> None:
        """Raises where the library is not there."""


OVERRIDES = (
    "demo",
    "host",
    "port",
    "gateway_processes",
    "device_budget_bytes",
    "host_tier_bytes",
    "num_threads",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options; one that is not given leaves its setting alone."""
    add_common_options(parser)
    parser.add_argument(
        "--demo",
        action="store_true",
        default=None,
        help="register the demo models, the tenant `demo` and its key",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000)")
    parser.add_argument(
        "--gateway-processes",
        dest="gateway_processes",
        type=int,
        metavar="N",
        help="processes that serve HTTP (1); more share one fair queue",
    )
    parser.add_argument(
        "--device-budget",
        dest="device_budget_bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory for the weights and KV of all models, such as 2GiB",
    )
    parser.add_argument(
        "--host-tier",
        dest="host_tier_bytes",
        type=parse_size,
        metavar="SIZE",
        help="shared memory that keeps packs warm; 0: none",
    )
    parser.add_argument(
        "--threads", dest="num_threads", type=int, metavar="N", help="threads of one operator"
    )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    settings = settings_of(options, {name: getattr(options, name) for name in OVERRIDES})
    if settings.oidc_issuer:
        cast(_Provider, importlib.import_module("admin.oidc.provider")).require_joserfc()
    uvloop.run(_serve_with_worker(settings))
    return 0


async def _serve_with_worker(settings: Settings) -> None:
    worker = await start_early(WORKER_COMMAND, worker_environment(settings.num_threads))
    try:
        supervisor = cast(_Supervisor, importlib.import_module("gateway.server.supervisor"))
        await asyncio.sleep(0)  # A Ctrl-C meanwhile is heard here, before anything is changed.
        interpreter.settle()
        await supervisor.serve(settings, WORKER_COMMAND, worker)
    finally:
        if worker.process.returncode is None:  # The server could not begin.
            worker.process.kill()
            await worker.process.wait()
