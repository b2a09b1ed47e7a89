"""Stored responses: whose they are, what they follow, and which object has their items.

    (nothing)   -> completed | incomplete        stored with its answer
    (nothing)   -> queued                        asked for in the background
    queued      -> in_progress | failed | cancelled
    in_progress -> completed | incomplete | failed | cancelled

A response that has not ended belongs to the gateway process that runs it (`owner`), which says
every now and then that it lives (`heartbeat_at`). It ends once: whoever ends it finds it active,
in the statement that ends it.

Every query of a tenant's response is `_visible`: of this tenant, of a model that the key may use,
and not past the tenant's retention. What fails any of these is missing, in the same words. How long
responses are kept is decided when they are read, so a shorter retention holds at once.

Objects are written before their rows and deleted after them, by gateway/state/response_store.py.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    Index,
    Row,
    String,
    Text,
    delete,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.accounts.tenants import Tenant
from registry.base import Base, Count, Id, Instant, Name, OptionalInstant, record_of
from registry.errors import NotFound
from registry.session import insert_new

ResponseState: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ACTIVE: Final = ("queued", "in_progress")
ENDED: Final = ("completed", "incomplete", "failed", "cancelled")
MAX_ID_LEN: Final = 64
MAX_DEPTH: Final = 1000
"""Responses that follow one another."""


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """One response. `depth`: how many come before it. `items_bytes`: of its items as JSON, input
    and output. `error_code`, `error_message`: of one that failed in the background."""

    id: str
    tenant_id: str
    parent_id: str | None
    model: str
    state: ResponseState
    depth: int
    object_name: str
    sha256: str
    items_bytes: int
    created_at: float
    owner: str = ""
    heartbeat_at: float | None = None
    error_code: str = ""
    error_message: str = ""
    conversation_id: str | None = None
    """What its items are appended to."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who asks. `models` None: all. `since_at`: what is older is past the tenant's retention."""

    tenant_id: str
    models: frozenset[str] | None
    since_at: float


class StoredResponse(Base):
    """See ResponseRecord."""

    __tablename__ = "responses"
    __table_args__ = (
        CheckConstraint(f"state IN ({', '.join(map(repr, ACTIVE + ENDED))})", name="state"),
        Index(None, "tenant_id", "created_at"),
        Index(None, "heartbeat_at"),
        Index(None, "object_name", unique=True),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    parent_id: Mapped[str | None] = mapped_column(String(64))
    model: Mapped[Name]
    state: Mapped[str] = mapped_column(String(16))
    depth: Mapped[Count]
    object_name: Mapped[str] = mapped_column(String(200))
    sha256: Mapped[str] = mapped_column(String(64))
    items_bytes: Mapped[Count]
    created_at: Mapped[Instant]
    owner: Mapped[str] = mapped_column(String(200), default="")
    heartbeat_at: Mapped[OptionalInstant]
    error_code: Mapped[str] = mapped_column(String(64), default="")
    error_message: Mapped[str] = mapped_column(Text, default="")
    conversation_id: Mapped[str | None] = mapped_column(String(64))


class ResponseCount(Base):
    """How many responses and conversations a tenant has: a quota that counted rows would read them
    all."""

    __tablename__ = "response_counts"

    tenant_id: Mapped[Id] = mapped_column(primary_key=True)
    num_responses: Mapped[Count]


_table = StoredResponse
_COLUMNS = tuple(getattr(_table, name) for name in ResponseRecord.__dataclass_fields__)


def add(session: Session, record: ResponseRecord, max_responses: int) -> bool:
    """Store a row. False, changing nothing, where its tenant has `max_responses`."""
    if not count_one(session, record.tenant_id, max_responses):
        return False
    values = {name: getattr(record, name) for name in ResponseRecord.__dataclass_fields__}
    session.execute(insert(_table).values(values))
    return True


def get(session: Session, viewer: Viewer, response_id: str) -> ResponseRecord:
    """Raises NotFound."""
    check_id(response_id)
    query = select(*_COLUMNS).where(_table.id == response_id, *_visible(viewer))
    row = session.execute(query).one_or_none()
    if row is None:
        raise _missing(response_id)
    return _record(row)


def chain(session: Session, viewer: Viewer, response_id: str) -> list[ResponseRecord]:
    """The response and those before it, the newest first, as far as they are there: the chain is
    whole where the last has no parent. Raises NotFound where the first is not there."""
    check_id(response_id)
    first = select(_table.id, _table.parent_id, literal(0).label("step")).where(
        _table.id == response_id, *_visible(viewer)
    )
    walk = first.cte("walk", recursive=True)
    further = (
        select(_table.id, _table.parent_id, walk.c.step + 1)
        .join(walk, _table.id == walk.c.parent_id)
        .where(walk.c.step < MAX_DEPTH, *_visible(viewer))
    )
    walk = walk.union_all(further)
    query = select(*_COLUMNS).join(walk, _table.id == walk.c.id).order_by(walk.c.step)
    found = [_record(row) for row in session.execute(query)]
    if not found:
        raise _missing(response_id)
    return found


def remove(session: Session, viewer: Viewer, response_id: str) -> ResponseRecord:
    """Delete the row; the caller deletes its object. Raises NotFound."""
    check_id(response_id)
    mine = delete(_table).where(_table.id == response_id, *_visible(viewer))
    row = session.execute(mine.returning(*_COLUMNS)).one_or_none()
    if row is None:
        raise _missing(response_id)
    count_less(session, viewer.tenant_id, 1)
    return _record(row)


def begin(session: Session, response_id: str, owner: str) -> bool:
    """It runs. False where it is not this owner's to run any more."""
    mine = _active(response_id, owner)
    return _num_rows(session, update(_table).where(*mine).values(state="in_progress")) == 1


def finish(session: Session, owner: str, ended: ResponseRecord) -> bool:
    """An active one ends with the state and the object of `ended`. False, changing nothing, where
    it has ended already or is gone."""
    values = {
        name: getattr(ended, name)
        for name in ("state", "object_name", "sha256", "items_bytes", "error_code")
    }
    values["error_message"] = storable(ended.error_message)
    mine = update(_table).where(*_active(ended.id, owner))
    return _num_rows(session, mine.values(**values, heartbeat_at=None)) == 1


def cancel(session: Session, viewer: Viewer, response_id: str) -> ResponseRecord:
    """An active one is cancelled; one that has ended stays as it is. Raises NotFound."""
    check_id(response_id)
    mine = update(_table).where(
        _table.id == response_id, _table.state.in_(ACTIVE), *_visible(viewer)
    )
    session.execute(mine.values(state="cancelled", heartbeat_at=None))
    return get(session, viewer, response_id)


def beat(session: Session, owner: str, response_ids: Collection[str], *, now_at: float) -> set[str]:
    """The owner lives, and runs these. Returns the ids of those that it still has to run."""
    mine = update(_table).where(
        _table.id.in_(response_ids), _table.owner == owner, _table.heartbeat_at.is_not(None)
    )
    found = session.execute(mine.values(heartbeat_at=now_at).returning(_table.id))
    return set(found.scalars())


def has_lost(session: Session, before_at: float) -> bool:
    """Whether there is anything for `fail_lost`."""
    query = select(_table.id).where(_table.heartbeat_at < before_at).limit(1)
    return session.execute(query).first() is not None


def fail_lost(
    session: Session, code: str, message: str, *, owner: str | None = None, before_at: float
) -> int:
    """Active ones whose owner was last heard of before then have failed; of this owner, where one
    is named. Returns how many."""
    lost = update(_table).where(_table.heartbeat_at < before_at)
    if owner is not None:
        lost = lost.where(_table.owner == owner)
    values = {"state": "failed", "error_code": code, "error_message": message}
    return _num_rows(session, lost.values(**values, heartbeat_at=None))


def tenants_of(session: Session) -> dict[str, int | None]:
    """Tenants that have responses, with the days that they keep them; None: the server's."""
    query = select(ResponseCount.tenant_id, Tenant.response_retention_days).outerjoin(
        Tenant, Tenant.id == ResponseCount.tenant_id
    )
    rows = session.execute(query.where(ResponseCount.num_responses > 0))
    return {row.tenant_id: row.response_retention_days for row in rows}


def remove_before(
    session: Session, tenant_id: str, before_at: float, *, limit: int
) -> Sequence[str]:
    """Delete rows of this tenant that were made before then, at most so many. Returns the names of
    their objects, for the caller to delete."""
    old = (
        select(_table.id)
        .where(_table.tenant_id == tenant_id, _table.created_at < before_at)
        .order_by(_table.created_at)
        .limit(limit)
    )
    found = session.execute(
        delete(_table).where(_table.id.in_(old)).returning(_table.object_name)
    ).scalars()
    names = list(found)
    count_less(session, tenant_id, len(names))
    return names


def without_row(session: Session, object_names: Collection[str]) -> set[str]:
    """Those of these names, a few hundred, that no row has."""
    query = select(_table.object_name).where(_table.object_name.in_(object_names))
    return set(object_names) - set(session.execute(query).scalars())


def num_responses(session: Session, tenant_id: str) -> int:
    """How many the tenant has."""
    query = select(ResponseCount.num_responses).where(ResponseCount.tenant_id == tenant_id)
    return session.execute(query).scalar() or 0


def check_id(found: str) -> None:
    """Raises NotFound of what is no id."""
    if not is_id(found):
        raise _missing(found)


def storable(text: str) -> str:
    """What PostgreSQL takes of a text, which may repeat what a caller wrote: no NUL, no half of a
    surrogate pair. Each is a question mark then."""
    return text.replace("\0", "?").encode(errors="replace").decode()


def is_id(text: str) -> bool:
    """An id comes from an address, where anybody may have written anything: PostgreSQL takes no
    NUL, and neither takes half a surrogate pair."""
    return text.isascii() and text.isprintable() and len(text) <= MAX_ID_LEN


def _visible(viewer: Viewer) -> Iterable[ColumnElement[bool]]:
    yield _table.tenant_id == viewer.tenant_id
    yield _table.created_at >= viewer.since_at
    if viewer.models is not None:
        yield _table.model.in_(sorted(viewer.models))


def _active(response_id: str, owner: str) -> Iterable[ColumnElement[bool]]:
    yield _table.id == response_id
    yield _table.owner == owner
    yield _table.state.in_(ACTIVE)


def _missing(response_id: str) -> NotFound:
    return NotFound(f"response {response_id[:80]!r} does not exist")


def count_one(session: Session, tenant_id: str, max_responses: int) -> bool:
    """One more. False where the tenant has as many as it may."""
    count = ResponseCount
    insert_new(session, count, "tenant_id", ("tenant_id", "num_responses"), [(tenant_id, 0)])
    one_more = (
        update(count)
        .where(count.tenant_id == tenant_id, count.num_responses < max_responses)
        .values(num_responses=count.num_responses + 1)
    )
    return _num_rows(session, one_more) == 1


def count_less(session: Session, tenant_id: str, num: int) -> None:
    """So many fewer."""
    if num:
        mine = update(ResponseCount).where(ResponseCount.tenant_id == tenant_id)
        session.execute(mine.values(num_responses=ResponseCount.num_responses - num))


def _num_rows(session: Session, statement: Any) -> int:
    return int(session.connection().execute(statement).rowcount)


def _record(row: Row[Any]) -> ResponseRecord:
    return record_of(ResponseRecord, row)
