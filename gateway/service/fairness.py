"""The verb that shows service by tenant against its share, with waiting times (control.py).

What a tenant is due is its weight's part among those who asked in the same time. Who asks for less
than that is given less, which wrongs nobody; who waits and is given less is what the page is for.
The order itself is policy/fair_share.py's, and is not decided here.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.service.control import Control, require
from registry import recent_service
from registry.recent_service import MAX_POSTINGS

WINDOW_S = 900.0
MAX_TENANTS = 100
TOLERANCE = 0.1
"""Of the share due: less is not called over or under."""


@dataclass(frozen=True, slots=True)
class ShareLine:
    """One tenant. Shares are parts of all service in the window; times in seconds, None: nothing
    ended."""

    tenant_id: str
    name: str
    weight: float
    num_waiting: int
    num_ended: int
    service_s: float
    got: float
    due: float
    wait_p50_s: float | None
    wait_p99_s: float | None
    standing: Literal["even", "over", "under", "asks for less"]


@dataclass(frozen=True, slots=True)
class Shares:
    """`since_at`: where the window begins; later than WINDOW_S ago where there are more postings
    than are looked at. `num_tenants`: of all, where only the first ones are listed."""

    since_at: float
    num_ended: int
    num_tenants: int
    lines: list[ShareLine]


def fair_shares(control: Control, waiting: Mapping[str, int]) -> Shares:
    """The tenants that asked lately or wait now, those with the most service first.

    `waiting`: requests in the queue by tenant id, as the dispatcher says. Raises Forbidden.
    """
    require(control, "tenants.read")
    require(control, "usage.read")
    since_at = control.clock() - WINDOW_S
    with control.reading() as session:
        rows = recent_service.newest(session, since_at)
        ids = sorted({row.tenant_id for row in rows} | {t for t, n in waiting.items() if n})
        known = recent_service.weights(session, ids)
    if len(rows) == MAX_POSTINGS:
        since_at = rows[-1].posted_at
    service_s: dict[str, float] = defaultdict(float)
    waits: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        service_s[row.tenant_id] += row.service_s
        waits[row.tenant_id].append(row.queue_s)
    total_s = sum(service_s[each.tenant_id] for each in known)
    total_weight = sum(each.weight for each in known)
    lines = []
    for each in known:
        got = service_s[each.tenant_id] / total_s if total_s else 0.0
        due = each.weight / total_weight if total_weight else 0.0
        num_waiting = waiting.get(each.tenant_id, 0)
        times = sorted(waits[each.tenant_id])
        lines.append(
            ShareLine(
                each.tenant_id,
                each.name,
                each.weight,
                num_waiting,
                len(times),
                service_s[each.tenant_id],
                got,
                due,
                quantile(times, 0.5),
                quantile(times, 0.99),
                _standing(got, due, num_waiting, bool(total_s)),
            )
        )
    lines.sort(key=lambda line: (-line.service_s, -line.num_waiting, line.name))
    return Shares(since_at, len(rows), len(lines), lines[:MAX_TENANTS])


def quantile(rising: list[float], part: float) -> float | None:
    """The smallest value that at least this part of all does not exceed; None of nothing."""
    if not rising:
        return None
    return rising[max(0, min(len(rising) - 1, -int(-part * len(rising) // 1) - 1))]


def _standing(
    got: float, due: float, num_waiting: int, any_service: bool
) -> Literal["even", "over", "under", "asks for less"]:
    if not any_service or abs(got - due) <= TOLERANCE * due:
        return "even"
    if got > due:
        return "over"
    return "under" if num_waiting else "asks for less"
