"""`polyhost models add|update|retry|cancel|list|show|revisions|rollback|rm|pin|unpin|load|unload`.

All work while a server runs. A registration shows what it needs and its progress. The commands
before it, `search` and `inspect`, are in find_models.py.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

from admin.cli import find_models
from admin.cli.common import (
    Commands,
    add_command,
    add_commands,
    call,
    instant,
    note,
    open_registry,
    print_fields,
    print_json,
    print_table,
    show_rows,
    size,
)
from admin.context import operator_context as service
from admin.context.operator_context import OperatorContext
from admin.context.registration_files import is_hub, is_old
from admin.live.load_plan import Leaver, plan_load
from admin.operations import models
from admin.registration import registrar
from admin.registration.register_process import RegisterEvent
from admin.registration.registrar import Progress
from registry.models.catalog import ModelRecord
from registry.models.residency_requests import ResidencyAction

FP8_ADVICE = (
    "fp8 is fast on GPUs that compute in it (Ada, Hopper and later); on processors it is correct "
    "but slow"
)
_INTERNAL_FIELDS = ("registration",)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    find_models.configure(commands)
    add = add_command(commands, "add", "register a model", _add)
    add.add_argument("name", help="public name, used in the `model` field of requests")
    source = "folder with a safetensors model, or a model ID on the hub such as org/name"
    add.add_argument("--source", required=True, metavar="FOLDER|HUB_ID", help=source)
    add.add_argument(
        "--revision", default="", help="branch, tag or commit on the hub (default: main)"
    )
    add.add_argument(
        "--dtype", choices=models.DTYPES, default="auto", help="weight type (default: auto)"
    )
    add.add_argument(
        "--pin", action="store_true", help="keep the model on the device; never evict it"
    )
    update = add_command(commands, "update", "register a new revision of a ready model", _update)
    update.add_argument("name", help="name of the model")
    update.add_argument(
        "--source", default="", metavar="FOLDER|HUB_ID", help="new source (default: as before)"
    )
    update.add_argument(
        "--revision", default="", help="branch, tag or commit on the hub (default: as before)"
    )
    update.add_argument(
        "--dtype", choices=models.DTYPES, default="", help="weight type (default: as before)"
    )
    retry = add_command(commands, "retry", "try a failed registration again", _retry)
    retry.add_argument("name", help="name of the model")
    for command in (add, update, retry):
        command.add_argument(
            "--no-wait", action="store_true", help="register in the background and return at once"
        )
    _configure_others(commands)


def _configure_others(commands: Commands) -> None:
    """What is there: revisions, residency, lists."""
    rollback = add_command(commands, "rollback", "serve an earlier revision again", _rollback)
    rollback.add_argument("name", help="name of the model")
    rollback.add_argument(
        "--to",
        default="",
        metavar="REVISION",
        help="revision or commit, or how it begins (default: the previous one)",
    )
    former = add_command(
        commands,
        "revisions",
        "list the revisions of a model that you can roll back to",
        _revisions,
        with_json=True,
    )
    former.add_argument("name", help="name of the model")
    every = add_command(commands, "list", "list models and their state", _list, with_json=True)
    every.add_argument("--all", action="store_true", help="include removed models")
    show = add_command(commands, "show", "show the details of a model", _show, with_json=True)
    show.add_argument("name", help="name of the model")
    simple: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("cancel", "stop a registration", _cancel),
        ("rm", "remove a model; its usage records and prices stay", _rm),
        ("pin", "keep a model on the device", lambda options: _pin(options, True)),
        ("unpin", "allow a model to be evicted again", lambda options: _pin(options, False)),
        (
            "unload",
            "ask the running server to unload a model",
            lambda options: _ask(options, "unload"),
        ),
    )
    for name, summary, run in simple:
        add_command(commands, name, summary, run).add_argument("name", help="name of the model")
    summary = "ask the running server to load a model"
    load = add_command(commands, "load", summary, _load, with_json=True)
    load.add_argument("name", help="name of the model")
    load.add_argument("--dry-run", action="store_true", help="show what would be evicted")


def _add(options: argparse.Namespace) -> int:
    with open_registry(options, create=True, makes_files=True) as context:
        model = models.begin_registration(
            context,
            options.name,
            options.source,
            options.dtype,
            options.pin,
            options.revision,
        )
        return _register(context, model, options.no_wait)


def _update(options: argparse.Namespace) -> int:
    with open_registry(options, makes_files=True) as context:
        model = models.begin_update(
            context, options.name, options.source, options.dtype, options.revision
        )
        return _register(context, model, options.no_wait)


def _retry(options: argparse.Namespace) -> int:
    with open_registry(options, makes_files=True) as context:
        return _register(context, models.retry_registration(context, options.name), options.no_wait)


def _register(context: OperatorContext, model: ModelRecord, no_wait: bool) -> int:
    if no_wait:
        registrar.run_detached(context, model)
        note(
            f"registering {model.name} in the background: check with "
            f"`polyhost models show {model.name}`"
        )
        return 0
    printer = ProgressPrinter()
    ended = registrar.run(context, [model], printer.show)
    printer.end()
    for row in ended:
        if row.registration == model.registration and row.state == "ready":
            facts = f"{row.family}, {row.dtype}, {size(row.weight_bytes)}"
            commit = f", commit {row.source_commit[:12]}" if is_hub(row.source) else ""
            print(f"{row.name} is ready ({facts}, context {row.max_context}{commit})")
            return 0
        why = (
            f"{row.reason} ({row.reason_code})"
            if row.reason_code
            else "it was removed during the registration"
        )
        note(f"polyhost: {row.name} is {row.state}: {why}")
    return 1


def _cancel(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        model = models.cancel_registration(context, options.name)
        models.await_cleanup(context, model)
    print(f"cancelled the registration of {model.name}")
    return 0


def _rollback(options: argparse.Namespace) -> int:
    model = call(options, models.roll_back, options.name, options.to)
    print(f"rolled back {model.name} to revision {model.revision}")
    return 0


def _revisions(options: argparse.Namespace) -> int:
    found = call(options, models.list_revisions, options.name)
    return show_rows(
        options,
        found,
        asdict,
        ("REVISION", "SOURCE", "COMMIT", "DTYPE", "WEIGHTS", "REGISTERED", "CURRENT"),
        lambda row: (
            row.revision,
            row.source,
            row.source_commit[:12] or "-",
            row.dtype,
            size(row.weight_bytes),
            instant(row.registered_at),
            "yes" if row.current else "no",
        ),
    )


def _list(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        found = models.list_models(context, with_removed=options.all)
    return show_rows(
        options,
        found,
        model_fields,
        ("NAME", "STATE", "TASK", "FAMILY", "DTYPE", "WEIGHTS", "CONTEXT", "PINNED", "NOTE"),
        lambda model: _table_row(model, context),
    )


def _show(options: argparse.Namespace) -> int:
    model = call(options, models.show_model, options.name)
    if options.json:
        print_json(model_fields(model))
        return 0
    shown = model_fields(model)
    for name in ("created_at", "ready_at", "removed_at", "heartbeat_at"):
        shown[name] = instant(getattr(model, name))
    print_fields({name: value for name, value in shown.items() if value not in ("", "-", None, [])})
    return 0


def _rm(options: argparse.Namespace) -> int:
    with open_registry(options) as context:
        deleted = models.remove_model(context, options.name)
        running = service.server_is_running(context.data_dir)
    print(f"removed model {options.name}")
    if running and not deleted:
        note("its pack is deleted when the server starts next, unless another model uses it")
    return 0


def _pin(options: argparse.Namespace, pinned: bool) -> int:
    model = call(options, models.set_pinned, options.name, pinned)
    print(f"{model.name} is {'pinned' if model.pinned else 'not pinned'}")
    return 0


def _load(options: argparse.Namespace) -> int:
    if not options.dry_run:
        return _ask(options, "load")
    plan = call(options, plan_load, options.name)
    if options.json:
        print_json(asdict(plan))
        return 0
    fit = {
        "free": "fits beside the loaded models",
        "evicts": f"evicts {len(plan.leavers)} models",
        "never": "does not fit beside the pinned models",
    }[plan.fit]
    print_fields(
        {
            "model": plan.model,
            "weights": size(plan.weight_bytes),
            "load time": "not measured yet" if plan.load_s is None else f"{plan.load_s:.2f} s",
            "loaded on": ", ".join(plan.present) or "-",
            "worker": plan.worker or "-",
            "free": f"{size(plan.free_bytes)} of {size(plan.arena_bytes)}" if plan.worker else "-",
            "result": fit if plan.worker else "-",
            "pinned": ", ".join(plan.pinned) or "-",
        }
    )
    if plan.leavers:
        print()
        heads = ("EVICTED", "WEIGHTS", "RUNNING", "REQUESTS/H", "RELOAD")
        print_table(heads, [_leaver_row(each) for each in plan.leavers])
    return 0


def _leaver_row(each: Leaver) -> tuple[object, ...]:
    reload_time = "-" if each.load_s is None else f"{each.load_s:.2f} s"
    busy = "yes" if each.is_busy else "no"
    return each.model, size(each.weight_bytes), busy, f"{each.requests_per_hour:.1f}", reload_time


def _ask(options: argparse.Namespace, action: ResidencyAction) -> int:
    call(options, models.request_residency, options.name, action)
    print(f"asked the server to {action} {options.name}")
    return 0


def model_fields(model: ModelRecord) -> dict[str, object]:
    """A model for `--json`."""
    return {name: value for name, value in asdict(model).items() if name not in _INTERNAL_FIELDS}


def _table_row(model: ModelRecord, context: OperatorContext) -> tuple[object, ...]:
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
        _remark(model, context),
    )


def _remark(model: ModelRecord, context: OperatorContext) -> str:
    if model.state == "registering":
        return progress_text(model.phase, model.done_bytes, model.total_bytes)
    if model.state == "ready" and is_old(context.packs_dir / model.pack):
        return f"pack from an earlier version: run `polyhost models update {model.name}`"
    return f"{model.reason_code}: {model.reason}" if model.state == "failed" else ""


def progress_text(phase: str, done_bytes: int, total_bytes: int) -> str:
    """How far a phase is."""
    if total_bytes <= 0:
        return phase
    return f"{phase} {100 * done_bytes // total_bytes} % of {size(total_bytes)}"


def preflight_text(found: RegisterEvent) -> str:
    """Shown before anything large is fetched or written."""
    fetch = f"{size(found.download_bytes)} to download, " if found.download_bytes else ""
    text = (
        f"{found.family}, {size(found.weight_bytes)} of weights in memory, context "
        f"{found.max_context}; {fetch}{size(found.pack_bytes)} of disk space for the pack, "
        f"{size(found.free_bytes)} free"
    )
    if found.source_format:
        options = ", ".join(
            f"{each.dtype} {size(each.weight_bytes)} (adds {each.added_error:.1%})"
            for each in found.choices
        )
        text += f"; quantized by {found.source_format}, can be hosted as {options}"
    if found.dtype == "fp8":
        text += f"; {FP8_ADVICE}"
    return text


class ProgressPrinter:
    """One line that is written over on a terminal; a line a phase elsewhere. On standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def show(self, progress: Progress) -> None:
        """Called for every event of the registration."""
        if progress.preflight is not None:
            self.end()
            print(f"{progress.model}: {preflight_text(progress.preflight)}", file=sys.stderr)
            self._last = ""
            return
        text = progress_text(progress.phase, progress.done_bytes, progress.total_bytes)
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
