"""Tenants: who is billed. A name, a share of the service, and whether its keys are let in.

Tenants are never deleted, only disabled: bills refer to them.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sqlalchemy import BigInteger, Double, String, false, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import (
    MAX_NAME_LEN,
    Base,
    Id,
    Instant,
    JsonObject,
    Name,
    new_id,
    record_of,
    values_of,
)
from registry.errors import AlreadyExists, InvalidValue, NotFound

Priority: TypeAlias = Literal["interactive", "standard", "batch"]

MAX_WEIGHT = 1000.0
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
BATCH_FACTOR = 0.05
PRIORITY_FACTORS: dict[str, float] = {
    "interactive": 4.0,
    "standard": 1.0,
    "batch": BATCH_FACTOR,
}
"""What a weight is multiplied by. All requests of a batch tenant are of class batch: they have what
others leave, and once their time is almost up a twentieth of a share: they wait long, and never for
ever."""
SERVERS_RETENTION = -1
"""As a tenant's own: none, the server's holds."""
MAX_RETENTION_DAYS = 3650
MAX_RESERVED_SHARE = 0.5
"""Of a worker, over all tenants together: the rest is for everybody."""


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant. `weight` is its share against other tenants' (2.0 gets twice 1.0's service).

    `priority` multiplies it (PRIORITY_FACTORS). `reserved_share` of each worker's request places
    and KV memory is kept free for this tenant's requests. `internal`: the operator's own; the
    playground asks as its keys where nobody chooses another. `response_retention_days`: how long
    its stored responses are kept where that is less than the server's setting; 0: nothing is
    stored; None: as the server's setting says.
    """

    id: str
    name: str
    weight: float
    disabled: bool
    created_at: float
    priority: Priority = "standard"
    reserved_share: float = 0.0
    internal: bool = False
    response_retention_days: int | None = None


class Tenant(Base):
    """See TenantRecord."""

    __tablename__ = "tenants"

    id: Mapped[Id] = mapped_column(primary_key=True)
    name: Mapped[Name] = mapped_column(unique=True)
    weight: Mapped[float] = mapped_column(Double)
    disabled: Mapped[bool]
    created_at: Mapped[Instant]
    priority: Mapped[Priority] = mapped_column(String(16), server_default="standard")
    reserved_share: Mapped[float] = mapped_column(Double, server_default="0")
    internal: Mapped[bool] = mapped_column(server_default=false())
    response_retention_days: Mapped[int | None] = mapped_column(BigInteger)


def create_tenant(
    session: Session, name: str, weight: float = 1.0, internal: bool = False, *, now_at: float
) -> TenantRecord:
    """Raises AlreadyExists or InvalidValue."""
    check_display_name("tenant", name)
    if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
        raise AlreadyExists(f"tenant {name!r} already exists")
    tenant = Tenant(
        id=new_id("ten"),
        name=name,
        weight=_checked(weight),
        disabled=False,
        created_at=now_at,
        priority="standard",
        reserved_share=0.0,
        internal=internal,
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
    priority: str | None = None,
    reserved_share: float | None = None,
    internal: bool | None = None,
    response_retention_days: int | None = None,
    now_at: float,
) -> TenantRecord:
    """Change what is given; a retention of SERVERS_RETENTION is none of its own. Raises NotFound
    or InvalidValue."""
    tenant = _row(session, name_or_id)
    before = _public(tenant)
    if weight is not None:
        tenant.weight = _checked(weight)
    if disabled is not None:
        tenant.disabled = disabled
    if priority is not None:
        tenant.priority = _checked_priority(priority)
    if reserved_share is not None:
        if not math.isfinite(reserved_share) or not 0 <= reserved_share <= MAX_RESERVED_SHARE:
            most = f"0 to {MAX_RESERVED_SHARE:g}"
            raise InvalidValue(f"reserved share must be {most}, got {reserved_share}")
        tenant.reserved_share = reserved_share
    if internal is not None:
        tenant.internal = internal
    if response_retention_days is not None:
        tenant.response_retention_days = _checked_retention(response_retention_days)
    session.flush()
    if reserved_share is not None or disabled is False:
        _check_reserved(session, tenant)
    audit.record(session, now_at, "tenant.update", tenant.id, before, _public(tenant))
    return _record(tenant)


def reserved_shares(session: Session) -> dict[str, float]:
    """By tenant id, of tenants that have something reserved and are let in."""
    rows = session.execute(
        select(Tenant.id, Tenant.reserved_share).where(
            Tenant.reserved_share > 0, Tenant.disabled.is_(False)
        )
    )
    return {row.id: row.reserved_share for row in rows}


def check_display_name(what: str, name: str) -> None:
    """Names shown to people: 1 to 128 printable characters, no space at the ends."""
    if not name or len(name) > MAX_NAME_LEN or not name.isprintable() or name != name.strip():
        raise InvalidValue(
            f"the name of a {what} must have 1 to {MAX_NAME_LEN} printable characters and must not "
            f"begin or end with a space, got {name!r}"
        )


def _checked(weight: float) -> float:
    if not math.isfinite(weight) or not 0 < weight <= MAX_WEIGHT:
        raise InvalidValue(
            f"weight must be greater than 0 and at most {MAX_WEIGHT:g}, got {weight}"
        )
    return weight


def _checked_priority(priority: str) -> Priority:
    for known in PRIORITIES:
        if priority == known:
            return known
    raise InvalidValue(f"priority must be one of {', '.join(PRIORITIES)}, got {priority!r}")


def _checked_retention(days: int) -> int | None:
    if days == SERVERS_RETENTION:
        return None
    if not 0 <= days <= MAX_RETENTION_DAYS:
        raise InvalidValue(f"response retention must be 0 to {MAX_RETENTION_DAYS} days, got {days}")
    return days


def _check_reserved(session: Session, tenant: Tenant) -> None:
    """Raises InvalidValue where all tenants' shares together are out of bounds."""
    total = session.scalar(
        select(func.sum(Tenant.reserved_share)).where(Tenant.disabled.is_(False))
    )
    if tenant.reserved_share and (total or 0.0) > MAX_RESERVED_SHARE + 1e-9:
        raise InvalidValue(
            f"all tenants together may reserve at most {MAX_RESERVED_SHARE:g} of a worker, and "
            f"this makes {total:g}: lower the share of another tenant first"
        )


def _row(session: Session, name_or_id: str) -> Tenant:
    row = session.scalar(select(Tenant).where(Tenant.id == name_or_id)) or session.scalar(
        select(Tenant).where(Tenant.name == name_or_id)
    )
    if row is None:
        raise NotFound(f"unknown tenant {name_or_id!r}: see `polyhost tenants list`")
    return row


def _record(row: Tenant) -> TenantRecord:
    return record_of(TenantRecord, row)


def _public(row: Tenant) -> JsonObject:
    names = ("name", "weight", "disabled", "priority", "reserved_share", "internal")
    return values_of(row, *names, "response_retention_days")
