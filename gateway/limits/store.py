"""The seam behind stage 3, where the counts of limits live, and the store in this process. No
arithmetic (limits/policy/rate_limit.py).

`MemoryStore` keeps them here, shared_store.py in a Redis that several gateways share,
cluster/remote_limits.py asks the dispatcher's. Every call is atomic over all that it is given.
Everything that crosses the seam is plain data, and a reservation is named by the id of its request,
so that a store may live in another process.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.limits.policy import rate_limit
from gateway.limits.policy.rate_limit import (
    Count,
    Draw,
    LimitFigures,
    Refusal,
    Reservation,
    Spend,
    Taken,
    UsedAmounts,
)


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """Either a reservation or a refusal, and how each draw's count stands now."""

    figures: tuple[LimitFigures, ...]
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

    async def reserve(
        self, reservation_id: str, draws: Sequence[Draw], now_s: float
    ) -> LimitDecision:
        """Take every draw, of which there is one at least; a refusal has taken nothing. An id that
        is open is answered again."""

    async def settle(self, reservation: Reservation, used: UsedAmounts) -> None:
        """Close with what was really used."""

    async def release(self, reservation: Reservation) -> None:
        """Close and give everything back."""

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[LimitFigures]:
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
        """What was asked for by `loss`, all of it; from then on budgets are known again."""

    @property
    def is_degraded(self) -> bool:
        """Counts are this gateway's share for now: those of all are out of reach."""

    @property
    def num_open(self) -> int:
        """Reservations of this gateway that nobody has closed yet."""


class MemoryStore:
    """See LimitStore. Counts are in the order in which they are next looked at."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, Count | Spend] = OrderedDict()
        self._open: dict[str, Reservation] = {}

    async def reserve(
        self, reservation_id: str, draws: Sequence[Draw], now_s: float
    ) -> LimitDecision:
        """See LimitStore."""
        self._forget_idle(now_s)
        reservation, refusal = self._open.get(reservation_id), None
        if reservation is None:
            counts = [self._count(draw) for draw in draws]
            taken = rate_limit.reserve(counts, draws, now_s)
            if isinstance(taken, Refusal):
                refusal = taken
                if taken.is_unknown:
                    return LimitDecision((), refusal=taken)
            else:
                reservation = self._open[reservation_id] = Reservation(reservation_id, taken)
        return LimitDecision(tuple(await self.figures(draws, now_s)), reservation, refusal)

    async def settle(self, reservation: Reservation, used: UsedAmounts) -> None:
        """See LimitStore."""
        for taken in self._close(reservation):
            if taken.name in self._counts:  # or its window has passed, and it is forgotten
                rate_limit.settle(self._counts[taken.name], taken, used)

    async def release(self, reservation: Reservation) -> None:
        """See LimitStore."""
        for taken in self._close(reservation):
            if taken.name in self._counts:
                rate_limit.release(self._counts[taken.name], taken)

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[LimitFigures]:
        """See LimitStore."""
        return [
            (self._counts.get(draw.name) or _new_count(draw)).figures(draw, now_s) for draw in draws
        ]

    async def carry(self, reservations: Sequence[Reservation], now_s: float) -> None:
        """See LimitStore."""
        for reservation in reservations:
            self._forget_idle(now_s)
            if reservation.id not in self._open:
                taken = tuple(self._carried(one, now_s) for one in reservation.taken)
                self._open[reservation.id] = Reservation(reservation.id, taken)

    async def restore(self, pasts: Sequence[Past], now_s: float) -> None:
        """A limit that was lifted for a while is still counted here, and requests may hold on to
        it: what they took goes along, and the count that knows of more is the right one."""
        for past in pasts:
            if past.window_s:
                self._restore_rate(past, now_s)
            else:
                self._restore_spend(past)

    async def add(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        for past in pasts:
            if past.window_s:
                count = self._counts.setdefault(past.name, Count(past.window_s))
                if isinstance(count, Count):
                    count.expire(now_s)
                    count.restore(0.0, sum(amount for _, amount in past.amounts), now_s)
            else:
                spend = self._counts.setdefault(past.name, Spend(past.period))
                if isinstance(spend, Spend):
                    spend.add(past.spent, past.period)

    async def loss(self) -> Loss | None:
        """What is lost here is this process, whose next start restores everything."""
        return None

    async def restore_loss(self, loss: Loss, pasts: Sequence[Past], now_s: float) -> None:
        """Never asked for."""
        raise AssertionError("this store loses nothing")

    def settled_in(self, window_s: int, now_s: float) -> list[Past]:
        """What counts of that window hold of reservations that are closed."""
        held = Counter[str]()
        for reservation in self._open.values():
            for taken in reservation.taken:
                held[taken.name] += taken.cost
        found = []
        for name, count in self._counts.items():
            if isinstance(count, Count) and count.window_s == window_s:
                count.expire(now_s)
                amount = count.total - held[name]
                if amount > 0:
                    found.append(Past(name, window_s, ((0.0, amount),)))
        return found

    def knows(self, name: str) -> bool:
        """Whether something is counted under the name."""
        return name in self._counts

    @property
    def is_degraded(self) -> bool:
        """Never: they are here."""
        return False

    @property
    def num_counts(self) -> int:
        """Counts held."""
        return len(self._counts)

    @property
    def num_open(self) -> int:
        """Reservations that nobody has closed yet."""
        return len(self._open)

    def check_integrity(self) -> None:
        """Raises AssertionError where totals and slots disagree or a place is owed."""
        for name, count in self._counts.items():
            if isinstance(count, Spend):
                if not 0 <= count.reserved <= count.total:
                    raise AssertionError(f"{name}: {count.reserved} reserved of {count.total}")
                continue
            total = sum(amount for _, amount in count.slots) if count.window_s else count.total
            if count.total != total or any(amount < 0 for _, amount in count.slots):
                raise AssertionError(f"{name}: {count.total} != {total} or below 0")
            if count.total < 0:
                raise AssertionError(f"{name}: {count.total} places taken")

    def _close(self, reservation: Reservation) -> tuple[Taken, ...]:
        """What it holds; nothing where it is closed already."""
        held = self._open.pop(reservation.id, None)
        return () if held is None else held.taken

    def _carried(self, taken: Taken, now_s: float) -> Taken:
        """Taken once more, in the present: where it was before says nothing about here."""
        draw = Draw(
            taken.name, taken.meter, taken.window_s, 0, taken.cost, taken.slot, kind=taken.kind
        )
        count = self._count(draw)
        count.refresh(draw, now_s)
        return count.take(draw, now_s)

    def _restore_rate(self, past: Past, now_s: float) -> None:
        count = Count(past.window_s)
        for age_s, amount in past.amounts:
            count.restore(age_s, amount, now_s)
        old = self._counts.get(past.name)
        if isinstance(old, Count):
            for reservation in self._open.values():
                for taken in reservation.taken:
                    if taken.name == past.name:
                        count.carry(taken)
            count.expire(now_s)
            old.expire(now_s)
            if old.total > count.total:
                return
        self._counts[past.name] = count

    def _restore_spend(self, past: Past) -> None:
        old = self._counts.get(past.name)
        if not isinstance(old, Spend):
            self._counts[past.name] = Spend(past.period, past.spent)
        else:
            old.restore(past.period, past.spent)

    def _count(self, draw: Draw) -> Count | Spend:
        count = self._counts.get(draw.name)
        if count is None:
            count = self._counts[draw.name] = _new_count(draw)
        self._counts.move_to_end(draw.name)
        return count

    def _forget_idle(self, now_s: float) -> None:
        """Amortised: every call looks at two counts, so that all come round."""
        for _ in range(min(2, len(self._counts))):
            name = next(iter(self._counts))
            if self._counts[name].is_idle(now_s):
                del self._counts[name]
            else:
                self._counts.move_to_end(name)


def _new_count(draw: Draw) -> Count | Spend:
    return Spend(draw.period) if draw.meter == "cost" else Count(draw.window_s)
