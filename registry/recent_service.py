"""What each tenant was given lately: service and waiting times of the newest postings.

Read-only and bounded: at most MAX_POSTINGS, however busy it is; what is older is a report's
(usage_sums.py). Cached answers waited for nobody and are left out.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry.ledger import PostingRow
from registry.tenants import Tenant

MAX_POSTINGS = 2000
_NOT_QUEUED = ("correction", "cache_hit")


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


def newest(session: Session, since_at: float) -> list[Served]:
    """Posted since then, the newest first."""
    query = (
        select(PostingRow.tenant_id, PostingRow.posted_at, PostingRow.queue_s, PostingRow.service_s)
        .where(PostingRow.posted_at >= since_at, PostingRow.outcome.not_in(_NOT_QUEUED))
        .order_by(PostingRow.posted_at.desc(), PostingRow.request_id.desc())
        .limit(MAX_POSTINGS)
    )
    return [Served(*row) for row in session.execute(query)]


def weights(session: Session, tenant_ids: list[str]) -> list[TenantWeight]:
    """Of those that there are."""
    query = select(Tenant.id, Tenant.name, Tenant.weight).where(Tenant.id.in_(tenant_ids))
    return [TenantWeight(*row) for row in session.execute(query)]
