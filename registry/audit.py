"""The audit log: who changed what, when, from what to what. Append-only.

`record` is what every change to the registry ends with: it appends here and raises the registry's
version, both in the caller's transaction, so a change without a trace cannot be committed by way
of this package. Secrets and digests never appear in `before` or `after`.
"""

from dataclasses import dataclass

from sqlalchemy import JSON, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import version
from registry.base import Base, Instant, JsonObject, Name, Serial

# Where `registry.session.writing` keeps who is acting.
ACTOR_KEY = "actor"


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


class AuditRow(Base):
    """See AuditEntry."""

    __tablename__ = "audit_log"

    id: Mapped[Serial] = mapped_column(primary_key=True)
    at: Mapped[Instant]
    actor: Mapped[Name]
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[Name]
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
    rows = session.scalars(select(AuditRow).order_by(AuditRow.id.desc()).limit(limit))
    return [
        AuditEntry(row.id, row.at, row.actor, row.action, row.target, row.before, row.after)
        for row in rows
    ]
