"""What a month will have cost at its end, from its days so far. Pure.

A day to come costs as much as the mean of the newest whole days, a week at most, so that working
days and week-ends both count and last month's habits do not; what is left of today, its share of
that. Before the month's first day is over today's own pace is all there is, and in its first hour
nothing is foretold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_DAYS: Final = 7
MIN_SHARE: Final = 1 / 24
"""Of a first day; before that there is nothing to go by."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Costs added up at each day's end, in nano-units: of days that are over, today as it is, and
    what is foretold for today and the days to come (empty: nothing is)."""

    past: tuple[int, ...]
    spent: int
    coming: tuple[int, ...]

    @property
    def at_end(self) -> int | None:
        """At the month's end; None: nothing is foretold."""
        return self.coming[-1] if self.coming else None

    def reached_on(self, budget: int) -> int | None:
        """The day (0: the first) at whose end that much is spent; None: not in this month."""
        rest = (self.spent,) if self.spent >= budget else self.coming
        ends = (*self.past, *rest)
        return next((day for day, total in enumerate(ends) if total >= budget), None)


def forecast(costs: Sequence[int], num_days: int, share_of_today: float) -> Forecast:
    """`costs` of the month's days up to today, today last; `num_days` of the whole month."""
    *over, today = costs
    past, total = [], 0
    for cost in over:
        total += cost
        past.append(total)
    rate = _rate(over, today, share_of_today)
    coming: list[int] = []
    if rate is not None:
        left = round(rate * (1 - share_of_today))
        coming = [total + today + left + round(rate * n) for n in range(num_days - len(over))]
    return Forecast(tuple(past), total + today, tuple(coming))


def _rate(over: Sequence[int], today: int, share_of_today: float) -> float | None:
    """A day's cost."""
    newest = over[-MAX_DAYS:]
    if newest:
        return max(0.0, sum(newest) / len(newest))
    return max(0.0, today / share_of_today) if share_of_today >= MIN_SHARE else None
