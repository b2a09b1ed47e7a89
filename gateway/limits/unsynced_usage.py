"""What a gateway holds of shared limits, and what Redis has not been told of it. No I/O.

open    reservations that nobody has closed; `local_ids` of those that Redis may not know
asked   ids of those that Redis is being asked for
ended   closed here, not there yet; closing twice changes nothing, so it may be reported again
owed    used of rates and budgets that Redis was not told of, by count and when; in bundles where it
        may have been: reported again by their names, they count once
pasts   what counts begin with (LimitStore.restore) and Redis has not been told
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from gateway.limits.policy.rate_limit import DAY_S, Reservation, UsedAmounts
from gateway.limits.store import Past

MAX_STAMPS = 128
"""Of one count: in a longer outage, when something was used is known less exactly."""

_Owed: TypeAlias = tuple[str, int, int]
_Debts: TypeAlias = dict[_Owed, list[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class EndedReservation:
    """A reservation that Redis has not been told the end of; `used` None: given back."""

    reservation: Reservation
    used: UsedAmounts | None


class UnsyncedUsage:
    """See above. Bounded by what is open when Redis goes away, and by the limits there are."""

    def __init__(self) -> None:
        self.open: dict[str, Reservation] = {}
        self.asked: set[str] = set()
        self.local_ids: set[str] = set()
        self._doubted: set[str] = set()
        self.ended: dict[str, EndedReservation] = {}
        self.pasts: dict[str, Past] = {}
        self._owed: _Debts = {}
        self._bundles: dict[str, _Debts] = {}
        self._began_at = 0.0
        self._orphans: frozenset[str] = frozenset()

    @property
    def is_behind(self) -> bool:
        """There is something that only this gateway counts."""
        return bool(self.local_ids or self._owed or self._bundles or self.pasts)

    def begin_epoch(self, began_at: float, is_restored: bool) -> None:
        """Redis knows nothing of us: all that is open is to be reported, and of what has ended what
        no ledger tells, since only what was posted before the epoch is restored from there.
        `is_restored`: that has been done; otherwise it will tell of what counts begin with. Minutes
        the caller owes anew: all that it has granted."""
        self._began_at = began_at
        for debts in self._bundles.values():  # what they were reported to is no more
            for key, stamped in debts.items():
                self._owed[key] = sorted((*stamped, *self._owed.get(key, ())))
        self._bundles.clear()
        for key, stamped in list(self._owed.items()):
            is_minute = 0 < key[1] < DAY_S
            self._owed[key] = [s for s in stamped if s[0] >= began_at and not is_minute]
            if not self._owed[key]:
                del self._owed[key]
        if not is_restored:
            self.pasts.clear()
        for ended in self.ended.values():
            if ended.used is not None:
                self.owe_used(ended.reservation, ended.used, with_minutes=False)
        self.ended.clear()
        self.local_ids = set(self.open)

    def in_doubt(self, reservation_id: str) -> None:
        """Redis may hold it, and was not heard to. Where nobody here does, it is given back; of one
        that is counted here, when it ends."""
        if reservation_id in self.local_ids:
            self._doubted.add(reservation_id)
        else:
            self.ended[reservation_id] = EndedReservation(Reservation(reservation_id, ()), None)

    def end_local(self, reservation: Reservation, used: UsedAmounts | None) -> None:
        """One of `local_ids` was closed with what it used; None: given back."""
        self.local_ids.discard(reservation.id)
        if reservation.id in self._doubted:
            self._doubted.discard(reservation.id)
            self.in_doubt(reservation.id)
        if used is not None:
            self.owe_used(reservation, used)

    def report(self, ids: Iterable[str]) -> None:
        """These were local and are known to Redis; what has ended meanwhile is given back."""
        for one in ids:
            self.local_ids.discard(one)
            self._doubted.discard(one)
            if one not in self.open:
                self.in_doubt(one)

    def report_ends(self, ended: Iterable[EndedReservation]) -> None:
        """These ends are known to Redis."""
        for one in ended:
            if self.ended.get(one.reservation.id) is one:
                del self.ended[one.reservation.id]

    def compare(self, held: Iterable[str]) -> None:
        """What Redis holds in our name and nobody here knows, at two looks, is given back."""
        orphans = frozenset(held).difference(self.open, self.ended, self.asked)
        for one in orphans & self._orphans:
            self.in_doubt(one)
        self._orphans = orphans

    def owe_used(
        self, reservation: Reservation, used: UsedAmounts, *, with_minutes: bool = True
    ) -> None:
        """What a request has used, unseen by Redis. The ledger tells of days and money that were
        posted before the epoch began."""
        is_told = used.posted_at < self._began_at
        for taken in reservation.taken:
            if taken.meter == "cost" and not is_told:
                period = used.month if taken.kind == "month" else used.day
                self._owe((taken.name, 0, period or taken.slot), used.cost_nanos, used.posted_at)
            elif taken.window_s and (with_minutes if taken.window_s < DAY_S else not is_told):
                self._owe((taken.name, taken.window_s, 0), used.of(taken.meter), used.posted_at)

    def owe(self, past: Past, posted_at: float) -> None:
        """What nobody has reserved, unseen by Redis."""
        amount = past.spent + sum(amount for _, amount in past.amounts)
        self._owe((past.name, past.window_s, past.period), amount, posted_at)

    def bundle(self, name: str, num: int, now_at: float = 0.0) -> tuple[str, list[Past]] | None:
        """What is to be reported next of what is owed, and its name: one that may have been, or
        so many counts under the name given; what has left its window is not. None: nothing is
        owed."""
        while not self._bundles and self._owed:
            debts = {key: self._owed.pop(key) for key in list(islice(self._owed, num))}
            for key, stamped in list(debts.items()):
                if 0 < key[1] < DAY_S:
                    debts[key] = [s for s in stamped if s[0] > now_at - key[1]]
            debts = {key: stamped for key, stamped in debts.items() if stamped}
            if debts:
                self._bundles[name] = debts
        for pending, debts in self._bundles.items():
            return pending, _pasts(debts)
        return None

    def owed(self) -> list[Past]:
        """All of that."""
        return [past for debts in (*self._bundles.values(), self._owed) for past in _pasts(debts)]

    def paid(self, name: str) -> None:
        """Redis counts this bundle now; one of an epoch that is over is owed anew."""
        self._bundles.pop(name, None)

    def restored(self, pasts: Iterable[Past]) -> None:
        """Redis has been told of these."""
        for past in pasts:
            if self.pasts.get(past.name) is past:
                del self.pasts[past.name]

    def _owe(self, key: _Owed, amount: int, posted_at: float) -> None:
        if not amount:
            return
        stamped = self._owed.setdefault(key, [])
        stamped.append((posted_at, amount))
        if len(stamped) > MAX_STAMPS:
            # Two neighbours become the later one: rather counted twice than not at all.
            i = min(range(1, MAX_STAMPS), key=lambda n: stamped[n + 1][0] - stamped[n - 1][0])
            stamped[i : i + 2] = [(stamped[i + 1][0], stamped[i][1] + stamped[i + 1][1])]


def _pasts(debts: _Debts) -> list[Past]:
    return [
        Past(name, window_s, ((0.0, amount),) if window_s else (), period, amount)
        for (name, window_s, period), stamped in debts.items()
        for amount in (sum(each for _, each in stamped),)
    ]
