"""The verbs on how the server does at this moment, for the operator's first page (control.py).

Rates and times come from the newest postings, of all gateway processes: a request counts when it
ends. What was spent today is exact: roll-ups, and the postings behind their mark.
"""

from dataclasses import dataclass
from typing import Final

from gateway.policy.permissions import Verb
from gateway.service.control import Control, require
from gateway.service.fairness import quantile
from registry import recent_service, recent_traffic, usage_sums
from registry.recent_traffic import MAX_POSTINGS
from registry.rollups import DAY_S
from registry.usage_sums import UsageFilter

RATE_S = 60.0
TTFT_S = 300.0
_ALL: Final[tuple[Verb, ...]] = ("usage.read", "tenants.read", "models.read", "audit.read")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rates a second over the last `rate_s` seconds: less than RATE_S where there are more postings
    than are looked at. Times to the first token over `ttft_span_s`; None: there was none."""

    rate_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    num_ended: int
    ttft_span_s: float
    num_ttft: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    spent_today_nanos: int


def traffic_now(control: Control) -> Traffic:
    """Of all tenants. Raises Forbidden."""
    require(control, "usage.read")
    now_at = control.clock()
    midnight = int(now_at // DAY_S) * DAY_S
    with control.reading() as session:
        rows = recent_traffic.newest(session, now_at - TTFT_S)
        today = usage_sums.total(session, UsageFilter(midnight, midnight + DAY_S))
    seen_s = now_at - rows[-1].posted_at if len(rows) == MAX_POSTINGS else TTFT_S
    rate_s = max(1.0, min(RATE_S, seen_s))
    lately = [row for row in rows if row.posted_at >= now_at - rate_s]
    times = sorted(row.ttft_s for row in rows if row.ttft_s > 0 and row.outcome != "cache_hit")
    return Traffic(
        rate_s=rate_s,
        requests_per_s=len(lately) / rate_s,
        prompt_tokens_per_s=sum(row.prompt_tokens for row in lately) / rate_s,
        completion_tokens_per_s=sum(row.completion_tokens for row in lately) / rate_s,
        num_ended=len(lately),
        ttft_span_s=max(1.0, seen_s),
        num_ttft=len(times),
        ttft_p50_s=quantile(times, 0.5),
        ttft_p99_s=quantile(times, 0.99),
        spent_today_nanos=today.cost_nanos,
    )


def may_watch(control: Control) -> None:
    """Raises Forbidden unless who acts may see traffic, queues and models of all tenants."""
    for verb in _ALL:
        require(control, verb)


def tenant_names(control: Control, tenant_ids: list[str]) -> dict[str, str]:
    """Names by id, of those that there are. Raises Forbidden."""
    require(control, "tenants.read")
    with control.reading() as session:
        return {each.tenant_id: each.name for each in recent_service.weights(session, tenant_ids)}
