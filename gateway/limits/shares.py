"""What a gateway may grant by itself of shared limits, while Redis is late or away. No I/O.

A share of a limit is the limit divided by the number of gateways, but at least one request that
fits the whole. That alone would let a gateway grant its share of a limit that others have used up.
So what Redis said last of a rate counts as well, for the length of its window: of what was left
then, this gateway grants its part and no more. Places come and go with requests, and the share of
them is all that counts.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from gateway.limits.policy.rate_limit import UNKNOWN_RETRY_S, Draw, LimitFigures, Refusal

UNSEEN_NANOS = 2**62
MAX_KEPT = 65_536
"""Counts of which it is known what was left."""


class Shares:
    """`num_gateways`: how many share the limits, as far as is known; at first, what is assumed."""

    def __init__(self, num_gateways: int) -> None:
        self.num_gateways = num_gateways
        self._most: OrderedDict[str, tuple[float, int, int]] = OrderedDict()

    def note(
        self,
        draws: Sequence[Draw],
        told: Sequence[LimitFigures],
        here: Sequence[LimitFigures],
        now_s: float,
    ) -> None:
        """What Redis says of these counts, and what this gateway has granted of them itself."""
        for draw, left, mine in zip(draws, told, here, strict=False):
            if draw.window_s:
                most = draw.limit - mine.remaining + left.remaining // self.num_gateways
                self._most[draw.name] = now_s, draw.limit, most
                self._most.move_to_end(draw.name)
        while len(self._most) > MAX_KEPT:
            self._most.popitem(last=False)

    def of(self, draw: Draw, now_s: float) -> Draw:
        """The draw against this gateway's share."""
        if draw.meter == "cost":  # granted unseen
            return replace(draw, limit=UNSEEN_NANOS)
        share = max(draw.limit // self.num_gateways, min(draw.cost, draw.limit), 1)
        told_s, limit, most = self._most.get(draw.name, (now_s, 0, 0))
        if limit == draw.limit and now_s - told_s < draw.window_s:
            share = min(share, most)
        return replace(draw, limit=share)


def refusal_of(whole: Draw, refusal: Refusal) -> Refusal:
    """A share's refusal, as one of the whole limit: what fits that may go another time."""
    waits = refusal.wait_s is None and whole.cost <= whole.limit
    return replace(refusal, draw=whole, wait_s=UNKNOWN_RETRY_S if waits else refusal.wait_s)
