"""The verbs on limits, for the CLI and, later, the admin API and pages (control.py)."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.orm import Session

from gateway.service.control import Control, find_key, find_tenant, require, visible
from gateway.service.meanwhile import ChangedMeanwhile, setters
from registry import api_keys, catalog, quotas, tenants
from registry.quotas import Limits, LimitScope


@dataclass(frozen=True, slots=True)
class OwnedLimits:
    """Limits and whose they are. `name` is for people."""

    scope: LimitScope
    owner: str
    name: str
    limits: Limits


class LimitsChanged(ChangedMeanwhile):
    """Somebody else has set a limit since it was looked at; nothing was changed. `now` holds, and
    `by` says who set each of those that clash."""

    def __init__(self, now: Limits, by: Mapping[str, str]) -> None:
        super().__init__("somebody else has changed these limits meanwhile: nothing was done")
        self.now = now
        self.by = by


def set_limits(
    control: Control,
    scope: LimitScope,
    owner: str,
    changes: Mapping[str, int],
    seen: Limits | None = None,
) -> OwnedLimits:
    """Change the limits that are named (fields of Limits); 0 means unlimited.

    `owner`: a key's id or public id, a tenant's id or name, a model's name, "" for the gateway.
    `seen`: what held when they were chosen. Raises LimitsChanged where one of them holds no
    more and is not what is wanted anyway.
    """
    require(control, "limits.write")
    with control.writing() as session:
        owner, name = resolve_owner(control, session, scope, owner)
        if seen is not None:
            _check_unchanged(session, scope, owner, changes, seen)
        limits = quotas.set_limits(session, scope, owner, changes, now_at=control.clock())
        return OwnedLimits(scope, owner, name, limits)


def show_limits(control: Control, scope: LimitScope, owner: str) -> OwnedLimits:
    """As `set_limits` names them."""
    with control.reading() as session:
        owner, name = resolve_owner(control, session, scope, owner)
        return OwnedLimits(scope, owner, name, quotas.get_limits(session, scope, owner))


def list_limits(control: Control) -> list[OwnedLimits]:
    """Everybody's who has some: the gateway's, then models', tenants' and keys'.

    To who may see tenants only: theirs.
    """
    seen = visible(control, "limits.read")
    with control.reading() as session:
        keys = [k for k in api_keys.list_keys(session) if seen is None or k.tenant_id in seen]
        owners = [t for t in tenants.list_tenants(session) if seen is None or t.id in seen]
        names = {
            "key": {k.id: f"{k.tenant_name}: {k.name}" for k in keys},
            "tenant": {t.id: t.name for t in owners},
        }
        scopes: tuple[LimitScope, ...] = ("gateway", "model", "tenant", "key")
        return [
            OwnedLimits(scope, owner, names.get(scope, {}).get(owner, owner or scope), limits)
            for scope in scopes
            for owner, limits in quotas.all_limits(session, scope).items()
            if limits != quotas.UNLIMITED and (seen is None or owner in names.get(scope, {}))
        ]


def _check_unchanged(
    session: Session, scope: LimitScope, owner: str, changes: Mapping[str, int], seen: Limits
) -> None:
    now = quotas.get_limits(session, scope, owner)
    clashing = {
        name
        for name, value in changes.items()
        if getattr(now, name) not in (getattr(seen, name), value)
    }
    if not clashing:
        return
    raise LimitsChanged(now, setters(session, "limits.set", owner or scope, clashing))


def resolve_owner(
    control: Control, session: Session, scope: LimitScope, owner: str
) -> tuple[str, str]:
    """The owner's id and its name. Raises NotFound, or Forbidden where they may not be seen."""
    if scope == "key":
        key = find_key(control, session, owner, "limits.read")
        return key.id, f"{key.tenant_name}: {key.name}"
    if scope == "tenant":
        tenant = find_tenant(control, session, owner, "limits.read")
        return tenant.id, tenant.name
    require(control, "limits.read")
    if scope == "model":
        return (catalog.get_model(session, owner).name,) * 2
    return "", "gateway"
