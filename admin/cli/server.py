"""`polyhost serve`, `polyhost simulate TRACE`, `polyhost db upgrade` and `polyhost db adopt`.

`serve` runs the gateway in this process until it is stopped. It is the only command that imports
the server, and only once the worker's process is under way, which takes its own seconds to import,
on another core. Options here are those one tries out; every other setting is in polyhost.toml or
POLYHOST_* (gateway/settings/config.py).

`simulate` runs a workload through the product's own code in simulated time. The simulator is
`bench.sim`, which imports the engine; the gateway does not. So it is a process of its own with the
same Python, and this module only hands the command line over. What it prints is passed through, and
so is its exit status. It checks what it is given and says what to write.
"""

import argparse
import asyncio
import importlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import uvloop

from admin.cli.common import (
    add_command,
    add_commands,
    add_common_options,
    os_user,
    parse_size,
    settings_of,
)
from admin.context.data_folder import (
    adopt_database,
    check_database,
    has_journal,
    private_files,
    unknown_packs,
)
from gateway.server import process_setup as interpreter
from gateway.server.child_process import WORKER_COMMAND, EarlyWorker, start_early
from gateway.settings.config import worker_environment
from gateway.settings.settings import Settings
from registry import locks, schema
from registry.schema import upgrade
from registry.session import shown

OVERRIDES = (
    "demo",
    "host",
    "port",
    "gateway_processes",
    "device_budget_bytes",
    "host_tier_bytes",
    "num_threads",
    "num_workers",
)
MODULE = "bench.sim"
INTERRUPT_S = 5.0
"""A simulation has so long to end by itself."""
# Name, metavar, meaning; the simulator has the same names and knows what they may be.
VALUES = (
    ("--models", "N|FILE", "number of hosted models (default: 20), or a JSON file that lists them"),
    ("--mix", "NAME", "sizes of the models: tiny, small, mixed or large (default: mixed)"),
    ("--workers", "N", "number of workers (default: 4)"),
    (
        "--device",
        "NAME|FILE",
        "device of each worker (default: h100), or a file written by bench.sim_calibrate",
    ),
    ("--memory", "GIB", "memory of each device, instead of its real size"),
    ("--host-memory", "GIB", "size of the host tier"),
    ("--cost", "PRICE", "price of one worker for an hour"),
    ("--tenants", "N", "number of tenants (default: 16)"),
    ("--weights", "NAME", "weights of the tenants: equal or tiers (default: equal)"),
    ("--data", "DIR", "folder with recorded traces"),
    ("--out", "DIR", "folder for the report (default: simulation)"),
    ("--seed", "N", "random seed (default: 0)"),
    ("--until", "SECONDS", "simulated time at which the run ends"),
    ("--sample", "SECONDS", "time between two samples (default: 1)"),
    ("--slo-ttft", "SECONDS", "target for the time to first token (default: 2)"),
    ("--slo-tpot", "SECONDS", "target for the time per output token (default: 0.1)"),
)
REPEATED = (
    ("--policy", "KIND=NAME,...", "add a run with these baseline policies; may be repeated"),
    (
        "--set",
        "NAME=VALUE",
        "change a setting of gateway or engine, such as max_num_seqs=128; may be repeated",
    ),
)
FLAGS = (
    ("--only", "skip the run with the product's own policies"),
    ("--json", "print the report as JSON"),
)


class _Supervisor(Protocol):
    """What is used of gateway/server/supervisor.py."""

    async def serve(
        self, settings: Settings, worker_command: Sequence[str], early: EarlyWorker | None
    ) -> None:
        """Run until a signal."""


class _Provider(Protocol):
    """What is used of admin/oidc/provider.py."""

    def require_joserfc(self) -> None:
        """Raises where the library is not there."""


def configure_serve(parser: argparse.ArgumentParser) -> None:
    """The command's options; one that is not given leaves its setting alone."""
    add_common_options(parser)
    parser.add_argument(
        "--demo",
        action="store_true",
        default=None,
        help="register three demo models and a tenant `demo` with an API key",
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="port to listen on; 0: choose a free one (default: 8000)"
    )
    parser.add_argument(
        "--gateway-processes",
        dest="gateway_processes",
        type=int,
        metavar="N",
        help="number of processes that serve HTTP (default: 1)",
    )
    parser.add_argument(
        "--device-budget",
        dest="device_budget_bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory for the weights and KV cache of all models, such as 2GiB",
    )
    parser.add_argument(
        "--host-tier",
        dest="host_tier_bytes",
        type=parse_size,
        metavar="SIZE",
        help="shared memory that keeps copies of packs for fast loading; 0: none",
    )
    parser.add_argument(
        "--threads",
        dest="num_threads",
        type=int,
        metavar="N",
        help="CPU threads for one operator, in each worker; 0: chosen",
    )
    parser.add_argument(
        "--workers",
        dest="num_workers",
        type=_num_workers,
        metavar="N|auto",
        help="number of worker processes; auto: one per GPU, or per NUMA node of the CPU",
    )
    parser.set_defaults(run=_serve)


def _num_workers(text: str) -> int:
    """0 for `auto`. Raises ValueError."""
    return 0 if text == "auto" else int(text)


def _serve(options: argparse.Namespace) -> int:
    settings = settings_of(options, {name: getattr(options, name) for name in OVERRIDES})
    if settings.oidc_issuer:
        cast(_Provider, importlib.import_module("admin.oidc.provider")).require_joserfc()
    with private_files():
        uvloop.run(_serve_with_worker(settings))
    return 0


async def _serve_with_worker(settings: Settings) -> None:
    if settings.workers and all(spec.endpoint for spec in settings.workers):
        supervisor = cast(_Supervisor, importlib.import_module("gateway.server.supervisor"))
        await supervisor.serve(settings, WORKER_COMMAND, None)
        return
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


def configure_simulate(parser: argparse.ArgumentParser) -> None:
    """The simulator's options."""
    add_common_options(parser)
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="workload: NAME, NAME:key=value,... or the path of a CSV file",
    )
    for name, metavar, meaning in VALUES:
        parser.add_argument(name, metavar=metavar, help=meaning)
    for name, metavar, meaning in REPEATED:
        parser.add_argument(name, metavar=metavar, help=meaning, action="append", default=[])
    for name, meaning in FLAGS:
        parser.add_argument(name, help=meaning, action="store_true")
    parser.set_defaults(run=_simulate)


def command(options: argparse.Namespace) -> list[str]:
    """The simulator's command line."""
    words = [sys.executable, "-m", MODULE]
    for name, *_ in VALUES:
        value = getattr(options, _place(name))
        words += [] if value is None else [f"{name}={value}"]
    for name, *_ in REPEATED:
        words += [f"{name}={value}" for value in getattr(options, _place(name))]
    words += [name for name, _ in FLAGS if getattr(options, _place(name))]
    return [*words, "--", options.trace]


def _place(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _simulate(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("bench") is None:
        raise FileNotFoundError(
            "the simulator is not installed: run this command in a checkout of the repository, "
            "which has the package `bench`"
        )
    with subprocess.Popen(command(options)) as child:
        before = signal.signal(signal.SIGTERM, lambda _signal, _frame: child.terminate())
        try:
            status = child.wait()
        except KeyboardInterrupt:
            # The terminal has told the child as well. An interrupt amid its imports may be lost.
            try:
                child.wait(INTERRUPT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


def configure_db(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add_command(
        commands, "upgrade", "create the database schema or upgrade it for this version", _upgrade
    )
    add_command(
        commands,
        "adopt",
        "use the data folder with this database from now on, after a restore or a move",
        _adopt,
    )


def _upgrade(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    check_database(settings)
    upgrade(settings.registry_url)
    print(f"{settings.data_path}: the schema is at version {schema.HEAD}")
    return 0


def _adopt(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    folder = settings.data_path
    with locks.hold(folder / locks.SERVER_LOCK):
        upgrade(settings.registry_url)
        adopt_database(settings, f"cli:{os_user()}")
    print(f"{folder} belongs to {shown(settings.registry_url)} from now on")
    if num := unknown_packs(settings):
        print(f"packs that the database does not know: {num}; the next start deletes them")
    if has_journal(folder):
        print("the journal holds postings: the next start writes them into the database")
    return 0
