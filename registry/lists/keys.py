"""API keys as a list shows them: in pages, with their state now and what they used lately.

Read only, and without digests: a list has no use for them. What was used comes from the roll-ups by
hour, so it is some seconds behind.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import ColumnElement, case, func, literal, select
from sqlalchemy.orm import Session

from registry.accounts.api_keys import ApiKey
from registry.accounts.tenants import Tenant
from registry.lists.tenants import recent
from registry.money.rollups import RollupRow
from registry.paging import Cut, Listed, listed

SORTS: Final = ("name", "tenant", "requests", "cost", "created", "expires")
KeyState: TypeAlias = Literal["working", "rotating", "expired", "revoked", "shut out"]
STATES: Final[tuple[KeyState, ...]] = ("working", "rotating", "expired", "revoked", "shut out")
_NEVER_AT = 1e15
"""Sorts keys without an expiry behind all others."""


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """What a list is to show; what is empty or None is not asked for. `tenant_ids`: of these
    tenants alone."""

    text: str = ""
    state: str = ""
    tenant_ids: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One row. "rotating": the secret before the last one still works; "shut out": its tenant."""

    id: str
    public_id: str
    name: str
    tenant_id: str
    tenant_name: str
    state: KeyState
    created_at: float
    expires_at: float | None
    num_requests: int
    num_failed: int
    cost_nanos: int


def page(
    session: Session, wanted: KeyFilter, sort: str, cut: Cut, *, since_at: float, now_at: float
) -> Listed[KeyLine]:
    """Keys with what they used since then, in whole hours."""
    used = recent(RollupRow.key_id, since_at).subquery()
    num_requests = func.coalesce(used.c.num_requests, 0)
    cost_nanos = func.coalesce(used.c.cost_nanos, 0)
    columns: dict[str, Any] = {
        "name": ApiKey.name,
        "tenant": Tenant.name,
        "requests": num_requests,
        "cost": cost_nanos,
        "created": ApiKey.created_at,
        "expires": func.coalesce(ApiKey.expires_at, _NEVER_AT),
    }
    shown = (
        ("id", ApiKey.id),
        ("public_id", ApiKey.public_id),
        ("name", ApiKey.name),
        ("tenant_id", ApiKey.tenant_id),
        ("tenant_name", Tenant.name),
        ("state", _state(now_at)),
        ("created_at", ApiKey.created_at),
        ("expires_at", ApiKey.expires_at),
        ("num_requests", num_requests),
        ("num_failed", func.coalesce(used.c.num_failed, 0)),
        ("cost_nanos", cost_nanos),
    )
    query = (
        select(*(column.label(f"key_{name}") for name, column in shown))
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .outerjoin(used, used.c.owner == ApiKey.id)
        .where(*_where(wanted, now_at))
    )
    found = listed(session, query, columns[sort], ApiKey.id, cut)
    rows = [
        KeyLine(
            **{name: getattr(row, f"key_{name}") for name, _ in shown[:8]},
            num_requests=int(row.key_num_requests),
            num_failed=int(row.key_num_failed),
            cost_nanos=int(row.key_cost_nanos),
        )
        for row in found.rows
    ]
    return Listed(rows, found.previous, found.next)


def num_keys(session: Session, tenant_ids: Collection[str] | None) -> int:
    """Of these tenants; None: of all."""
    query = select(func.count()).select_from(ApiKey)
    if tenant_ids is not None:
        query = query.where(ApiKey.tenant_id.in_(tenant_ids))
    return session.scalar(query) or 0


def _state(now_at: float) -> ColumnElement[Any]:
    return case(
        (ApiKey.revoked_at.is_not(None), literal("revoked")),
        (ApiKey.expires_at <= now_at, literal("expired")),
        (Tenant.disabled, literal("shut out")),
        (ApiKey.previous_until_at > now_at, literal("rotating")),
        else_=literal("working"),
    )


def _where(wanted: KeyFilter, now_at: float) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    if wanted.text:
        lower = wanted.text.lower()
        named = func.lower(ApiKey.name).contains(lower, autoescape=True)
        named |= ApiKey.public_id.startswith(lower, autoescape=True) | (ApiKey.id == wanted.text)
        where.append(named | func.lower(Tenant.name).contains(lower, autoescape=True))
    if wanted.state:
        where.append(_state(now_at) == wanted.state)
    if wanted.tenant_ids is not None:
        where.append(ApiKey.tenant_id.in_(wanted.tenant_ids))
    return where
