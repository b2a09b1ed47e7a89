"""The append-only audit log (who changed what, when, from what to what) and the registry's version.

`record` is what every change to the registry ends with: it appends an entry and raises the version,
both in the caller's transaction, so a change without a trace cannot be committed by way of this
package. Secrets and digests never appear in `before` or `after`. A target is an id where the thing
has one; its name at that time stands in `before` and `after`.

Gateways poll the version (one indexed read). When it has moved, `changes_since` tells them from the
log which keys and tenants to read again: changes come one after the other
(`registry.session.writing`), so the entries after the last one seen are all that is new. Usage
postings and registration progress change nothing that a gateway caches and do not raise it.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import JSON, String, func, or_, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Count, Id, Instant, JsonObject, Name, Serial, random_token
from registry.session import ACTOR_KEY

MAX_PAGE: Final = 1000
MAX_ENTRIES: Final = 1000
"""Beyond it, reading everything is the cheaper way."""
# Entries that change nothing a gateway serves by.
SILENT: Final = ("user.", "invoice.", "alert.", "cache.")
ONLY_ROW: Final = 1


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change. `before` is None for a creation, `after` for a removal."""

    id: int
    at: float
    actor: str
    action: str
    target: str
    before: JsonObject | None
    after: JsonObject | None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """What a list is to show; what is empty or None is not asked for. Instants in epoch seconds.

    `action` also by its first part: "key" is every key.*. `target` by id or name.
    """

    actor: str = ""
    action: str = ""
    target: str = ""
    from_at: float | None = None
    to_at: float | None = None


class AuditRow(Base):
    """See AuditEntry."""

    __tablename__ = "audit_log"

    id: Mapped[Serial] = mapped_column(primary_key=True)
    at: Mapped[Instant] = mapped_column(index=True)
    actor: Mapped[Name] = mapped_column(index=True)
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[Name] = mapped_column(index=True)
    before: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    after: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))


def append(
    session: Session,
    actor: str,
    action: str,
    target: str,
    before: JsonObject | None,
    after: JsonObject | None,
    *,
    now_at: float,
) -> None:
    """One entry; it becomes durable with the caller's commit."""
    session.add(
        AuditRow(at=now_at, actor=actor, action=action, target=target, before=before, after=after)
    )


def record(
    session: Session,
    now_at: float,
    action: str,
    target: str,
    before: JsonObject | None,
    after: JsonObject | None,
) -> None:
    """Append an entry for the session's actor and raise the registry's version."""
    actor = session.info.get(ACTOR_KEY, "unknown")
    append(session, actor, action, target, before, after, now_at=now_at)
    bump_version(session)


def latest(session: Session, limit: int = 100) -> list[AuditEntry]:
    """The newest entries, newest first."""
    return page(session, AuditFilter(), limit=limit)


def page(
    session: Session, wanted: AuditFilter, *, before_id: int | None = None, limit: int = 100
) -> list[AuditEntry]:
    """Newest first, at most `limit` (and MAX_PAGE); `before_id` is the last entry of the page
    before. Entries are only ever added, so pages neither repeat nor miss one."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(min(limit, MAX_PAGE))
    if before_id is not None:
        query = query.where(AuditRow.id < before_id)
    if wanted.actor:
        query = query.where(AuditRow.actor == wanted.actor)
    if wanted.action:
        kind = AuditRow.action.startswith(wanted.action + ".", autoescape=True)
        query = query.where(or_(AuditRow.action == wanted.action, kind))
    if wanted.target:
        named = [column["name"].as_string() for column in (AuditRow.before, AuditRow.after)]
        same = (column == wanted.target for column in (AuditRow.target, *named))
        query = query.where(or_(*same))
    if wanted.from_at is not None:
        query = query.where(AuditRow.at >= wanted.from_at)
    if wanted.to_at is not None:
        query = query.where(AuditRow.at < wanted.to_at)
    return [
        AuditEntry(row.id, row.at, row.actor, row.action, row.target, row.before, row.after)
        for row in session.scalars(query)
    ]


class RegistryVersion(Base):
    """A table of exactly one row, made by the first migration."""

    __tablename__ = "registry_version"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[Count]
    database_id: Mapped[Id] = mapped_column(default="")


def current_version(session: Session) -> int:
    """The version as of this session's transaction."""
    return session.scalars(
        select(RegistryVersion.version).where(RegistryVersion.id == ONLY_ROW)
    ).one()


def bump_version(session: Session) -> None:
    """Raise the version; takes effect with the caller's commit."""
    session.execute(
        update(RegistryVersion)
        .where(RegistryVersion.id == ONLY_ROW)
        .values(version=RegistryVersion.version + 1)
    )


def ensure_database_id(session: Session) -> str:
    """What this database calls itself: data folders name it. Drawn at the first call."""
    row = session.scalars(select(RegistryVersion).where(RegistryVersion.id == ONLY_ROW)).one()
    row.database_id = row.database_id or random_token(10)
    return row.database_id


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids of keys and of tenants, and whether anything else has changed: models, prices, plans.
    `limited`: whose limits have; the log does not say whether a key's, a tenant's or a model's.
    `upto`: the last entry seen."""

    upto: int
    keys: frozenset[str]
    tenants: frozenset[str]
    limited: frozenset[str]
    others: bool


def changed_at(session: Session) -> float:
    """When the registry was last changed, by the clock of whoever did; 0: never."""
    return session.scalar(select(AuditRow.at).order_by(AuditRow.id.desc()).limit(1)) or 0.0


def last_entry(session: Session) -> int:
    """The last entry there is; 0: none."""
    return session.scalar(select(func.max(AuditRow.id))) or 0


def changes_since(session: Session, upto: int) -> Changes | None:
    """What came after that entry; None: too much, or the log does not go on from there."""
    rows = session.execute(
        select(AuditRow.id, AuditRow.action, AuditRow.target)
        .where(AuditRow.id > upto)
        .order_by(AuditRow.id)
        .limit(MAX_ENTRIES + 1)
    ).all()
    if not rows or len(rows) > MAX_ENTRIES:
        return None
    keys, tenants, limited, others = set[str](), set[str](), set[str](), False
    for _, action, target in rows:
        if action.startswith("key."):
            keys.add(target)
        elif action in ("tenant.create", "tenant.update"):
            tenants.add(target)
        elif action == "limits.set":
            limited.add(target)
        elif not action.startswith(SILENT):
            others = True
    found = (frozenset(keys), frozenset(tenants), frozenset(limited))
    return Changes(rows[-1][0], *found, others)
