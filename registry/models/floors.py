"""Floors of tenants' models: how much of a worker other tenants' loads leave to them.

An operator says of a tenant which models are its own and how many bytes of them stay where they
are. A model may be several tenants'. What a floor keeps is the worker's decision
(engine/residency/policy/eviction_rules.py); models go by their names here, so that a floor outlives
a new revision, and a name that is not hosted keeps nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import JSON, ForeignKey, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.accounts import tenants
from registry.base import Base, Count, Id, JsonObject, values_of
from registry.errors import InvalidValue
from registry.models import catalog

MAX_FLOOR_BYTES = 1 << 50
MAX_FLOOR_MODELS = 64


@dataclass(frozen=True, slots=True)
class ModelFloor:
    """So many bytes of these models (names, sorted) stay on a worker that has them."""

    tenant_id: str
    size_bytes: int
    models: tuple[str, ...]


class FloorRow(Base):
    """See ModelFloor."""

    __tablename__ = "model_floors"

    tenant_id: Mapped[Id] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    size_bytes: Mapped[Count]
    models: Mapped[list[str]] = mapped_column(JSON)


def set_floor(
    session: Session, tenant: str, size_bytes: int, models: Sequence[str], *, now_at: float
) -> ModelFloor:
    """In place of the one before; 0 bytes: none. Raises NotFound or InvalidValue."""
    owner = tenants.get_tenant(session, tenant)
    names = sorted(set(models)) if size_bytes else []
    if not 0 <= size_bytes <= MAX_FLOOR_BYTES:
        raise InvalidValue(f"a memory floor must be 0 to {MAX_FLOOR_BYTES} bytes, got {size_bytes}")
    if size_bytes and not 1 <= len(names) <= MAX_FLOOR_MODELS:
        raise InvalidValue(f"a memory floor needs 1 to {MAX_FLOOR_MODELS} models, got {len(names)}")
    for name in names:
        catalog.get_model(session, name)
    row = session.get(FloorRow, owner.id)
    before = None if row is None else _public(row)
    if not size_bytes:
        if row is not None:
            session.delete(row)
    elif row is None:
        row = FloorRow(tenant_id=owner.id, size_bytes=size_bytes, models=names)
        session.add(row)
    else:
        row.size_bytes, row.models = size_bytes, names
    session.flush()
    after = _public(row) if row is not None and size_bytes else None
    audit.record(session, now_at, "tenant.floor", owner.id, before, after)
    return ModelFloor(owner.id, size_bytes, tuple(names))


def get_floor(session: Session, tenant_id: str) -> ModelFloor | None:
    """Of one tenant; None: it has none."""
    row = session.get(FloorRow, tenant_id)
    return None if row is None else ModelFloor(row.tenant_id, row.size_bytes, tuple(row.models))


def list_floors(session: Session) -> list[ModelFloor]:
    """Of all tenants that have one."""
    rows = session.scalars(select(FloorRow).order_by(FloorRow.tenant_id))
    return [ModelFloor(row.tenant_id, row.size_bytes, tuple(row.models)) for row in rows]


def by_model(session: Session) -> dict[str, tuple[tuple[str, int], ...]]:
    """(tenant, bytes) by model, as workers get it, of tenants that are let in."""
    active = select(tenants.Tenant.id).where(tenants.Tenant.disabled.is_(False))
    found: dict[str, list[tuple[str, int]]] = {}
    query = select(FloorRow).where(FloorRow.tenant_id.in_(active)).order_by(FloorRow.tenant_id)
    for row in session.scalars(query):
        for name in row.models:
            found.setdefault(name, []).append((row.tenant_id, row.size_bytes))
    return {name: tuple(floors) for name, floors in found.items()}


def _public(row: FloorRow) -> JsonObject:
    return values_of(row, "size_bytes", "models")
