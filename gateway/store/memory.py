"""Counts of limits in this process: the store of a server that runs one gateway.

Nothing awaits, so each call is atomic in the event loop. Only what is limited is counted. A count
whose window has passed is forgotten; what is held is bounded by the budgets that are set and the
limits drawn on in the last day.
"""

from collections import OrderedDict
from collections.abc import Sequence

from gateway.policy import rate_limit
from gateway.policy.rate_limit import Count, Draw, Figures, Refusal, Reservation, Taken, Used
from gateway.policy.spend import Spend
from gateway.store.base import Decision, Loss, Past


class MemoryStore:
    """See store/base.py. Counts are in the order in which they are next looked at."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, Count | Spend] = OrderedDict()
        self._open: dict[str, Reservation] = {}

    async def reserve(self, reservation_id: str, draws: Sequence[Draw], now_s: float) -> Decision:
        """See LimitStore."""
        self._forget_idle(now_s)
        reservation, refusal = self._open.get(reservation_id), None
        if reservation is None:
            counts = [self._count(draw) for draw in draws]
            taken = rate_limit.reserve(counts, draws, now_s)
            if isinstance(taken, Refusal):
                refusal = taken
            else:
                reservation = self._open[reservation_id] = Reservation(reservation_id, taken)
        return Decision(tuple(await self.figures(draws, now_s)), reservation, refusal)

    async def settle(self, reservation: Reservation, used: Used) -> None:
        """See LimitStore."""
        for taken in self._close(reservation):
            if taken.name in self._counts:  # or its window has passed, and it is forgotten
                rate_limit.settle(self._counts[taken.name], taken, used)

    async def release(self, reservation: Reservation) -> None:
        """See LimitStore."""
        for taken in self._close(reservation):
            if taken.name in self._counts:
                rate_limit.release(self._counts[taken.name], taken)

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[Figures]:
        """See LimitStore."""
        return [
            (self._counts.get(draw.name) or _new_count(draw)).figures(draw, now_s) for draw in draws
        ]

    async def carry(self, reservations: Sequence[Reservation], now_s: float) -> None:
        """See LimitStore."""
        for reservation in reservations:
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
            return
        old.roll(past.period)
        if old.period == past.period:  # or a new one began while the ledger was read
            old.total = max(old.total, past.spent + old.reserved)

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
