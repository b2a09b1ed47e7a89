"""Stage 3: hold what a request may cost, settle once what it did cost.

Comes in: a principal and a prepared request. Goes out: a `LimitReservation`, with the x-ratelimit
headers, or 429 with how long to wait. A request draws on the limits of its key, its tenant, its
model and the whole gateway, all or nothing. The arithmetic is limits/policy/rate_limit.py's, the
counts are the store's.

    open -> settled    the request ended: tokens not used are given back
    open -> released   it was refused, or we failed it: everything is given back

A limit by the day and a budget begin with what the ledger knows (limit_restore.py). Requests that
draw on one whose past is still being read wait for it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

from gateway.errors import INSUFFICIENT_QUOTA, RATE_LIMITED, UNAVAILABLE, ApiError
from gateway.limits.policy import rate_limit
from gateway.limits.policy.rate_limit import (
    DAY_S,
    MINUTE_S,
    Draw,
    LimitFigures,
    Meter,
    Refusal,
    Reservation,
    UsedAmounts,
)
from gateway.limits.store import LimitStore
from gateway.pricing.policy.pricing import most_nanos
from gateway.types import HostedModel, PreparedRequest, Principal
from registry.accounts.quotas import UNLIMITED, Limits, LimitScope

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


class Rate(NamedTuple):
    """One field of `Limits` as the arithmetic sees it, and what people call it."""

    field: str
    meter: Meter
    window_s: int
    words: str


RATES = (
    Rate("requests_per_minute", "requests", MINUTE_S, "requests per minute"),
    Rate("requests_per_day", "requests", DAY_S, "requests per day"),
    Rate("tokens_per_minute", "tokens", MINUTE_S, "tokens per minute"),
    Rate("tokens_per_day", "tokens", DAY_S, "tokens per day"),
    Rate("input_tokens_per_minute", "input_tokens", MINUTE_S, "input tokens per minute"),
    Rate("input_tokens_per_day", "input_tokens", DAY_S, "input tokens per day"),
    Rate("output_tokens_per_minute", "output_tokens", MINUTE_S, "output tokens per minute"),
    Rate("output_tokens_per_day", "output_tokens", DAY_S, "output tokens per day"),
    Rate("max_concurrency", "concurrency", 0, "concurrent requests"),
)
# OpenAI's clients wait no longer than this and would ask again, twice, at once.
LONGEST_RETRY_S = 120.0
UNREAD_WAIT_S = 5.0
"""How long a request waits for the past of its limits. After that it is refused."""
MAX_COST_NANOS = 2**54
"""Larger than any budget (registry/accounts/quotas.py), and a shared store counts it in 64 bits."""
_WORDS = {(rate.meter, rate.window_s): rate.words for rate in RATES}
_WHOSE = {"key": "the key's", "tenant": "your tenant's", "model": "the model's"}
_GATEWAY_WHOSE = "this server's"
_UNKNOWN = "the remaining budget cannot be determined at the moment: try again later"
_UNREAD = "what is left of your limits cannot be determined at the moment: try again later"
_OWN = (_WHOSE["key"], _WHOSE["tenant"])
# What OpenAI's headers have names for. Where several limits bind, they tell the tightest.
_HEADERS: tuple[tuple[str, frozenset[Meter]], ...] = (
    ("requests", frozenset({"requests"})),
    ("tokens", frozenset({"tokens", "input_tokens", "output_tokens"})),
)


_Budget: TypeAlias = tuple[str, PeriodKind, int]


class LimitReservation:
    """One request's share of its limits, or of none. Closes once; what comes later changes
    nothing."""

    def __init__(self, store: LimitStore, reservation: Reservation) -> None:
        self._store = store
        self._reservation = reservation
        self.is_open = bool(reservation.taken)

    async def settle(
        self, input_tokens: int, output_tokens: int, cost_nanos: int, posted_at: float
    ) -> None:
        """The request used so many tokens, and is billed so much in a posting of `posted_at`."""
        if self.is_open:
            self.is_open = False
            day = month = 0
            if any(taken.meter == "cost" for taken in self._reservation.taken):
                day = period_of("day", posted_at).number
                month = period_of("month", posted_at).number
            used = UsedAmounts(input_tokens, output_tokens, cost_nanos, day, month, posted_at)
            await self._store.settle(self._reservation, used)

    async def release(self) -> None:
        """As if the request had never come."""
        if self.is_open:
            self.is_open = False
            await self._store.release(self._reservation)


class UnreadPasts:
    """Counts, by name, whose past is being read. Of one gateway, on its event loop."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.read_again: Callable[[str], None] = lambda name: None
        """Set by whoever reads: this count's present period is unread, too."""
        self._changed = asyncio.Event()

    def change(self, old: Iterable[str], new: Iterable[str]) -> None:
        """These are not unread any more, those are."""
        self.names.difference_update(old)
        self.names.update(new)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, names: Sequence[str]) -> bool:
        """Returns when none of them is unread; False where that takes longer than UNREAD_WAIT_S."""
        try:
            async with asyncio.timeout(UNREAD_WAIT_S):
                while not self.names.isdisjoint(names):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Limiter:
    """Reserves for requests. `on_rejection` gets the meter that was exhausted;
    `gateway_limits` are those of all requests together. `budgets_fail_open`: what is not known in
    time is not waited for any longer."""

    def __init__(
        self,
        store: LimitStore,
        clock: Callable[[], float],
        on_rejection: Callable[[str], None],
        gateway_limits: Callable[[], Limits] = lambda: UNLIMITED,
        wall_clock: Callable[[], float] = time.time,
        unread: UnreadPasts | None = None,
        *,
        budgets_fail_open: bool = False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_rejection = on_rejection
        self._gateway_limits = gateway_limits
        self._wall_clock = wall_clock
        self._unread = unread or UnreadPasts()
        self._fail_open = budgets_fail_open

    async def reserve(
        self, principal: Principal, request: PreparedRequest, headers: MutableMapping[str, str]
    ) -> LimitReservation:
        """Hold one request, its prompt, max_tokens for each choice, and what these may cost. Fills
        in `headers` whether granted or not.

        Raises ApiError RATE_LIMITED or INSUFFICIENT_QUOTA, or UNAVAILABLE where nobody can say what
        is left of a limit; nothing was taken then.
        """
        num_prompt, num_output = (
            len(request.prompt_token_ids),
            request.num_choices * request.max_tokens,
        )
        most = min(MAX_COST_NANOS, most_nanos(request.rates, num_prompt, num_output))
        used = UsedAmounts(num_prompt, num_output, most)
        draws = partial(self._draws, principal, request.model, used)
        return await self._reserve(request.request_id, draws, headers)

    async def count(
        self,
        principal: Principal,
        request_id: str,
        headers: MutableMapping[str, str],
        model: HostedModel | None = None,
    ) -> None:
        """Take one request that no model computes: no tokens, no money, and over at once. Raises as
        `reserve`. `model`: whose limits hold for it too, if it is of one."""
        draws = partial(self._draws, principal, model, UsedAmounts(0, 0, 0))
        reservation = await self._reserve(request_id, draws, headers)
        await reservation.settle(0, 0, 0, self._wall_clock())

    async def _reserve(
        self,
        request_id: str,
        draws_now: Callable[[], list[Draw]],
        headers: MutableMapping[str, str],
    ) -> LimitReservation:
        draws = draws_now()
        if self._unread.names:
            draws = await self._once_read(draws, draws_now)
        if not draws:  # Nobody is asked, which may be another process.
            return LimitReservation(self._store, Reservation(request_id, ()))
        decision = await self._store.reserve(request_id, draws, self._clock())
        if decision.refusal is not None and decision.refusal.is_past:  # The clock was set back.
            self._unread.read_again(decision.refusal.draw.name)
            draws = await self._once_read(draws, draws_now)
            decision = await self._store.reserve(request_id, draws, self._clock())
        if decision.figures:
            _add_headers(headers, draws, decision.figures)
        if decision.reservation is not None:
            return LimitReservation(self._store, decision.reservation)
        refusal = decision.refusal
        if refusal is None:
            raise AssertionError("a store neither granted nor refused")
        self._on_rejection(refusal.draw.meter)
        raise _error(refusal, headers)

    async def _once_read(
        self, draws: list[Draw], draws_now: Callable[[], list[Draw]]
    ) -> list[Draw]:
        """What it draws when the past of all of them is known. Raises ApiError UNAVAILABLE."""
        names = [draw.name for draw in draws]
        if self._unread.names.isdisjoint(names):
            return draws
        if not await self._unread.wait(names) and not self._fail_open:
            self._on_rejection(next(d.meter for d in draws if d.name in self._unread.names))
            raise ApiError(UNAVAILABLE, _UNREAD, retry_after_s=1.0)
        return draws_now()  # Another period may have begun.

    def _draws(
        self, principal: Principal, model: HostedModel | None, used: UsedAmounts
    ) -> list[Draw]:
        of_model: tuple[tuple[LimitScope, str, Limits], ...] = ()
        if model is not None:
            of_model = (("model", model.name, model.limits),)
        scopes: tuple[tuple[LimitScope, str, Limits], ...] = (
            ("key", principal.key_id, principal.limits),
            ("tenant", principal.tenant_id, principal.tenant_limits),
            *of_model,
            ("gateway", "", self._gateway_limits()),
        )
        draws, budgets = list[Draw](), list[_Budget]()
        for scope, owner, limits in scopes:
            if limits != UNLIMITED:
                rates, own = _counts(scope, owner, limits)
                draws += (
                    Draw(name, rate.meter, rate.window_s, limit, used.of(rate.meter))
                    for name, rate, limit in rates
                )
                budgets += own
        if budgets:
            now_at = self._wall_clock()
            for name, kind, limit in budgets:
                period = period_of(kind, now_at)
                resets_in_s = period.ends_at - now_at
                about = period.number, resets_in_s, kind
                draws.append(Draw(name, "cost", 0, limit, used.cost_nanos, *about))
        return draws


@lru_cache(4096)
def _counts(
    scope: LimitScope, owner: str, limits: Limits
) -> tuple[tuple[tuple[str, Rate, int], ...], tuple[_Budget, ...]]:
    """Its rates and budgets by the names of their counts. Kept: every request asks for four."""
    return (
        tuple((count_name(scope, owner, rate), rate, limit) for rate, limit in limited(limits)),
        tuple((budget_name(scope, owner, kind), kind, sum_) for kind, sum_ in budgets_of(limits)),
    )


def limited(limits: Limits) -> Iterator[tuple[Rate, int]]:
    """The rates that are bounded, and by how much."""
    if limits != UNLIMITED:
        for rate in RATES:
            limit: int = getattr(limits, rate.field)
            if limit:
                yield rate, limit


def budgets_of(limits: Limits) -> Iterator[tuple[PeriodKind, int]]:
    """The budgets that are set."""
    if limits.day_budget_nanos:
        yield "day", limits.day_budget_nanos
    if limits.month_budget_nanos:
        yield "month", limits.month_budget_nanos


def budget_name(scope: LimitScope, owner: str, kind: PeriodKind) -> str:
    """As `count_name`."""
    return f"{scope} {owner} cost {kind}"


def count_name(scope: LimitScope, owner: str, rate: Rate) -> str:
    """What a store counts it under. A model's name may hold anything but a space."""
    return f"{scope} {owner} {rate.meter} {rate.window_s}"


def go_duration(seconds: float) -> str:
    """As OpenAI writes resets: 250ms, 1s, 59.5s, 6m0s, 23h59m0s. Rounded up to milliseconds."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"


def _add_headers(
    headers: MutableMapping[str, str], draws: Sequence[Draw], figures: Sequence[LimitFigures]
) -> None:
    # Of what all tenants share, what others use is none of the caller's business.
    own = [(d, f) for d, f in zip(draws, figures, strict=True) if _whose(d) in _OWN]
    for name, meters in _HEADERS:
        of_name = [f for draw, f in own if draw.meter in meters]
        if of_name:
            tightest = min(of_name, key=lambda f: (f.remaining, f.limit))
            headers[f"x-ratelimit-limit-{name}"] = str(tightest.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{name}"] = go_duration(tightest.reset_s)


def _error(refusal: Refusal, headers: MutableMapping[str, str]) -> ApiError:
    """As clients see it. Where waiting does not help, `x-should-retry` says so."""
    if refusal.is_unknown:
        return ApiError(UNAVAILABLE, _UNKNOWN, retry_after_s=refusal.wait_s)
    is_final = refusal.wait_s is None
    if refusal.draw.meter == "cost":
        headers["x-should-retry"] = "false"
        return ApiError(INSUFFICIENT_QUOTA, _explain_budget(refusal), is_final=is_final)
    if refusal.wait_s is None or refusal.wait_s > LONGEST_RETRY_S:
        headers["x-should-retry"] = "false"
    return ApiError(RATE_LIMITED, _explain(refusal), None, refusal.wait_s, is_final)


def _explain_budget(refusal: Refusal) -> str:
    draw = refusal.draw
    whose = _whose(draw)
    kind = draw.name.rpartition(" ")[2]
    if refusal.wait_s is None:
        budget = f"{whose} budget for a {kind}" + (
            f", {_money(draw.limit)}" if whose in _OWN else ""
        )
        return (
            f"this request alone may cost {_money(draw.cost)}, more than {budget}: "
            "shorten the prompt, or lower max_tokens or n"
        )
    says = f"{whose} budget for this {kind} is used up or reserved by running requests"
    resets = f"the budget resets in {go_duration(draw.resets_in_s)}, when the {kind} ends in UTC"
    if whose not in _OWN:  # what others spend is none of the caller's business
        return f"{says}: this request may cost {_money(draw.cost)}; {resets}"
    left = max(0, draw.limit - refusal.used)
    return (
        f"{says}: {_money(left)} of {_money(draw.limit)} is left and this request may cost "
        f"{_money(draw.cost)}; {resets}"
    )


def _whose(draw: Draw) -> str:
    return _WHOSE.get(draw.name.partition(" ")[0], _GATEWAY_WHOSE)


def _money(nanos: int) -> str:
    """Units of the currency, no zeros at the end."""
    return f"{nanos // 10**9}.{nanos % 10**9:09d}".rstrip("0").rstrip(".")


def _explain(refusal: Refusal) -> str:
    draw = refusal.draw
    whose = _whose(draw)
    limit = f"{whose} {_WORDS[draw.meter, draw.window_s]}"
    used = f"used {refusal.used}, " if whose in _OWN else ""
    figures = f"limit {draw.limit}, {used}requested {draw.cost}"
    if refusal.wait_s is None:
        return (
            f"this request alone exceeds {limit} ({figures}): "
            "shorten the prompt, or lower max_tokens or n"
        )
    return f"rate limit reached for {limit} ({figures}): try again in {go_duration(refusal.wait_s)}"
