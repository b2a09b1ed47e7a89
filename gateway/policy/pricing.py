"""What a request costs (pure): integers only, by the table of outcomes.

    finished      prompt + generated (up to the stop)
    disconnected  prompt + generated until the abort took effect
    failed        nothing
    cache_hit     the answer's tokens at the cached-token price: reading, not computing

Cached prompt tokens (prefix cache) are part of the prompt and have their own price. Prices are
nano-units of the currency per token, so a product of integers is the bill; nothing is rounded.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Nano-units per token of one model at the time of the request."""

    prompt_nanos: int
    cached_nanos: int
    completion_nanos: int


def most_nanos(prices: TokenPrices, prompt_tokens: int, completion_tokens: int) -> int:
    """What a request may cost at most, whatever becomes of it and whatever a cache holds of it."""
    return prompt_tokens * max(prices.prompt_nanos, prices.cached_nanos) + (
        completion_tokens * max(prices.completion_nanos, prices.cached_nanos)
    )


def cost_nanos(
    prices: TokenPrices,
    outcome: Literal["finished", "disconnected", "failed", "cache_hit"],
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
) -> int:
    """The bill of one request. Raises ValueError on counts that cannot be."""
    if not 0 <= cached_tokens <= prompt_tokens or completion_tokens < 0:
        raise ValueError(
            f"{prompt_tokens} prompt ({cached_tokens} cached), {completion_tokens} completion"
        )
    if outcome == "failed":
        return 0
    if outcome == "cache_hit":
        return (prompt_tokens + completion_tokens) * prices.cached_nanos
    return (
        (prompt_tokens - cached_tokens) * prices.prompt_nanos
        + cached_tokens * prices.cached_nanos
        + completion_tokens * prices.completion_nanos
    )
