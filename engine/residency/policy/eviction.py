"""Who leaves the device when a model has to come in. Pure: state and `now_s` in, names out.

Keeping a model is worth `demand x reload_s x weight / bytes`: what it would cost its users to bring
it back, from the tier it would really come from, by the memory it holds (the GDSF family:
Cherkasova 1998, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching"). In
place of that family's ageing clock demand itself ages, by two half-lives (`Demand`). Equal
scores leave in the order of last use.

Who may leave at all is `eviction_rules.py`. Of those, idle ones go first, whatever their scores,
then the least worth a byte; nobody is taken that is not needed. That is greedy on purpose: the set
with the least worth in sum frees just what is asked for, and the next incoming model finds no
slack. It made more reloads and gained nothing for sure (docs/log.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.residency.policy.eviction_rules import (
    Candidate,
    Demand,
    EvictionParams,
    Floors,
    IncomingModel,
    KeptFor,
    candidate_score,
    incoming_score,
    why_kept,
)

__all__ = [
    "Candidate",
    "Demand",
    "EvictionParams",
    "EvictionPolicy",
    "GreedyDual",
    "IncomingModel",
    "KeptFor",
    "Victims",
    "candidate_score",
    "choose_idle_victim",
    "choose_kv_victim",
    "choose_victims",
    "first_that_do",
    "incoming_score",
]


@dataclass(frozen=True, slots=True)
class Victims:
    """What to do now: `evict` are idle and go at once, `drain` finish what they run first.

    kept    rules by model, for those that may not leave; the others were not needed
    scores  worth of keeping each candidate, a byte, as this policy sees it
    """

    evict: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    kept: dict[str, KeptFor] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


class EvictionPolicy(Protocol):
    """Who goes. `GreedyDual` is ours; `bench/sim/baselines` has those it is compared with."""

    @property
    def params(self) -> EvictionParams:
        """The constants, of which residency needs the half-lives."""
        ...

    def victims(
        self,
        incoming: IncomingModel,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        now_s: float,
    ) -> Victims:
        """Whose pages make up what the incoming model lacks; none if they cannot."""
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
        incoming: IncomingModel,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        now_s: float,
    ) -> Victims:
        """The cheapest by demand x reload time x weight / bytes."""
        return choose_victims(incoming, num_pages_short, candidates, now_s, self.params)

    def kv_victim(self, model_id: str, candidates: Sequence[Candidate], now_s: float) -> str | None:
        """The cheapest, idle ones first."""
        return choose_kv_victim(model_id, candidates, now_s, self.params)


def choose_victims(
    incoming: IncomingModel,
    num_pages_short: int,
    candidates: Sequence[Candidate],
    now_s: float,
    params: EvictionParams,
) -> Victims:
    """The cheapest models whose pages make up `num_pages_short`; none if they cannot.

    Models that drain already count as room to come.
    """
    short = num_pages_short - sum(c.num_pages for c in candidates if c.draining)
    if short <= 0:
        return Victims()
    staying = [c for c in candidates if not c.draining and c.model_id != incoming.model_id]
    scores = {c.model_id: candidate_score(c, now_s, params) for c in staying}
    wanted = incoming_score(incoming, now_s, params)
    kept: dict[str, KeptFor] = {}
    free: list[Candidate] = []
    for candidate in staying:
        rule = why_kept(candidate, scores[candidate.model_id], incoming, wanted, now_s, params)
        if rule is None:
            free.append(candidate)
        else:
            kept[candidate.model_id] = rule
    free.sort(key=lambda c: (c.busy, scores[c.model_id], c.last_used_s, c.model_id))
    floors = Floors(incoming, candidates)
    allowed = []
    for candidate in free:
        if floors.may_leave(candidate):
            allowed.append(candidate)
        else:
            kept[candidate.model_id] = "floor"
    found = first_that_do(allowed, short)
    return Victims(found.evict, found.drain, kept, scores)


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


def choose_idle_victim(
    model_id: str,
    worth: float,
    candidates: Sequence[Candidate],
    now_s: float,
    params: EvictionParams,
) -> str | None:
    """The idle model worth least a byte, if that is less than `worth`; None: nobody goes.

    `worth` is that of cached KV of `model_id` which would go otherwise, and which would go with
    its model: so `model_id` stays. Nobody waits for either: so any other stays for some load times
    after it came, for its first use, and where a tenant's floor wants it.
    """
    nobody = IncomingModel("", 0, Demand(), 0.0, 1.0, now_s)
    floors = Floors(nobody, candidates)
    scores: dict[str, float] = {}
    for candidate in candidates:
        resident_s = now_s - candidate.resident_since_s
        if candidate.busy or candidate.pinned or candidate.draining:
            continue
        if candidate.model_id == model_id:
            continue
        if resident_s < params.min_residence_loads * candidate.reload_s:
            continue
        if candidate.used or resident_s >= params.first_use_grace_s:
            score = candidate_score(candidate, now_s, params) * params.kv_margin
            if score < worth:
                scores[candidate.model_id] = score
    least = [c for c in candidates if c.model_id in scores]
    least.sort(key=lambda c: (scores[c.model_id], c.last_used_s, c.model_id))
    return next((c.model_id for c in least if floors.may_leave(c)), None)
