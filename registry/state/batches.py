"""Batches: files of requests that are answered within a day, and how far each of them has come.

    validating  -> in_progress | failed | cancelling      its file is read once
    in_progress -> finalizing | cancelling                its lines are answered
    cancelling  -> finalizing                             nothing more is begun
    finalizing  -> completed | expired | cancelled        its segments become files

A batch that has not ended is held by one gateway process at a time: who claims it draws a token,
and every later statement names it, so that a process that was silent for too long and comes back
changes nothing. What is done is written segment by segment: the rows of a segment's objects, the
bitmap of answered lines and the counts, in one transaction. So a line is in a segment, and counted,
exactly if its bit is set, and whoever holds the batch next answers the others.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import (
    JSON,
    CheckConstraint,
    ColumnElement,
    Index,
    LargeBinary,
    String,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, aliased, mapped_column

from registry.accounts.tenants import Tenant
from registry.base import Base, Count, Id, Instant, Name, OptionalInstant, record_of
from registry.errors import NotFound
from registry.state import file_quota, responses
from registry.state.files import FileViewer

BatchState: TypeAlias = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]
ACTIVE: Final = ("validating", "in_progress", "finalizing", "cancelling")
ENDED: Final = ("completed", "failed", "expired", "cancelled")
KIND: Final = "segments"
"""Of the objects of segments."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. `answered`: a bit for each line of the file, the first in the lowest bit of the
    first byte. `ends_as`: what it is when it is finalized. `error_lines`: what is wrong with its
    file. `details`: the caller's metadata. `output_expires_s`: of its output files."""

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    model: str
    input_file_id: str
    state: BatchState
    details: dict[str, str]
    created_at: float
    expires_at: float
    output_expires_s: float | None = None
    ends_as: str = ""
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    answered: bytes = b""
    error_lines: Sequence[dict[str, Any]] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Lines of a batch that were answered together. `has_errors`: for the error file."""

    id: str
    batch_id: str
    has_errors: bool
    object_name: str
    size_bytes: int


class Batch(Base):
    """See BatchRecord. `token`, `heartbeat_at`: of whoever holds it."""

    __tablename__ = "batches"
    __table_args__ = (
        CheckConstraint(f"state IN ({', '.join(map(repr, ACTIVE + ENDED))})", name="state"),
        Index(None, "tenant_id", "created_at", "id"),
        Index(None, "state"),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    key_id: Mapped[Id]
    endpoint: Mapped[str] = mapped_column(String(64))
    model: Mapped[Name]
    input_file_id: Mapped[Id]
    state: Mapped[str] = mapped_column(String(16))
    details: Mapped[dict[str, str]] = mapped_column(JSON)
    created_at: Mapped[Instant]
    expires_at: Mapped[Instant]
    output_expires_s: Mapped[OptionalInstant]
    ends_as: Mapped[str] = mapped_column(String(16))
    num_lines: Mapped[Count]
    num_completed: Mapped[Count]
    num_failed: Mapped[Count]
    answered: Mapped[bytes] = mapped_column(LargeBinary)
    error_lines: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))
    in_progress_at: Mapped[OptionalInstant]
    finalizing_at: Mapped[OptionalInstant]
    cancelling_at: Mapped[OptionalInstant]
    ended_at: Mapped[OptionalInstant]
    token: Mapped[str] = mapped_column(String(64), default="")
    heartbeat_at: Mapped[OptionalInstant]


class BatchSegment(Base):
    """See SegmentRecord."""

    __tablename__ = "batch_segments"
    __table_args__ = (Index(None, "batch_id"), Index(None, "object_name", unique=True))

    id: Mapped[Id] = mapped_column(primary_key=True)
    batch_id: Mapped[Id]
    has_errors: Mapped[bool]
    object_name: Mapped[str] = mapped_column(String(200))
    size_bytes: Mapped[Count]


_table = Batch
_NAMES = tuple(BatchRecord.__dataclass_fields__)
_COLUMNS = tuple(getattr(_table, name) for name in _NAMES)
_SEGMENT_NAMES = tuple(SegmentRecord.__dataclass_fields__)
_SEGMENT_COLUMNS = tuple(getattr(BatchSegment, name) for name in _SEGMENT_NAMES)


def add(session: Session, record: BatchRecord, max_active: int, max_ended: int) -> bool:
    """Store a row, and forget the tenant's oldest that have ended, beyond so many. False, changing
    nothing, where its tenant has so many that have not ended. One batch of a tenant is added at a
    time, so that two at once do not both find room."""
    file_quota.locked_usage(session, record.tenant_id)
    mine = _table.tenant_id == record.tenant_id
    active = select(func.count()).where(mine, _table.state.in_(ACTIVE))
    if (session.execute(active).scalar() or 0) >= max_active:
        return False
    ended = select(_table.id).where(mine, _table.state.in_(ENDED))
    old = ended.order_by(_table.created_at.desc(), _table.id.desc()).offset(max_ended)
    session.execute(delete(_table).where(_table.id.in_(old)))
    values = {name: getattr(record, name) for name in _NAMES}
    session.execute(insert(_table).values(values))
    return True


def get(session: Session, viewer: FileViewer, batch_id: str) -> BatchRecord:
    """Raises NotFound."""
    row = None
    if responses.is_id(batch_id):
        query = select(*_COLUMNS).where(_table.id == batch_id, *_visible(viewer))
        row = session.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"batch {batch_id[:80]!r} does not exist")
    return record_of(BatchRecord, row)


def listed(session: Session, viewer: FileViewer, *, limit: int, after: str) -> list[BatchRecord]:
    """The newest first, behind the batch `after` if it is given. Raises NotFound where that is not
    there."""
    query = select(*_COLUMNS).where(*_visible(viewer))
    if after:
        at = get(session, viewer, after)
        same = _table.created_at == at.created_at
        query = query.where(or_(_table.created_at < at.created_at, same & (_table.id < at.id)))
    ordered = query.order_by(_table.created_at.desc(), _table.id.desc()).limit(limit)
    return [record_of(BatchRecord, row) for row in session.execute(ordered)]


def input_files(session: Session) -> set[str]:
    """Ids of the files that batches are still to read."""
    query = select(_table.input_file_id).where(_table.state.in_(ACTIVE))
    return set(session.execute(query).scalars())


def is_input(session: Session, tenant_id: str, file_id: str) -> bool:
    """Whether a batch of this tenant is still to read the file."""
    mine = _table.tenant_id == tenant_id, _table.input_file_id == file_id
    query = select(_table.id).where(*mine, _table.state.in_(ACTIVE)).limit(1)
    return session.execute(query).first() is not None


def cancel(session: Session, viewer: FileViewer, batch_id: str, now_at: float) -> BatchRecord:
    """Nothing more of it is begun; one that is finalized or has ended stays as it is. Raises
    NotFound."""
    get(session, viewer, batch_id)
    mine = update(_table).where(
        _table.id == batch_id, _table.state.in_(("validating", "in_progress"))
    )
    session.execute(mine.values(state="cancelling", cancelling_at=now_at))
    return get(session, viewer, batch_id)


def claim(
    session: Session,
    token: str,
    now_at: float,
    *,
    lost_at: float,
    without: Collection[str],
    without_tenants: Collection[str] = (),
) -> BatchRecord | None:
    """A batch that has not ended, that nobody has said to hold since `lost_at`, and that is not one
    of `without`, nor of one of these tenants, becomes this token's: the oldest of the tenant of
    which the fewest are held. None: there is none."""
    free = _free(lost_at, without, without_tenants)
    held = aliased(_table)
    of_tenant = held.tenant_id == _table.tenant_id, held.state.in_(ACTIVE)
    num_held = select(func.count()).where(*of_tenant, held.heartbeat_at >= lost_at)
    order = num_held.correlate(_table).scalar_subquery(), _table.created_at
    query = select(_table.id).where(*free).order_by(*order).limit(1)
    batch_id = session.execute(query).scalar()
    if batch_id is None:
        return None
    mine = update(_table).where(_table.id == batch_id, *free)
    taken = session.execute(mine.values(token=token, heartbeat_at=now_at).returning(*_COLUMNS))
    row = taken.one_or_none()
    return None if row is None else record_of(BatchRecord, row)


def has_free(
    session: Session,
    lost_at: float,
    without: Collection[str],
    without_tenants: Collection[str] = (),
) -> bool:
    """Whether there is anything for `claim`."""
    query = select(_table.id).where(*_free(lost_at, without, without_tenants)).limit(1)
    return session.execute(query).first() is not None


def beat(session: Session, batch_id: str, token: str, now_at: float) -> BatchState | None:
    """Whoever has the token holds it still. Returns its state; None: it is another's now, or
    gone."""
    mine = update(_table).where(*_held(batch_id, token)).values(heartbeat_at=now_at)
    state: BatchState | None = session.execute(mine.returning(_table.state)).scalar()  # type: ignore[assignment]
    return state


def release(session: Session, batch_id: str, token: str) -> None:
    """Whoever has the token gives it up, for the next who claims it."""
    session.execute(update(_table).where(*_held(batch_id, token)).values(heartbeat_at=None))


def release_all(session: Session, prefix: str) -> None:
    """Whoever drew tokens that begin so is dead: what they hold is for the next who claims it."""
    mine = update(_table).where(_table.state.in_(ACTIVE), _table.token.startswith(prefix))
    session.execute(mine.values(heartbeat_at=None))


def change(
    session: Session, batch_id: str, token: str, states: Collection[str], **values: Any
) -> bool:
    """Set columns of a batch in one of these states. False, changing nothing, where it is in
    another, or another's."""
    mine = update(_table).where(*_held(batch_id, token), _table.state.in_(states))
    return session.connection().execute(mine.values(**values)).rowcount == 1


def add_segments(session: Session, segments: Sequence[SegmentRecord]) -> None:
    """In the transaction that says which lines are in them."""
    for each in segments:
        values = {name: getattr(each, name) for name in _SEGMENT_NAMES}
        session.execute(insert(BatchSegment).values(values))


def segments(session: Session, batch_id: str) -> list[SegmentRecord]:
    """Of a batch, in the order of their ids."""
    query = select(*_SEGMENT_COLUMNS).where(BatchSegment.batch_id == batch_id)
    found = session.execute(query.order_by(BatchSegment.id))
    return [record_of(SegmentRecord, row) for row in found]


def remove_segments(session: Session, batch_id: str) -> Sequence[str]:
    """Returns the names of their objects, for the caller to delete."""
    its = delete(BatchSegment).where(BatchSegment.batch_id == batch_id)
    return list(session.execute(its.returning(BatchSegment.object_name)).scalars())


def remove_before(session: Session, before_at: float) -> int:
    """Forget batches that ended and were made before then, and all that ended of tenants for whom
    nothing is stored. Returns how many."""
    keep_nothing = select(Tenant.id).where(Tenant.response_retention_days == 0)
    is_old = or_(_table.created_at < before_at, _table.tenant_id.in_(keep_nothing))
    old = delete(_table).where(is_old, _table.state.in_(ENDED))
    return session.connection().execute(old).rowcount


def has_segments(session: Session) -> bool:
    """Whether there are answers of batches that are not in files yet."""
    return session.scalar(select(BatchSegment.batch_id).limit(1)) is not None


def without_row(session: Session, object_names: Collection[str]) -> set[str]:
    """Those of these names, a few hundred, that no row of a segment has."""
    query = select(BatchSegment.object_name).where(BatchSegment.object_name.in_(object_names))
    return set(object_names) - set(session.execute(query).scalars())


def _visible(viewer: FileViewer) -> Iterable[ColumnElement[bool]]:
    yield _table.tenant_id == viewer.tenant_id
    yield _table.created_at >= viewer.since_at
    if viewer.models is not None:  # a batch has no model before its file is validated
        yield or_(_table.model.in_(viewer.models), _table.key_id == viewer.key_id)


def _free(
    lost_at: float, without: Collection[str], without_tenants: Collection[str]
) -> tuple[ColumnElement[bool], ...]:
    return (
        _table.state.in_(ACTIVE),
        or_(_table.heartbeat_at.is_(None), _table.heartbeat_at < lost_at),
        _table.id.not_in(without),
        _table.tenant_id.not_in(without_tenants),
    )


def _held(batch_id: str, token: str) -> tuple[ColumnElement[bool], ...]:
    return _table.id == batch_id, _table.token == token
