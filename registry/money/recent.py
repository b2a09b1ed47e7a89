"""What happened lately: the newest requests, each tenant's service, and answers from the cache.

Read-only and bounded, however busy it is; what is older is a report's (usage.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry.accounts.tenants import Tenant
from registry.money.ledger import CORRECTION, PostingRow
from registry.money.rollups import HOUR_S, RollupRow

MAX_SERVED = 2000
MAX_ENDED = 4000
MAX_CACHE_ROWS = 100
_NOT_QUEUED = (CORRECTION, "cache_hit")
_GENERATES = ("chat", "completion")


@dataclass(frozen=True, slots=True)
class TenantWeight:
    """What a tenant's share goes by."""

    tenant_id: str
    name: str
    weight: float


@dataclass(frozen=True, slots=True)
class Served:
    """One request: how long it waited, and the service it had (seconds)."""

    tenant_id: str
    posted_at: float
    queue_s: float
    service_s: float


def served(session: Session, since_at: float) -> list[Served]:
    """Posted since then, the newest first; cached answers waited for nobody and are left out."""
    query = (
        select(PostingRow.tenant_id, PostingRow.posted_at, PostingRow.queue_s, PostingRow.service_s)
        .where(PostingRow.posted_at >= since_at, PostingRow.outcome.not_in(_NOT_QUEUED))
        .order_by(PostingRow.posted_at.desc(), PostingRow.request_id.desc())
        .limit(MAX_SERVED)
    )
    return [Served(*row) for row in session.execute(query)]


def weights(session: Session, tenant_ids: list[str]) -> list[TenantWeight]:
    """Of those that there are."""
    query = select(Tenant.id, Tenant.name, Tenant.weight).where(Tenant.id.in_(tenant_ids))
    return [TenantWeight(*row) for row in session.execute(query)]


class Ended(NamedTuple):
    """One request. `ttft_s` is 0 where no token came."""

    posted_at: float
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float


def ended(session: Session, since_at: float) -> list[Ended]:
    """Posted since then, the newest first; corrections are no requests."""
    query = (
        select(
            PostingRow.posted_at,
            PostingRow.outcome,
            PostingRow.prompt_tokens,
            PostingRow.completion_tokens,
            PostingRow.ttft_s,
        )
        .where(PostingRow.posted_at >= since_at, PostingRow.outcome != CORRECTION)
        .order_by(PostingRow.posted_at.desc(), PostingRow.request_id.desc())
        .limit(MAX_ENDED)
    )
    return [Ended(*row) for row in session.execute(query)]


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


def cache_use(session: Session, since_at: float) -> list[CacheUse]:
    """By tenant and model, in whole hours, those with a hit, the most hits first."""
    lately = (
        RollupRow.span_s == HOUR_S,
        RollupRow.began_at >= int(since_at) // HOUR_S * HOUR_S,
        RollupRow.kind.in_(_GENERATES),
    )
    num = func.sum(RollupRow.num_postings)
    pair = (RollupRow.tenant_id, RollupRow.model)
    query = (
        select(*pair, Tenant.name, num, func.sum(RollupRow.cost_nanos))
        .join(Tenant, Tenant.id == RollupRow.tenant_id)
        .where(*lately, RollupRow.outcome == "cache_hit")
        .group_by(*pair, Tenant.name)
        .order_by(num.desc(), Tenant.name, RollupRow.model)
        .limit(MAX_CACHE_ROWS)
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
