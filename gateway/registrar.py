"""Registers models: runs `python -m engine.register` and relays its progress into the catalog.

The engine's part (check, convert, probe) needs torch, so it is another process that prints one
JSON object a line. This file starts it, writes its progress and a heartbeat into the model's row,
and ends the row as ready or failed. It is used by `polyhost models add`, by the demo's bootstrap
(several models in one subprocess), and as a process of its own for `--no-wait`:

    python -m gateway.registrar --data-dir DIR NAME     forks, and returns while the child works

While packs are written, packs.lock is held shared, by the subprocess too.
"""

import argparse
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from gateway.config import load_settings
from gateway.service import Control, list_models, open_control
from registry import catalog, locks
from registry.catalog import INTERRUPTED, ModelRecord, PackFacts
from registry.errors import InvalidValue, RegistryError

REGISTER_COMMAND = (sys.executable, "-m", "engine.register")
DTYPES = ("auto", "float32", "bfloat16")
HEARTBEAT_S = 1.0
PACKS_LOCK_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
_MAX_REASON_LEN = 2000


class RegisterEvent(msgspec.Struct, frozen=True):
    """One line of the subprocess: progress, ready or refused. Unknown fields are passed over."""

    event: str
    source: str
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    pack_dir: str = ""
    revision: str = ""
    family: str = ""
    dtype: str = ""
    max_context: int = 0
    vocab_size: int = 0
    weight_bytes: int = 0
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a registration is, for whoever shows it."""

    model: str
    phase: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Run:
    """One subprocess and the rows it works for, by source."""

    control: Control
    on_progress: OnProgress
    waiting: dict[str, list[ModelRecord]] = field(default_factory=lambda: defaultdict(list))
    latest: dict[str, RegisterEvent] = field(default_factory=dict)


def begin(
    control: Control, name: str, source: str, dtype: str = "auto", pinned: bool = False
) -> ModelRecord:
    """Check the request and put the model into the catalog as `registering`, for this process.

    Follow with `run` or `run_detached`. Raises RegistryError.
    """
    folder = Path(source).expanduser().resolve()
    if not folder.is_dir():
        if not folder.exists() and source.count("/") == 1 and not source.startswith((".", "/")):
            raise InvalidValue(
                f"there is no folder {source!r}, and models cannot be fetched from a hub yet: "
                "download the model and give its folder"
            )
        raise InvalidValue(f"{source} is not a folder: give the one with config.json in it")
    if dtype not in DTYPES:
        raise InvalidValue(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    list_models(control)  # a name whose registration died is free again
    with control.writing() as session:
        return catalog.add_model(
            session,
            name,
            str(folder),
            dtype=dtype,
            pinned=pinned,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=control.clock(),
        )


def run(
    control: Control,
    models: Sequence[ModelRecord],
    on_progress: OnProgress = lambda progress: None,
    command: Sequence[str] | None = None,
) -> list[ModelRecord]:
    """Register models that `begin` returned; one subprocess for each dtype. Blocks until done.

    Returns the rows as they are afterwards: ready, failed, or whatever another hand made of them.
    When interrupted (KeyboardInterrupt) the subprocess is stopped and the rows fail.
    """
    by_dtype: dict[str, list[ModelRecord]] = defaultdict(list)
    for model in models:
        by_dtype[model.requested_dtype].append(model)
    try:
        for dtype, group in by_dtype.items():
            _run_group(control, dtype, group, on_progress, command or REGISTER_COMMAND)
    except BaseException as error:
        reason = f"the registration was stopped ({type(error).__name__}): add the model again"
        _fail(control, models, INTERRUPTED, reason)
        raise
    with control.reading() as session:
        found = [catalog.find_model(session, model.name) for model in models]
    return [model for model in found if model is not None]


def run_detached(control: Control, model: ModelRecord) -> None:
    """Hand a registration that `begin` made to a background process, and return.

    The launcher forks and leaves at once, so that the registration is nobody's child: it lives on
    when this process and its terminal are gone. Output goes to `<data_dir>/logs`.
    """
    module = [sys.executable, "-m", "gateway.registrar"]
    launched = subprocess.run(
        [*module, "--data-dir", str(control.data_dir), model.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    if launched.returncode:
        reason = launched.stderr.strip() or f"exit status {launched.returncode}"
        _fail(control, [model], "not_started", reason)
        raise RegistryError(f"the registration could not be started: {reason}")


def _run_group(
    control: Control,
    dtype: str,
    models: Sequence[ModelRecord],
    on_progress: OnProgress,
    command: Sequence[str],
) -> None:
    job = _Run(control, on_progress)
    for model in models:
        job.waiting[model.source].append(model)
    arguments = [*command, "--dest", str(control.packs_dir), "--dtype", dtype]
    for source in job.waiting:
        arguments += ["--source", source]
    control.packs_dir.mkdir(parents=True, exist_ok=True)
    lock_path = control.data_dir / locks.PACKS_LOCK
    with (
        locks.hold(lock_path, shared=True, timeout_s=PACKS_LOCK_TIMEOUT_S) as lock,
        tempfile.TemporaryFile() as errors,
    ):
        with _subprocess(arguments, errors, lock) as process:
            _relay(job, process)
        if job.waiting:
            status = process.returncode
            reason = _last_line(errors) or f"the registering process ended with status {status}"
            for rows in job.waiting.values():
                _fail(control, rows, "crashed", reason)


def _relay(job: _Run, process: subprocess.Popen[bytes]) -> None:
    """Handle events until the subprocess has closed its output; beat once a second meanwhile."""
    events: queue.SimpleQueue[RegisterEvent | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_events, args=(process.stdout, events), daemon=True)
    reader.start()
    next_beat = 0.0
    while True:
        try:
            event = events.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            pass
        else:
            if event is None:
                break
            changed_phase = _handle(job, event)
            next_beat = 0.0 if changed_phase else next_beat
        if time.monotonic() >= next_beat:
            _beat(job)
            next_beat = time.monotonic() + HEARTBEAT_S
            if not job.waiting:
                break
    if not job.waiting:
        # All is said, or other hands removed the rows: what it might still do is of no use.
        _stop(process)
    reader.join()


def _read_events(stream: IO[bytes], events: queue.SimpleQueue[RegisterEvent | None]) -> None:
    """Thread: lines to events. A line that is no event (a library's print) is passed over."""
    decoder = msgspec.json.Decoder(RegisterEvent)
    for line in stream:
        try:
            events.put(decoder.decode(line))
        except msgspec.DecodeError:
            continue
    events.put(None)


def _handle(job: _Run, event: RegisterEvent) -> bool:
    """Apply one event; True if it is worth writing down at once."""
    rows = job.waiting.get(event.source, [])
    if event.event == "progress" and rows:
        before = job.latest.get(event.source)
        job.latest[event.source] = event
        for row in rows:
            job.on_progress(Progress(row.name, event.phase, event.done_bytes, event.total_bytes))
        return before is None or before.phase != event.phase
    if event.event == "ready":
        pack = Path(event.pack_dir)
        facts = PackFacts(
            revision=event.revision,
            pack=pack.name,
            family=event.family,
            dtype=event.dtype,
            weight_bytes=event.weight_bytes,
            max_context=event.max_context,
            vocab_size=event.vocab_size,
        )
        for row in job.waiting.pop(event.source, []):
            with job.control.writing() as session:
                catalog.finish(session, row.registration, facts, now_at=job.control.clock())
            job.on_progress(Progress(row.name, "ready", event.weight_bytes, event.weight_bytes))
    if event.event == "refused":
        _fail(job.control, job.waiting.pop(event.source, []), event.code, event.message)
    return False


def _beat(job: _Run) -> None:
    """Write progress and heartbeat; rows that are no longer ours are given up."""
    for source, rows in list(job.waiting.items()):
        event = job.latest.get(source) or RegisterEvent("progress", source, phase="start")
        with job.control.writing() as session:
            kept = [
                row
                for row in rows
                if catalog.progress(
                    session,
                    row.registration,
                    event.phase[:32],
                    event.done_bytes,
                    event.total_bytes,
                    now_at=job.control.clock(),
                )
            ]
        if kept:
            job.waiting[source] = kept
        else:
            del job.waiting[source]


def _fail(control: Control, rows: Iterable[ModelRecord], code: str, reason: str) -> None:
    for row in rows:
        with control.writing() as session:
            catalog.fail(
                session, row.registration, code, reason[:_MAX_REASON_LEN], now_at=control.clock()
            )


@contextmanager
def _subprocess(
    arguments: Sequence[str], errors: IO[bytes], lock: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The subprocess, surely ended when the block is left."""
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        pass_fds=(lock,),
    ) as process:
        try:
            yield process
            process.wait()
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The background process of `--no-wait`: fork, let the parent return, register in the child."""
    parser = argparse.ArgumentParser(prog="python -m gateway.registrar")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("name")
    options = parser.parse_args(argv)
    settings = load_settings(overrides={"data_dir": options.data_dir})
    log = settings.data_path / "logs" / f"register-{options.name.replace('/', '--')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        # The row must name the child before this process is gone, or it would look interrupted.
        with open_control(settings, "registrar") as control:
            _adopt(control, options.name, child)
        return 0
    os.setsid()
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with open_control(settings, "registrar") as control:
        model = _adopt(control, options.name, os.getpid())
        ended = run(control, [model])
    return 0 if all(model.state == "ready" for model in ended) else 1


def _adopt(control: Control, name: str, pid: int) -> ModelRecord:
    with control.writing() as session:
        model = catalog.get_model(session, name)
        catalog.adopt(
            session, model.registration, socket.gethostname(), pid, now_at=control.clock()
        )
    return model


if __name__ == "__main__":
    sys.exit(main())
