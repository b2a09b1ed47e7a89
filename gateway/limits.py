"""Stage 3: hold what a request may cost, settle once what it did cost.

Comes in: a principal and a prepared request. Goes out: a `Hold`, with the x-ratelimit headers, or
429 with how long to wait. The arithmetic is policy/rate_limit.py's, the counts are the store's.

    open -> settled    the request ended: tokens not used are given back
    open -> released   it was refused, or we failed it: everything is given back
"""

import math
from collections.abc import Callable, MutableMapping

from gateway.errors import RATE_LIMITED, ApiError
from gateway.policy.rate_limit import Figures, Refusal, Reservation
from gateway.store.base import LimitStore
from gateway.types import PreparedRequest, Principal

_UNITS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrency": "requests at one time",
}


class Hold:
    """One request's share of its key's limits. Closes once; what comes later changes nothing."""

    def __init__(self, store: LimitStore, key_id: str, reservation: Reservation) -> None:
        self._store = store
        self._key_id = key_id
        self._reservation = reservation
        self.is_open = True

    async def settle(self, tokens: int) -> None:
        """The request used this many tokens."""
        if self.is_open:
            self.is_open = False
            await self._store.settle(self._key_id, self._reservation, tokens)

    async def release(self) -> None:
        """As if the request had never come."""
        if self.is_open:
            self.is_open = False
            await self._store.release(self._key_id, self._reservation)


class Limiter:
    """Reserves for requests. `on_rejection` is told the dimension that was exhausted."""

    def __init__(
        self, store: LimitStore, clock: Callable[[], float], on_rejection: Callable[[str], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_rejection = on_rejection

    async def reserve(
        self, principal: Principal, request: PreparedRequest, headers: MutableMapping[str, str]
    ) -> Hold:
        """Hold one request, its prompt, and max_tokens for each choice. Fills in `headers` whether
        granted or not.

        Raises ApiError RATE_LIMITED; nothing was taken then.
        """
        now_s = self._clock()
        tokens = len(request.prompt_token_ids) + request.num_choices * request.max_tokens
        key_id, limits = principal.key_id, principal.limits
        result = await self._store.reserve(key_id, limits, tokens, now_s)
        requests, per_minute = await self._store.figures(key_id, limits, now_s)
        _add_headers(headers, "requests", requests)
        _add_headers(headers, "tokens", per_minute)
        if isinstance(result, Refusal):
            self._on_rejection(result.dimension)
            if result.wait_s is None:
                headers["x-should-retry"] = "false"
            raise ApiError(RATE_LIMITED, _explain(result), retry_after_s=result.wait_s)
        return Hold(self._store, key_id, result)


def go_duration(seconds: float) -> str:
    """As OpenAI writes resets: 250ms, 1s, 59.5s, 6m0s. Rounded up to whole milliseconds."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"


def _add_headers(headers: MutableMapping[str, str], name: str, figures: Figures | None) -> None:
    if figures is not None:
        headers[f"x-ratelimit-limit-{name}"] = str(figures.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(figures.remaining)
        headers[f"x-ratelimit-reset-{name}"] = go_duration(figures.reset_s)


def _explain(refusal: Refusal) -> str:
    unit = _UNITS[refusal.dimension]
    figures = f"limit {refusal.limit}, used {refusal.used}, this request {refusal.cost}"
    if refusal.wait_s is None:
        return (
            f"this request alone is over the key's {unit} ({figures}): "
            "send a shorter prompt, a smaller max_tokens or a smaller n"
        )
    return (
        f"rate limit reached for the key's {unit} ({figures}): "
        f"try again in {go_duration(refusal.wait_s)}"
    )
