"""Operators' requests to load and unload weights: `models load` and `models unload`.

A mailbox from the CLI and the operator's pages to the running gateway, which takes the requests
when the registry's version has moved and hands them to a worker. A request is of the
moment and no state: one that no gateway took within MAX_AGE_S is dropped. To keep a model resident
for good, pin it.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sqlalchemy import CheckConstraint, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Instant, Name, Serial
from registry.errors import InvalidValue
from registry.models import catalog

ResidencyAction: TypeAlias = Literal["load", "unload"]
MAX_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class ResidencyRequest:
    """Make the model resident, or give its pages back."""

    model: str
    action: ResidencyAction
    requested_at: float


class ResidencyRequestRow(Base):
    """See ResidencyRequest."""

    __tablename__ = "residency_requests"
    __table_args__ = (CheckConstraint("action IN ('load', 'unload')", name="action"),)

    id: Mapped[Serial] = mapped_column(primary_key=True)
    model: Mapped[Name]
    action: Mapped[str] = mapped_column(String(16))
    requested_at: Mapped[Instant]


def ask(session: Session, model: str, action: ResidencyAction, *, now_at: float) -> None:
    """Leave a request for the running gateway. Raises NotFound, or InvalidValue if not ready."""
    record = catalog.get_model(session, model)
    if record.state != "ready":
        raise InvalidValue(
            f"model {model!r} is {record.state}: only a ready model can be {action}ed"
        )
    session.add(ResidencyRequestRow(model=model, action=action, requested_at=now_at))
    session.flush()
    audit.record(session, now_at, f"model.{action}", model, None, None)


def take(session: Session, *, now_at: float) -> list[ResidencyRequest]:
    """All requests in order, removed from the table; those older than MAX_AGE_S are left out."""
    rows = session.scalars(select(ResidencyRequestRow).order_by(ResidencyRequestRow.id)).all()
    if rows:
        session.execute(
            delete(ResidencyRequestRow)
            .where(ResidencyRequestRow.id <= rows[-1].id)
            .execution_options(synchronize_session=False)
        )
    return [
        ResidencyRequest(row.model, "load" if row.action == "load" else "unload", row.requested_at)
        for row in rows
        if now_at - row.requested_at <= MAX_AGE_S
    ]
