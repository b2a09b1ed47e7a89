"""Usage and costs: what was used, by whom, of what, when; and the same as a file."""

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlencode

from admin.amounts import day_text, midnight, text_of
from admin.ask import PREFIX, Ask, PageRoute, Reply
from admin.errors import Refused
from admin.money_chart import Stack, stacked
from admin.month_chart import Month, is_month, month_of
from admin.pages.exports import LABELS
from admin.templating import colour
from gateway.billing.usage_export import Format
from gateway.service import limits, usage_sums
from gateway.service import usage as verbs
from gateway.service.usage_sums import UsageView
from registry.base import random_token
from registry.errors import Forbidden
from registry.quotas import LimitScope

DAY_S = 86_400
HOUR_S = 3600
DEFAULT_DAYS = 7
MAX_DAYS = 400
MAX_HOURLY_DAYS = 7
MAX_LINES = 200
BY = {"model": "Model", "tenant": "Tenant", "key": "Key", "day": "Day", "hour": "Hour"}
FORMATS: Mapping[str, tuple[str, Format, str, str]] = {
    "csv": ("CSV", "csv", "text/csv; charset=utf-8", "csv"),
    "jsonl": ("JSONL", "jsonl", "application/x-ndjson", "jsonl"),
    "parquet": ("Parquet", "parquet", "application/vnd.apache.parquet", "parquet"),
    "focus": ("FOCUS", "focus", "text/csv; charset=utf-8", "focus.csv"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the address asks for: [from_at, to_at), by what, of whom."""

    from_at: float
    to_at: float
    by: str
    tenant: str
    key: str
    model: str

    @property
    def unit(self) -> str:
        """Of the picture: hours where a span is short."""
        short = self.to_at - self.from_at <= 2 * DAY_S
        return "hour" if self.by == "hour" or short else "day"

    @property
    def fields(self) -> dict[str, str]:
        """As they stand in the address; the last day is included."""
        told = {
            "from": day_text(self.from_at),
            "to": day_text(self.to_at - 1),
            "by": self.by,
            "tenant": self.tenant,
            "key": self.key,
            "model": self.model,
        }
        return {name: value for name, value in told.items() if value}


def show(ask: Ask) -> Reply:
    """The page."""
    wanted = _wanted(ask)
    view = usage_sums.usage_view(
        ask.control,
        wanted.from_at,
        wanted.to_at,
        wanted.by,
        wanted.unit,
        wanted.tenant,
        wanted.key,
        wanted.model,
        MAX_LINES,
    )
    left = view.total
    for line in view.lines:
        left = left.plus([-amount for amount in line.amounts])
    return ask.page(
        "usage.html",
        view=view,
        wanted=wanted,
        by=BY,
        lines=view.lines,
        num_rest=view.num_lines - len(view.lines),
        rest=left,
        chart=_chart(ask, view, wanted),
        month=_month(ask, view, wanted),
        labels=LABELS,
        once=random_token(10),
        formats={
            name: (label, f"{PREFIX}/usage/export?{urlencode({**wanted.fields, 'format': name})}")
            for name, (label, *_) in FORMATS.items()
        },
        kinds=[
            (each.name, colour(each.ref) if each.ref else "rest")
            for each in view.series
            if any(each.costs.values())
        ],
        instant=_instant,
        exact_cost=text_of(view.total.cost_nanos),
        url=lambda **changes: _url(wanted, changes),
        presets=_presets(ask, wanted),
    )


def export(ask: Ask) -> Reply:
    """A download, made while it is sent."""
    found = FORMATS.get(ask.query.get("format", ""))
    if found is None:
        raise Refused(404, "There is no such format", "Choose one of the page's.")
    wanted = _wanted(ask)
    scope = verbs.scope_of(
        ask.control,
        wanted.from_at,
        wanted.to_at,
        wanted.tenant or None,
        wanted.key or None,
        wanted.model or None,
    )
    _, format_name, media, suffix = found
    order = verbs.order_export(ask.control, format_name, scope)
    name = f"usage-{day_text(wanted.from_at)}-{day_text(wanted.to_at - 1)}.{suffix}"
    headers = [("content-disposition", f'attachment; filename="{name}"')]
    chunks = usage_sums.export_chunks(ask.control, order)
    return Reply(media=media, headers=headers, chunks=chunks)


def _wanted(ask: Ask) -> Wanted:
    """What means nothing is as if not said; a span that is too long ends earlier."""
    query = ask.query
    today = ask.now_at // DAY_S * DAY_S
    by = query.get("by", "") if query.get("by", "") in BY else "model"
    last = midnight(query.get("to", ""))
    last = today if last is None else last
    first = midnight(query.get("from", ""))
    first = last - (DEFAULT_DAYS - 1) * DAY_S if first is None else first
    longest = MAX_HOURLY_DAYS if by == "hour" else MAX_DAYS
    first = max(0.0, min(first, last), last - (longest - 1) * DAY_S)
    names = {name: query.get(name, "").strip()[:128] for name in ("tenant", "key", "model")}
    return Wanted(first, last + DAY_S, by, **names)


def _url(wanted: Wanted, changes: Mapping[str, str]) -> str:
    kept = {name: value for name, value in {**wanted.fields, **changes}.items() if value}
    return f"{PREFIX}/usage?{urlencode(kept)}"


def _presets(ask: Ask, wanted: Wanted) -> list[tuple[str, str, bool]]:
    """(words, address, whether it is this one)."""
    today = ask.now_at // DAY_S * DAY_S
    month = midnight(day_text(today)[:8] + "01") or today
    before = midnight(day_text(month - 1)[:8] + "01") or month
    spans = (
        ("Today", today, today),
        ("7 days", today - 6 * DAY_S, today),
        ("This month", month, today),
        ("Last month", before, month - DAY_S),
    )
    return [
        (
            words,
            _url(wanted, {"from": day_text(first), "to": day_text(last)}),
            (first, last + DAY_S) == (wanted.from_at, wanted.to_at),
        )
        for words, first, last in spans
    ]


def _month(ask: Ask, view: UsageView, wanted: Wanted) -> Month | None:
    """Where this month is asked for: what it will come to, and the budget of whom it is asked."""
    if not is_month(wanted.from_at, wanted.to_at, ask.now_at):
        return None
    costs: dict[int, int] = {}
    for each in view.series:
        for at, cost in each.costs.items():
            costs[at] = costs.get(at, 0) + cost
    budget = 0
    if not wanted.model:
        scope: LimitScope = "key" if view.key else "tenant" if view.tenant else "gateway"
        owner = view.key.id if view.key else view.tenant.id if view.tenant else ""
        with suppress(Forbidden):  # the whole server's is not for a tenant's user
            budget = limits.show_limits(ask.control, scope, owner).limits.month_budget_nanos
    return month_of(costs, ask.now_at, budget, ask.desk.settings.currency)


def _chart(ask: Ask, view: UsageView, wanted: Wanted) -> str:
    width = HOUR_S if wanted.unit == "hour" else DAY_S
    upto = min(wanted.to_at, ask.now_at // width * width + width)
    begins = range(int(wanted.from_at), max(int(upto), int(wanted.from_at) + width), width)
    stacks = [
        Stack(
            each.name,
            f"fill-{colour(each.ref)}" if each.ref else "fill-rest",
            [each.costs.get(at, 0) for at in begins],
        )
        for each in view.series
    ]
    labels = [_instant(str(at), wanted.unit)[5:] for at in begins]
    name = f"Costs by {wanted.unit}"
    return stacked(labels, stacks, name, ask.desk.settings.currency)


def _instant(ref: str, by: str) -> str:
    """A day or an hour that begins then, in UTC."""
    at = datetime.datetime.fromtimestamp(int(ref), datetime.UTC)
    return f"{at:%Y-%m-%d}" if by == "day" else f"{at:%Y-%m-%d %H:%M}"


ROUTES = (PageRoute("GET", "/usage", show), PageRoute("GET", "/usage/export", export))
