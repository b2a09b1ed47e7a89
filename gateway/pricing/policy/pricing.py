"""What a request costs, by the prices that hold when it arrives (pure): integers only.

    finished      prompt + generated (up to the stop)
    disconnected  prompt + generated until the abort took effect
    failed        nothing
    cache_hit     prompt + answer at the cached-token price: reading, not computing

Cached prompt tokens (prefix cache) are part of the prompt and have their own price; an encoder's
tokens have theirs. Where a second of service or of loading has a price, whole microseconds count.

Rounding. The bill of a request is an exact fraction: amounts times prices times the share that
discounts leave. It is rounded once, down to a whole nano-unit, in the client's favour; so a
request is billed at most one nano-unit too little, and nobody a fraction too much. What each meter
adds is the difference of the sums rounded behind and before it, so the parts add up to the bill.

What is dated (`PriceBook`):

    list price           of a model, from a date on; none: free of charge
    plan's price         of a model in a plan, from a date on, in place of the list price; it may
                         end, and then the list price holds again
    plan's discount      basis points off list prices, from a date on; never off the plan's own
    tenant's terms       its plan, and a discount of its own off whatever the plan says

It comes sorted by date; what lies in the future is in here too, so nobody has to read prices anew
at the moment when they change.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

Billed: TypeAlias = Literal["finished", "disconnected", "failed", "cache_hit"]

BASIS_POINTS = 10_000
WHOLE = BASIS_POINTS**2
"""The share that no discount leaves: a plan's and a tenant's own discount, in basis points each."""
MICROS = 10**6
MAX_BILLED_S = 600
"""Of service, and of loading, no more is billed to one request: what a hard budget reserves."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Nano-units: per token of a prompt, of a prompt found in a cache, generated, of an encoder's
    input; per second of service and of loading."""

    prompt_nanos: int = 0
    cached_nanos: int = 0
    completion_nanos: int = 0
    embedding_nanos: int = 0
    service_second_nanos: int = 0
    load_second_nanos: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What one tenant pays for one model at the instant `at` (epoch seconds, a request's arrival).

    `listed`: everybody's prices. `agreed`: the tenant's plan's own, or the same as listed.
    `share`: what discounts leave of `agreed`, in parts of WHOLE.
    """

    at: float = 0.0
    listed: Prices = Prices()
    agreed: Prices = Prices()
    share: int = WHOLE


FREE = Rates()


@dataclass(frozen=True, slots=True)
class Consumption:
    """What a request used. Raises ValueError on counts that cannot be.

    `is_encoder`: its input has the encoders' price. Cached tokens are part of the prompt.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    service_us: int = 0
    load_us: int = 0
    is_encoder: bool = False

    def __post_init__(self) -> None:
        """Check the counts."""
        cached_fits = 0 <= self.cached_tokens <= self.prompt_tokens
        if not cached_fits or min(self.completion_tokens, self.service_us, self.load_us) < 0:
            raise ValueError(
                f"{self.prompt_tokens} prompt ({self.cached_tokens} cached), "
                f"{self.completion_tokens} completion, {self.service_us} and {self.load_us} us"
            )


@dataclass(frozen=True, slots=True)
class Cost:
    """A bill in nano-units, by meter. `list_nanos`: the whole at list prices, rounded alike."""

    input_nanos: int = 0
    cached_nanos: int = 0
    output_nanos: int = 0
    service_nanos: int = 0
    load_nanos: int = 0
    list_nanos: int = 0

    @property
    def cost_nanos(self) -> int:
        """What is billed."""
        return (
            self.input_nanos
            + self.cached_nanos
            + self.output_nanos
            + self.service_nanos
            + self.load_nanos
        )


def cost_of(rates: Rates, outcome: Billed, used: Consumption) -> Cost:
    """The bill of one request."""
    if outcome == "failed":
        return Cost()
    fresh, cached, made, service, load = _rounded(_meters(rates.agreed, outcome, used), rates.share)
    listed = sum(_rounded(_meters(rates.listed, outcome, used), WHOLE))
    return Cost(fresh, cached, made, service, load, listed)


def most_nanos(rates: Rates, prompt_tokens: int, completion_tokens: int) -> int:
    """What a request may cost at most, whatever becomes of it and whatever a cache holds of it."""
    prices = rates.agreed
    per_prompt = max(prices.prompt_nanos, prices.cached_nanos, prices.embedding_nanos)
    tokens = prompt_tokens * per_prompt + completion_tokens * max(
        prices.completion_nanos, prices.cached_nanos
    )
    seconds = MAX_BILLED_S * (prices.service_second_nanos + prices.load_second_nanos)
    return (tokens + seconds) * rates.share // WHOLE


def micros(seconds: float) -> int:
    """Whole microseconds in a duration: one product of doubles, rounded down, so that any database
    and any other program comes to the same."""
    return max(0, math.floor(seconds * 1e6))


def _meters(prices: Prices, outcome: Billed, used: Consumption) -> tuple[int, ...]:
    """Exact amounts of input, cached, output, service and loading, in nano-units by MICROS."""
    if outcome == "cache_hit":
        read = used.prompt_tokens + used.completion_tokens
        return 0, read * prices.cached_nanos * MICROS, 0, 0, 0
    per_input = prices.embedding_nanos if used.is_encoder else prices.prompt_nanos
    most_us = MAX_BILLED_S * MICROS
    return (
        (used.prompt_tokens - used.cached_tokens) * per_input * MICROS,
        used.cached_tokens * prices.cached_nanos * MICROS,
        used.completion_tokens * prices.completion_nanos * MICROS,
        min(used.service_us, most_us) * prices.service_second_nanos,
        min(used.load_us, most_us) * prices.load_second_nanos,
    )


def _rounded(meters: tuple[int, ...], share: int) -> list[int]:
    """Whole nano-units of each meter, which add up to the whole sum rounded down once."""
    parts: list[int] = []
    exact = rounded = 0
    for amount in meters:
        exact += amount * share
        upto = exact // (WHOLE * MICROS)
        parts.append(upto - rounded)
        rounded = upto
    return parts


_T = TypeVar("_T")
Dated: TypeAlias = Sequence[tuple[float, _T]]
"""(since when, what), the oldest first."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a tenant agreed: a plan ("" for none) and basis points off."""

    plan: str = ""
    discount_bp: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A price plan. `prices` by model; None where the plan's price of it ends."""

    discounts: Dated[int] = ()
    prices: Mapping[str, Dated[Prices | None]] = field(default_factory=dict)


_NO_PRICES = Prices()
_NO_TERMS = Terms()
_NO_PLAN = Plan()


@dataclass(frozen=True, slots=True)
class PriceBook:
    """List prices by model, plans by name, terms by tenant id."""

    listed: Mapping[str, Dated[Prices]] = field(default_factory=dict)
    plans: Mapping[str, Plan] = field(default_factory=dict)
    terms: Mapping[str, Dated[Terms]] = field(default_factory=dict)

    def rates(self, tenant_id: str, model: str, at: float) -> Rates:
        """What a request that arrives at `at` is billed by."""
        listed = _holding(self.listed.get(model, ()), at, _NO_PRICES)
        terms = self.terms_of(tenant_id, at)
        plan = self.plans.get(terms.plan, _NO_PLAN)
        own = _holding(plan.prices.get(model, ()), at, None)
        left = BASIS_POINTS
        if own is None:
            left -= _holding(plan.discounts, at, 0)
        share = left * (BASIS_POINTS - terms.discount_bp)
        return Rates(at, listed, listed if own is None else own, share)

    def terms_of(self, tenant_id: str, at: float) -> Terms:
        """What the tenant has agreed at `at`."""
        return _holding(self.terms.get(tenant_id, ()), at, _NO_TERMS)

    def changes(self, from_at: float, to_at: float, tenant_id: str | None = None) -> list[float]:
        """When something changes inside the span, of one tenant's prices or of anybody's."""
        found = {at for at in self._instants(tenant_id) if from_at < at < to_at}
        return sorted(found)

    def _instants(self, tenant_id: str | None) -> Iterator[float]:
        if tenant_id is None:
            terms, plans = list(self.terms.values()), list(self.plans.values())
        else:
            terms = [self.terms.get(tenant_id, ())]
            names = {one.plan for dated in terms for _, one in dated}
            plans = [self.plans[name] for name in sorted(names) if name in self.plans]
        for dated in (*self.listed.values(), *terms):
            yield from (at for at, _ in dated)
        for plan in plans:
            yield from (at for at, _ in plan.discounts)
            for own in plan.prices.values():
                yield from (at for at, _ in own)


def _holding(dated: Dated[_T], at: float, before: _T) -> _T:
    """What holds at `at`; `before` the first date."""
    index = bisect_right(dated, at, key=lambda one: one[0])
    return before if index == 0 else dated[index - 1][1]
