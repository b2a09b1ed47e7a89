"""`polyhost models add|list|show|rm|pin|unpin|load|unload`. Works while a server runs."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

from gateway import registrar, service
from gateway.cli_common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    print_fields,
    print_json,
    print_table,
    size,
)
from gateway.registrar import Progress
from registry.catalog import ModelRecord
from registry.residency_requests import ResidencyAction

_INTERNAL_FIELDS = ("registration",)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add = add_command(commands, "add", "register a model folder", _add)
    add.add_argument("name", help="public name, what requests say in `model`")
    add.add_argument("--source", required=True, metavar="FOLDER", help="safetensors model folder")
    add.add_argument("--dtype", choices=registrar.DTYPES, default="auto")
    add.add_argument("--pin", action="store_true", help="never evict it")
    add.add_argument("--no-wait", action="store_true", help="register in the background")
    every = add_command(commands, "list", "hosted models and their state", _list, with_json=True)
    every.add_argument("--all", action="store_true", help="removed ones too")
    show = add_command(commands, "show", "all about one model", _show, with_json=True)
    show.add_argument("name")
    simple: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("rm", "take a model out of service; its postings stay", _rm),
        ("pin", "keep a model resident", lambda options: _pin(options, True)),
        ("unpin", "let a model be evicted again", lambda options: _pin(options, False)),
        ("load", "ask the running server to load a model", lambda options: _ask(options, "load")),
        ("unload", "ask it to give the pages back", lambda options: _ask(options, "unload")),
    )
    for name, summary, run in simple:
        add_command(commands, name, summary, run).add_argument("name")


def _add(options: argparse.Namespace) -> int:
    with open_registry(options, create=True) as control:
        model = registrar.begin(control, options.name, options.source, options.dtype, options.pin)
        if options.no_wait:
            registrar.run_detached(control, model)
            note(f"registering {model.name}: see `polyhost models show {model.name}`")
            return 0
        printer = _ProgressPrinter()
        ended = registrar.run(control, [model], printer.show)
        printer.end()
    for row in ended:
        if row.registration == model.registration and row.state == "ready":
            facts = f"{row.family}, {row.dtype}, {size(row.weight_bytes)}"
            print(f"{row.name} is ready ({facts}, context {row.max_context})")
            return 0
        note(f"polyhost: {row.name} is {row.state}: {row.reason or 'removed meanwhile'}")
    return 1


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service.list_models(control, with_removed=options.all)
    if options.json:
        print_json([model_fields(model) for model in found])
    else:
        print_table(
            ("NAME", "STATE", "FAMILY", "DTYPE", "WEIGHTS", "CONTEXT", "PINNED", "REMARK"),
            [_table_row(model) for model in found],
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        model = service.show_model(control, options.name)
    if options.json:
        print_json(model_fields(model))
        return 0
    shown = model_fields(model)
    for name in ("created_at", "ready_at", "removed_at", "heartbeat_at"):
        shown[name] = instant(getattr(model, name))
    print_fields({name: value for name, value in shown.items() if value not in ("", "-", None)})
    return 0


def _rm(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        deleted = service.remove_model(control, options.name)
        running = service.server_is_running(control.data_dir)
    print(f"{options.name} is removed")
    if running and not deleted:
        note("its pack is deleted at the server's next start, where no other model uses it")
    return 0


def _pin(options: argparse.Namespace, pinned: bool) -> int:
    with open_registry(options) as control:
        model = service.set_pinned(control, options.name, pinned)
    print(f"{model.name} is {'pinned' if model.pinned else 'not pinned'}")
    return 0


def _ask(options: argparse.Namespace, action: ResidencyAction) -> int:
    with open_registry(options) as control:
        service.request_residency(control, options.name, action)
    print(f"asked the server to {action} {options.name}")
    return 0


def model_fields(model: ModelRecord) -> dict[str, object]:
    """A model for `--json`."""
    return {name: value for name, value in asdict(model).items() if name not in _INTERNAL_FIELDS}


def _table_row(model: ModelRecord) -> tuple[object, ...]:
    ready = model.state == "ready"
    return (
        model.name,
        model.state,
        model.family or "-",
        model.dtype or model.requested_dtype,
        size(model.weight_bytes) if ready else "-",
        model.max_context if ready else "-",
        "yes" if model.pinned else "no",
        _remark(model),
    )


def _remark(model: ModelRecord) -> str:
    if model.state == "registering":
        return _progress(model.phase, model.done_bytes, model.total_bytes)
    return f"{model.reason_code}: {model.reason}" if model.state == "failed" else ""


def _progress(phase: str, done_bytes: int, total_bytes: int) -> str:
    if total_bytes <= 0:
        return phase
    return f"{phase} {100 * done_bytes // total_bytes} % of {size(total_bytes)}"


class _ProgressPrinter:
    """One line that is written over on a terminal; a line a phase elsewhere. On standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def show(self, progress: Progress) -> None:
        """Called for every event of the registration."""
        text = _progress(progress.phase, progress.done_bytes, progress.total_bytes)
        if self._terminal:
            width = max(len(self._last), len(text))
            print(f"\r{text.ljust(width)}", end="", file=sys.stderr, flush=True)
            self._last = text
        elif progress.phase != self._last:
            print(f"{progress.model}: {text}", file=sys.stderr, flush=True)
            self._last = progress.phase

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._last:
            print(file=sys.stderr)
