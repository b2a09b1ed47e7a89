"""The form of somebody's limits, and how much of each is used at this moment.

What is used comes from the store where requests are counted, over all gateways that share it; what
is in force comes from this gateway's own directory, so that the page can say when a change has
arrived.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from admin.context.operator_context import require
from admin.operations import limits as verbs
from admin.operations.limits import LimitsChanged
from admin.rendering.templating import money, number, span
from admin.web.forms import Field, Form, nanos_of, text_of
from admin.web.request import PageRequest
from gateway.limits.limits import budget_name, budgets_of, count_name, limited, period_of
from gateway.limits.policy.rate_limit import Draw, LimitFigures
from gateway.limits.store import LimitStore
from registry.accounts.quotas import LIMIT_NAMES, MAX_LIMIT, Limits, LimitScope

TIMEOUT_S = 2.0
SEEN: Final = "seen"
"""What held when the form was shown, in a field of its own that is not to be seen."""
BUDGETS: Final = frozenset({"day_budget_nanos", "month_budget_nanos"})
_AMOUNT: Final = re.compile(r"[0-9]{1,19}")
LABELS: Final[Mapping[str, str]] = {
    "requests_per_minute": "Requests per minute",
    "requests_per_day": "Requests per 24 hours",
    "max_concurrency": "Concurrent requests",
    "tokens_per_minute": "Tokens per minute",
    "tokens_per_day": "Tokens per 24 hours",
    "input_tokens_per_minute": "Input tokens per minute",
    "input_tokens_per_day": "Input tokens per 24 hours",
    "output_tokens_per_minute": "Output tokens per minute",
    "output_tokens_per_day": "Output tokens per 24 hours",
    "max_prompt_tokens": "Input tokens per request",
    "max_output_tokens": "Output tokens per request",
    "day_budget_nanos": "Daily budget",
    "month_budget_nanos": "Monthly budget",
}


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose limits are shown beside others': "key" and an id, in words "this key"."""

    scope: LimitScope
    id: str
    words: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Use:
    """One limit and how much of it is used: `share` 0 to 1, as words too."""

    label: str
    whose: str
    share: float
    text: str
    note: str

    @property
    def kind(self) -> str:
        """Of the bar."""
        return "bad" if self.share >= 1 else "warn" if self.share >= 0.8 else "ok"


def limits_form(request: PageRequest, owners: Sequence[Owner], given: bool = False) -> Form:
    """The first owner's limits; each field says what is in effect where another's is tighter."""
    own = owners[0].limits
    fields = [
        Field(
            name,
            label,
            "number",
            value=_text(name, getattr(own, name)),
            unit=request.context.settings.currency if name in BUDGETS else "",
            now=_effective(request, name, owners),
            placeholder="unlimited",
        )
        for name, label in LABELS.items()
    ]
    fields.append(Field(SEEN, "Seen", value=_seen_text(own), max_length=1000))
    return Form(tuple(fields), request.fields if given else None)


def change_limits(
    request: PageRequest, owners: Sequence[Owner], back: str, again: Callable[[Form], Response]
) -> Response:
    """Set the first owner's limits and go `back`, or show the form `again` with what is wrong."""
    require(request.operator, "limits.write")
    form = limits_form(request, owners, given=True)
    if _store(request, owners[0], form):
        return request.redirect(back, "The limits were changed.")
    return again(form)


def _store(request: PageRequest, owner: Owner, form: Form) -> bool:
    """Set what the form changes of what it was shown with: an empty field is no limit. Whether it
    was done; else the form says why, and what others have set meanwhile stands in it."""
    wanted = {
        name: (nanos_of(form, name) if name in BUDGETS else form.whole(name)) or 0
        for name in LABELS
    }
    for name, value in wanted.items():
        if value > MAX_LIMIT:
            most = MAX_LIMIT // 10**9 if name in BUDGETS else MAX_LIMIT
            form.errors.setdefault(name, f"At most {number(most)}.")
    seen = _seen(form.text(SEEN))
    changes = {
        name: value
        for name, value in wanted.items()
        if seen is None or value != getattr(seen, name)
    }
    if not form.is_sound:
        return False
    try:
        with form.refusals():
            verbs.set_limits(request.operator, owner.scope, owner.id, changes, seen)
    except LimitsChanged as error:
        now = {name: _text(name, getattr(error.now, name)) for name in LABELS}
        kept = {name: form.value(name) for name in changes}
        form.given = {**now, **kept, SEEN: _seen_text(error.now)}
        for name, who in error.by.items():
            said = now[name] or "unlimited"
            form.errors[name] = (
                f"{who} set {said} in the meantime. Send again to replace it with yours."
            )
        form.trouble = str(error)
    return form.is_sound


def _seen_text(limits: Limits) -> str:
    return " ".join(f"{name}={getattr(limits, name)}" for name in LIMIT_NAMES)


def _seen(text: str) -> Limits | None:
    """None: not given."""
    pairs = [pair.partition("=")[::2] for pair in text.split()]
    sound = bool(pairs) and all(
        name in LIMIT_NAMES and _AMOUNT.fullmatch(value) for name, value in pairs
    )
    return Limits(**{name: int(value) for name, value in pairs}) if sound else None


def uses(request: PageRequest, owners: Sequence[Owner]) -> list[Use] | None:
    """How each limit stands; None where the store does not say."""
    edge, now_at = request.context.edge, request.now_at
    draws: list[Draw] = []
    lines: list[tuple[str, str, bool]] = []
    for owner in owners:
        for rate, limit in limited(owner.limits):
            name = count_name(owner.scope, owner.id, rate)
            draws.append(Draw(name, rate.meter, rate.window_s, limit, 0))
            lines.append((LABELS[rate.field], owner.words, False))
        for kind, limit in budgets_of(owner.limits):
            period = period_of(kind, now_at)
            name = budget_name(owner.scope, owner.id, kind)
            ends_s = period.ends_at - now_at
            draws.append(Draw(name, "cost", 0, limit, 0, period.number, ends_s, kind))
            lines.append((LABELS[f"{kind}_budget_nanos"], owner.words, True))
    if not draws:
        return []
    asked = _figures(edge.store, draws, edge.clocks.now_s())
    future = asyncio.run_coroutine_threadsafe(asked, request.loop)
    try:
        found = future.result(TIMEOUT_S)
    except TimeoutError:
        future.cancel()
        return None
    currency = request.context.settings.currency
    return [
        _use(draw, figures, *words, currency)
        for draw, figures, words in zip(draws, found, lines, strict=True)
    ]


def is_in_force(request: PageRequest, owner: Owner, key_id: str) -> bool:
    """Whether this gateway goes by these limits already; `key_id`: of a key that is let in."""
    record = request.context.edge.services.directory.find_key_by_id(key_id)
    if record is None:
        return False
    return owner.limits == (record.limits if owner.scope == "key" else record.tenant_limits)


async def _figures(store: LimitStore, draws: Sequence[Draw], now_s: float) -> list[LimitFigures]:
    return await store.figures(draws, now_s)


def _use(
    draw: Draw, figures: LimitFigures, label: str, whose: str, is_money: bool, currency: str
) -> Use:
    used = max(0, draw.limit - figures.remaining)
    share = min(1.0, used / draw.limit)
    said = (lambda amount: money(amount, currency)) if is_money else number
    note = f"fully available in {span(figures.reset_s)}" if used and figures.reset_s > 0 else ""
    if is_money:
        note = f"resets in {span(draw.resets_in_s)}"
    return Use(label, whose, share, f"{said(used)} of {said(draw.limit)}", note)


def _effective(request: PageRequest, name: str, owners: Sequence[Owner]) -> str:
    """What holds, where somebody else's limit is tighter than the one that stands in the field."""
    bounds = [(getattr(owner.limits, name), owner.words) for owner in owners]
    own, others = bounds[0][0], [(limit, words) for limit, words in bounds[1:] if limit]
    if not others or (own and own <= min(others)[0]):
        return ""
    limit, words = min(others)
    said = money(limit, request.context.settings.currency) if name in BUDGETS else number(limit)
    return f"{said}, set for {words}"


def _text(name: str, limit: int) -> str:
    if not limit:
        return ""
    return text_of(limit) if name in BUDGETS else str(limit)
