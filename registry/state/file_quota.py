"""What a tenant's files may take: bytes and a number, reserved before a body is read and settled
after it, as limits are.

    (nothing) --reserve--> reserved --settle--> counted as a file
                           reserved --resize--> reserved        more parts of an upload came
                           reserved --release--> (nothing)      it failed, or was cancelled
                           reserved --remove_expired--> (nothing)   its process died
    counted   --give_back--> (nothing)                          the file is deleted

A tenant's count is the sum of its files and reservations, in one row: adding up all files for each
of them would read them all. Each step changes the count in the transaction that changes what is
counted, so a crash leaves at most a reservation, which has an end.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Index, delete, insert, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Count, Id, Instant, record_of
from registry.session import insert_new


@dataclass(frozen=True, slots=True)
class FileReservation:
    """Bytes that a file may come to have. `id`: the file's or the upload's. `expires_at`: when
    whoever reserved it can no longer be at work."""

    id: str
    tenant_id: str
    num_bytes: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class FileBounds:
    """What one tenant may have, reservations included."""

    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class FileUsage:
    """What one tenant has, reservations included."""

    num_files: int = 0
    num_bytes: int = 0


class FileCount(Base):
    """See FileUsage."""

    __tablename__ = "file_counts"

    tenant_id: Mapped[Id] = mapped_column(primary_key=True)
    num_files: Mapped[Count]
    num_bytes: Mapped[Count]


class ReservedFile(Base):
    """See FileReservation."""

    __tablename__ = "file_reservations"
    __table_args__ = (Index(None, "expires_at"),)

    id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    num_bytes: Mapped[Count]
    expires_at: Mapped[Instant]


_table = ReservedFile
_COLUMNS = (_table.id, _table.tenant_id, _table.num_bytes, _table.expires_at)


def reserve(session: Session, wanted: FileReservation, bounds: FileBounds) -> bool:
    """False, changing nothing, where the tenant may not have so much more."""
    _ensure_count(session, wanted.tenant_id)
    if not _count(session, wanted.tenant_id, 1, wanted.num_bytes, bounds):
        return False
    values = {name: getattr(wanted, name) for name in FileReservation.__dataclass_fields__}
    session.execute(insert(_table).values(values))
    return True


def resize(
    session: Session, reservation_id: str, num_bytes: int, bounds: FileBounds | None
) -> bool:
    """Reserve `num_bytes` instead. False, changing nothing, where the tenant may not have so much
    more (`bounds` None: it may), or nothing is reserved."""
    query = select(*_COLUMNS).where(_table.id == reservation_id).with_for_update()
    held = session.execute(query).one_or_none()
    if held is None:
        return False
    more = num_bytes - held.num_bytes
    if not _count(session, held.tenant_id, 0, more, bounds if more > 0 else None):
        return False
    mine = update(_table).where(_table.id == reservation_id)
    session.execute(mine.values(num_bytes=num_bytes))
    return True


def settle(session: Session, reservation_id: str, size_bytes: int) -> bool:
    """What was reserved has become a file of `size_bytes`. False, changing nothing, where nothing
    is reserved any more."""
    held = _taken(session, reservation_id)
    if held is None:
        return False
    _count(session, held.tenant_id, 0, size_bytes - held.num_bytes, None)
    return True


def release(session: Session, reservation_id: str) -> bool:
    """Nothing has become of it. False where nothing is reserved any more."""
    held = _taken(session, reservation_id)
    if held is None:
        return False
    give_back(session, held.tenant_id, 1, held.num_bytes)
    return True


def give_back(session: Session, tenant_id: str, num_files: int, num_bytes: int) -> None:
    """Files of these bytes together are deleted."""
    _count(session, tenant_id, -num_files, -num_bytes, None)


def remove_expired(session: Session, now_at: float, *, limit: int) -> int:
    """Release reservations past their end, at most so many, but for those that somebody is at work
    on. Returns how many."""
    old = select(_table.id).where(_table.expires_at <= now_at).limit(limit)
    ids = session.execute(old.with_for_update(skip_locked=True)).scalars().all()
    return release_many(session, ids)


def release_many(session: Session, ids: Collection[str]) -> int:
    """Nothing has become of these, a few hundred. Returns how many were reserved.

    All reservations first, then the counts in the order of their tenants: whoever settles one has
    its row and waits for the count, so nobody may have a count and wait for such a row.
    """
    its = delete(_table).where(_table.id.in_(ids)).returning(_table.tenant_id, _table.num_bytes)
    rows = session.execute(its).all()
    num_files, num_bytes = Counter[str](), Counter[str]()
    for row in rows:
        num_files[row.tenant_id] += 1
        num_bytes[row.tenant_id] += row.num_bytes
    for tenant_id in sorted(num_files):
        give_back(session, tenant_id, num_files[tenant_id], num_bytes[tenant_id])
    return len(rows)


def usage(session: Session, tenant_id: str) -> FileUsage:
    """What the tenant has."""
    query = select(FileCount.num_files, FileCount.num_bytes)
    row = session.execute(query.where(FileCount.tenant_id == tenant_id)).one_or_none()
    return FileUsage() if row is None else record_of(FileUsage, row)


def locked_usage(session: Session, tenant_id: str) -> FileUsage:
    """As `usage`. Until this transaction ends nobody else changes it, or gets it by this."""
    _ensure_count(session, tenant_id)
    query = select(FileCount.num_files, FileCount.num_bytes)
    mine = query.where(FileCount.tenant_id == tenant_id).with_for_update()
    return record_of(FileUsage, session.execute(mine).one())


def _ensure_count(session: Session, tenant_id: str) -> None:
    names = ("tenant_id", "num_files", "num_bytes")
    insert_new(session, FileCount, "tenant_id", names, [(tenant_id, 0, 0)])


def _taken(session: Session, reservation_id: str) -> FileReservation | None:
    mine = delete(_table).where(_table.id == reservation_id).returning(*_COLUMNS)
    row = session.execute(mine).one_or_none()
    return None if row is None else record_of(FileReservation, row)


def _count(
    session: Session, tenant_id: str, num_files: int, num_bytes: int, bounds: FileBounds | None
) -> bool:
    """So much more. False where that is more than the bounds."""
    count = FileCount
    files, size = count.num_files + num_files, count.num_bytes + num_bytes
    mine = update(count).where(count.tenant_id == tenant_id)
    if bounds is not None:
        mine = mine.where(files <= bounds.max_files, size <= bounds.max_bytes)
    changed = session.connection().execute(mine.values(num_files=files, num_bytes=size))
    return changed.rowcount == 1
