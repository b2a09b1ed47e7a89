"""The verbs on limits, for the CLI and, later, the admin API and pages (see service.py)."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.orm import Session

from gateway.service import Control
from registry import api_keys, catalog, quotas, tenants
from registry.quotas import Limits, LimitScope


@dataclass(frozen=True, slots=True)
class OwnedLimits:
    """Limits and whose they are. `name` is for people."""

    scope: LimitScope
    owner: str
    name: str
    limits: Limits


def set_limits(
    control: Control, scope: LimitScope, owner: str, changes: Mapping[str, int]
) -> OwnedLimits:
    """Change the limits that are named (fields of Limits); 0 means unlimited.

    `owner`: a key's id or public id, a tenant's id or name, a model's name, "" for the gateway.
    """
    with control.writing() as session:
        owner, name = _resolve(session, scope, owner)
        limits = quotas.set_limits(session, scope, owner, changes, now_at=control.clock())
        return OwnedLimits(scope, owner, name, limits)


def show_limits(control: Control, scope: LimitScope, owner: str) -> OwnedLimits:
    """As `set_limits` names them."""
    with control.reading() as session:
        owner, name = _resolve(session, scope, owner)
        return OwnedLimits(scope, owner, name, quotas.get_limits(session, scope, owner))


def list_limits(control: Control) -> list[OwnedLimits]:
    """Everybody's who has some: the gateway's, then models', tenants' and keys'."""
    with control.reading() as session:
        names = {
            "key": {k.id: f"{k.tenant_name}: {k.name}" for k in api_keys.list_keys(session)},
            "tenant": {t.id: t.name for t in tenants.list_tenants(session)},
        }
        scopes: tuple[LimitScope, ...] = ("gateway", "model", "tenant", "key")
        return [
            OwnedLimits(scope, owner, names.get(scope, {}).get(owner, owner or scope), limits)
            for scope in scopes
            for owner, limits in quotas.all_limits(session, scope).items()
            if limits != quotas.UNLIMITED
        ]


def _resolve(session: Session, scope: LimitScope, owner: str) -> tuple[str, str]:
    """The owner's id and its name. Raises NotFound."""
    if scope == "key":
        key = api_keys.get_key(session, owner)
        return key.id, f"{key.tenant_name}: {key.name}"
    if scope == "tenant":
        tenant = tenants.get_tenant(session, owner)
        return tenant.id, tenant.name
    if scope == "model":
        return (catalog.get_model(session, owner).name,) * 2
    return "", "gateway"
