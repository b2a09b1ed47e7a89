"""Counts of limits in this process: the store of a server that runs one gateway.

Nothing awaits, so each call is atomic in the event loop. Only what is limited is counted. A count
whose window has passed is forgotten; what is held is bounded by the budgets that are set and the
limits drawn on in the last day.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gateway.policy import rate_limit
from gateway.policy.rate_limit import Count, Draw, Figures, Refusal, Reservation, Used
from gateway.policy.spend import Spend


class MemoryStore:
    """See store/base.py. Counts are in the order in which they are next looked at."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, Count | Spend] = OrderedDict()
        self._open: dict[int, Reservation] = {}  # by identity: two may be equal

    async def reserve(self, draws: Sequence[Draw], now_s: float) -> Reservation | Refusal:
        """See LimitStore."""
        self._forget_idle(now_s)
        counts = [self._count(draw) for draw in draws]
        taken = rate_limit.reserve(counts, draws, now_s)
        if isinstance(taken, Refusal):
            return taken
        reservation = Reservation(taken)
        self._open[id(reservation)] = reservation
        return reservation

    async def settle(self, reservation: Reservation, used: Used) -> None:
        """See LimitStore."""
        del self._open[id(reservation)]
        for taken in reservation.taken:
            if taken.name in self._counts:  # or its window has passed, and it is forgotten
                rate_limit.settle(self._counts[taken.name], taken, used)

    async def release(self, reservation: Reservation) -> None:
        """See LimitStore."""
        del self._open[id(reservation)]
        for taken in reservation.taken:
            if taken.name in self._counts:
                rate_limit.release(self._counts[taken.name], taken)

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[Figures]:
        """See LimitStore."""
        return [
            (self._counts.get(draw.name) or _new_count(draw)).figures(draw, now_s) for draw in draws
        ]

    def knows(self, name: str) -> bool:
        """Whether something is counted under the name."""
        return name in self._counts

    def restore(
        self, name: str, window_s: int, amounts: Iterable[tuple[float, int]], now_s: float
    ) -> None:
        """Begin a count with what is known of its past: (age, amount), the oldest first.

        A limit that was lifted for a while is still counted here, and requests may hold on to it:
        what they took goes along, and the count that knows of more is the right one.
        """
        count = Count(window_s)
        for age_s, amount in amounts:
            count.restore(age_s, amount, now_s)
        old = self._counts.get(name)
        if isinstance(old, Count):
            for reservation in self._open.values():
                for taken in reservation.taken:
                    if taken.name == name:
                        count.carry(taken)
            old.expire(now_s)
            if old.total > count.total:
                return
        self._counts[name] = count

    def restore_spend(self, name: str, period: int, spent: int) -> None:
        """Begin a budget's count with what was spent of it before; as `restore` where there is
        one already."""
        old = self._counts.get(name)
        if not isinstance(old, Spend):
            self._counts[name] = Spend(period, spent)
            return
        old.roll(period)
        if old.period == period:  # or a new one began while the ledger was read
            old.total = max(old.total, spent + old.reserved)

    def add(self, name: str, window_s: int, amount: int, now_s: float) -> None:
        """Count what nobody reserved, as if it had been granted now."""
        count = self._counts.setdefault(name, Count(window_s))
        if isinstance(count, Count):
            count.expire(now_s)
            count.restore(0.0, amount, now_s)

    def add_spend(self, name: str, period: int, spent: int) -> None:
        """Count money that nobody reserved."""
        count = self._counts.setdefault(name, Spend(period))
        if isinstance(count, Spend):
            count.roll(period)
            count.total += spent

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
