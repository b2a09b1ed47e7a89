"""The charts of the pages: a model's last hours, money by day or hour, and this month's costs with
what they will come to (policy/forecast.py) and the budget's line."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from admin.rendering.policy.forecast import Forecast, forecast
from admin.rendering.svg import LEFT, NUM_LINES, Bar, bar_chart
from admin.rendering.templating import number, span
from gateway.limits.limits import Period, period_of
from gateway.limits.policy.rate_limit import DAY_S
from registry.lists.models import Hour

PICTURES: Final = {
    "requests": "Requests by hour",
    "tokens": "Tokens by hour",
    "first": "Time to first token by hour",
}
"""Of a model. The first is shown where the address says nothing of ours."""
MAX_LABELS = 8
NANOS = 10**9
_MONEY_LEFT = LEFT + 16
_DIGIT_WIDTH = 7


def shown(wanted: str) -> str:
    """Which of PICTURES."""
    return wanted if wanted in PICTURES else next(iter(PICTURES))


def hours_chart(hours: Sequence[Hour], name: str, show: str) -> Markup:
    """One of PICTURES, the oldest hour first. The table beside it has all figures."""
    bars = [_bar(hour, show) for hour in hours]
    top = _round_up(max((sum(value for _, value in bar.parts) for bar in bars), default=0.0))
    return bar_chart(bars, f"{PICTURES[show]} of {name}, the last 24", top, _short, 6)


def _bar(hour: Hour, show: str) -> Bar:
    num, bad = hour.num_requests, 0
    if show == "requests":
        value, bad = float(num), hour.num_failed
        text = f"{number(num)} requests, {number(bad)} failed"
    elif show == "tokens":
        value = hour.prompt_tokens + hour.completion_tokens
        text = f"{number(hour.prompt_tokens)} input tokens, "
        text += f"{number(hour.completion_tokens)} output tokens"
    else:  # in milliseconds: the mean, for the roll-ups know no more
        mean_s = hour.ttft_s / num if num else 0.0
        value, text = 1000 * mean_s, f"mean {span(mean_s)}" if num else "no requests"
    label = f"{datetime.datetime.fromtimestamp(hour.at, datetime.UTC):%H:%M}"
    return Bar(label, (("bar", value - bad), ("bar bad", bad)), f"{label} UTC: {text}")


def _round_up(value: float) -> float:
    """The next number that a scale may end with: 1, 2, 4 or 8 times a power of ten, or 4."""
    if value <= NUM_LINES:
        return float(NUM_LINES)
    power = 10.0 ** (len(str(int(value))) - 1)
    return next(factor * power for factor in (1, 2, 4, 8, 10, 20) if factor * power >= value)


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Stack:
    """One part of every bar. `kind`: its class, which has its colour."""

    name: str
    kind: str
    costs: Sequence[int]


def stacked(labels: Sequence[str], stacks: Sequence[Stack], name: str, currency: str) -> Markup:
    """Bars side by side over a common scale, each of the stacks' costs (nano-units)."""
    bars, most = [], 0
    for index, label in enumerate(labels):
        costs = [(stack, stack.costs[index]) for stack in stacks]
        total = sum(max(0, cost) for _, cost in costs)
        lines = [_line(label, total, currency, 4)]
        if len(stacks) > 1:
            lines += [_line(stack.name, cost, currency, 4) for stack, cost in costs if cost]
        parts = [(stack.kind, max(0, cost)) for stack, cost in costs]
        bars.append(Bar(label, parts, "\n".join(lines)))
        most = max(most, total)
    return _money_chart(bars, name, most)


def _money_chart(
    bars: Sequence[Bar], name: str, most: int, line: tuple[float, str] | None = None
) -> Markup:
    """The scale ends with 1, 2, 4, 8 or 10 times a power of ten; with 4 where nothing was spent."""
    most = most or 4 * NANOS
    power: int = 10 ** max(0, len(str(max(1, most))) - 1)
    top = max(4, next(f * power for f in (1, 2, 4, 8, 10) if f * power >= most))
    every = max(1, -(-len(bars) // MAX_LABELS))
    widest = max(len(_units(top * index / NUM_LINES)) for index in range(NUM_LINES + 1))
    left = max(_MONEY_LEFT, _DIGIT_WIDTH * (widest + 1))
    return bar_chart(bars, name, top, _units, every, left, line)


def _units(nanos: float) -> str:
    return f"{nanos / NANOS:,.9f}".rstrip("0").rstrip(".")


def _line(what: str, nanos: int, currency: str, digits: int) -> str:
    return f"{what}: {currency} {nanos / NANOS:,.{digits}f}"


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
    chart = _month_chart(days, budget, currency)
    return Month(days, found.spent, found.at_end, budget, said, chart)


def _days(month: Period, found: Forecast) -> list[Day]:
    """Today stands there twice: as it is, and as it will be."""
    so_far = [*found.past, found.spent]
    days = [Day(_label(month, n), total, False) for n, total in enumerate(so_far)]
    coming = enumerate(found.coming, len(found.past))
    return days + [Day(_label(month, n), total, True) for n, total in coming]


def _label(month: Period, day: int) -> str:
    at = datetime.datetime.fromtimestamp(month.began_at + day * DAY_S, datetime.UTC)
    return f"{at:%m-%d}"


def _month_chart(days: Sequence[Day], budget: int, currency: str) -> Markup:
    """A bar a day; today's has what is spent, and on it what is foretold."""
    parts: dict[str, list[tuple[str, float]]] = {}
    lines: dict[str, list[str]] = {}
    for day in days:
        kind, word = ("coming", "forecast") if day.is_coming else ("bar", "spent")
        below = sum(value for _, value in parts.setdefault(day.label, []))
        parts[day.label].append((kind, max(0, day.total) - below))
        line = _line(day.label, day.total, currency, 4)
        lines.setdefault(day.label, []).append(f"{line} {word}")
    bars = [Bar(label, each, "\n".join(lines[label])) for label, each in parts.items()]
    most = max(budget, *(day.total for day in days))
    level = (float(budget), _line("Budget", budget, currency, 2)) if budget else None
    return _money_chart(bars, "Cumulative cost of this month, with forecast", most, level)
