"""`polyhost workers list|check|drain|resume|restart`: the workers of the running server."""

import argparse
import time
from dataclasses import asdict

from admin.cli.common import add_command, add_commands, call, instant, show_rows, size
from admin.live.workers import STATES, WorkerView, check_books, list_workers, order_workers
from registry.errors import InvalidValue, RegistryError
from registry.models.worker_orders import WorkerAction

LOOK_S = 0.5
PATIENCE_S = 15.0
"""A server that does not say how its workers are is asked for so long."""


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
