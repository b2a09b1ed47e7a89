"""The seam behind stage 3: where the counts of limits live. No arithmetic (policy/rate_limit.py).

`memory` keeps them in this process; a store shared by several gateways has the same methods, which
is why they are coroutines. Every call is atomic over all draws.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.policy.rate_limit import Draw, Figures, Refusal, Reservation, Used


class LimitStore(Protocol):
    """Counts by name. Each reservation is closed once, by `settle` or `release`."""

    async def reserve(self, draws: Sequence[Draw], now_s: float) -> Reservation | Refusal:
        """Take every draw; a refusal has taken nothing."""

    async def settle(self, reservation: Reservation, used: Used) -> None:
        """Close with what was really used."""

    async def release(self, reservation: Reservation) -> None:
        """Close and give everything back."""

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[Figures]:
        """How each draw's count stands."""
