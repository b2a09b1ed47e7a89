"""Stage 3's arithmetic for money: what was spent of a budget in a calendar day or month (UTC).

Pure, beside rate_limit.py; when periods begin says gateway/limits/periods.py. A request reserves
the most that it may cost, and settles what it did cost, so a budget is never overrun, not by
parallel requests either.

Requests that are under way when a period ends are posted in the next one; what they have reserved
goes along, or the new period could be overrun by it.
"""

from dataclasses import dataclass

from gateway.policy.rate_limit import Draw, Figures, Taken


@dataclass(slots=True)
class Spend:
    """`total`: spent in `period` and reserved; `reserved`: the part of requests under way."""

    period: int
    total: int = 0
    reserved: int = 0

    def refresh(self, draw: Draw, now_s: float) -> None:
        """As `roll`."""
        self.roll(draw.period)

    def roll(self, period: int) -> None:
        """Begin a new period with what is under way. A clock that goes back changes nothing."""
        if period > self.period:
            self.period, self.total = period, self.reserved

    def wait_s(self, draw: Draw, now_s: float) -> float | None:
        """0 where it fits. Otherwise the period's end; None where it could never fit."""
        if not draw.cost or self.total + draw.cost <= draw.limit:
            return 0.0
        return None if draw.cost > draw.limit else draw.resets_in_s

    def take(self, draw: Draw, now_s: float) -> Taken:
        """Reserve the draw's cost."""
        self.total += draw.cost
        self.reserved += draw.cost
        return Taken(draw.name, draw.meter, draw.window_s, self.period, draw.cost, draw.kind)

    def close(self, taken: Taken, used: int, period: int = 0) -> None:
        """End a reservation with what was spent. It is posted in `period`, which may have begun
        with nobody reserving in it yet: then it begins here, or this would be forgotten."""
        self.roll(period)
        self.total += used - taken.cost
        self.reserved -= taken.cost

    def add(self, spent: int, period: int) -> None:
        """Count what nobody reserved, and was posted in `period`."""
        self.roll(period)
        if period == self.period:
            self.total += spent

    def figures(self, draw: Draw, now_s: float) -> Figures:
        """As of rates."""
        self.roll(draw.period)
        return Figures(draw.limit, max(0, draw.limit - self.total), draw.resets_in_s)

    def is_idle(self, now_s: float) -> bool:
        """Never: what was spent is known nowhere else in this process."""
        return False
