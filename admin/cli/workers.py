"""`polyhost workers list|check|drain|resume|restart`: the workers of the running server.
`polyhost workers serve|key`: workers of this machine for a server on another one."""

import argparse
import importlib
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, cast

import uvloop

from admin.cli.common import (
    add_command,
    add_commands,
    call,
    instant,
    settings_of,
    show_rows,
    size,
)
from admin.context.data_folder import private_files
from admin.live.workers import STATES, WorkerView, check_books, list_workers, order_workers
from gateway.settings.settings import Settings
from gateway.settings.worker_settings import CURVE_KEY, MAX_PORT
from gateway.workers.curve_keys import key_pair
from registry.errors import InvalidValue, RegistryError
from registry.models.worker_orders import WorkerAction

LOOK_S = 0.5
PATIENCE_S = 15.0
"""A server that does not say how its workers are is asked for so long."""


class _Home(Protocol):
    """What is used of gateway/server/worker_home.py."""

    async def serve_workers(
        self, settings: Settings, host: str, port: int, server_keys: Sequence[str], packs_dir: Path
    ) -> None:
        """Run until a signal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add_command(commands, "list", "list the workers and what they do", _list, with_json=True)
    add_command(
        commands,
        "check",
        "have the server and its workers check their books",
        _check,
        with_json=True,
    )
    for action, summary in (
        ("drain", "give workers no more requests; their models are loaded elsewhere"),
        ("resume", "give drained workers requests again"),
        ("restart", "drain and restart workers, one after another"),
    ):
        command = add_command(commands, action, summary, _order)
        command.add_argument("names", metavar="NAME", nargs="*", help="worker, such as worker-0")
        command.add_argument("--all", action="store_true", help="all workers")
        command.add_argument(
            "--wait", action="store_true", help="return when it is done, and say what happens"
        )
        command.set_defaults(action=action)
    home = add_command(
        commands, "serve", "run workers of this machine for a server on another machine", _serve
    )
    home.add_argument(
        "--listen",
        type=_address,
        required=True,
        metavar="HOST:PORT",
        help="address of this machine; every further worker takes the next port",
    )
    home.add_argument(
        "--server-key",
        action="append",
        required=True,
        type=_key,
        metavar="KEY",
        help="public key of the server (`polyhost workers key` there); may be repeated",
    )
    home.add_argument(
        "--packs",
        type=Path,
        metavar="DIR",
        help="folder with the server's packs (default: packs in the data folder)",
    )
    add_command(commands, "key", "print the public key of this data folder", _key_of)


def _list(options: argparse.Namespace) -> int:
    return show_rows(
        options,
        call(options, list_workers),
        asdict,
        ("WORKER", "STATE", "RUNNING", "MODELS", "MEMORY", "FREE", "STARTED (UTC)", "LABELS"),
        lambda view: (
            view.name,
            STATES[view.state] + (", restart pending" if view.restarts else ""),
            view.num_running,
            view.num_models,
            size(view.memory_bytes) if view.memory_bytes else "-",
            size(view.free_bytes) if view.memory_bytes else "-",
            instant(view.started_at) if view.started_at else "-",
            ", ".join(view.labels) or "-",
        ),
    )


def _address(text: str) -> tuple[str, int]:
    """Raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
        example = "10.0.0.5:7600 or [fd00::5]:7600"
        raise argparse.ArgumentTypeError(f"{text!r} is no address with a port, such as {example}")
    return host, int(port)


def _key(text: str) -> str:
    """Raises ArgumentTypeError."""
    if not re.fullmatch(CURVE_KEY, text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no key: run `polyhost workers key` on the server's machine, and put what "
            "it prints between single quotes"
        )
    return text


def _serve(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    host, port = options.listen
    packs = options.packs or settings.data_path / "packs"
    home = cast(_Home, importlib.import_module("gateway.server.worker_home"))
    with private_files():
        uvloop.run(home.serve_workers(settings, host, port, options.server_key, packs.absolute()))
    return 0


def _key_of(options: argparse.Namespace) -> int:
    with private_files():
        print(key_pair(settings_of(options).data_path).public_key)
    return 0


def _check(options: argparse.Namespace) -> int:
    found = call(options, check_books)
    columns = ("WHAT", "STATE", "FOUND")
    show_rows(options, found, asdict, columns, lambda one: (one.name, one.state, one.text))
    return int(any(one.state == "broken" for one in found))


def _order(options: argparse.Namespace) -> int:
    action: WorkerAction = options.action
    if bool(options.names) == options.all:
        raise InvalidValue(f"name the workers to {action}, or give --all")
    call(options, order_workers, options.names, action)
    print(f"asked the server to {action} {', '.join(options.names) or 'all workers'}")
    if options.wait:
        _wait(options)
    return 0


def _wait(options: argparse.Namespace) -> None:
    """Until all of them are as they were ordered to be. Each change is a line."""
    shown: dict[str, str] = {}
    num_failed = 0
    while True:
        try:
            views: list[WorkerView] = call(options, list_workers)
            num_failed = 0
        except RegistryError:  # another dispatcher takes over
            num_failed += 1
            if num_failed * LOOK_S > PATIENCE_S:
                raise
            views = []
        mine = [view for view in views if options.all or view.name in options.names]
        for view in mine:
            text = STATES[view.state]
            if shown.get(view.name) != text:
                shown[view.name] = text
                print(f"{view.name}: {text}", flush=True)
        if mine and all(view.is_settled for view in mine):
            return
        time.sleep(LOOK_S)
