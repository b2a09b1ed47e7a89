"""Uploads: files that come in parts, each an object, until one request joins them.

    (nothing) -> pending -> completed       its parts have become a file
                 pending -> cancelled
                 pending -> expired         an hour after it was made

An upload's bytes are reserved under its id (`file_quota`) when it is made. Parts that are sent
again count as well, so that nobody stores more than the quota: `claim_part` reserves what goes
beyond, before a part's body is read. Whoever ends an upload finds it pending, in the statement that
ends it, and takes the rows of its parts; their objects go afterwards.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    Index,
    String,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Count, Id, Instant, OptionalInstant, record_of
from registry.errors import NotFound
from registry.state import file_quota, responses
from registry.state.file_quota import FileBounds, FileReservation
from registry.state.files import MAX_FILENAME_CHARS, FileViewer

UploadState: TypeAlias = Literal["pending", "completed", "cancelled", "expired"]
STATES: Final = ("pending", "completed", "cancelled", "expired")
KIND: Final = "parts"
"""Of the objects of parts."""
MAX_PARTS: Final = 10_000
KEEP_S: Final = 86_400.0
"""How long an upload can be asked for after its end."""


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """One upload. `size_bytes`: of the file that it is to become. `parts_bytes`: of all its parts,
    those that are being sent included. `file_expires_s`: after the file is made."""

    id: str
    tenant_id: str
    purpose: str
    filename: str
    size_bytes: int
    state: UploadState
    num_parts: int
    parts_bytes: int
    created_at: float
    expires_at: float
    file_expires_s: float | None = None
    file_id: str | None = None


@dataclass(frozen=True, slots=True)
class UploadPartRecord:
    """One part."""

    id: str
    upload_id: str
    size_bytes: int
    object_name: str
    created_at: float


class FileUpload(Base):
    """See UploadRecord."""

    __tablename__ = "uploads"
    __table_args__ = (
        CheckConstraint(f"state IN ({', '.join(map(repr, STATES))})", name="state"),
        Index(None, "expires_at"),
        Index(None, "tenant_id"),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(MAX_FILENAME_CHARS))
    size_bytes: Mapped[Count]
    state: Mapped[str] = mapped_column(String(16))
    num_parts: Mapped[Count]
    parts_bytes: Mapped[Count]
    created_at: Mapped[Instant]
    expires_at: Mapped[Instant]
    file_expires_s: Mapped[OptionalInstant]
    file_id: Mapped[str | None] = mapped_column(String(64))


class UploadPart(Base):
    """See UploadPartRecord."""

    __tablename__ = "upload_parts"
    __table_args__ = (Index(None, "upload_id"), Index(None, "object_name", unique=True))

    id: Mapped[Id] = mapped_column(primary_key=True)
    upload_id: Mapped[Id]
    size_bytes: Mapped[Count]
    object_name: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[Instant]


_table = FileUpload
_NAMES = tuple(UploadRecord.__dataclass_fields__)
_COLUMNS = tuple(getattr(_table, name) for name in _NAMES)
_PART_NAMES = tuple(UploadPartRecord.__dataclass_fields__)
_PART_COLUMNS = tuple(getattr(UploadPart, name) for name in _PART_NAMES)


def add(session: Session, record: UploadRecord, bounds: FileBounds) -> bool:
    """Store a pending one and reserve its bytes. False, changing nothing, where the tenant may not
    have so much more, or has `max_files` uploads already, those included that are remembered
    after their end."""
    file_quota.locked_usage(session, record.tenant_id)
    mine = select(func.count()).where(_table.tenant_id == record.tenant_id)
    if (session.scalar(mine) or 0) >= bounds.max_files:
        return False
    wanted = FileReservation(record.id, record.tenant_id, record.size_bytes, record.expires_at)
    if not file_quota.reserve(session, wanted, bounds):
        return False
    session.execute(insert(_table).values({name: getattr(record, name) for name in _NAMES}))
    return True


def get(session: Session, viewer: FileViewer, upload_id: str) -> UploadRecord:
    """Whatever its state. Raises NotFound."""
    row = None
    if responses.is_id(upload_id):
        query = select(*_COLUMNS).where(
            _table.id == upload_id,
            _table.tenant_id == viewer.tenant_id,
            _table.created_at >= viewer.since_at,
        )
        row = session.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"upload {upload_id[:80]!r} does not exist")
    return record_of(UploadRecord, row)


def claim_part(session: Session, upload_id: str, num_bytes: int, bounds: FileBounds) -> bool:
    """A part of at most so many bytes is to come. False where its upload has ended or has
    MAX_PARTS, or the tenant may not have so much more: the caller rolls back."""
    more = _table.num_parts < MAX_PARTS
    return _count(session, upload_id, 1, num_bytes, bounds, more)


def add_part(session: Session, part: UploadPartRecord, num_claimed: int) -> bool:
    """A part has come. `num_claimed`: what `claim_part` was asked for. False, changing nothing,
    where its upload has ended."""
    if not _count(session, part.upload_id, 0, part.size_bytes - num_claimed):
        return False
    values = {name: getattr(part, name) for name in _PART_NAMES}
    session.execute(insert(UploadPart).values(values))
    return True


def unclaim_part(session: Session, upload_id: str, num_claimed: int) -> None:
    """It has not come."""
    _count(session, upload_id, -1, -num_claimed)


def parts(session: Session, upload_id: str) -> dict[str, UploadPartRecord]:
    """By id."""
    query = select(*_PART_COLUMNS).where(UploadPart.upload_id == upload_id)
    return {row.id: record_of(UploadPartRecord, row) for row in session.execute(query)}


def end(
    session: Session, upload_id: str, state: UploadState, file_id: str | None = None
) -> Sequence[str] | None:
    """A pending upload ends; what is reserved stays, for the caller to settle or release. Returns
    the names of its parts' objects, for the caller to delete; None, changing nothing, where it has
    ended already."""
    mine = update(_table).where(*_pending(upload_id)).values(state=state, file_id=file_id)
    if session.connection().execute(mine).rowcount != 1:
        return None
    its = delete(UploadPart).where(UploadPart.upload_id == upload_id)
    return list(session.execute(its.returning(UploadPart.object_name)).scalars())


def expire(session: Session, now_at: float, *, limit: int) -> tuple[int, Sequence[str]]:
    """Pending uploads past their end expire, at most so many, but for those that somebody is at
    work on, and those that ended long ago are forgotten. Returns how many expired and the names of
    their parts' objects, for the caller to delete. Rows are locked in the order that all
    others keep: uploads, reservations, counts."""
    over = _table.expires_at <= now_at - KEEP_S, _table.state != "pending"
    session.execute(delete(_table).where(*over))
    late = select(_table.id).where(_table.expires_at <= now_at, _table.state == "pending")
    found = late.limit(limit).with_for_update(skip_locked=True)
    ids = session.execute(found).scalars().all()
    session.execute(update(_table).where(_table.id.in_(ids)).values(state="expired"))
    its = delete(UploadPart).where(UploadPart.upload_id.in_(ids))
    names = session.execute(its.returning(UploadPart.object_name)).scalars().all()
    file_quota.release_many(session, ids)
    return len(ids), names


def has_parts(session: Session) -> bool:
    """Whether there are parts of uploads."""
    return session.scalar(select(UploadPart.id).limit(1)) is not None


def without_row(session: Session, object_names: Collection[str]) -> set[str]:
    """Those of these names, a few hundred, that no row of a part has."""
    query = select(UploadPart.object_name).where(UploadPart.object_name.in_(object_names))
    return set(object_names) - set(session.execute(query).scalars())


def _count(
    session: Session,
    upload_id: str,
    num_parts: int,
    num_bytes: int,
    bounds: FileBounds | None = None,
    *only: ColumnElement[bool],
) -> bool:
    """So many more parts and bytes of them; what is reserved follows. False where the upload is
    not pending, or the tenant may not have so much."""
    mine = update(_table).where(*_pending(upload_id), *only)
    counted = mine.values(
        num_parts=_table.num_parts + num_parts, parts_bytes=_table.parts_bytes + num_bytes
    )
    row = session.execute(counted.returning(_table.size_bytes, _table.parts_bytes)).one_or_none()
    if row is None:
        return False
    return file_quota.resize(session, upload_id, max(row.size_bytes, row.parts_bytes), bounds)


def _pending(upload_id: str) -> tuple[ColumnElement[bool], ...]:
    return _table.id == upload_id, _table.state == "pending"
