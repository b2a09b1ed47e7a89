"""How much was answered from the cache, by tenant and model: sums of roll-ups by hour.

Read-only. What the cache keeps is gateway/cache's; what a bill says of it is the ledger's.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry.rollups import HOUR_S, RollupRow
from registry.tenants import Tenant

MAX_ROWS = 100
_KINDS = ("chat", "completion")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Answers to one tenant by one model; `num_hits` of them from the cache, billed together as
    `hits_nanos`."""

    tenant_id: str
    tenant_name: str
    model: str
    num_answers: int
    num_hits: int
    hits_nanos: int


def by_tenant_and_model(session: Session, since_at: float) -> list[CacheUse]:
    """In whole hours, those with a hit, the most hits first."""
    lately = (
        RollupRow.span_s == HOUR_S,
        RollupRow.began_at >= int(since_at) // HOUR_S * HOUR_S,
        RollupRow.kind.in_(_KINDS),
    )
    num = func.sum(RollupRow.num_postings)
    pair = (RollupRow.tenant_id, RollupRow.model)
    query = (
        select(*pair, Tenant.name, num, func.sum(RollupRow.cost_nanos))
        .join(Tenant, Tenant.id == RollupRow.tenant_id)
        .where(*lately, RollupRow.outcome == "cache_hit")
        .group_by(*pair, Tenant.name)
        .order_by(num.desc(), Tenant.name, RollupRow.model)
        .limit(MAX_ROWS)
    )
    hits = session.execute(query).all()
    if not hits:
        return []
    tenants = {tenant_id for tenant_id, *_ in hits}
    others = select(*pair, num).where(
        *lately, RollupRow.outcome == "finished", RollupRow.tenant_id.in_(tenants)
    )
    computed = {(t, m): int(n) for t, m, n in session.execute(others.group_by(*pair))}
    return [
        CacheUse(t, name, model, computed.get((t, model), 0) + int(n), int(n), int(cost))
        for t, model, name, n, cost in hits
    ]
