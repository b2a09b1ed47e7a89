"""What a request costs (pure): integers only, by the table of outcomes.

    finished      prompt + generated (up to the stop)
    disconnected  prompt + generated until the abort took effect
    failed        nothing
    cache_hit     the answer's tokens at the cached-token price: reading, not computing

Cached prompt tokens (prefix cache) are part of the prompt and have their own price; an encoder's
tokens have theirs. Where a second of service or of loading has a price, whole microseconds count.

Rounding. The bill of a request is an exact fraction: amounts times prices times the share that
discounts leave. It is rounded once, down to a whole nano-unit, in the client's favour; so a
request is billed at most one nano-unit too little, and nobody a fraction too much. What each meter
adds is the difference of the sums rounded behind and before it, so the parts add up to the bill.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

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
