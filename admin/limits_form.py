"""The form of somebody's limits, and how much of each is used at this moment.

What is used comes from the store where requests are counted, over all gateways that share it; what
is in force comes from this gateway's own directory, so that the page can say when a change has
arrived.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from admin.amounts import nanos_of, text_of
from admin.ask import Ask
from admin.forms import Field, Form
from admin.templating import money, number, span
from gateway.limits.limits import budget_name, budgets_of, count_name, limited
from gateway.limits.periods import period_of
from gateway.policy.rate_limit import Draw, Figures
from gateway.service import limits as verbs
from gateway.service.limits import LimitsChanged
from gateway.store.base import LimitStore
from registry.errors import RegistryError
from registry.quotas import LIMIT_NAMES, MAX_LIMIT, Limits, LimitScope

TIMEOUT_S = 2.0
SEEN: Final = "seen"
"""What held when the form was shown, in a field of its own that is not to be seen."""
BUDGETS: Final = frozenset({"day_budget_nanos", "month_budget_nanos"})
_AMOUNT: Final = re.compile(r"[0-9]{1,19}")
LABELS: Final[Mapping[str, str]] = {
    "requests_per_minute": "Requests a minute",
    "requests_per_day": "Requests in 24 hours",
    "max_concurrency": "Requests at a time",
    "tokens_per_minute": "Tokens a minute",
    "tokens_per_day": "Tokens in 24 hours",
    "input_tokens_per_minute": "Prompt tokens a minute",
    "input_tokens_per_day": "Prompt tokens in 24 hours",
    "output_tokens_per_minute": "Answer tokens a minute",
    "output_tokens_per_day": "Answer tokens in 24 hours",
    "max_prompt_tokens": "Tokens of one prompt",
    "max_output_tokens": "Tokens of one answer",
    "day_budget_nanos": "Budget of a day",
    "month_budget_nanos": "Budget of a month",
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


def limits_form(ask: Ask, owners: Sequence[Owner], given: bool = False) -> Form:
    """The first owner's limits; each field says what is in effect where another's is tighter."""
    own = owners[0].limits
    fields = [
        Field(
            name,
            label,
            "number",
            value=_text(name, getattr(own, name)),
            unit=ask.desk.settings.currency if name in BUDGETS else "",
            now=_effective(ask, name, owners),
            placeholder="unlimited",
        )
        for name, label in LABELS.items()
    ]
    fields.append(Field(SEEN, "Seen", value=_seen_text(own), max_length=1000))
    return Form(tuple(fields), ask.form if given else None)


def store(ask: Ask, owner: Owner, form: Form) -> bool:
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
        verbs.set_limits(ask.control, owner.scope, owner.id, changes, seen)
    except LimitsChanged as error:
        now = {name: _text(name, getattr(error.now, name)) for name in LABELS}
        kept = {name: form.value(name) for name in changes}
        form.given = {**now, **kept, SEEN: _seen_text(error.now)}
        for name, who in error.by.items():
            said = now[name] or "unlimited"
            form.errors[name] = f"{who} has set {said} meanwhile: sent again, yours replaces it."
        form.trouble = str(error)
    except RegistryError as error:
        form.trouble = str(error)
    return form.is_sound


def _seen_text(limits: Limits) -> str:
    return " ".join(f"{name}={getattr(limits, name)}" for name in LIMIT_NAMES)


def _seen(text: str) -> Limits | None:
    """None: not told."""
    pairs = [pair.partition("=")[::2] for pair in text.split()]
    sound = bool(pairs) and all(
        name in LIMIT_NAMES and _AMOUNT.fullmatch(value) for name, value in pairs
    )
    return Limits(**{name: int(value) for name, value in pairs}) if sound else None


def uses(ask: Ask, owners: Sequence[Owner]) -> list[Use] | None:
    """How each limit stands; None where the store does not say."""
    edge, now_at = ask.desk.edge, ask.now_at
    draws: list[Draw] = []
    told: list[tuple[str, str, bool]] = []
    for owner in owners:
        for rate, limit in limited(owner.limits):
            name = count_name(owner.scope, owner.id, rate)
            draws.append(Draw(name, rate.meter, rate.window_s, limit, 0))
            told.append((LABELS[rate.field], owner.words, False))
        for kind, limit in budgets_of(owner.limits):
            period = period_of(kind, now_at)
            name = budget_name(owner.scope, owner.id, kind)
            ends_s = period.ends_at - now_at
            draws.append(Draw(name, "cost", 0, limit, 0, period.number, ends_s, kind))
            told.append((LABELS[f"{kind}_budget_nanos"], owner.words, True))
    if not draws:
        return []
    asked = _figures(edge.store, draws, edge.clocks.now_s())
    future = asyncio.run_coroutine_threadsafe(asked, ask.incoming.loop)
    try:
        found = future.result(TIMEOUT_S)
    except TimeoutError:
        future.cancel()
        return None
    currency = ask.desk.settings.currency
    return [
        _use(draw, figures, *words, currency)
        for draw, figures, words in zip(draws, found, told, strict=True)
    ]


def is_in_force(ask: Ask, owner: Owner, key_id: str) -> bool:
    """Whether this gateway goes by these limits already; `key_id`: of a key that is let in."""
    record = ask.desk.edge.services.directory.find_key_by_id(key_id)
    if record is None:
        return False
    return owner.limits == (record.limits if owner.scope == "key" else record.tenant_limits)


async def _figures(store: LimitStore, draws: Sequence[Draw], now_s: float) -> list[Figures]:
    return await store.figures(draws, now_s)


def _use(
    draw: Draw, figures: Figures, label: str, whose: str, is_money: bool, currency: str
) -> Use:
    used = max(0, draw.limit - figures.remaining)
    share = min(1.0, used / draw.limit)
    said = (lambda amount: money(amount, currency)) if is_money else number
    note = f"free again in {span(figures.reset_s)}" if used and figures.reset_s > 0 else ""
    if is_money:
        note = f"begins anew in {span(draw.resets_in_s)}"
    return Use(label, whose, share, f"{said(used)} of {said(draw.limit)}", note)


def _effective(ask: Ask, name: str, owners: Sequence[Owner]) -> str:
    """What holds, where somebody else's limit is tighter than the one that stands in the field."""
    bounds = [(getattr(owner.limits, name), owner.words) for owner in owners]
    own, others = bounds[0][0], [(limit, words) for limit, words in bounds[1:] if limit]
    if not others or (own and own <= min(others)[0]):
        return ""
    limit, words = min(others)
    said = money(limit, ask.desk.settings.currency) if name in BUDGETS else number(limit)
    return f"{said}, by {words}"


def _text(name: str, limit: int) -> str:
    if not limit:
        return ""
    return text_of(limit) if name in BUDGETS else str(limit)
