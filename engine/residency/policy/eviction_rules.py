"""Who may be made to leave the device for an incoming model, and what a model is worth. Pure.

In this order; the first that holds is the reason that is reported:

    pinned      never leaves
    first use   just loaded, and its first request has not come (`first_use_grace_s`) or not had its
                first token yet, however long that takes. Without that two models could throw each
                other out for ever
    busy        runs something, and the incoming model is a prefetch, for which nobody waits
    residence   busy, and on the device for less than `min_residence_loads` of its own load times
    margin      busy, and worth more than the incoming model's worth over `margin`
    floor       a tenant would keep less of its models than its floor, and the incoming model is not
                one of the tenant's

An idle model costs nobody anything when it leaves: it has to be worth less than who waits only if
the incoming model is a prefetch (`prefetch_margin`, and residence too), or where
`idle_residence_loads` and `idle_margin` say so. Holding loads back while models rest is the
gateway's to do, which sees who waits for what.

Residence and margin give way to an incoming model that has waited for `starvation_s`, or that the
gateway has decided to load within its budget (`forced`); the others never do. An incoming model
that somebody waits for has more than its decayed demand: the service that waits for it, and its
waiting, which counts for one whole device at `starvation_s`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

KeptFor: TypeAlias = Literal["pinned", "floor", "first use", "residence", "margin", "busy"]


@dataclass(frozen=True, slots=True)
class HalfLives:
    """Seconds in which service counts half."""

    fast_s: float = 10.0
    slow_s: float = 120.0


HALF_LIVES = HalfLives()


@dataclass(frozen=True, slots=True)
class Demand:
    """Decayed service of one model: `fast_s` and `slow_s` device seconds as of `at_s`."""

    fast_s: float = 0.0
    slow_s: float = 0.0
    at_s: float = 0.0

    def added(self, service_s: float, now_s: float, half_lives: HalfLives = HALF_LIVES) -> "Demand":
        """With `service_s` more at `now_s`."""
        return self.added_often(((now_s, service_s),), half_lives)

    def added_often(
        self, services: Sequence[tuple[float, float]], half_lives: HalfLives = HALF_LIVES
    ) -> "Demand":
        """With each (now, service) more, in their order."""
        fast_s, slow_s, at_s = self.fast_s, self.slow_s, self.at_s
        by_fast, by_slow = -1.0 / half_lives.fast_s, -1.0 / half_lives.slow_s
        for now_s, more_s in services:
            past_s = max(0.0, now_s - at_s)
            fast_s = fast_s * math.exp2(past_s * by_fast) + more_s
            slow_s = slow_s * math.exp2(past_s * by_slow) + more_s
            at_s = now_s
        return Demand(fast_s, slow_s, at_s)

    def rate(self, now_s: float, half_lives: HalfLives = HALF_LIVES) -> float:
        """Device seconds a second: under steady load, the model's share of the device."""
        past_s = max(0.0, now_s - self.at_s)
        fast = self.fast_s * math.exp2(-past_s / half_lives.fast_s) / half_lives.fast_s
        slow = self.slow_s * math.exp2(-past_s / half_lives.slow_s) / half_lives.slow_s
        return (fast + slow) * (math.log(2) / 2)


@dataclass(frozen=True, slots=True)
class EvictionParams:
    """The policy's constants; where the defaults come from stands in docs/packs.md.

    starvation_s          waiting that wins over margin and residence
    margin                an incoming model's score must be so many times a busy victim's
    idle_margin           an idle victim's
    prefetch_margin       an idle victim's, where nobody waits for the incoming model
    min_residence_loads   a busy victim has been resident for so many of its own load times
    idle_residence_loads  an idle one
    first_use_grace_s     time a loaded model has for its first request to arrive
    fast_half_life_s, slow_half_life_s   of demand
    kv_margin             an idle model leaves for cached KV that is worth so many times as much, a
                          byte; infinite: cached KV always goes first
    host_by_worth         the host tier goes by demand too (policy/host_tier.py), not by last use
    """

    starvation_s: float = 2.0
    margin: float = 1.25
    idle_margin: float = 0.0
    prefetch_margin: float = 2.0
    min_residence_loads: float = 4.0
    idle_residence_loads: float = 0.0
    first_use_grace_s: float = 1.0
    fast_half_life_s: float = 10.0
    slow_half_life_s: float = 120.0
    kv_margin: float = 1.0
    host_by_worth: bool = True

    @property
    def half_lives(self) -> HalfLives:
        """Both."""
        return HalfLives(self.fast_half_life_s, self.slow_half_life_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that holds pages.

    num_pages  that come free when it goes: weights, and KV that is not spare anyway
    used       has produced a token since it was loaded
    floors     (tenant, bytes) of tenants with a floor whose model it is
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
    floors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class IncomingModel:
    """The model at the head of the load queue, waiting since `queued_at_s`.

    backlog_s  predicted service of what waits for it
    prefetch   nobody waits for it
    forced     the gateway has decided that it wins over margin and residence
    """

    model_id: str
    num_bytes: int
    demand: Demand
    reload_s: float
    weight: float
    queued_at_s: float
    backlog_s: float = 0.0
    prefetch: bool = False
    forced: bool = False
    floors: tuple[tuple[str, int], ...] = ()


class Floors:
    """What each tenant with a floor may still lose. Asked in the order in which models leave."""

    def __init__(self, incoming: IncomingModel, candidates: Sequence[Candidate]) -> None:
        own = {tenant_id for tenant_id, _ in incoming.floors}
        held: dict[str, int] = {}
        floor: dict[str, int] = {}
        for candidate in candidates:
            for tenant_id, num_bytes in candidate.floors:
                floor[tenant_id] = max(num_bytes, floor.get(tenant_id, 0))
                if not candidate.draining:
                    held[tenant_id] = held.get(tenant_id, 0) + candidate.num_bytes
        self._spare = {
            tenant_id: held.get(tenant_id, 0) - num_bytes
            for tenant_id, num_bytes in floor.items()
            if tenant_id not in own
        }

    def may_leave(self, candidate: Candidate) -> bool:
        """Whether it may, after those that were let go before; if so it counts as gone."""
        tenants = [t for t, _ in candidate.floors if t in self._spare]
        if any(self._spare[tenant_id] < candidate.num_bytes for tenant_id in tenants):
            return False
        for tenant_id in tenants:
            self._spare[tenant_id] -= candidate.num_bytes
        return True


def keep_score(rate: float, reload_s: float, weight: float, num_bytes: int) -> float:
    """Worth of keeping a model, a byte."""
    return rate * reload_s * weight / max(1, num_bytes)


def candidate_score(candidate: Candidate, now_s: float, params: EvictionParams) -> float:
    """Worth of keeping a resident model, a byte."""
    rate = candidate.demand.rate(now_s, params.half_lives)
    return keep_score(rate, candidate.reload_s, candidate.weight, candidate.num_bytes)


def incoming_score(incoming: IncomingModel, now_s: float, params: EvictionParams) -> float:
    """Worth of bringing a model in, a byte; grows with its waiting."""
    demand = incoming.demand
    if incoming.backlog_s > 0:
        demand = demand.added(incoming.backlog_s, now_s, params.half_lives)
    rate = demand.rate(now_s, params.half_lives)
    if not incoming.prefetch:
        waited_s = max(0.0, now_s - incoming.queued_at_s)
        rate += waited_s / params.starvation_s if params.starvation_s > 0 else 1.0
    return keep_score(rate, incoming.reload_s, incoming.weight, incoming.num_bytes)


def why_kept(
    candidate: Candidate,
    score: float,
    incoming: IncomingModel,
    wanted: float,
    now_s: float,
    params: EvictionParams,
) -> KeptFor | None:
    """The first rule but the floors' that keeps the candidate; None: it may leave.

    `score` and `wanted` are the candidate's and the incoming model's worth.
    """
    if candidate.pinned:
        return "pinned"
    resident_s = now_s - candidate.resident_since_s
    if not candidate.used and (candidate.busy or resident_s < params.first_use_grace_s):
        return "first use"
    if incoming.prefetch and candidate.busy:
        return "busy"
    waited_s = -math.inf if incoming.prefetch else now_s - incoming.queued_at_s
    if incoming.forced or waited_s >= params.starvation_s:
        return None
    if incoming.prefetch:
        loads, margin = params.min_residence_loads, params.prefetch_margin
    elif candidate.busy:
        loads, margin = params.min_residence_loads, params.margin
    else:
        loads, margin = params.idle_residence_loads, params.idle_margin
    if resident_s < loads * candidate.reload_s:
        return "residence"
    if 0.0 < margin * score >= wanted:
        return "margin"
    return None
