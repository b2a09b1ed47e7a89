"""Files of tenants: whose they are, until when they are kept, and which object has their bytes.

A row makes a file exist. Its object is written before it and deleted after it
(gateway/files/file_store.py), and `file_quota` counts its bytes in the same transaction. A row does
not change.

Every query of a tenant's file is `_visible`: of this tenant, not expired, and not older than files
are kept. What fails any of these is missing, in the same words. How long files are kept is decided
when they are read, so a shorter time holds at once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Index, Row, String, delete, insert, or_, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.accounts.tenants import Tenant
from registry.base import Base, Count, Id, Instant, record_of
from registry.errors import NotFound
from registry.state import file_quota, responses

KIND: Final = "files"
"""Of their objects."""
MAX_FILENAME_CHARS: Final = 255


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. `filename`: what its owner calls it."""

    id: str
    tenant_id: str
    purpose: str
    filename: str
    size_bytes: int
    sha256: str
    object_name: str
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class FileViewer:
    """Who asks, and when. `since_at`: what is older is not kept. Of batches, `models` None: all;
    otherwise those of these models and of the key `key_id` itself."""

    tenant_id: str
    now_at: float
    since_at: float
    key_id: str = ""
    models: frozenset[str] | None = None


class StoredFile(Base):
    """See FileRecord."""

    __tablename__ = "files"
    __table_args__ = (
        Index(None, "tenant_id", "created_at", "id"),
        Index(None, "expires_at"),
        Index(None, "object_name", unique=True),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(MAX_FILENAME_CHARS))
    size_bytes: Mapped[Count]
    sha256: Mapped[str] = mapped_column(String(64))
    object_name: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[Instant]
    expires_at: Mapped[Instant]


_table = StoredFile
_NAMES = tuple(FileRecord.__dataclass_fields__)
_COLUMNS = tuple(getattr(_table, name) for name in _NAMES)


def add(session: Session, record: FileRecord, reservation_id: str) -> bool:
    """Store a row in place of what was reserved for it. False, changing nothing, where nothing is
    reserved any more."""
    if not file_quota.settle(session, reservation_id, record.size_bytes):
        return False
    session.execute(insert(_table).values({name: getattr(record, name) for name in _NAMES}))
    return True


def get(session: Session, viewer: FileViewer, file_id: str) -> FileRecord:
    """Raises NotFound."""
    _check_id(file_id)
    query = select(*_COLUMNS).where(_table.id == file_id, *_visible(viewer))
    return _found(session.execute(query).one_or_none(), file_id)


def listed(
    session: Session,
    viewer: FileViewer,
    *,
    limit: int,
    descending: bool,
    after: str = "",
    purpose: str = "",
) -> list[FileRecord]:
    """At most so many, by their time and id, of this purpose if it is given, behind the file
    `after` if it is given. Raises NotFound where that is not there."""
    query = select(*_COLUMNS).where(*_visible(viewer))
    if purpose:
        query = query.where(_table.purpose == purpose)
    if after:
        at = get(session, viewer, after)
        same = _table.created_at == at.created_at
        if descending:
            query = query.where(or_(_table.created_at < at.created_at, same & (_table.id < at.id)))
        else:
            query = query.where(or_(_table.created_at > at.created_at, same & (_table.id > at.id)))
    order = _table.created_at, _table.id
    ordered = query.order_by(*(column.desc() if descending else column.asc() for column in order))
    return [record_of(FileRecord, row) for row in session.execute(ordered.limit(limit))]


def remove(session: Session, viewer: FileViewer, file_id: str) -> FileRecord:
    """Delete the row; the caller deletes its object. Raises NotFound."""
    _check_id(file_id)
    mine = delete(_table).where(_table.id == file_id, *_visible(viewer)).returning(*_COLUMNS)
    record = _found(session.execute(mine).one_or_none(), file_id)
    file_quota.give_back(session, record.tenant_id, 1, record.size_bytes)
    return record


def remove_expired(
    session: Session,
    now_at: float,
    since_at: float,
    *,
    limit: int,
    without: Collection[str] = (),
) -> Sequence[str]:
    """Delete rows that have expired or are older than files are kept, but for those of the ids
    `without`; and all rows of tenants for whom nothing is stored; at most so many. Returns the
    names of their objects, for the caller to delete."""
    keep_nothing = select(Tenant.id).where(Tenant.response_retention_days == 0)
    old = (
        select(_table.id)
        .where(
            or_(
                or_(_table.expires_at <= now_at, _table.created_at < since_at)
                & _table.id.not_in(without),
                _table.tenant_id.in_(keep_nothing),
            )
        )
        .limit(limit)
    )
    returned = _table.tenant_id, _table.size_bytes, _table.object_name
    rows = session.execute(delete(_table).where(_table.id.in_(old)).returning(*returned)).all()
    num_files, num_bytes = Counter[str](), Counter[str]()
    for row in rows:
        num_files[row.tenant_id] += 1
        num_bytes[row.tenant_id] += row.size_bytes
    for tenant_id in sorted(num_files):
        file_quota.give_back(session, tenant_id, num_files[tenant_id], num_bytes[tenant_id])
    return [row.object_name for row in rows]


def has_any(session: Session) -> bool:
    """Whether there are files."""
    return session.scalar(select(StoredFile.id).limit(1)) is not None


def without_row(session: Session, object_names: Collection[str]) -> set[str]:
    """Those of these names, a few hundred, that no row has."""
    query = select(_table.object_name).where(_table.object_name.in_(object_names))
    return set(object_names) - set(session.execute(query).scalars())


def _visible(viewer: FileViewer) -> Iterable[ColumnElement[bool]]:
    yield _table.tenant_id == viewer.tenant_id
    yield _table.expires_at > viewer.now_at
    yield _table.created_at >= viewer.since_at


def _found(row: Row[Any] | None, file_id: str) -> FileRecord:
    if row is None:
        raise _missing(file_id)
    return record_of(FileRecord, row)


def _check_id(file_id: str) -> None:
    if not responses.is_id(file_id):
        raise _missing(file_id)


def _missing(file_id: str) -> NotFound:
    return NotFound(f"file {file_id[:80]!r} does not exist")
