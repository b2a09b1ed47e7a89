"""Conversations: mutable lists of items, each list an object, changed under a version check.

A row names the object that holds all items. Whoever changes a conversation reads row and object,
puts a new object, and moves the row from the version that was read to the next (`move`): of two at
a time one finds that the version has moved, and begins anew.

Whose a conversation is, is the responses' rule (`responses.Viewer`): the tenant's; of models that
the key may use, which are all that have written to it; and changed within the tenant's retention.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Index,
    String,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Count, Id, Instant, record_of
from registry.errors import NotFound
from registry.state import responses
from registry.state.responses import Viewer


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """One conversation. `models`: those whose answers are in it. `details`: the caller's metadata.
    `version`: how often it was changed."""

    id: str
    tenant_id: str
    version: int
    models: Sequence[str]
    details: dict[str, str]
    object_name: str
    sha256: str
    items_bytes: int
    created_at: float
    updated_at: float


class Conversation(Base):
    """See ConversationRecord."""

    __tablename__ = "conversations"
    __table_args__ = (
        Index(None, "tenant_id", "updated_at"),
        Index(None, "object_name", unique=True),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    version: Mapped[Count]
    models: Mapped[list[str]] = mapped_column(JSON)
    details: Mapped[dict[str, str]] = mapped_column(JSON)
    object_name: Mapped[str] = mapped_column(String(200))
    sha256: Mapped[str] = mapped_column(String(64))
    items_bytes: Mapped[Count]
    created_at: Mapped[Instant]
    updated_at: Mapped[Instant]


_table = Conversation
_NAMES = tuple(ConversationRecord.__dataclass_fields__)
_COLUMNS = tuple(getattr(_table, name) for name in _NAMES)


def add(session: Session, record: ConversationRecord, max_responses: int) -> bool:
    """Store a row; it counts as a response. False, changing nothing, where its tenant has as many
    as it may."""
    if not responses.count_one(session, record.tenant_id, max_responses):
        return False
    session.execute(insert(_table).values(_values(record)))
    return True


def get(session: Session, viewer: Viewer, conversation_id: str) -> ConversationRecord:
    """Raises NotFound."""
    responses.check_id(conversation_id)
    query = select(*_COLUMNS).where(_table.id == conversation_id, *_recent(viewer))
    row = session.execute(query).one_or_none()
    if row is None or not _may_see(viewer, row.models):
        raise NotFound(f"conversation {conversation_id[:80]!r} does not exist")
    return record_of(ConversationRecord, row)


def move(session: Session, changed: ConversationRecord) -> bool:
    """Replace the row by this one, whose version is one more. False, changing nothing, where
    another change came first, or it is gone."""
    mine = update(_table).where(_table.id == changed.id, _table.version == changed.version - 1)
    return session.connection().execute(mine.values(_values(changed))).rowcount == 1


def remove(session: Session, viewer: Viewer, conversation_id: str) -> ConversationRecord:
    """Delete the row; the caller deletes its object. Raises NotFound."""
    record = get(session, viewer, conversation_id)
    mine = delete(_table).where(_table.id == conversation_id).returning(_table.object_name)
    object_name = session.execute(mine).scalar()
    if object_name is None:
        raise NotFound(f"conversation {conversation_id[:80]!r} does not exist")
    responses.count_less(session, viewer.tenant_id, 1)
    return record_of(ConversationRecord, record, object_name=object_name)


def remove_before(
    session: Session, tenant_id: str, before_at: float, *, limit: int
) -> Sequence[str]:
    """Delete rows of this tenant that were last changed before then, at most so many. Returns the
    names of their objects, for the caller to delete.

    A change that commits while the statement waits for its row keeps it: PostgreSQL looks at a
    condition on the row again then, and not at the list of ids.
    """
    is_old = _table.updated_at < before_at
    old = (
        select(_table.id)
        .where(_table.tenant_id == tenant_id, is_old)
        .order_by(_table.updated_at)
        .limit(limit)
    )
    mine = delete(_table).where(_table.id.in_(old), is_old).returning(_table.object_name)
    names = list(session.execute(mine).scalars())
    responses.count_less(session, tenant_id, len(names))
    return names


def without_row(session: Session, object_names: Iterable[str]) -> set[str]:
    """Those of these names, a few hundred, that no row has."""
    names = set(object_names)
    query = select(_table.object_name).where(_table.object_name.in_(names))
    return names - set(session.execute(query).scalars())


def _recent(viewer: Viewer) -> Iterable[ColumnElement[bool]]:
    yield _table.tenant_id == viewer.tenant_id
    yield _table.updated_at >= viewer.since_at


def _may_see(viewer: Viewer, models: Sequence[str]) -> bool:
    return viewer.models is None or viewer.models.issuperset(models)


def _values(record: ConversationRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _NAMES}
