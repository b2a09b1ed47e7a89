"""The calendar that budgets go by: days and months in UTC."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TypeAlias

from gateway.policy import rate_limit
from gateway.policy.rate_limit import DAY_S

PeriodKind: TypeAlias = rate_limit.PeriodKind
PERIOD_KINDS: tuple[PeriodKind, ...] = ("day", "month")


@dataclass(frozen=True, slots=True)
class Period:
    """One calendar day or month. `number` rises by one with each."""

    number: int
    began_at: float
    ends_at: float


def period_of(kind: PeriodKind, now_at: float) -> Period:
    """The period that `now_at` (epoch seconds) lies in."""
    return _of_day(kind, int(now_at // DAY_S))


@lru_cache(64)
def _of_day(kind: PeriodKind, day: int) -> Period:
    """Days since 1970. Kept: every request with a budget asks."""
    began = datetime.fromtimestamp(day * DAY_S, UTC)
    if kind == "day":
        return Period(began.toordinal(), began.timestamp(), (began + timedelta(1)).timestamp())
    began = began.replace(day=1)
    ends = (began + timedelta(31)).replace(day=1)
    return Period(began.year * 12 + began.month, began.timestamp(), ends.timestamp())
