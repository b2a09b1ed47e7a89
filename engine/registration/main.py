"""Registration as a process of its own: folders and hub ids in, checkpoint packs out.

    python -m engine.registration.main [--source FOLDER ...] [--hub REPO@REVISION ...] --dest
    PACKS_DIR [--downloads DIR] [--dtype auto] [--check | --inspect] [bounds]
    python -m engine.registration.main --search WORDS [--limit N] [--author A] [--task T] --dest DIR

On standard output, one JSON object a line: `progress` (phase "resolve", "wait", "preflight",
"download", "check", "probe" or "convert", bytes done and in all), for a hub id `resolved` with the
commit and what the hub says of the model, `described` with what its config.json calls it,
`preflight` with what it is and what it will take, and then for each source either `ready` or
`refused` with a stable code and a message for the operator. Exit status 0 only if every source is
ready. With --check nothing is registered: `checked` is said where a registration would begin its
work. --inspect asks whether a model could be hosted at all: the parity probe runs, and disk, quota
and arena do not matter. A search says `found` for each model (`search.py`). Whoever starts it needs
no torch.

Nothing large is fetched or written before the configuration and the list of files are known to be
safe, the sizes to fit, and the family to come out right. Every refusal removes what was fetched;
only an interruption ("network") leaves it for another try. SIGTERM ends the process like a
refusal, without a word; the death of `--parent-pid` ends it like kill -9, and whoever looks next
clears up (admin/context/registration_files.py).
"""

import argparse
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_args

import msgspec

from engine.errors import DownloadInterrupted, RegistrationRefused
from engine.pack import PackIndex
from engine.registration.blueprint import Blueprint
from engine.registration.convert import DtypeChoice, inspect, write_pack
from engine.registration.download import (
    check_listing,
    fetch,
    find_pack,
    folder_name,
    locked,
    note_origin,
    present_bytes,
    remove,
    small_files,
    weights,
)
from engine.registration.hub import Hub, HubLimits, check_repo
from engine.registration.hub_models import shown
from engine.registration.parity import probe_model
from engine.registration.preflight import Preflight, Room, check_arena, check_disk, judge, preflight
from engine.registration.quantize import QUANTIZATIONS
from engine.registration.search import DEFAULT_LIMIT, Search, search
from engine.registration.source import TOKENIZER_NAME, declared_of, describe
from engine.registration.staging import staged
from engine.registration.tokenizer_check import check_readable

PROGRESS_INTERVAL_S = 0.1
PARENT_POLL_S = 0.2
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """What holds for every source of the process."""

    dest: Path
    downloads: Path
    dtype: DtypeChoice = "auto"
    room: Room = field(default_factory=Room)
    limits: HubLimits = field(default_factory=HubLimits)
    only_check: bool = False
    only_inspect: bool = False


class Checked(Exception):
    """What was asked for is known; nothing is registered. `parity_error`: where it was probed."""

    def __init__(self, parity_error: float | None = None) -> None:
        super().__init__("checked")
        self.parity_error = parity_error


@dataclass(frozen=True, slots=True)
class Registered:
    """A pack that may be served."""

    pack_dir: Path
    index: PackIndex
    parity_error: float | None


class Reporter:
    """Events of one source; progress at most every PROGRESS_INTERVAL_S, phases' ends always."""

    def __init__(self, source: str, out: TextIO) -> None:
        self._source = source
        self._out = out
        self._last_s = 0.0
        self._phase = ""

    def progress(self, phase: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """How far a phase is."""
        now_s = time.monotonic()
        due = now_s - self._last_s >= PROGRESS_INTERVAL_S or phase != self._phase
        if due or done_bytes >= total_bytes:
            self._last_s = now_s
            self._phase = phase
            self.event("progress", phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)

    def event(self, event: str, **fields: Any) -> None:
        """One line."""
        said = {"event": event, "source": self._source, **fields}
        try:
            line = msgspec.json.encode(said)
        except UnicodeEncodeError:  # half a letter in a file's name, or quoted from a file
            whole = {key: _whole_letters(value) for key, value in said.items()}
            line = msgspec.json.encode(whole)
        try:
            self._out.write(line.decode() + "\n")
            self._out.flush()
        except BrokenPipeError:
            # Whoever started this is dead, and what was fetched is for its retry: as in `_obey`.
            os._exit(1)


def _whole_letters(value: Any) -> Any:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def register(source: str, is_hub: bool, job: Registration, out: TextIO) -> bool:
    """Register one folder or hub id; True if it is ready. Every outcome is reported."""
    report = Reporter(source, out)

    def work() -> None:
        if is_hub:
            done = _from_hub(source, job, report)
        else:
            done = _from_own_folder(Path(source).expanduser(), job, report)
        _report_ready(done, report)

    return _ended_well(source, work, report)


def find(wanted: Search, limits: HubLimits, out: TextIO) -> bool:
    """Search a hub; True if it answered. Every outcome is reported."""
    report = Reporter(wanted.words, out)
    return _ended_well(wanted.words, lambda: search(wanted, limits, report.event), report)


def _ended_well(source: str, work: Callable[[], None], report: Reporter) -> bool:
    """Whether it did; what it was refused for is reported."""
    try:
        work()
    except Checked as checked:
        report.event("checked", parity_error=checked.parity_error)
    except RegistrationRefused as refusal:
        report.event("refused", code=refusal.code, message=str(refusal))
        return False
    except OSError as error:
        code = "disk_full" if error.errno in DISK_FULL else "io_error"
        advice = ": free disk space and try again" if code == "disk_full" else ""
        report.event("refused", code=code, message=f"{source}: {error}{advice}")
        return False
    except Exception as error:  # the process's boundary: one bad folder must not hide the others
        logger.exception("registration of %s failed", source)
        message = f"unexpected {type(error).__name__}: {error} (a bug; see logs/register.log)"
        report.event("refused", code="internal_error", message=message)
        return False
    return True


def _report_ready(done: Registered, report: Reporter) -> None:
    index = done.index
    report.event(
        "ready",
        pack_dir=str(done.pack_dir),
        revision=index.revision,
        family=index.family,
        max_context=index.max_context,
        vocab_size=index.vocab_size,
        weight_bytes=index.total_bytes,
        dtype=index.quantization or index.dtype,
        parity_error=done.parity_error,
        task=index.task,
        dim=index.encoder.dim if index.encoder else 0,
        labels=index.encoder.labels if index.encoder else (),
        multi_label=index.encoder.multi_label if index.encoder else False,
    )


def _probe(plan: Blueprint, dtype: DtypeChoice) -> float:
    return probe_model(plan, dtype if dtype in QUANTIZATIONS else "")


def _from_own_folder(source: Path, job: Registration, report: Reporter) -> Registered:
    with staged(source, job.dest) as folder:
        return _from_folder(folder, source, job, report)


def _from_folder(folder: Path, source: Path, job: Registration, report: Reporter) -> Registered:
    _describe(folder, report)
    candidate = inspect(folder)
    check_readable(folder / TOKENIZER_NAME)
    size = sum(path.stat().st_size for path in candidate.files)
    plan, declared = candidate.blueprint, candidate.declared
    found = preflight(plan, job.dtype, size, 0, job.dest, job.room, declared)
    _report_preflight(found, plan, job, report)
    check_arena(found, str(source), job.room)
    if job.only_check:
        check_disk(found, str(source), job.room)
        raise Checked
    report.progress("probe")
    parity_error = _probe(candidate.blueprint, job.dtype)

    checked = False

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal checked
        if phase == "convert" and not checked:
            # Only now is it known that the pack is not there yet and takes room.
            check_disk(found, str(source), job.room)
            checked = True
        report.progress(phase, done, total)

    pack_dir, index = write_pack(candidate, job.dest, job.dtype, progress)
    return Registered(pack_dir, index, parity_error)


def _from_hub(source: str, job: Registration, report: Reporter) -> Registered:
    repo, _, revision = source.partition("@")
    check_repo(repo)
    report.progress("resolve")
    hub = Hub(job.limits)
    try:
        commit, model = hub.commit(repo, revision)
    except DownloadInterrupted as error:
        raise RegistrationRefused("network", f"{error}: try again later") from error
    report.event("resolved", commit=commit, hub=shown(model))
    folder = job.downloads / folder_name(repo, commit)
    with locked(folder, lambda: report.progress("wait")):
        keep = False
        try:
            made = _known(repo, commit, job)
            return made or _downloaded(hub, repo, commit, folder, job, report)
        except DownloadInterrupted as error:
            keep = any(folder.iterdir())
            then = "the downloaded part is kept: try again" if keep else "try again later"
            raise RegistrationRefused("network", f"{error}: {then}") from error
        except RegistrationRefused as refusal:
            # The folder is gone when the operator reads this.
            message = str(refusal).replace(str(folder), f"{repo}@{commit[:12]}")
            raise RegistrationRefused(refusal.code, message) from refusal
        finally:
            if not keep:
                remove(folder)


def _known(repo: str, commit: str, job: Registration) -> Registered | None:
    """The pack that this commit has become before; it was probed then."""
    found = find_pack(job.dest, repo, commit, job.dtype)
    return None if found is None else Registered(*found, parity_error=None)


def _downloaded(
    hub: Hub, repo: str, commit: str, folder: Path, job: Registration, report: Reporter
) -> Registered:
    label = f"{repo}@{commit[:12]}"
    report.progress("preflight")
    files = hub.files(repo, commit)
    check_listing(label, files)
    small = small_files(label, files)
    fetch(hub, repo, commit, small, folder, lambda done, total: None)
    _describe(folder, report)
    plan = judge(folder)
    check_readable(folder / TOKENIZER_NAME)
    chosen = weights(label, files, folder)
    size = sum(file.size for file in chosen)
    missing = size - present_bytes(chosen, folder)
    declared = declared_of(folder)
    found = preflight(plan, job.dtype, size, missing, job.dest, job.room, declared)
    _report_preflight(found, plan, job, report)
    check_arena(found, label, job.room)
    check_disk(found, label, job.room)
    if job.only_check:
        raise Checked
    report.progress("probe")
    parity_error = _probe(plan, job.dtype)
    fetch(hub, repo, commit, chosen, folder, lambda *done: report.progress("download", *done))
    pack_dir, index = write_pack(inspect(folder), job.dest, job.dtype, report.progress)
    note_origin(pack_dir, repo, commit, job.dtype)
    return Registered(pack_dir, index, parity_error)


def _describe(folder: Path, report: Reporter) -> None:
    """Also of a model that will be refused: what its files call it."""
    if described := describe(folder):
        report.event("described", **described)


def _report_preflight(
    found: Preflight, plan: Blueprint, job: Registration, report: Reporter
) -> None:
    """Raises Checked where only an inspection is asked for."""
    report.event("preflight", **asdict(found))
    if job.only_inspect:
        report.progress("probe")
        raise Checked(probe_model(plan))


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Entry of the process."""
    patience = HubLimits()
    parser = argparse.ArgumentParser(prog="python -m engine.registration.main", description=__doc__)
    parser.add_argument("--source", action="append", default=[], help="model folder")
    parser.add_argument("--hub", action="append", default=[], metavar="REPO@REVISION")
    parser.add_argument("--dest", type=Path, required=True, help="folder for packs")
    parser.add_argument("--downloads", type=Path, help="folder for what is fetched")
    parser.add_argument("--dtype", choices=get_args(DtypeChoice), default="auto")
    parser.add_argument("--check", action="store_true", help="tell what it takes, do nothing")
    parser.add_argument("--inspect", action="store_true", help="tell what it is, do nothing")
    parser.add_argument("--search", metavar="WORDS", help="find models on the hub, do nothing else")
    parser.add_argument("--limit", type=int, default=DEFAULT_LIMIT, help="models of a search")
    parser.add_argument("--author", default="", help="whose models are searched")
    parser.add_argument("--task", default="", help="the hub's pipeline tag")
    parser.add_argument("--quota-bytes", type=int, default=0, help="packs and downloads together")
    parser.add_argument("--arena-bytes", type=int, default=0, help="the worker's; 0: not known")
    parser.add_argument("--timeout-s", type=float, default=patience.timeout_s)
    parser.add_argument("--attempts", type=int, default=patience.attempts)
    parser.add_argument("--pause-s", type=float, default=patience.pause_s)
    parser.add_argument("--parent-pid", type=int, default=0, help="end when it is gone")
    options = parser.parse_args(arguments)
    if options.parent_pid:
        _obey(options.parent_pid)
    dest = options.dest.expanduser().absolute()
    downloads = (options.downloads or dest.with_name("downloads")).expanduser().absolute()
    limits = HubLimits(
        timeout_s=options.timeout_s, attempts=options.attempts, pause_s=options.pause_s
    )
    room = Room((dest, downloads), options.quota_bytes, options.arena_bytes)
    if options.search is not None:
        wanted = Search(options.search, options.limit, options.author, options.task)
        return 0 if find(wanted, limits, out) else 1
    only = options.check, options.inspect
    job = Registration(dest, downloads, options.dtype, room, limits, *only)
    ready = [register(source, False, job, out) for source in options.source]
    ready += [register(source, True, job, out) for source in options.hub]
    return 0 if all(ready) else 1


def _obey(parent_pid: int) -> None:
    """Clean up on SIGTERM; end at once when the parent is gone."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
