"""The seam behind stage 3: where the counts of limits live. No arithmetic (policy/rate_limit.py).

`memory` keeps them in one process, `redis` in a Redis that several gateways share. Every call is
atomic over all that it is given. Everything that crosses the seam is plain data, and a reservation
is named by the id of its request, so that a store may live in another process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.policy.rate_limit import Draw, Figures, Refusal, Reservation, Used


@dataclass(frozen=True, slots=True)
class Decision:
    """Either a reservation or a refusal, and how each draw's count stands now."""

    figures: tuple[Figures, ...]
    reservation: Reservation | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of one count from before.

    name      of the count
    window_s  0: money
    amounts   of a rate: (age in seconds, amount), the oldest first
    period    of money: the calendar period's number
    spent     of money: in that period
    """

    name: str
    window_s: int
    amounts: tuple[tuple[float, int], ...] = ()
    period: int = 0
    spent: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """Counts that a shared store has lost. `before_at`: what was posted from then on (epoch
    seconds) it has counted again; only what was posted before is to be restored."""

    epoch: str
    before_at: float


class LimitStore(Protocol):
    """Counts by name. Each reservation is closed once, by `settle` or `release`; closing it again,
    or one that is not known, changes nothing."""

    async def reserve(self, reservation_id: str, draws: Sequence[Draw], now_s: float) -> Decision:
        """Take every draw; a refusal has taken nothing. An id that is open is answered again."""

    async def settle(self, reservation: Reservation, used: Used) -> None:
        """Close with what was really used."""

    async def release(self, reservation: Reservation) -> None:
        """Close and give everything back."""

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[Figures]:
        """How each draw's count stands."""

    async def carry(self, reservations: Sequence[Reservation], now_s: float) -> None:
        """Count as open here what was reserved before, or elsewhere, whatever the limits say now.
        One that is open already stays as it is."""

    async def restore(self, pasts: Sequence[Past], now_s: float) -> None:
        """Begin counts with what the ledger knows; a count that knows of more stays as it is."""

    async def add(self, pasts: Sequence[Past], now_s: float) -> None:
        """Count what nobody reserved, as if it had been granted now."""

    async def loss(self) -> Loss | None:
        """What this caller, and no other, is to restore of counts that were lost."""

    async def restore_loss(self, loss: Loss, pasts: Sequence[Past], now_s: float) -> None:
        """What was asked for by `loss`, all of it; from then on budgets can be told again."""

    @property
    def is_degraded(self) -> bool:
        """Counts are this gateway's share for now: those of all are out of reach."""

    @property
    def num_open(self) -> int:
        """Reservations of this gateway that nobody has closed yet."""
