"""Exports that somebody asked for: from the request to a file that is there for some days.

    waiting -> running | cancelled        running -> done | failed | cancelled
    failed  -> waiting

A job is worked on by some process (admin/exporting/export_runner.py) that writes its progress and
a heartbeat here under an `attempt` token; a job that was cancelled, or taken up anew, no longer
answers to the old token. A running job whose process died becomes failed ("interrupted") by the
hand of whoever looks next. Jobs and their files are removed some time after their end.

Not here: the files (admin/exporting/), who may see a job (admin/operations/export_jobs.py).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Double,
    Index,
    String,
    Text,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import (
    Base,
    Count,
    Id,
    Instant,
    JsonObject,
    Name,
    Nanos,
    OptionalInstant,
    random_token,
    record_of,
    values_of,
)
from registry.errors import AlreadyExists, IllegalTransition, NotFound
from registry.session import ACTOR_KEY

ExportState: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]

TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    "waiting": frozenset({"running", "cancelled"}),
    "running": frozenset({"done", "failed", "cancelled"}),
    "failed": frozenset({"waiting"}),
    "done": frozenset(),
    "cancelled": frozenset(),
}
INTERRUPTED = "interrupted"
HEARTBEAT_TIMEOUT_S = 30.0
CANCELLED_KEEP_S = 3600.0
"""How long the list still says so."""


@dataclass(frozen=True, slots=True)
class ExportJob:
    """One export. `asked` is all that its bytes depend on; `tenant_id` "": of all tenants.

    total_rows    how many rows it is about to have, 0 where nobody knows; num_rows: so far
    done_share    of the work, 0 to 1; share_per_s: how fast that grows now
    """

    id: str
    state: ExportState
    format: str
    tenant_id: str
    tenant_name: str
    asked: JsonObject
    file_name: str
    asked_by: str
    total_rows: int
    num_rows: int
    size_bytes: int
    cost_nanos: int
    sha256: str
    done_share: float
    share_per_s: float
    reason_code: str
    reason: str
    attempt: str
    runner_host: str
    runner_pid: int
    heartbeat_at: float | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float | None

    @property
    def is_going_on(self) -> bool:
        """Whether it is still to end."""
        return self.state in ("waiting", "running")

    @property
    def left_s(self) -> float | None:
        """How long it will take; None where nobody can tell."""
        if self.state != "running" or self.share_per_s <= 0:
            return None
        return max(0.0, 1.0 - self.done_share) / self.share_per_s


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an attempt is."""

    num_rows: int = 0
    size_bytes: int = 0
    cost_nanos: int = 0
    done_share: float = 0.0
    share_per_s: float = 0.0


class ExportJobRow(Base):
    """See ExportJob."""

    __tablename__ = "export_jobs"
    __table_args__ = (
        CheckConstraint(f"state IN ({', '.join(map(repr, TRANSITIONS))})", name="state"),
        Index(None, "created_at"),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    format: Mapped[str] = mapped_column(String(16))
    tenant_id: Mapped[Id]
    tenant_name: Mapped[Name]
    asked: Mapped[JsonObject] = mapped_column(JSON)
    file_name: Mapped[str] = mapped_column(String(255))
    asked_by: Mapped[Name]
    total_rows: Mapped[Count]
    num_rows: Mapped[Count] = mapped_column(default=0)
    size_bytes: Mapped[Count] = mapped_column(default=0)
    cost_nanos: Mapped[Nanos] = mapped_column(default=0)
    sha256: Mapped[str] = mapped_column(String(64), default="")
    done_share: Mapped[float] = mapped_column(Double, default=0.0)
    share_per_s: Mapped[float] = mapped_column(Double, default=0.0)
    reason_code: Mapped[str] = mapped_column(String(64), default="")
    reason: Mapped[str] = mapped_column(Text, default="")
    attempt: Mapped[str] = mapped_column(String(32), default="")
    runner_host: Mapped[str] = mapped_column(String(255), default="")
    runner_pid: Mapped[Count] = mapped_column(default=0)
    heartbeat_at: Mapped[OptionalInstant]
    created_at: Mapped[Instant]
    started_at: Mapped[OptionalInstant]
    ended_at: Mapped[OptionalInstant]
    expires_at: Mapped[OptionalInstant]


def ask(
    session: Session,
    job_id: str,
    format_name: str,
    asked: JsonObject,
    *,
    tenant_id: str,
    tenant_name: str,
    file_name: str,
    asked_by: str,
    total_rows: int,
    now_at: float,
) -> ExportJob:
    """A new job that waits. Raises AlreadyExists where there is one of that id."""
    if session.get(ExportJobRow, job_id) is not None:
        raise AlreadyExists("this export already exists")
    row = ExportJobRow(
        id=job_id,
        state="waiting",
        format=format_name,
        tenant_id=tenant_id,
        tenant_name=tenant_name,
        asked=asked,
        file_name=file_name,
        asked_by=asked_by,
        total_rows=total_rows,
        created_at=now_at,
    )
    session.add(row)
    session.flush()
    _note(session, now_at, "export.ask", job_id, _public(row))
    return _record(row)


def claim(
    session: Session, max_running: int, host: str, pid: int, *, now_at: float
) -> ExportJob | None:
    """The job that has waited longest becomes this process's; None where none waits, or as many
    run on this host as may. Only in a transaction that no other writer is beside."""
    running = ExportJobRow.state == "running"
    num = session.scalar(select(func.count()).where(running, ExportJobRow.runner_host == host))
    if (num or 0) >= max_running:
        return None
    waiting = select(ExportJobRow).where(
        ExportJobRow.state == "waiting", ExportJobRow.runner_host.in_(("", host))
    )
    row = session.scalar(waiting.order_by(ExportJobRow.created_at, ExportJobRow.id).limit(1))
    if row is None:
        return None
    row.state, row.attempt = "running", random_token(15)
    row.runner_host, row.runner_pid = host, pid
    row.started_at = row.heartbeat_at = now_at
    row.done_share = row.share_per_s = 0.0
    session.flush()
    return _record(row)


def progress(session: Session, attempt: str, so_far: Progress, *, now_at: float) -> bool:
    """Progress and heartbeat. False if the job is no longer this attempt's. Not audited."""
    row = _running(session, attempt)
    if row is None:
        return False
    _put(row, so_far)
    row.heartbeat_at = now_at
    return True


def finish(
    session: Session, attempt: str, written: Progress, sha256: str, *, keep_s: float, now_at: float
) -> bool:
    """The file is there. False if the job is no longer this attempt's."""
    row = _running(session, attempt)
    if row is None:
        return False
    _put(row, written)
    row.state, row.sha256, row.done_share, row.share_per_s = "done", sha256, 1.0, 0.0
    row.total_rows = written.num_rows
    row.ended_at, row.expires_at = now_at, now_at + keep_s
    return True


def fail(
    session: Session, attempt: str, code: str, reason: str, *, keep_s: float, now_at: float
) -> bool:
    """It ended badly. False if the job is no longer this attempt's."""
    row = _running(session, attempt)
    if row is None:
        return False
    row.state, row.reason_code, row.reason = "failed", code[:64], reason
    row.share_per_s, row.ended_at, row.expires_at = 0.0, now_at, now_at + keep_s
    return True


def fail_interrupted(
    session: Session, is_alive: Callable[[str, int], bool], *, keep_s: float, now_at: float
) -> list[str]:
    """Fail jobs whose process is gone. Returns their ids."""
    lost = [job for job in jobs(session, states=("running",)) if is_lost(job, is_alive, now_at)]
    for job in lost:
        reason = (
            "the export process stopped before the file was complete: retry to continue from there"
        )
        fail(session, job.attempt, INTERRUPTED, reason, keep_s=keep_s, now_at=now_at)
    return [job.id for job in lost]


def is_lost(job: ExportJob, is_alive: Callable[[str, int], bool], now_at: float) -> bool:
    """Whether it runs and nobody works on it."""
    silent = now_at - (job.heartbeat_at or 0.0) > HEARTBEAT_TIMEOUT_S
    return job.state == "running" and (silent or not is_alive(job.runner_host, job.runner_pid))


def cancel(session: Session, job_id: str, *, now_at: float) -> ExportJob:
    """It waits or works no more. Raises NotFound, IllegalTransition."""
    row = _moved(session, job_id, "cancelled", "it cannot be cancelled")
    row.ended_at, row.expires_at = now_at, now_at + CANCELLED_KEEP_S
    session.flush()
    _note(session, now_at, "export.cancel", job_id, _public(row), gone=True)
    return _record(row)


def retry(session: Session, job_id: str, *, now_at: float) -> ExportJob:
    """A failed one waits again: on the machine where its part is. Raises as `cancel`."""
    row = _moved(session, job_id, "waiting", "there is nothing to retry")
    row.reason_code = row.reason = ""
    row.ended_at = row.expires_at = None
    row.heartbeat_at = now_at
    session.flush()
    _note(session, now_at, "export.retry", job_id, _public(row))
    return _record(row)


def remove(session: Session, job_id: str, *, now_at: float) -> ExportJob:
    """Forget one that has ended. Raises NotFound, IllegalTransition."""
    job = get(session, job_id)
    if job.is_going_on:
        raise IllegalTransition(f"the export is {job.state}: cancel it first")
    session.execute(delete(ExportJobRow).where(ExportJobRow.id == job_id))
    _note(session, now_at, "export.remove", job_id, _shown(job), gone=True)
    return job


def remove_expired(session: Session, *, now_at: float) -> int:
    """Those whose time is over. Returns how many; their files are swept by who has the folder."""
    over = ExportJobRow.expires_at <= now_at
    found = session.scalars(delete(ExportJobRow).where(over).returning(ExportJobRow.id))
    return len(list(found))


def nudge(session: Session, before_at: float, host: str, *, now_at: float) -> bool:
    """Waiting jobs that nobody has looked after since then, and this machine may make, are looked
    after now; False where there are none, any more."""
    row = ExportJobRow
    since_at = func.coalesce(row.heartbeat_at, row.created_at)
    found = session.scalars(
        update(row)
        .where(row.state == "waiting", since_at < before_at, row.runner_host.in_(("", host)))
        .values(heartbeat_at=now_at)
        .returning(row.id)
        .execution_options(synchronize_session=False)
    )
    return bool(list(found))


def note_download(session: Session, job: ExportJob, *, now_at: float) -> None:
    """Somebody takes the file."""
    _note(session, now_at, "export.download", job.id, _shown(job))


def get(session: Session, job_id: str) -> ExportJob:
    """Raises NotFound."""
    return _record(_row(session, job_id, for_change=False))


def jobs(
    session: Session,
    *,
    states: Collection[str] = (),
    tenant_ids: Collection[str] | None = None,
    limit: int | None = None,
) -> Sequence[ExportJob]:
    """The newest first; of these tenants where some are named."""
    query = select(ExportJobRow).order_by(ExportJobRow.created_at.desc(), ExportJobRow.id)
    if states:
        query = query.where(ExportJobRow.state.in_(states))
    if tenant_ids is not None:
        query = query.where(ExportJobRow.tenant_id.in_(tenant_ids))
    if limit is not None:
        query = query.limit(limit)
    return [_record(row) for row in session.scalars(query)]


def num_jobs(session: Session, asked_by: str = "") -> int:
    """Of one who asked, or of all; cancelled ones are on their way out and count no more."""
    query = select(func.count()).select_from(ExportJobRow)
    query = query.where(ExportJobRow.state != "cancelled")
    if asked_by:
        query = query.where(ExportJobRow.asked_by == asked_by)
    return session.scalar(query) or 0


def _note(
    session: Session, now_at: float, action: str, job_id: str, shown: JsonObject, gone: bool = False
) -> None:
    """In the audit log. No gateway caches exports, so the registry's version stays."""
    actor = session.info.get(ACTOR_KEY, "unknown")
    before, after = (shown, None) if gone else (None, shown)
    audit.append(session, actor, action, job_id, before, after, now_at=now_at)


def _moved(session: Session, job_id: str, to: str, problem: str) -> ExportJobRow:
    row = _row(session, job_id)
    if to not in TRANSITIONS[row.state]:
        raise IllegalTransition(f"the export is {row.state}: {problem}")
    row.state = to
    return row


def _running(session: Session, attempt: str) -> ExportJobRow | None:
    mine = (ExportJobRow.attempt == attempt, ExportJobRow.state == "running")
    return session.scalar(select(ExportJobRow).where(*mine).with_for_update())


def _row(session: Session, job_id: str, for_change: bool = True) -> ExportJobRow:
    row = session.get(ExportJobRow, job_id, with_for_update=for_change or None)
    if row is None:
        raise NotFound("unknown export: it may have been removed or expired")
    return row


def _record(row: ExportJobRow) -> ExportJob:
    return record_of(ExportJob, row)


def _put(row: ExportJobRow, so_far: Progress) -> None:
    for field in fields(Progress):
        setattr(row, field.name, getattr(so_far, field.name))


def _shown(job: ExportJob) -> JsonObject:
    return {"format": job.format, "tenant_id": job.tenant_id, "file": job.file_name}


def _public(row: ExportJobRow) -> JsonObject:
    return _shown(_record(row)) | values_of(row, "asked", "asked_by")
