"""A month's costs added up day by day, what they will come to, the budget's line: SVG made here.

The table beside it has the same figures. Costs come from the page's own sums; the forecast is
gateway/policy/forecast.py's.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from admin.charts import BOTTOM, HEIGHT, LEFT, NUM_LINES, TOP, WIDTH
from admin.money_chart import MAX_LABELS, NANOS, round_up
from gateway.limits.periods import Period, period_of
from gateway.policy.forecast import Forecast, forecast
from gateway.policy.rate_limit import DAY_S


@dataclass(frozen=True, slots=True)
class Day:
    """One day: at its end `total` was, or will have been, spent."""

    label: str
    total: int
    is_coming: bool


@dataclass(frozen=True, slots=True)
class Month:
    """What the page shows. `at_end` None: nothing is foretold; `budget` 0: there is none;
    `reached`: the day on which it is spent, "" where it is not."""

    days: Sequence[Day]
    spent: int
    at_end: int | None
    budget: int
    reached: str
    chart: Markup

    @property
    def is_over(self) -> bool:
        """Whether more will have been spent than the budget."""
        return bool(self.budget) and max(self.spent, self.at_end or 0) > self.budget


def is_month(from_at: float, to_at: float, now_at: float) -> bool:
    """Whether that is this month, from its first day to today or longer."""
    month = period_of("month", now_at)
    return from_at == month.began_at and now_at < to_at <= month.ends_at


def month_of(costs: Mapping[int, int], now_at: float, budget: int, currency: str) -> Month:
    """`costs` by the beginning of days or hours."""
    month = period_of("month", now_at)
    num_days = round((month.ends_at - month.began_at) / DAY_S)
    today = int((now_at - month.began_at) // DAY_S)
    daily = [0] * (today + 1)
    for at, cost in costs.items():
        day = int((at - month.began_at) // DAY_S)
        if 0 <= day <= today:
            daily[day] += cost
    found = forecast(daily, num_days, (now_at - month.began_at) / DAY_S - today)
    days = _days(month, found)
    reached = found.reached_on(budget) if budget else None
    said = "" if reached is None else _label(month, reached)
    chart = _chart(days, found, budget, currency)
    return Month(days, found.spent, found.at_end, budget, said, chart)


def _days(month: Period, found: Forecast) -> list[Day]:
    past = [Day(_label(month, n), total, False) for n, total in enumerate(found.past)]
    begun = [Day(_label(month, len(past)), found.spent, False)]
    coming = [
        Day(_label(month, len(past) + n), total, True) for n, total in enumerate(found.coming)
    ]
    return past + begun + coming


def _label(month: Period, day: int) -> str:
    at = datetime.datetime.fromtimestamp(month.began_at + day * DAY_S, datetime.UTC)
    return f"{at:%m-%d}"


def _chart(days: Sequence[Day], found: Forecast, budget: int, currency: str) -> Markup:
    """A bar a day; today's has what is spent, and on it what is foretold."""
    top = round_up(max(budget, *(day.total for day in days)))
    inner, left = HEIGHT - TOP - BOTTOM, LEFT + 16
    num = len(found.past) + max(1, len(found.coming))
    step = (WIDTH - left) / num
    shape = '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">'
    parts = [Markup(shape).format(WIDTH, HEIGHT, "Costs of this month added up, and its forecast")]
    for line in range(NUM_LINES + 1):
        y = TOP + inner * (1 - line / NUM_LINES)
        shape = '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
        parts.append(Markup(shape).format(left, WIDTH, y, y))
        shape = '<text x="{}" y="{:.1f}" text-anchor="end">{:g}</text>'
        parts.append(Markup(shape).format(left - 8, y + 4, top * line / NUM_LINES / NANOS))
    for order in (True, False):  # what is foretold lies behind what is spent
        for place, day in _placed(days):
            tall = inner * max(0, day.total) / top
            if day.is_coming is order and tall > 0:
                word = "foretold" if order else "spent"
                told = f"{day.label}: {currency} {day.total / NANOS:,.4f} {word}"
                shape = (
                    '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                    "<title>{}</title></rect>"
                )
                box = (left + (place + 0.15) * step, TOP + inner - tall, step * 0.7, tall)
                parts.append(Markup(shape).format("coming" if order else "bar", *box, told))
    every = -(-num // MAX_LABELS)
    for place, day in dict(_placed(days)).items():
        if (num - 1 - place) % every == 0:
            is_last = place == num - 1  # half of its label would be outside
            at, anchor = (WIDTH, "end") if is_last else (left + (place + 0.5) * step, "middle")
            shape = '<text x="{:.1f}" y="{}" text-anchor="{}">{}</text>'
            parts.append(Markup(shape).format(at, HEIGHT - 6, anchor, day.label))
    if budget:
        y = TOP + inner * (1 - budget / top)
        shape = (
            '<line class="budget" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"><title>{}</title></line>'
        )
        told = f"Budget: {currency} {budget / NANOS:,.2f}"
        parts.append(Markup(shape).format(left, WIDTH, y, y, told))
        shape = '<text class="budget-text" x="{}" y="{:.1f}">{}</text>'
        parts.append(Markup(shape).format(left + 4, y - 4 if y > TOP + 12 else y + 12, told))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _placed(days: Sequence[Day]) -> list[tuple[int, Day]]:
    """Today stands at one place twice: as it is, and as it will be."""
    num_so_far = sum(not day.is_coming for day in days)
    return [(n - (n >= num_so_far), day) for n, day in enumerate(days)]
