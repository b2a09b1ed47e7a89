"""The verbs on tenants, for the CLI and, later, the admin API and pages (control.py)."""

from collections.abc import Sequence

from gateway.service.control import Control, require, visible
from gateway.service.meanwhile import check_unchanged, mark_of
from registry import floors, tenants
from registry.floors import ModelFloor
from registry.tenants import TenantRecord


def create_tenant(control: Control, name: str, weight: float = 1.0) -> TenantRecord:
    """A new tenant."""
    require(control, "tenants.write")
    with control.writing() as session:
        return tenants.create_tenant(session, name, weight, now_at=control.clock())


def list_tenants(control: Control) -> list[TenantRecord]:
    """All tenants that who asks may see, by name."""
    seen = visible(control, "tenants.read")
    with control.reading() as session:
        every = tenants.list_tenants(session)
    return [tenant for tenant in every if seen is None or tenant.id in seen]


def update_tenant(
    control: Control,
    name: str,
    weight: float | None = None,
    disabled: bool | None = None,
    priority: str | None = None,
    reserved_share: float | None = None,
    seen: str = "",
) -> TenantRecord:
    """Change what is given. `seen`: the mark of the share that was looked at. Raises
    ChangedMeanwhile where it is another by now."""
    require(control, "tenants.write")
    with control.writing() as session:
        if seen:
            now = tenants.get_tenant(session, name)
            check_unchanged("the tenant's share was", share_mark(now), seen)
        return tenants.update_tenant(
            session,
            name,
            weight=weight,
            disabled=disabled,
            priority=priority,
            reserved_share=reserved_share,
            now_at=control.clock(),
        )


def set_model_floor(
    control: Control, name: str, size_bytes: int, models: Sequence[str], seen: str = ""
) -> ModelFloor:
    """So many bytes of these models, which are the tenant's, stay on a worker that has them,
    whatever others load; 0 takes the floor away. `seen`: the mark of the floor that was looked at.
    Raises ChangedMeanwhile where it is another by now."""
    require(control, "tenants.write")
    with control.writing() as session:
        if seen:
            now = floors.get_floor(session, tenants.get_tenant(session, name).id)
            check_unchanged("the tenant's floor was", floor_mark(now), seen)
        return floors.set_floor(session, name, size_bytes, models, now_at=control.clock())


def list_model_floors(control: Control) -> list[ModelFloor]:
    """Of the tenants that who asks may see."""
    seen = visible(control, "tenants.read")
    with control.reading() as session:
        every = floors.list_floors(session)
    return [floor for floor in every if seen is None or floor.tenant_id in seen]


def floor_mark(floor: ModelFloor | None) -> str:
    """Of a tenant's floor, or of there being none."""
    return mark_of(None if floor is None else (floor.size_bytes, floor.models))


def share_mark(tenant: TenantRecord) -> str:
    """Of all that decides what the tenant gets."""
    return mark_of((tenant.weight, tenant.priority, tenant.reserved_share))
