"""Who leaves the device, by the books' rules: what ours is compared to.

Ours is engine/residency/policy/eviction.py.

    lru       the longest unused
    lfu       the least demanded: device seconds, decayed as ours, whatever it costs to have
    size      the largest
    idle      who has been unused for a time-out; the longest unused once the load has waited
    belady    whose next request is the furthest away; it is told the future
    never     nobody: what is on the device stays there

All have the same guards as ours, so that what differs is the order: never who is pinned, and never
who was just loaded and has had no time to serve its first request. Idle models go before busy ones,
and busy ones only once the incoming model has waited for `starvation_s` (without that, models that
are always busy would keep all others out for ever).

Belady's rule is optimal for pages of one size on one device (Belady, 1966). With models of many
sizes, loads that take time and several workers it is a strong yardstick and no bound.
"""

import bisect
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from bench.sim.types import Arrival
from engine.residency.policy.eviction import Victims, first_that_do
from engine.residency.policy.eviction_rules import (
    Candidate,
    EvictionParams,
    HalfLives,
    IncomingModel,
)

Worth = Callable[[Candidate, float], float]
"""(model, now) -> worth of keeping it: the smallest goes first."""


class Ranked:
    """An EvictionPolicy that goes by one figure. `idle_timeout_s`: unused for less, it stays."""

    def __init__(self, worth: Worth, params: EvictionParams, idle_timeout_s: float = 0.0) -> None:
        self._worth = worth
        # The host tier goes by last use, and cached KV before weights, as they do for who knows of
        # nothing else.
        self.params = replace(params, host_by_worth=False, kv_margin=math.inf)
        self._idle_timeout_s = idle_timeout_s

    def victims(
        self,
        incoming: IncomingModel,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        now_s: float,
    ) -> Victims:
        """The least worth of those that may leave; none if they do not make up what lacks."""
        short = num_pages_short - sum(c.num_pages for c in candidates if c.draining)
        if short <= 0:
            return Victims()
        ranked = self._ranked([c for c in candidates if self._may_leave(c, incoming, now_s)], now_s)
        return first_that_do(ranked, short)

    def kv_victim(self, model_id: str, candidates: Sequence[Candidate], now_s: float) -> str | None:
        """The least worth; one that leaves already goes first."""
        leaving = [c for c in candidates if c.draining]
        others = [c for c in candidates if not c.pinned and c.model_id != model_id]
        ranked = self._ranked(leaving or others, now_s)
        return ranked[0].model_id if ranked else None

    def _ranked(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        return sorted(
            candidates,
            key=lambda c: (c.busy, self._worth(c, now_s), c.last_used_s, c.model_id),
        )

    def _may_leave(self, candidate: Candidate, incoming: IncomingModel, now_s: float) -> bool:
        if candidate.pinned or candidate.draining or candidate.model_id == incoming.model_id:
            return False
        resident_s = now_s - candidate.resident_since_s
        if not candidate.used and (candidate.busy or resident_s < self.params.first_use_grace_s):
            return False
        if now_s - incoming.queued_at_s >= self.params.starvation_s:
            return True
        return not candidate.busy and now_s - candidate.last_used_s >= self._idle_timeout_s


class Never(Ranked):
    """Nobody leaves for a load; for KV, without which nothing runs, the longest unused does."""

    def __init__(self, params: EvictionParams) -> None:
        super().__init__(last_used, params)

    def victims(
        self,
        incoming: IncomingModel,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        now_s: float,
    ) -> Victims:
        """None."""
        return Victims()


class Future:
    """When each model of a world is asked for, all of it known beforehand."""

    def __init__(self, arrivals: Iterable[Arrival], num_models: int) -> None:
        self._times = [array("d") for _ in range(num_models)]
        for arrival in arrivals:
            self._times[arrival.model].append(arrival.at_s)

    def next_use_s(self, model: int, now_s: float) -> float:
        """The next request after now; infinite: there is none."""
        times = self._times[model]
        place = bisect.bisect_right(times, now_s)
        return times[place] if place < len(times) else math.inf


def last_used(candidate: Candidate, now_s: float) -> float:
    """When it last ran."""
    return candidate.last_used_s


def least_demanded(half_lives: HalfLives) -> Worth:
    """Its device seconds, decayed as ours are."""
    return lambda candidate, now_s: candidate.demand.rate(now_s, half_lives)


def largest(candidate: Candidate, now_s: float) -> float:
    """The more bytes, the less worth."""
    return -float(candidate.num_bytes)


def furthest(future: Future, number_of: Mapping[str, int]) -> Worth:
    """The further its next request, the less worth. `number_of`: the model's place by instance
    id."""
    return lambda candidate, now_s: -future.next_use_s(number_of[candidate.model_id], now_s)
