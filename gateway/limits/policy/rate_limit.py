"""Stage 3's arithmetic: amounts in sliding windows, requests at one time, and money.

Pure: callers pass `now_s` (any clock that never runs backwards) and get decisions. A store holds
the counts and acts; a store shared by several gateways runs the same arithmetic and is tested
against this file.

A request draws on several counts at once: of its key, its tenant, its model and the whole gateway,
by the minute and by the day. It gets all or nothing.

    reserve   what it may cost at most of each: all or none
    settle    correct that to what it did cost (more may have been: debt), and give its places back
    release   give back everything, as if the request had never come

What was granted is kept by slots, SLOTS to a window, so a settlement corrects the very slot in
which the reservation was made, and nothing where that slot has left the window. A token bucket
cannot do that: a refund after the bucket has refilled is capacity that was never lost, and
reserving and refunding in turns multiplies the burst. A slot counts until a full window after its
end, so no interval of that length ever holds more than the limit.

Of money it is counted what was spent in a calendar day or month (UTC); when periods begin says
gateway/limits/limits.py. A request reserves the most that it may cost, so a budget is never
overrun, not by parallel requests either. Requests that are under way when a period ends are posted
in the next one; what they have reserved goes along, or the new period could be overrun by it.

A wall clock may jump, and gateways may disagree on the period. So two periods are counted: the
latest, and the one before it that was drawn on or restored. A draw on any other earlier one is
unknown until the ledger has been read for it (`Refusal.is_past`): counted from 0, it would be a
budget more.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

Meter: TypeAlias = Literal[
    "requests", "input_tokens", "output_tokens", "tokens", "concurrency", "cost"
]
PeriodKind: TypeAlias = Literal["day", "month"]

MINUTE_S = 60
DAY_S = 86_400
SLOTS = 120
"""Of a window: half a second of a minute, twelve minutes of a day."""
# Nobody can know when a running request ends; a client that asks again after this is polite.
CONCURRENCY_RETRY_S = 1.0
UNKNOWN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """What one request takes of one count.

    name         of the count: who shares it, what is counted, over how long
    window_s     0: places at one time, or money (`Spend`)
    period       of money: the calendar period's number
    resets_in_s  of money: how long this period still is
    kind         of money: of days or of months
    """

    name: str
    meter: Meter
    window_s: int
    limit: int
    cost: int
    period: int = 0
    resets_in_s: float = 0.0
    kind: PeriodKind = "day"


@dataclass(frozen=True, slots=True)
class Taken:
    """What a draw took, and in which slot."""

    name: str
    meter: Meter
    window_s: int
    slot: int
    cost: int
    kind: PeriodKind = "day"


@dataclass(frozen=True, slots=True)
class Reservation:
    """All that was taken for one request. `id` names it in the store that holds it. Closed once, by
    settle or release."""

    id: str
    taken: tuple[Taken, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not go now. `wait_s` None: it never may, its cost is over the limit.
    `is_unknown`: nobody can say at present what is used, and the limit is not to be overrun;
    `is_past`: the ledger can, of this earlier period."""

    draw: Draw
    used: int
    wait_s: float | None
    is_unknown: bool = False
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class UsedAmounts:
    """What a request used in the end. `day`, `month`: numbers of the periods in which it is posted;
    0: of those in which it was reserved. `posted_at`: when, in epoch seconds."""

    input_tokens: int
    output_tokens: int
    cost_nanos: int = 0
    day: int = 0
    month: int = 0
    posted_at: float = 0.0

    def of(self, meter: Meter) -> int:
        """As the meter counts it."""
        if meter == "input_tokens":
            return self.input_tokens
        if meter == "output_tokens":
            return self.output_tokens
        if meter == "cost":
            return self.cost_nanos
        return self.input_tokens + self.output_tokens if meter == "tokens" else 1


@dataclass(frozen=True, slots=True)
class LimitFigures:
    """One count for the x-ratelimit headers. `reset_s`: until nothing of it is used."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Count:
    """Amounts of the last `window_s` by slot, oldest first; `total` is their sum. With window 0
    there are no slots: places that are taken."""

    window_s: int
    slots: deque[list[int]] = field(default_factory=deque)
    total: int = 0

    def refresh(self, draw: Draw, now_s: float) -> None:
        """As `expire`."""
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Forget what has left the window. At most SLOTS + 2 slots are ever held."""
        while self.slots and self._expires_s(self.slots[0][0]) <= now_s:
            self.total -= self.slots.popleft()[1]

    def take(self, draw: Draw, now_s: float) -> Taken:
        """Charge the newest slot; a later one where the clock's last tick was rounded."""
        slot = self._slot(now_s)
        if self.window_s:
            if self.slots and self.slots[-1][0] >= slot:
                slot = self.slots[-1][0]
                self.slots[-1][1] += draw.cost
            else:
                self.slots.append([slot, draw.cost])
        self.total += draw.cost
        return Taken(draw.name, draw.meter, self.window_s, slot, draw.cost)

    def correct(self, slot: int, amount: int) -> None:
        """Change what an earlier `take` charged; nothing where its slot has left the window."""
        if not self.window_s:
            self.total += amount
            return
        for entry in reversed(self.slots):
            if entry[0] == slot:
                entry[1] += amount
                self.total += amount
                return

    def restore(self, age_s: float, amount: int, now_s: float) -> None:
        """Put back what was granted so long ago, older amounts before younger ones. For counts
        that a restart has lost."""
        slot = self._slot(now_s - age_s)
        if self._expires_s(slot) <= now_s:
            return
        if self.slots and self.slots[-1][0] >= slot:
            self.slots[-1][1] += amount
        else:
            self.slots.append([slot, amount])
        self.total += amount

    def knows(self, draw: Draw) -> bool:
        """Always: rates do not go by the wall clock."""
        return True

    def used_of(self, draw: Draw) -> int:
        """What counts against the limit."""
        return self.total

    def wait_s(self, draw: Draw, now_s: float) -> float | None:
        """How long until it fits: 0 now, None never. What takes nothing always fits."""
        if not draw.cost:
            return 0.0
        if draw.cost > draw.limit:
            return None
        excess = self.total + draw.cost - draw.limit
        if excess <= 0:
            return 0.0
        if not self.window_s:
            return CONCURRENCY_RETRY_S
        slots = iter(self.slots)
        slot = 0
        while excess > 0:  # ends: the slots add up to `total`, and cost <= limit
            slot, amount = next(slots)
            excess -= amount
        return self._expires_s(slot) - now_s

    def close(self, taken: Taken, used: int, period: int = 0) -> None:
        """End a reservation with what was used."""
        self.correct(taken.slot, used - taken.cost)

    def carry(self, taken: Taken) -> None:
        """Put back what an open reservation took, in its very slot: where a count begins anew."""
        at = next((i for i, (slot, _) in enumerate(self.slots) if slot >= taken.slot), None)
        if at is None:
            self.slots.append([taken.slot, taken.cost])
        elif self.slots[at][0] == taken.slot:
            self.slots[at][1] += taken.cost
        else:
            self.slots.insert(at, [taken.slot, taken.cost])
        self.total += taken.cost

    def figures(self, draw: Draw, now_s: float) -> LimitFigures:
        """For the headers."""
        self.expire(now_s)
        last = next((slot for slot, amount in reversed(self.slots) if amount), None)
        reset_s = 0.0 if last is None else max(0.0, self._expires_s(last) - now_s)
        return LimitFigures(draw.limit, max(0, draw.limit - self.total), reset_s)

    def is_idle(self, now_s: float) -> bool:
        """Nothing is counted any more: forgetting this count changes no decision."""
        self.expire(now_s)
        return not self.slots and not self.total

    def _slot(self, now_s: float) -> int:
        return math.floor(now_s * SLOTS / self.window_s) if self.window_s else 0

    def _expires_s(self, slot: int) -> float:
        return (slot + 1) * self.window_s / SLOTS + self.window_s


class Counted(Protocol):
    """What `reserve` draws on: a `Count` or a `Spend`."""

    total: int

    def refresh(self, draw: Draw, now_s: float) -> None:
        """Forget what is over."""

    def knows(self, draw: Draw) -> bool:
        """What was used in the draw's period is counted here."""

    def used_of(self, draw: Draw) -> int:
        """What counts against the limit."""

    def wait_s(self, draw: Draw, now_s: float) -> float | None:
        """How long until it fits: 0 now, None never."""

    def take(self, draw: Draw, now_s: float) -> Taken:
        """Charge it."""

    def close(self, taken: Taken, used: int, period: int = 0) -> None:
        """Correct a charge to what was used; nothing where that is not counted any more.
        `period`: of money, the one in which it is posted, where that is known."""

    def figures(self, draw: Draw, now_s: float) -> LimitFigures:
        """How it stands."""

    def is_idle(self, now_s: float) -> bool:
        """Forgetting it changes no decision."""


def reserve(
    counts: Sequence[Counted], draws: Sequence[Draw], now_s: float
) -> tuple[Taken, ...] | Refusal:
    """Take every draw of its count, or change nothing and say what is in the way longest."""
    refusals: list[Refusal] = []
    for count, draw in zip(counts, draws, strict=True):
        count.refresh(draw, now_s)
        if not count.knows(draw):
            return Refusal(draw, 0, UNKNOWN_RETRY_S, is_unknown=True, is_past=True)
        wait_s = count.wait_s(draw, now_s)
        if wait_s is None or wait_s > 0:
            refusals.append(Refusal(draw, count.used_of(draw), wait_s))
    if refusals:
        return max(refusals, key=lambda r: math.inf if r.wait_s is None else r.wait_s)
    return tuple(count.take(draw, now_s) for count, draw in zip(counts, draws, strict=True))


def settle(count: Counted, taken: Taken, used: UsedAmounts) -> None:
    """Close one draw with what was really used."""
    amount = 0 if taken.meter == "concurrency" else used.of(taken.meter)
    count.close(taken, amount, used.month if taken.kind == "month" else used.day)


def release(count: Counted, taken: Taken) -> None:
    """Close one draw as if it had never been."""
    count.close(taken, 0)


@dataclass(slots=True)
class Spend:
    """`total`: spent in `period` and reserved; `reserved`: the part of requests under way, whatever
    period they will be posted in. `before`: an earlier period that is counted, too (0: none), and
    what was spent in it."""

    period: int
    total: int = 0
    reserved: int = 0
    before: int = 0
    before_spent: int = 0

    def refresh(self, draw: Draw, now_s: float) -> None:
        """As `roll`."""
        self.roll(draw.period)

    def roll(self, period: int) -> None:
        """Begin a later period with what is under way; an earlier one changes nothing."""
        if period > self.period:
            self.before, self.before_spent = self.period, self.total - self.reserved
            self.period, self.total = period, self.reserved

    def knows(self, draw: Draw) -> bool:
        """What was used in the draw's period is counted here."""
        return draw.period in (self.period, self.before)

    def used_of(self, draw: Draw) -> int:
        """Spent in the draw's period, and reserved."""
        return self.total if draw.period == self.period else self.before_spent + self.reserved

    def wait_s(self, draw: Draw, now_s: float) -> float | None:
        """0 where it fits. Otherwise the period's end; None where it could never fit."""
        if not draw.cost or self.used_of(draw) + draw.cost <= draw.limit:
            return 0.0
        return None if draw.cost > draw.limit else draw.resets_in_s

    def take(self, draw: Draw, now_s: float) -> Taken:
        """Reserve the draw's cost."""
        self.total += draw.cost
        self.reserved += draw.cost
        return Taken(draw.name, draw.meter, draw.window_s, draw.period, draw.cost, draw.kind)

    def close(self, taken: Taken, used: int, period: int = 0) -> None:
        """End a reservation with what was spent. It is posted in `period`, which may have begun
        with nobody reserving in it yet: then it begins here, or this would be forgotten."""
        self.total -= taken.cost
        self.reserved -= taken.cost
        self.add(used, period or self.period)

    def add(self, spent: int, period: int) -> None:
        """Count what was posted in `period`; nothing where that is not counted any more."""
        self.roll(period)
        if period == self.period:
            self.total += spent
        elif period == self.before:
            self.before_spent += spent

    def restore(self, period: int, spent: int) -> None:
        """Begin `period` with what the ledger knows of it, or keep what is more."""
        self.roll(period)
        if period == self.period:
            self.total = max(self.total, spent + self.reserved)
        elif period == self.before:
            self.before_spent = max(self.before_spent, spent)
        else:
            self.before, self.before_spent = period, spent

    def figures(self, draw: Draw, now_s: float) -> LimitFigures:
        """As of rates."""
        self.roll(draw.period)
        left = max(0, draw.limit - self.used_of(draw)) if self.knows(draw) else 0
        return LimitFigures(draw.limit, left, draw.resets_in_s)

    def is_idle(self, now_s: float) -> bool:
        """Never: what was spent is known nowhere else in this process."""
        return False
