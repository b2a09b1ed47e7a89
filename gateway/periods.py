"""The calendar that budgets go by: days and months in UTC."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from gateway.policy import rate_limit

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
    now = datetime.fromtimestamp(now_at, UTC)
    began = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return Period(began.toordinal(), began.timestamp(), (began + timedelta(1)).timestamp())
    began = began.replace(day=1)
    ends = (began + timedelta(31)).replace(day=1)
    return Period(began.year * 12 + began.month, began.timestamp(), ends.timestamp())
