"""The verbs on tenants, for the CLI and, later, the admin API and pages (control.py)."""

from gateway.service.control import Control, require, visible
from registry import tenants
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
) -> TenantRecord:
    """Change what is given."""
    require(control, "tenants.write")
    with control.writing() as session:
        return tenants.update_tenant(
            session,
            name,
            weight=weight,
            disabled=disabled,
            priority=priority,
            reserved_share=reserved_share,
            now_at=control.clock(),
        )
