"""Who leaves the device when a model has to come in. Pure: state and `now_s` in, names out.

Keeping a model is worth `demand x reload_s x weight / bytes`: what it would cost its users to bring
it back, by the memory it holds (the GDSF family: Cherkasova 1998, "Improving WWW proxies
performance with Greedy-Dual-Size-Frequency caching"). Demand is the device seconds spent for the
model, exponentially decayed, so that a thousand one-token pings keep nothing resident and what was
popular an hour ago ages by itself. Equal scores leave in the order of last use.

A newcomer has no service yet: its demand rises with its waiting, to one whole device at
`starvation_s`, and from there on it wins over margin and residence. It never wins over pins, nor
over a model that was just loaded and has not had the time to serve its first request, however long
that takes while it works on one: without that two models could throw each other out for ever.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EvictionParams:
    """The policy's constants.

    starvation_s          waiting that wins over margin and residence
    margin                a newcomer's score must be so many times the victim's
    min_residence_loads   a victim has been resident for so many of its own load times
    first_use_grace_s     time a loaded model has for its first request to arrive
    half_life_s           of demand
    """

    starvation_s: float = 2.0
    margin: float = 1.25
    min_residence_loads: float = 4.0
    first_use_grace_s: float = 1.0
    half_life_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Exponentially decayed service of one model: `service_s` as of `at_s`."""

    service_s: float = 0.0
    at_s: float = 0.0

    def decayed(self, now_s: float, half_life_s: float) -> float:
        """Service seconds that still count at `now_s`."""
        return self.service_s * math.exp2(-max(0.0, now_s - self.at_s) / half_life_s)

    def added(self, service_s: float, now_s: float, half_life_s: float) -> "Demand":
        """With `service_s` more at `now_s`."""
        return Demand(self.decayed(now_s, half_life_s) + service_s, now_s)

    def added_often(self, services: Sequence[tuple[float, float]], half_life_s: float) -> "Demand":
        """`added` for each (now, service), in their order."""
        service_s, at_s = self.service_s, self.at_s
        for now_s, more_s in services:
            fading = math.exp2(-max(0.0, now_s - at_s) / half_life_s)
            service_s, at_s = service_s * fading + more_s, now_s
        return Demand(service_s, at_s)

    def rate(self, now_s: float, half_life_s: float) -> float:
        """Device seconds a second: under steady load, the model's share of the device."""
        return self.decayed(now_s, half_life_s) * math.log(2) / half_life_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that holds pages.

    num_pages  that come free when it goes: weights, and KV that is not spare anyway
    used       has produced a token since it was loaded
    """

    model_id: str
    num_pages: int
    num_bytes: int
    demand: Demand
    reload_s: float
    weight: float
    pinned: bool
    busy: bool
    draining: bool
    used: bool
    resident_since_s: float
    last_used_s: float


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The model at the head of the load queue, waiting since `queued_at_s`."""

    model_id: str
    num_bytes: int
    demand: Demand
    reload_s: float
    weight: float
    queued_at_s: float


@dataclass(frozen=True, slots=True)
class Victims:
    """What to do now: `evict` are idle and go at once, `drain` finish what they run first."""

    evict: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


class EvictionPolicy(Protocol):
    """Who goes. `GreedyDual` is ours; `bench/sim/baselines` has those it is compared with."""

    def victims(
        self,
        newcomer: Newcomer,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        now_s: float,
    ) -> Victims:
        """Whose pages make up what the newcomer lacks; none if they cannot."""
        ...

    def kv_victim(self, model_id: str, candidates: Sequence[Candidate], now_s: float) -> str | None:
        """Who goes so that `model_id` gets KV when nothing can run without; None if nobody may."""
        ...


@dataclass(frozen=True, slots=True)
class GreedyDual:
    """An EvictionPolicy: the functions of this file."""

    params: EvictionParams

    def victims(
        self,
        newcomer: Newcomer,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        now_s: float,
    ) -> Victims:
        """The cheapest by demand x reload time x weight / bytes."""
        return choose_victims(newcomer, num_pages_short, candidates, now_s, self.params)

    def kv_victim(self, model_id: str, candidates: Sequence[Candidate], now_s: float) -> str | None:
        """The cheapest, idle ones first."""
        return choose_kv_victim(model_id, candidates, now_s, self.params)


def keep_score(rate: float, reload_s: float, weight: float, num_bytes: int) -> float:
    """Worth of keeping a model, a byte."""
    return rate * reload_s * weight / max(1, num_bytes)


def newcomer_score(newcomer: Newcomer, now_s: float, params: EvictionParams) -> float:
    """Worth of bringing a model in, a byte; grows with its waiting."""
    waited = max(0.0, now_s - newcomer.queued_at_s)
    urgency = waited / params.starvation_s if params.starvation_s > 0 else 1.0
    rate = newcomer.demand.rate(now_s, params.half_life_s) + urgency
    return keep_score(rate, newcomer.reload_s, newcomer.weight, newcomer.num_bytes)


def choose_victims(
    newcomer: Newcomer,
    num_pages_short: int,
    candidates: Sequence[Candidate],
    now_s: float,
    params: EvictionParams,
) -> Victims:
    """The cheapest models whose pages make up `num_pages_short`; none if they cannot.

    Models that drain already count as room to come. Of those that may leave idle ones go first,
    whatever their scores; nobody is taken that is not needed.
    """
    short = num_pages_short - sum(c.num_pages for c in candidates if c.draining)
    if short <= 0:
        return Victims()
    ranked = sorted(
        (c for c in candidates if _may_leave(c, newcomer, now_s, params)),
        key=lambda c: (c.busy, candidate_score(c, now_s, params), c.last_used_s, c.model_id),
    )
    return first_that_do(ranked, short)


def first_that_do(ranked: Sequence[Candidate], short: int) -> Victims:
    """The first of `ranked` whose pages make up `short`, less those that then are not needed."""
    chosen: list[Candidate] = []
    for candidate in ranked:
        if short <= 0:
            break
        chosen.append(candidate)
        short -= candidate.num_pages
    if short > 0:
        return Victims()
    for candidate in reversed(chosen[:-1]):
        # The last one may have made an earlier, smaller one unnecessary.
        if short + candidate.num_pages <= 0:
            chosen.remove(candidate)
            short += candidate.num_pages
    return Victims(
        evict=tuple(c.model_id for c in chosen if not c.busy),
        drain=tuple(c.model_id for c in chosen if c.busy),
    )


def choose_kv_victim(
    model_id: str, candidates: Sequence[Candidate], now_s: float, params: EvictionParams
) -> str | None:
    """Who goes so that `model_id` gets KV when nothing can run without; None if nobody may.

    Neither margin nor residence counts: the device stands still. A model that drains goes first.
    """
    leaving = [c for c in candidates if c.draining]
    others = [c for c in candidates if not c.pinned and c.model_id != model_id]
    ranked = sorted(
        leaving or others,
        key=lambda c: (c.busy, candidate_score(c, now_s, params), c.last_used_s, c.model_id),
    )
    return ranked[0].model_id if ranked else None


def candidate_score(candidate: Candidate, now_s: float, params: EvictionParams) -> float:
    """Worth of keeping a resident model, a byte."""
    rate = candidate.demand.rate(now_s, params.half_life_s)
    return keep_score(rate, candidate.reload_s, candidate.weight, candidate.num_bytes)


def _may_leave(
    candidate: Candidate, newcomer: Newcomer, now_s: float, params: EvictionParams
) -> bool:
    if candidate.pinned or candidate.draining or candidate.model_id == newcomer.model_id:
        return False
    resident_s = now_s - candidate.resident_since_s
    if not candidate.used and (candidate.busy or resident_s < params.first_use_grace_s):
        return False
    if now_s - newcomer.queued_at_s >= params.starvation_s:
        return True
    if resident_s < params.min_residence_loads * candidate.reload_s:
        return False
    score = candidate_score(candidate, now_s, params)
    return score == 0.0 or newcomer_score(newcomer, now_s, params) > params.margin * score
