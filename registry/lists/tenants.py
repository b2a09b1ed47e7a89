"""Tenants as a list shows them: in pages, with their keys and what they used lately.

Read only. What was used comes from the roll-ups by hour, so it is some seconds behind.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import Session

from registry.accounts.api_keys import ApiKey
from registry.accounts.tenants import Priority, Tenant
from registry.base import record_of
from registry.money.ledger import CORRECTION
from registry.money.rollups import HOUR_S, RollupRow
from registry.paging import Cut, Listed, listed

SORTS: Final = ("name", "weight", "keys", "requests", "cost", "created")


@dataclass(frozen=True, slots=True)
class TenantFilter:
    """What a list is to show; what is empty or None is not asked for. `ids`: these alone."""

    text: str = ""
    priority: str = ""
    disabled: bool | None = None
    ids: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class TenantLine:
    """One row. `num_keys`: those that are not revoked."""

    id: str
    name: str
    weight: float
    priority: Priority
    reserved_share: float
    internal: bool
    disabled: bool
    created_at: float
    num_keys: int
    num_requests: int
    cost_nanos: int


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """How many there are to be seen, and how many of them are shut out."""

    total: int
    num_disabled: int


def page(
    session: Session, wanted: TenantFilter, sort: str, cut: Cut, *, since_at: float
) -> Listed[TenantLine]:
    """Tenants with what they used since then, in whole hours."""
    used = recent(RollupRow.tenant_id, since_at).subquery()
    keys = (
        select(ApiKey.tenant_id, func.count().label("num_keys"))
        .where(ApiKey.revoked_at.is_(None))
        .group_by(ApiKey.tenant_id)
        .subquery()
    )
    num_keys = func.coalesce(keys.c.num_keys, 0)
    num_requests = func.coalesce(used.c.num_requests, 0)
    cost_nanos = func.coalesce(used.c.cost_nanos, 0)
    columns: dict[str, Any] = {
        "name": Tenant.name,
        "weight": Tenant.weight,
        "keys": num_keys,
        "requests": num_requests,
        "cost": cost_nanos,
        "created": Tenant.created_at,
    }
    query = (
        select(
            Tenant,
            num_keys.label("num_keys"),
            num_requests.label("num_requests"),
            cost_nanos.label("cost_nanos"),
        )
        .outerjoin(used, used.c.owner == Tenant.id)
        .outerjoin(keys, keys.c.tenant_id == Tenant.id)
        .where(*_where(wanted))
    )
    found = listed(session, query, columns[sort], Tenant.id, cut)
    rows = [
        record_of(
            TenantLine,
            row.Tenant,
            num_keys=int(row.num_keys),
            num_requests=int(row.num_requests),
            cost_nanos=int(row.cost_nanos),
        )
        for row in found.rows
    ]
    return Listed(rows, found.previous, found.next)


def counts(session: Session, ids: Collection[str] | None) -> TenantCounts:
    """Of these tenants; None: of all."""
    disabled = func.sum(case((Tenant.disabled, 1), else_=0))
    query = select(func.count(), func.coalesce(disabled, 0)).where(
        *([] if ids is None else [Tenant.id.in_(ids)])
    )
    total, num_disabled = session.execute(query).one()
    return TenantCounts(int(total), int(num_disabled))


def recent(owner: Any, since_at: float) -> Select[Any]:
    """(owner, num_requests, num_failed, num_tokens, cost_nanos) by a column of the roll-ups, in
    whole hours from the one in which `since_at` lies."""
    corrects = RollupRow.outcome == CORRECTION
    ordinary = case((corrects, 0), else_=RollupRow.num_postings)
    tokens = case((corrects, 0), else_=RollupRow.prompt_tokens + RollupRow.completion_tokens)
    failed = case((RollupRow.outcome == "failed", RollupRow.num_postings), else_=0)
    return (
        select(
            owner.label("owner"),
            func.sum(ordinary).label("num_requests"),
            func.sum(failed).label("num_failed"),
            func.sum(tokens).label("num_tokens"),
            func.sum(RollupRow.cost_nanos).label("cost_nanos"),
        )
        .where(
            RollupRow.span_s == HOUR_S,
            RollupRow.began_at >= int(since_at // HOUR_S) * HOUR_S,
        )
        .group_by(owner)
    )


def _where(wanted: TenantFilter) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    if wanted.text:
        lower = wanted.text.lower()
        named = func.lower(Tenant.name).contains(lower, autoescape=True)
        where.append(named | (Tenant.id == wanted.text))
    if wanted.priority:
        where.append(Tenant.priority == wanted.priority)
    if wanted.disabled is not None:
        where.append(Tenant.disabled.is_(wanted.disabled))
    if wanted.ids is not None:
        where.append(Tenant.id.in_(wanted.ids))
    return where
