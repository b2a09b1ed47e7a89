"""Registers models: runs `python -m engine.registration.main` and relays its progress into the
catalog.

The engine's part (fetch, check, convert, probe) is a subprocess (register_process.py); the row it
works for was begun by admin/operations/models.py. This file writes its progress and a heartbeat
into the model's row, and ends the row as ready or failed. A row that is no longer this
registration's (cancelled, removed, taken over) stops the subprocess within half a second. Used by
`polyhost models add|update|retry`, by the demo's bootstrap (several models in one subprocess), and
as a process of its own for `--no-wait`:

    python -m admin.registration.registrar NAME
                                         settings as JSON on standard input; forks, and returns
                                         while the child works

While packs are written, packs.lock is held shared, by the subprocess too. What it may leave behind
is swept by `registration_files.py`.
"""

import argparse
import os
import queue
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from admin.context.data_folder import private_files
from admin.context.operator_context import OperatorContext, open_context
from admin.context.registration_files import CRASHED, LOGS_FOLDER, RESUMABLE
from admin.operations.models import list_models
from admin.registration import register_process
from admin.registration.policy.pace import Pace
from admin.registration.register_process import (
    INTERNAL_ERROR,
    REGISTER_COMMAND,
    RegisterEvent,
    source_name,
)
from admin.registration.text_probe import CODE, check_text_files
from gateway.settings.config import decode_settings
from registry import locks
from registry.errors import RegistryBusy, RegistryError
from registry.models import catalog, registrations, revisions
from registry.models.catalog import CANCELLED, INTERRUPTED, NEXT, ModelRecord, PackFacts

HEARTBEAT_S = 1.0
OWNER_POLL_S = 0.25
PACKS_LOCK_TIMEOUT_S = 60.0
PATIENCE_S = 120.0
AGAIN_S = 0.5
_MAX_REASON_LEN = 2000

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a registration is, for whoever shows it. `preflight` comes once, in its phase."""

    model: str
    phase: str
    done_bytes: int
    total_bytes: int
    preflight: RegisterEvent | None = None


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Run:
    """One subprocess and the rows it works for, by source."""

    operator: OperatorContext
    on_progress: OnProgress
    waiting: dict[str, list[ModelRecord]] = field(default_factory=lambda: defaultdict(list))
    latest: dict[str, RegisterEvent] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    has_reported_bug: bool = False


@private_files()
def run(
    context: OperatorContext,
    models: Sequence[ModelRecord],
    on_progress: OnProgress = lambda progress: None,
    command: Sequence[str] | None = None,
) -> list[ModelRecord]:
    """Register models that `begin` returned; one subprocess for each dtype. Blocks until done.

    Returns the rows as they are afterwards: ready, failed, or whatever another hand made of them;
    of an update that went well the updated model's. When interrupted (KeyboardInterrupt) the
    subprocess is stopped and the rows fail.
    """
    by_dtype: dict[str, list[ModelRecord]] = defaultdict(list)
    for model in models:
        by_dtype[model.requested_dtype].append(model)
    try:
        for dtype, group in by_dtype.items():
            _run_group(context, dtype, group, on_progress, command or REGISTER_COMMAND)
    except BaseException as error:
        by_hand = isinstance(error, KeyboardInterrupt)
        reason = "stopped by hand" if by_hand else f"stopped by {type(error).__name__}: {error}"
        _fail(context, models, CANCELLED if by_hand else INTERRUPTED, reason)
        raise
    finally:
        list_models(context)  # sweeps what the subprocess could not
    with context.reading() as session:
        found = [
            catalog.find_model(session, model.name)
            or catalog.find_model(session, model.name.removesuffix(NEXT))
            for model in models
        ]
    return [model for model in found if model is not None]


def run_detached(context: OperatorContext, model: ModelRecord) -> None:
    """Hand a registration that `begin` made to a background process, and return.

    The launcher forks and leaves at once, so that the registration is nobody's child: it lives on
    when this process and its terminal are gone. Output goes to `<data_dir>/logs`.
    """
    launched = subprocess.run(
        [sys.executable, "-m", "admin.registration.registrar", model.name],
        input=msgspec.json.encode(context.settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if launched.returncode:
        reason = launched.stderr.decode(errors="replace").strip()
        reason = reason or f"exit status {launched.returncode}"
        _fail(context, [model], "not_started", reason)
        raise RegistryError(f"cannot start the registration: {reason}")


def _run_group(
    context: OperatorContext,
    dtype: str,
    models: Sequence[ModelRecord],
    on_progress: OnProgress,
    command: Sequence[str],
) -> None:
    job = _Run(context, on_progress)
    for model in models:
        job.waiting[source_name(model)].append(model)
    arguments = register_process.arguments(context.settings, context.data_dir, dtype, models)
    context.packs_dir.mkdir(parents=True, exist_ok=True)
    lock_path = context.data_dir / locks.PACKS_LOCK
    with (
        locks.hold(lock_path, shared=True, timeout_s=PACKS_LOCK_TIMEOUT_S) as lock,
        tempfile.TemporaryFile() as errors,
    ):
        with register_process.started(
            [*command, *arguments], context.settings, errors, lock
        ) as process:
            _relay(job, process)
        if job.waiting or job.has_reported_bug:
            register_process.keep_log(errors, context.data_dir)
        if job.waiting:
            status = process.returncode
            last = register_process.last_words(errors)
            reason = last or f"the registration process ended with status {status}"
            for rows in job.waiting.values():
                _fail(context, rows, CRASHED, reason)


def _relay(job: _Run, process: subprocess.Popen[bytes]) -> None:
    """Handle events until the subprocess has closed its output; beat once a second meanwhile."""
    events, reader = register_process.read_events(process)
    next_beat = next_look = 0.0
    while True:
        try:
            event = events.get(timeout=OWNER_POLL_S)
        except queue.Empty:
            pass
        else:
            if event is None:
                break
            changed_phase = _handle(job, event)
            next_beat = 0.0 if changed_phase else next_beat
        now_s = time.monotonic()
        if now_s >= next_beat:
            _beat(job)
            next_beat = now_s + HEARTBEAT_S
        if now_s >= next_look:
            _give_up_lost(job)
            next_look = now_s + OWNER_POLL_S
        if not job.waiting:
            break
    if not job.waiting:
        # All is said, or other hands ended the rows: what it might still do is of no use.
        register_process.stop(process)
    reader.join()


def _handle(job: _Run, event: RegisterEvent) -> bool:
    """Apply one event; True if it is worth writing down at once."""
    rows = job.waiting.get(event.source, [])
    context = job.operator
    if event.event == "progress" and rows:
        before = job.latest.get(event.source)
        job.latest[event.source] = event
        same = before is not None and before.phase == event.phase
        pace = job.paces.get(event.source, Pace()) if same else Pace()
        job.paces[event.source] = pace.seen(event.done_bytes, time.monotonic())
        for row in rows:
            job.on_progress(Progress(row.name, event.phase, event.done_bytes, event.total_bytes))
        return not same
    if event.event == "preflight":
        for row in rows:
            job.on_progress(Progress(row.name, "preflight", 0, 0, event))
    if event.event == "resolved":
        for row in rows:
            note = partial(
                registrations.note_commit, registration=row.registration, commit=event.commit
            )
            lasting(context.writing, note)
    if event.event == "ready" and rows:
        pack, settings = Path(event.pack_dir), context.settings
        sizes = event.max_context, event.vocab_size
        problem = check_text_files(pack, event.task, *sizes, settings)
        if problem:
            _fail(context, job.waiting.pop(event.source), CODE, problem)
            return False
        facts = _facts(event)
        keep = context.settings.model_revisions_kept
        for row in job.waiting.pop(event.source, []):
            finish = partial(
                revisions.finish,
                registration=row.registration,
                facts=facts,
                keep=keep,
                now_at=context.clock(),
            )
            if lasting(context.writing, finish):
                size = event.weight_bytes
                job.on_progress(Progress(row.name, "ready", size, size))
    if event.event == "refused":
        job.has_reported_bug |= event.code == INTERNAL_ERROR
        _fail(context, job.waiting.pop(event.source, []), event.code, event.message)
    return False


def _facts(event: RegisterEvent) -> PackFacts:
    return PackFacts(
        revision=event.revision,
        pack=Path(event.pack_dir).name,
        family=event.family,
        dtype=event.dtype,
        weight_bytes=event.weight_bytes,
        max_context=event.max_context,
        vocab_size=event.vocab_size,
        task=event.task,
        dim=event.dim,
        labels=event.labels,
        multi_label=event.multi_label,
    )


def _beat(job: _Run) -> None:
    """Write progress and heartbeat."""
    for source, rows in job.waiting.items():
        event = job.latest.get(source) or RegisterEvent("progress", source, phase="start")
        for row in rows:
            beat = partial(
                registrations.progress,
                registration=row.registration,
                phase=event.phase[:32],
                done_bytes=event.done_bytes,
                total_bytes=event.total_bytes,
                bytes_per_s=job.paces.get(source, Pace()).at(time.monotonic()),
                now_at=job.operator.clock(),
            )
            lasting(job.operator.writing, beat)


def _give_up_lost(job: _Run) -> None:
    """Forget rows that are no longer this registration's."""
    for source, rows in list(job.waiting.items()):
        found = {
            row.registration: lasting(
                job.operator.reading, partial(catalog.find_model, name=row.name)
            )
            for row in rows
        }
        kept = [row for row in rows if _is_same(row, found[row.registration])]
        if kept:
            job.waiting[source] = kept
        else:
            del job.waiting[source]


def _is_same(row: ModelRecord, now: ModelRecord | None) -> bool:
    return now is not None and (now.registration, now.state) == (row.registration, "registering")


def _fail(context: OperatorContext, rows: Iterable[ModelRecord], code: str, reason: str) -> None:
    for row in rows:
        then = ""
        if code in RESUMABLE:
            then = f" (to try again: `polyhost models retry {row.name.removesuffix(NEXT)}`)"
        # It quotes hubs, files and libraries: one line, and nothing that a terminal would obey.
        plain = "".join(c if c.isprintable() else " " for c in reason[:_MAX_REASON_LEN])
        text = " ".join(plain.split()) + then
        fail = partial(
            catalog.fail,
            registration=row.registration,
            code=code,
            reason=text,
            now_at=context.clock(),
        )
        lasting(context.writing, fail)


def lasting(
    opened: Callable[[], AbstractContextManager[Session]], work: Callable[[Session], Found]
) -> Found:
    """`work` in a transaction of its own, once more for as long as the database is away or busy.

    A registration may have fetched for hours: it outlives PATIENCE_S without a database. Raises
    what the last try raised.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with opened() as session:
                return work(session)
        except (OperationalError, RegistryBusy):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(AGAIN_S)


@private_files()
def main(argv: Sequence[str] | None = None) -> int:
    """The background process of `--no-wait`: fork, let the parent return, register in the child."""
    parser = argparse.ArgumentParser(prog="python -m admin.registration.registrar")
    parser.add_argument("name")
    options = parser.parse_args(argv)
    settings = decode_settings(sys.stdin.buffer.read())
    log = settings.data_path / LOGS_FOLDER / f"register-{options.name.replace('/', '--')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        # The row must name the child before this process is gone, or it would look interrupted.
        with open_context(settings, "registrar") as context:
            _adopt(context, options.name, child)
        return 0
    os.setsid()
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with open_context(settings, "registrar") as context:
        model = _adopt(context, options.name, os.getpid())
        ended = run(context, [model])
    return 0 if all(model.state == "ready" for model in ended) else 1


def _adopt(context: OperatorContext, name: str, pid: int) -> ModelRecord:
    with context.writing() as session:
        model = catalog.get_model(session, name)
        registrations.adopt(
            session, model.registration, socket.gethostname(), pid, now_at=context.clock()
        )
    return model


if __name__ == "__main__":
    sys.exit(main())
