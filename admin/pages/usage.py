"""Usage and costs: what was used, by whom, of what, when; and the same as a file."""

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from starlette.responses import Response

from admin.billing.usage_export import Format
from admin.context.policy.permissions import allowed
from admin.operations import limits, models, tenants
from admin.operations import usage as verbs
from admin.operations.usage import UsageLine, UsageView
from admin.pages.exports import LABELS
from admin.rendering.charts import Month, Stack, is_month, month_of, stacked
from admin.rendering.model_colours import by_rank
from admin.web.errors import Refused
from admin.web.forms import day_text, midnight, text_of
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute
from admin.web.streams import Download
from registry.accounts.quotas import LimitScope
from registry.base import random_token
from registry.errors import Forbidden, InvalidValue, NotFound

DAY_S = 86_400
HOUR_S = 3600
DEFAULT_DAYS = 7
MAX_DAYS = 400
MAX_HOURLY_DAYS = 7
MAX_LINES = 200
MAX_SUGGESTED = 100
SORTS = {
    "num_requests": "Requests",
    "prompt_tokens": "Input tokens",
    "completion_tokens": "Output tokens",
    "cost_nanos": "Cost",
    "name": "",
}
"""Columns of the table that it can be sorted by."""
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
        shown = {
            "from": day_text(self.from_at),
            "to": day_text(self.to_at - 1),
            "by": self.by,
            "tenant": self.tenant,
            "key": self.key,
            "model": self.model,
        }
        return {name: value for name, value in shown.items() if value}


def show(request: PageRequest) -> Response:
    """The page. What the address names wrongly is said at its field, above what is left of it."""
    wanted, errors = _known(request, _wanted(request))
    view = verbs.usage_view(
        request.operator,
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
    kinds = by_rank(each.ref for each in view.series)
    sort = request.query.get("sort", "")
    return request.page(
        "usage.html",
        view=view,
        wanted=wanted,
        by=BY,
        errors=errors,
        suggested=_suggested(request),
        lines=sorted_lines(view.lines, sort),
        sort=sort,
        sorts=SORTS,
        num_rest=view.num_lines - len(view.lines),
        rest=left,
        chart=_chart(request, view, wanted, kinds),
        month=_month(request, view, wanted),
        labels=LABELS,
        once=random_token(10),
        formats={
            name: (label, f"{PREFIX}/usage/export?{urlencode({**wanted.fields, 'format': name})}")
            for name, (label, *_) in FORMATS.items()
        },
        kinds=[(each.name, kinds[each.ref]) for each in view.series if any(each.costs.values())],
        colours=kinds,
        instant=_instant,
        exact_cost=text_of(view.total.cost_nanos),
        url=lambda **changes: _url(wanted, changes),
        presets=_presets(request, wanted),
    )


def sorted_lines(lines: list[UsageLine], sort: str) -> list[UsageLine]:
    """By a column of SORTS, downwards with a minus; as they came where it is none."""
    name = sort.removeprefix("-")
    if name not in SORTS:
        return lines
    down = sort.startswith("-")
    if name == "name":
        return sorted(lines, key=lambda line: line.name.lower(), reverse=down)
    return sorted(lines, key=lambda line: int(getattr(line.amounts, name)), reverse=down)


def _known(request: PageRequest, wanted: Wanted) -> tuple[Wanted, dict[str, str]]:
    """Without the tenant or key that is none, and what is wrong, by field."""
    errors: dict[str, str] = {}
    first, last = (midnight(request.query.get(name, "")) for name in ("from", "to"))
    for name, at in (("from", first), ("to", last)):
        if request.query.get(name) and at is None:
            errors[name] = "Enter a day such as 2026-12-31."
    if first is not None and last is not None and first > last:
        errors["from"] = "The first day is after the last day; only the last day is shown."
    for name in ("tenant", "key"):
        if value := getattr(wanted, name):
            try:
                verbs.scope_of(request.operator, 0.0, 1.0, **{name: value})
            except NotFound:
                errors[name] = f"There is no {name} {value}."
                wanted = replace(wanted, tenant="") if name == "tenant" else replace(wanted, key="")
    if wanted.tenant and wanted.key:
        try:
            verbs.scope_of(request.operator, 0.0, 1.0, wanted.tenant, wanted.key)
        except InvalidValue:
            errors["key"] = "The key does not belong to the tenant."
            wanted = replace(wanted, key="")
    return wanted, errors


def _suggested(request: PageRequest) -> dict[str, list[str]]:
    """Some names for the fields, of what the user may see."""
    names = [each.name for each in tenants.list_tenants(request.operator)][:MAX_SUGGESTED]
    may_all = allowed(request.operator.grants, "models.read")
    found = models.chat_models(request.operator)[:MAX_SUGGESTED] if may_all else []
    return {"tenant": names, "model": found}


def export(request: PageRequest) -> Response:
    """A download, made while it is sent."""
    found = FORMATS.get(request.query.get("format", ""))
    if found is None:
        raise Refused(404, "Unknown format", "Choose a format on the usage page.")
    wanted = _wanted(request)
    scope = verbs.scope_of(
        request.operator,
        wanted.from_at,
        wanted.to_at,
        wanted.tenant or None,
        wanted.key or None,
        wanted.model or None,
    )
    _, format_name, media, suffix = found
    order = verbs.order_export(request.operator, format_name, scope)
    name = f"usage-{day_text(wanted.from_at)}-{day_text(wanted.to_at - 1)}.{suffix}"
    return Download(verbs.export_chunks(request.operator, order), name, media)


def _wanted(request: PageRequest) -> Wanted:
    """What means nothing is as if not said; a span that is too long ends earlier."""
    query = request.query
    today = request.now_at // DAY_S * DAY_S
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


def _presets(request: PageRequest, wanted: Wanted) -> list[tuple[str, str, bool]]:
    """(words, address, whether it is this one)."""
    today = request.now_at // DAY_S * DAY_S
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


def _month(request: PageRequest, view: UsageView, wanted: Wanted) -> Month | None:
    """Where this month is asked for: what it will come to, and the budget of whom it is asked."""
    if not is_month(wanted.from_at, wanted.to_at, request.now_at):
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
            budget = limits.show_limits(request.operator, scope, owner).limits.month_budget_nanos
    return month_of(costs, request.now_at, budget, request.context.settings.currency)


def _chart(request: PageRequest, view: UsageView, wanted: Wanted, kinds: Mapping[str, str]) -> str:
    width = HOUR_S if wanted.unit == "hour" else DAY_S
    upto = min(wanted.to_at, request.now_at // width * width + width)
    begins = range(int(wanted.from_at), max(int(upto), int(wanted.from_at) + width), width)
    stacks = [
        Stack(
            each.name,
            f"fill-{kinds[each.ref]}",
            [each.costs.get(at, 0) for at in begins],
        )
        for each in view.series
    ]
    labels = [_instant(str(at), wanted.unit)[5:] for at in begins]
    name = f"Costs by {wanted.unit}"
    return stacked(labels, stacks, name, request.context.settings.currency)


def _instant(ref: str, by: str) -> str:
    """A day or an hour that begins then, in UTC."""
    at = datetime.datetime.fromtimestamp(int(ref), datetime.UTC)
    return f"{at:%Y-%m-%d}" if by == "day" else f"{at:%Y-%m-%d %H:%M}"


ROUTES = (PageRoute("GET", "/usage", show), PageRoute("GET", "/usage/export", export))
