"""The seam behind stage 3: where the counts of limits live. No arithmetic (policy/rate_limit.py).

`memory` keeps them in this process; a store shared by several gateways has the same four methods,
which is why they are coroutines. Every call is atomic over all dimensions.
"""

from typing import Protocol

from gateway.policy.rate_limit import Figures, Refusal, Reservation
from gateway.types import Limits


class LimitStore(Protocol):
    """Counts per key. Each reservation is closed once, by `settle` or `release`."""

    async def reserve(
        self, key_id: str, limits: Limits, tokens: int, now_s: float
    ) -> Reservation | Refusal:
        """Take one request and `tokens` of a key; a refusal has taken nothing."""

    async def settle(self, key_id: str, reservation: Reservation, tokens: int) -> None:
        """Close with the tokens really used."""

    async def release(self, key_id: str, reservation: Reservation) -> None:
        """Close and give everything back."""

    async def figures(
        self, key_id: str, limits: Limits, now_s: float
    ) -> tuple[Figures | None, Figures | None]:
        """Requests and tokens per minute, None where unlimited."""
