"""The audit log: who changed what, when, from what to what. Append-only.

`record` is what every change to the registry ends with: it appends here and raises the registry's
version, both in the caller's transaction, so a change without a trace cannot be committed by way
of this package. Secrets and digests never appear in `before` or `after`. A target is an id where
the thing has one; its name at that time stands in `before` and `after`.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import JSON, String, or_, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import version
from registry.base import Base, Instant, JsonObject, Name, Serial

# Where `registry.session.writing` keeps who is acting.
ACTOR_KEY: Final = "actor"
MAX_PAGE: Final = 1000


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
    version.bump(session)


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
