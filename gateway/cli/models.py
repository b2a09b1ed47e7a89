"""`polyhost models add|update|retry|cancel|list|show|revisions|rollback|rm|pin|unpin|load|unload`.

All work while a server runs. How registrations are shown is `cli/progress.py`.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict

from gateway.cli.common import (
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
from gateway.cli.progress import ProgressPrinter, progress_text
from gateway.registration import registrar, registration
from gateway.registration.registration_files import is_hub, is_old
from gateway.service import control as service
from gateway.service import models as service_models
from gateway.service.control import Control
from registry.catalog import ModelRecord
from registry.residency_requests import ResidencyAction

_INTERNAL_FIELDS = ("registration",)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    add = add_command(commands, "add", "register a model", _add)
    add.add_argument("name", help="public name, what requests say in `model`")
    source = "safetensors model folder, or a hub id such as org/name"
    add.add_argument("--source", required=True, metavar="FOLDER|HUB_ID", help=source)
    add.add_argument("--revision", default="", help="a hub's branch, tag or commit (main)")
    add.add_argument("--dtype", choices=registration.DTYPES, default="auto")
    add.add_argument("--pin", action="store_true", help="never evict it")
    update = add_command(commands, "update", "register a new revision of a ready model", _update)
    update.add_argument("name")
    update.add_argument("--source", default="", metavar="FOLDER|HUB_ID", help="(as before)")
    update.add_argument("--revision", default="", help="a hub's branch, tag or commit (as before)")
    update.add_argument("--dtype", choices=registration.DTYPES, default="", help="(as before)")
    retry = add_command(commands, "retry", "register a failed model once more", _retry)
    retry.add_argument("name")
    for command in (add, update, retry):
        command.add_argument("--no-wait", action="store_true", help="register in the background")
    rollback = add_command(commands, "rollback", "serve an earlier revision again", _rollback)
    rollback.add_argument("name")
    rollback.add_argument("--to", default="", metavar="REVISION", help="(the one before)")
    former = add_command(
        commands, "revisions", "what it can be rolled back to", _revisions, with_json=True
    )
    former.add_argument("name")
    every = add_command(commands, "list", "hosted models and their state", _list, with_json=True)
    every.add_argument("--all", action="store_true", help="removed ones too")
    show = add_command(commands, "show", "all about one model", _show, with_json=True)
    show.add_argument("name")
    simple: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("cancel", "stop a registration", _cancel),
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
        model = registration.begin(
            control,
            options.name,
            options.source,
            options.dtype,
            options.pin,
            options.revision,
        )
        return _register(control, model, options.no_wait)


def _update(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        model = registration.begin_update(
            control, options.name, options.source, options.dtype, options.revision
        )
        return _register(control, model, options.no_wait)


def _retry(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        return _register(control, registration.begin_retry(control, options.name), options.no_wait)


def _register(control: Control, model: ModelRecord, no_wait: bool) -> int:
    if no_wait:
        registrar.run_detached(control, model)
        note(f"registering {model.name}: see `polyhost models show {model.name}`")
        return 0
    printer = ProgressPrinter()
    ended = registrar.run(control, [model], printer.show)
    printer.end()
    for row in ended:
        if row.registration == model.registration and row.state == "ready":
            facts = f"{row.family}, {row.dtype}, {size(row.weight_bytes)}"
            commit = f", commit {row.source_commit[:12]}" if is_hub(row.source) else ""
            print(f"{row.name} is ready ({facts}, context {row.max_context}{commit})")
            return 0
        why = f"{row.reason} ({row.reason_code})" if row.reason_code else "removed meanwhile"
        note(f"polyhost: {row.name} is {row.state}: {why}")
    return 1


def _cancel(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        model = registration.cancel(control, options.name)
        service_models.await_cleanup(control, model)
    print(f"the registration of {model.name} is cancelled")
    return 0


def _rollback(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        model = service_models.roll_back(control, options.name, options.to)
    print(f"{model.name} is back at revision {model.revision}")
    return 0


def _revisions(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_models.list_revisions(control, options.name)
    if options.json:
        print_json([asdict(revision) for revision in found])
        return 0
    print_table(
        ("REVISION", "SOURCE", "COMMIT", "DTYPE", "WEIGHTS", "REGISTERED", "CURRENT"),
        [
            (
                row.revision,
                row.source,
                row.source_commit[:12] or "-",
                row.dtype,
                size(row.weight_bytes),
                instant(row.registered_at),
                "yes" if row.current else "no",
            )
            for row in found
        ],
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_models.list_models(control, with_removed=options.all)
    if options.json:
        print_json([model_fields(model) for model in found])
    else:
        print_table(
            ("NAME", "STATE", "TASK", "FAMILY", "DTYPE", "WEIGHTS", "CONTEXT", "PINNED", "REMARK"),
            [_table_row(model, control) for model in found],
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        model = service_models.show_model(control, options.name)
    if options.json:
        print_json(model_fields(model))
        return 0
    shown = model_fields(model)
    for name in ("created_at", "ready_at", "removed_at", "heartbeat_at"):
        shown[name] = instant(getattr(model, name))
    print_fields({name: value for name, value in shown.items() if value not in ("", "-", None, [])})
    return 0


def _rm(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        deleted = service_models.remove_model(control, options.name)
        running = service.server_is_running(control.data_dir)
    print(f"{options.name} is removed")
    if running and not deleted:
        note("its pack is deleted at the server's next start, where no other model uses it")
    return 0


def _pin(options: argparse.Namespace, pinned: bool) -> int:
    with open_registry(options) as control:
        model = service_models.set_pinned(control, options.name, pinned)
    print(f"{model.name} is {'pinned' if model.pinned else 'not pinned'}")
    return 0


def _ask(options: argparse.Namespace, action: ResidencyAction) -> int:
    with open_registry(options) as control:
        service_models.request_residency(control, options.name, action)
    print(f"asked the server to {action} {options.name}")
    return 0


def model_fields(model: ModelRecord) -> dict[str, object]:
    """A model for `--json`."""
    return {name: value for name, value in asdict(model).items() if name not in _INTERNAL_FIELDS}


def _table_row(model: ModelRecord, control: Control) -> tuple[object, ...]:
    ready = model.state == "ready"
    return (
        model.name,
        model.state,
        model.task if ready else "-",
        model.family or "-",
        model.dtype or model.requested_dtype,
        size(model.weight_bytes) if ready else "-",
        model.max_context if ready else "-",
        "yes" if model.pinned else "no",
        _remark(model, control),
    )


def _remark(model: ModelRecord, control: Control) -> str:
    if model.state == "registering":
        return progress_text(model.phase, model.done_bytes, model.total_bytes)
    if model.state == "ready" and is_old(control.packs_dir / model.pack):
        return f"made by an earlier version: polyhost models update {model.name}"
    return f"{model.reason_code}: {model.reason}" if model.state == "failed" else ""
