"""Makes exports that were asked for, one after the other, in a process of its own.

    python -m admin.exporting.export_runner      settings as JSON on standard input

Takes the job that has waited longest, writes its file, takes the next; ends when nothing waits or
as many run on this machine as may. It belongs to nobody: a gateway's restart, a sign-out or a
closed browser do not concern it. While it works, a thread writes how far it is, which is its
heartbeat too; from a job that is not its own any more (cancelled) it lets go within a second. The
file appears in its folder when it is whole, and is offered when the job says so after that. Killed,
it leaves a part; whoever looks next says so (admin/operations/export_jobs.py), and a retry goes on
with it.
"""

import errno
import hashlib
import logging
import os
import shutil
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from admin.billing import export_file, export_folders
from admin.billing.usage_export import order_from_json
from admin.context.data_folder import private_files
from admin.context.operator_context import OperatorContext, open_context
from admin.exporting import export_runner
from admin.operations import invoices
from admin.registration.policy.pace import Pace
from gateway.auth.directory import price_book
from gateway.settings.config import decode_settings
from registry.errors import NotFound, RegistryError
from registry.money import export_jobs, exports
from registry.money.export_jobs import ExportJob, Progress
from registry.session import appending

FORMS = ("pdf", "json")


def write(
    context: OperatorContext, path: Path, numbers: Sequence[str], watch: Callable[[int, int], None]
) -> tuple[int, str]:
    """A new file. Returns what they ask for together, in nano-units, and its SHA-256. `watch` is
    called after each with how many there are and what they ask for."""
    total_nanos = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, number in enumerate(numbers, 1):
            record, _ = invoices.get_invoice(context, number)
            for form in FORMS:
                entry = zipfile.ZipInfo(f"{_safe(number)}.{form}")
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, invoices.render_invoice(context, number, form))
            total_nanos += record.total_nanos
            watch(place, total_nanos)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return total_nanos, hashlib.file_digest(stream, "sha256").hexdigest()


def _safe(number: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in number)


BEAT_S = 0.5
NICENESS = 10
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_USE = frozenset({"disk_full", "io_error", "refused", "internal_error"})
"""Reasons after which a retry begins anew."""

logger = logging.getLogger(__name__)


class GivenUp(Exception):
    """The job is nobody's any more."""


class NoRoom(Exception):
    """Exports may take no more of the disk."""


class Beat:
    """How far the work is, written down now and then by a thread of its own."""

    def __init__(
        self,
        context: OperatorContext,
        job: ExportJob,
        path: Path,
        share: Callable[[int, str], float],
    ) -> None:
        self.so_far = Progress()
        self._operator = context
        self._job = job
        self._path = path
        self._share = share
        self._room_bytes = _room(context, job)
        self._pace = Pace()
        self._over = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="export-beat", daemon=True)

    def __enter__(self) -> "Beat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, num_rows: int, cost_nanos: int, token: str) -> None:
        """The work has come this far. Raises GivenUp, NoRoom."""
        if self._lost.is_set():
            raise GivenUp
        size = self._path.stat().st_size
        if size > self._room_bytes:
            raise NoRoom
        done = min(0.999, self._share(num_rows, token))
        self._pace = self._pace.seen(done, time.monotonic())
        self.so_far = Progress(num_rows, size, cost_nanos, done, self._pace.per_s)

    def _keep(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                if not self._write():
                    self._lost.set()
                    return
            except FileNotFoundError:  # swept by who cancelled it
                self._lost.set()
                return
            except SQLAlchemyError:  # the work itself will say what is wrong, or it passes
                logger.warning(
                    "export %s: cannot write its progress to the database",
                    self._job.id,
                    exc_info=True,
                )

    def _write(self) -> bool:
        self._room_bytes = _room(self._operator, self._job)  # others take of it too
        note = partial(export_jobs.progress, attempt=self._job.attempt, so_far=self.so_far)
        with appending(self._operator.engine, self._operator.actor) as session:
            return note(session, now_at=self._operator.clock())


def work_off(context: OperatorContext) -> int:
    """All that waits, as far as it is this process's to do. Returns how many it had."""
    num = 0
    host = socket.gethostname()
    while True:
        most = context.settings.max_exports_running
        with context.writing() as session:
            job = export_jobs.claim(session, most, host, os.getpid(), now_at=context.clock())
        if job is None:
            return num
        num += 1
        make(context, job)


def make(context: OperatorContext, job: ExportJob) -> None:
    """One job, to whatever end."""
    folder = export_folders.folder_of(context.data_dir, job.id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written, digest = _written(context, job)
        finish = partial(export_jobs.finish, attempt=job.attempt, written=written, sha256=digest)
        _end(context, finish)
    except GivenUp:
        pass
    except NoRoom:
        _fail(context, job, "disk_full", "no disk space left for exports: remove some, then retry")
    except RegistryError as error:
        _fail(context, job, "refused", str(error))
    except SQLAlchemyError as error:
        logger.error("export %s: %s", job.id, error)
        _fail(context, job, "database", "the database did not answer: retry to continue from here")
    except OSError as error:
        code = "disk_full" if error.errno in DISK_FULL else "io_error"
        _fail(context, job, code, f"{error.strerror}: free disk space, then retry")
    except Exception as error:  # the process's boundary: the others must still be made
        logger.exception("export %s failed", job.id)
        _fail(
            context,
            job,
            "internal_error",
            f"internal error {type(error).__name__}: see logs/exports.log in the data folder",
        )
    _clear(context, job, folder)


def _clear(context: OperatorContext, job: ExportJob, folder: Path) -> None:
    """Nothing of a job that is gone or was cancelled stays, and no part that nobody goes on with.
    Another attempt's is not touched."""
    with context.reading() as session:
        try:
            now = export_jobs.get(session, job.id)
        except NotFound:
            now = None
    mine = now is None or now.attempt == job.attempt
    if mine and (now is None or now.state == "cancelled" or now.reason_code in NO_USE):
        shutil.rmtree(folder, ignore_errors=True)


def _written(context: OperatorContext, job: ExportJob) -> tuple[Progress, str]:
    path = export_folders.file_of(context.data_dir, job)
    part = path.with_name(path.name + export_file.PART_SUFFIX)
    part.touch()
    if job.format == "invoices":
        numbers = [str(number) for number in job.asked["numbers"]]
        beating = Beat(context, job, part, lambda done, _: done / len(numbers))
        with export_file.alone(part), beating as beat:
            watch = partial(_watch_invoices, beat)
            nanos, digest = export_runner.write(context, part, numbers, watch)
            part.replace(path)
        return Progress(len(numbers), path.stat().st_size, nanos), digest
    order = order_from_json(job.asked)
    with context.reading() as session:
        share = _by_time(session, job) if job.format == "focus" else _by_rows(job)
        with Beat(context, job, part, share) as beat:
            proof = export_file.write_file(path, session, order, price_book(session), beat.watch)
    return Progress(proof.num_rows, proof.size_bytes, proof.cost_nanos), proof.sha256


def _watch_invoices(beat: Beat, num: int, nanos: int) -> None:
    beat.watch(num, nanos, "")


def _by_rows(job: ExportJob) -> Callable[[int, str], float]:
    return lambda num_rows, _: num_rows / max(1, job.total_rows, num_rows)


def _by_time(session: Session, job: ExportJob) -> Callable[[int, str], float]:
    """FOCUS has as many rows as it turns out to have: how many of its hours are written."""
    order = order_from_json(job.asked)
    first, last = exports.bounds(session, order.scope, order.through_seq) or (0.0, 1.0)

    def share(_: int, token: str) -> float:
        return (float(token.rpartition(":")[2]) - first) / max(3600.0, last - first + 3600.0)

    return share


def _room(context: OperatorContext, job: ExportJob) -> int:
    """How large its file may become; negative where the disk is full."""
    settings = context.settings
    folder = export_folders.folder_of(context.data_dir, job.id)
    free = shutil.disk_usage(folder).free - settings.exports_min_free_bytes
    if free < 0:
        return -1
    own = export_folders.size_bytes(folder)
    if settings.exports_quota_bytes:
        others = export_folders.used_bytes(context.data_dir) - own
        return min(free + own, settings.exports_quota_bytes - others)
    return free + own


def _fail(context: OperatorContext, job: ExportJob, code: str, reason: str) -> None:
    _end(context, partial(export_jobs.fail, attempt=job.attempt, code=code, reason=reason))


def _end(context: OperatorContext, end: Callable[..., bool]) -> bool:
    """False where the job was not this process's any more."""
    settings = context.settings
    with appending(context.engine, context.actor) as session:
        return end(session, keep_s=settings.exports_keep_s, now_at=context.clock())


@private_files()
def main() -> int:
    """Entry of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = decode_settings(sys.stdin.buffer.read())
    os.nice(NICENESS)  # requests come first
    with open_context(settings, "exporter") as context:
        work_off(context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
