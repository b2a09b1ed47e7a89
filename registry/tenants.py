"""Tenants: who is billed. A name, a fair-share weight, and whether its keys are let in.

Tenants are never deleted, only disabled: bills refer to them.
"""

import math
from dataclasses import dataclass

from sqlalchemy import Double, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import MAX_NAME_LEN, Base, Id, Instant, JsonObject, Name, new_id
from registry.errors import AlreadyExists, InvalidValue, NotFound

MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant. `weight` is its share against other tenants' (2.0 gets twice 1.0's service)."""

    id: str
    name: str
    weight: float
    disabled: bool
    created_at: float


class Tenant(Base):
    """See TenantRecord."""

    __tablename__ = "tenants"

    id: Mapped[Id] = mapped_column(primary_key=True)
    name: Mapped[Name] = mapped_column(unique=True)
    weight: Mapped[float] = mapped_column(Double)
    disabled: Mapped[bool]
    created_at: Mapped[Instant]


def create_tenant(
    session: Session, name: str, weight: float = 1.0, *, now_at: float
) -> TenantRecord:
    """Raises AlreadyExists or InvalidValue."""
    check_display_name("tenant", name)
    if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
        raise AlreadyExists(f"tenant {name!r} exists already")
    tenant = Tenant(
        id=new_id("ten"), name=name, weight=_checked(weight), disabled=False, created_at=now_at
    )
    session.add(tenant)
    session.flush()
    audit.record(session, now_at, "tenant.create", tenant.id, None, _public(tenant))
    return _record(tenant)


def list_tenants(session: Session) -> list[TenantRecord]:
    """All tenants by name."""
    return [_record(row) for row in session.scalars(select(Tenant).order_by(Tenant.name))]


def get_tenant(session: Session, name_or_id: str) -> TenantRecord:
    """Raises NotFound."""
    return _record(_row(session, name_or_id))


def update_tenant(
    session: Session,
    name_or_id: str,
    *,
    weight: float | None = None,
    disabled: bool | None = None,
    now_at: float,
) -> TenantRecord:
    """Change what is given. Raises NotFound or InvalidValue."""
    tenant = _row(session, name_or_id)
    before = _public(tenant)
    if weight is not None:
        tenant.weight = _checked(weight)
    if disabled is not None:
        tenant.disabled = disabled
    session.flush()
    audit.record(session, now_at, "tenant.update", tenant.id, before, _public(tenant))
    return _record(tenant)


def check_display_name(what: str, name: str) -> None:
    """Names shown to people: 1 to 128 printable characters, no space at the ends."""
    if not name or len(name) > MAX_NAME_LEN or not name.isprintable() or name != name.strip():
        raise InvalidValue(
            f"a {what}'s name must have 1 to {MAX_NAME_LEN} printable characters and no space at "
            f"its ends, got {name!r}"
        )


def _checked(weight: float) -> float:
    if not math.isfinite(weight) or not 0 < weight <= MAX_WEIGHT:
        raise InvalidValue(f"weight must be above 0 and at most {MAX_WEIGHT:g}, got {weight}")
    return weight


def _row(session: Session, name_or_id: str) -> Tenant:
    row = session.scalar(select(Tenant).where(Tenant.id == name_or_id)) or session.scalar(
        select(Tenant).where(Tenant.name == name_or_id)
    )
    if row is None:
        raise NotFound(f"no tenant {name_or_id!r}: see `polyhost tenants list`")
    return row


def _record(row: Tenant) -> TenantRecord:
    return TenantRecord(row.id, row.name, row.weight, row.disabled, row.created_at)


def _public(row: Tenant) -> JsonObject:
    return {"name": row.name, "weight": row.weight, "disabled": row.disabled}
