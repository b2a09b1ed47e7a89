"""Registrations at work: progress, heartbeat, commit; and all of them as a list shows them.

Under a registration's token, as in catalog.py; none of it is audited or raises the registry's
version, for no gateway caches it.
"""

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, case, func, select, update
from sqlalchemy.orm import Session

from registry.models.catalog import NEXT, Model
from registry.paging import Cut, Listed, listed

STATES: Final = ("registering", "failed", "ready")
SORTS: Final = ("name", "since")


@dataclass(frozen=True, slots=True)
class RegistrationFilter:
    """What a list is to show; what is empty is not asked for."""

    text: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """One: going on, failed, or the one that a ready model came from. `base_name`: the model that
    it is of; `since_at`: when it began, or ended well."""

    name: str
    base_name: str
    source: str
    requested_revision: str
    source_commit: str
    requested_dtype: str
    state: str
    phase: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    reason_code: str
    reason: str
    weight_bytes: int
    created_at: float
    phase_at: float | None
    since_at: float

    @property
    def left_s(self) -> float | None:
        """How long its phase will take; None where nobody can tell."""
        if self.bytes_per_s <= 0 or not self.total_bytes or self.state != "registering":
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s


_OWN = tuple(
    name for name in Registration.__dataclass_fields__ if name not in ("base_name", "since_at")
)


def progress(
    session: Session,
    registration: str,
    phase: str,
    done_bytes: int,
    total_bytes: int,
    *,
    now_at: float,
    bytes_per_s: float = 0.0,
) -> bool:
    """Progress and heartbeat of a registration. False if the row is no longer this one's.

    `bytes_per_s`: how fast the phase goes now.
    """
    changed = session.scalars(
        update(Model)
        .where(Model.registration == registration, Model.state == "registering")
        .values(
            phase=phase,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            bytes_per_s=bytes_per_s,
            heartbeat_at=now_at,
            phase_at=case((Model.phase == phase, Model.phase_at), else_=now_at),
        )
        .returning(Model.id)
        .execution_options(synchronize_session=False)
    )
    return changed.first() is not None


def adopt(session: Session, registration: str, host: str, pid: int, *, now_at: float) -> bool:
    """Another process takes the registration over (`--no-wait`). False if it is gone."""
    changed = session.scalars(
        update(Model)
        .where(Model.registration == registration, Model.state == "registering")
        .values(registrar_host=host, registrar_pid=pid, heartbeat_at=now_at)
        .returning(Model.id)
        .execution_options(synchronize_session=False)
    )
    return changed.first() is not None


def note_commit(session: Session, registration: str, commit: str) -> None:
    """Which commit of a hub the registration is of; it stays that one when it is retried."""
    session.execute(
        update(Model)
        .where(Model.registration == registration, Model.state == "registering")
        .values(source_commit=commit)
        .execution_options(synchronize_session=False)
    )


def page(session: Session, wanted: RegistrationFilter, sort: str, cut: Cut) -> Listed[Registration]:
    """A page of them."""
    since_at = case((Model.state == "ready", func.coalesce(Model.ready_at, 0.0)),
                    else_=Model.created_at)  # fmt: skip
    orders: dict[str, Any] = {"name": Model.name, "since": since_at}
    columns = (getattr(Model, name) for name in _OWN)
    query = select(*columns, since_at.label("since_at")).where(*_where(wanted))
    found = listed(session, query, orders[sort], Model.name, cut)
    rows = [
        Registration(
            **{name: getattr(row, name) for name in _OWN},
            base_name=row.name.removesuffix(NEXT),
            since_at=row.since_at,
        )
        for row in found.rows
    ]
    return Listed(rows, found.previous, found.next)


def _where(wanted: RegistrationFilter) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = [Model.state.in_(STATES)]
    if wanted.text:
        lower = wanted.text.lower()
        named = func.lower(Model.name).contains(lower, autoescape=True)
        where.append(named | func.lower(Model.source).contains(lower, autoescape=True))
    if wanted.state:
        where.append(Model.state == wanted.state)
    return where
