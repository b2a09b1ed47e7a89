"""Pages for weights: how many a load needs, where they would lie, and who would have to go for it.

Puts pool, KV, store, planner and eviction policy together for `load_queue.py` and `residency.py`,
which act on the answers. Changes nothing.

`SwapChoices` keeps these decisions for the worker's status (protocol.SwapChoice). A load that has
to wait is decided about anew at every step, mostly with the same outcome: that is reported once,
and again only when somebody leaves or the reasons change, RETELL_S apart at the least. Bounded:
what nobody takes falls out, the oldest first.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.memory import Owner, PagePool
from engine.packs import WeightStore
from engine.protocol import MAX_CANDIDATES, Outcome, SwapCandidate, SwapChoice
from engine.residency.compaction import Picture, RunPlan, WeightRun, plan_runs
from engine.residency.loaded_models import ModelInstance
from engine.residency.policy.eviction import EvictionPolicy, Victims, choose_idle_victim
from engine.residency.policy.eviction_rules import (
    Candidate,
    EvictionParams,
    IncomingModel,
    candidate_score,
    incoming_score,
)

RETELL_S = 1.0
MOST_KEPT = 256

Reason: TypeAlias = Literal["load", "kv", "prefetch", "operator"]


# Counting cached KV by its owner takes milliseconds on a large device, too long for every step of
# a load that waits.
RECOUNT_S = 0.1


class SwapChoices:
    """What was decided and has not been taken yet."""

    def __init__(self, params: EvictionParams) -> None:
        self._params = params
        self._choices: deque[SwapChoice] = deque(maxlen=MOST_KEPT)
        self._last: object = None
        self._last_s = float("-inf")

    def take(self) -> list[SwapChoice]:
        """Those since the last call."""
        taken = list(self._choices)
        self._choices.clear()
        return taken

    def for_load(
        self,
        incoming: IncomingModel,
        score: float,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        victims: Victims,
        claimed: Collection[str],
        now_s: float,
    ) -> None:
        """Somebody had to go for a load. `claimed`: whose room a waiting request needs."""
        outcomes = {c.model_id: _outcome(c, victims, claimed) for c in candidates}
        leaves = bool(victims.evict or victims.drain)
        decision = (incoming.model_id, tuple(outcomes.values()))
        if not leaves and (decision == self._last or now_s - self._last_s < RETELL_S):
            return
        self._last, self._last_s = decision, now_s
        rows = [self._row(c, outcomes[c.model_id], victims.scores, now_s) for c in candidates]
        rows.sort(key=lambda row: (row.outcome.startswith("kept"), row.score, row.model_id))
        self._choices.append(
            SwapChoice(
                incoming=incoming.model_id,
                reason="prefetch" if incoming.prefetch else "load",
                num_pages_short=num_pages_short,
                waited_s=max(0.0, now_s - incoming.queued_at_s),
                score=score,
                candidates=rows[:MAX_CANDIDATES],
            )
        )

    def for_one(
        self,
        incoming: str,
        reason: Reason,
        candidates: Sequence[Candidate],
        victim: str,
        outcome: Outcome,
        now_s: float,
    ) -> None:
        """One model goes, for the KV of `incoming` or because an operator asked for it."""
        scores = {c.model_id: candidate_score(c, now_s, self._params) for c in candidates}
        rows = [
            self._row(
                candidate,
                outcome if candidate.model_id == victim else _kept(candidate),
                scores,
                now_s,
            )
            for candidate in candidates
            if candidate.model_id != incoming
        ]
        rows.sort(key=lambda row: (row.outcome.startswith("kept"), row.score, row.model_id))
        self._choices.append(SwapChoice(incoming, reason, 0, 0.0, 0.0, rows[:MAX_CANDIDATES]))

    def _row(
        self, candidate: Candidate, outcome: Outcome, scores: dict[str, float], now_s: float
    ) -> SwapCandidate:
        return SwapCandidate(
            model_id=candidate.model_id,
            outcome=outcome,
            score=scores.get(candidate.model_id, 0.0),
            demand=candidate.demand.rate(now_s, self._params.half_lives),
            reload_s=candidate.reload_s,
            weight=candidate.weight,
            size_bytes=candidate.num_bytes,
            num_pages=candidate.num_pages,
        )


def _outcome(candidate: Candidate, victims: Victims, claimed: Collection[str]) -> Outcome:
    model_id = candidate.model_id
    if model_id in victims.evict:
        return "evicted"
    if candidate.draining or model_id in victims.drain:
        return "drains"
    if model_id in claimed:
        return "kept: claimed"
    rule = victims.kept.get(model_id)
    if rule is None:
        return "kept: not needed"
    kept: dict[str, Outcome] = {
        "pinned": "kept: pinned",
        "floor": "kept: floor",
        "first use": "kept: first use",
        "residence": "kept: residence",
        "margin": "kept: margin",
        "busy": "kept: busy",
    }
    return kept[rule]


def _kept(candidate: Candidate) -> Outcome:
    return "kept: pinned" if candidate.pinned else "kept: not needed"


class KvSpace(Protocol):
    """What weights may ask of the KV of all models."""

    def num_evictable(self) -> int:
        """Pages of extents without live blocks."""

    def evictable_mask(self) -> npt.NDArray[np.bool_]:
        """Which pages these are, by page number."""

    def evict(self, num_pages: int) -> int:
        """Give so many evictable pages back, the least valuable first. Returns how many it were."""

    def clear(self, pages: Collection[int]) -> bool:
        """Evict or move what is in these KV pages, all of it, so that they are free or fenced.

        False, and nothing has changed, where live blocks find no free pages to go to.
        """


@dataclass(frozen=True, slots=True)
class KvClaim:
    """KV for which models have left, until its request has ended.

    instance_id    the model it is for: no load sends it away
    num_pages  what it may still need at the worst: loads leave so many alone
    """

    instance_id: str
    num_pages: int


def may_move(model: ModelInstance) -> bool:
    """Whether its weights may change their place: no loader writes them, and it is to stay."""
    return model.state == "resident" and model.views is not None


class WeightSpace:
    """Weights in one pool."""

    def __init__(
        self, pool: PagePool, kv: KvSpace, weight_store: WeightStore, policy: EvictionPolicy
    ) -> None:
        self._pool = pool
        self._kv = kv
        self._weight_store = weight_store
        self._policy = policy
        self.claim: KvClaim | None = None
        self.choices = SwapChoices(policy.params)
        self._cached: Counter[str] = Counter()
        self._counted_s = float("-inf")

    def num_pages_needed(self, model: ModelInstance) -> int:
        """Its weights and the first of its KV."""
        return sum(self._segment_pages(model)) + model.num_first_kv_pages

    def num_pages_pending(self, model: ModelInstance) -> int:
        """What it needs beyond the pages it has claimed already."""
        claimed = len(model.placement.claimed) if model.placement else 0
        return self.num_pages_needed(model) - claimed

    def num_pages_short(self, model: ModelInstance) -> int:
        """What it lacks though cached KV gave way and all fences passed; 0 or less: nothing.

        What a claim may still need is left to it. KV that others hold now is not counted for it,
        though they would have to give way: they may be there for long.
        """
        spare = self._pool.num_free + self._pool.num_fenced + self._kv.num_evictable()
        claimed = self.claim.num_pages if self.claim is not None else 0
        return self.num_pages_pending(model) + claimed - spare

    def why_never(self, model: ModelInstance, hosted: Iterable[ModelInstance]) -> str:
        """Why it would not fit though all but the pinned models went; "" if it would."""
        num_pinned = sum(
            run.num_pages
            for other in hosted
            if other.spec.pinned and other is not model and other.state != "draining"
            for run in other.runs
        )
        needed = self.num_pages_needed(model)
        if needed + num_pinned <= self._pool.num_pages:
            return ""  # in whatever pieces: pinned models may be moved
        page = self._pool.page_bytes
        return (
            f"it needs {needed * page} bytes with the smallest KV cache, but the device budget is "
            f"{self._pool.num_pages * page} bytes, of which pinned models hold {num_pinned * page}"
        )

    def plan(
        self, model: ModelInstance, hosted: Iterable[ModelInstance], kv_stays: bool
    ) -> RunPlan | None:
        """Where its weights could go now, and what must be moved for it."""
        movable = [
            WeightRun(other.model_id, segment, run)
            for other in hosted
            if may_move(other)
            for segment, run in enumerate(other.runs)
        ]
        kinds, evictable = self._pool.kinds(), self._kv.evictable_mask()
        fixed = None
        if kv_stays:
            fixed = (np.frombuffer(kinds, dtype=np.uint8) == PagePool.KV) & ~evictable
        picture = Picture(kinds, evictable, movable, fixed)
        return plan_runs(picture, self._segment_pages(model), model.home)

    def victims(
        self,
        model: ModelInstance,
        num_pages: int,
        hosted: Iterable[ModelInstance],
        now_s: float,
        busy: Callable[[str], bool],
    ) -> Victims:
        """Who has to go so that `num_pages` more become free."""
        assert model.index is not None
        incoming = IncomingModel(
            model_id=model.model_id,
            num_bytes=model.index.total_bytes,
            demand=model.demand,
            reload_s=self._weight_store.estimate_s(model.index),
            weight=model.spec.weight,
            queued_at_s=model.queued_at_s,
            backlog_s=model.load_request.backlog_s,
            prefetch=model.load_request.prefetch,
            forced=model.load_request.forced,
            floors=model.spec.floors,
        )
        on_device = [other for other in hosted if other.state in ("resident", "draining")]
        candidates = self._candidates(on_device, now_s, busy)
        # The model of a claim is not sent away for a load; one that drains already counts as room.
        claimed = self.claim.instance_id if self.claim is not None else None
        asked = [c for c in candidates if c.draining or c.model_id != claimed]
        victims = self._policy.victims(incoming, num_pages, asked, now_s)
        score = incoming_score(incoming, now_s, self._policy.params)
        self.choices.for_load(
            incoming,
            score,
            num_pages,
            candidates,
            victims,
            () if claimed is None else (claimed,),
            now_s,
        )
        return victims

    def kv_victim(
        self,
        model_id: str,
        on_device: Iterable[ModelInstance],
        now_s: float,
        busy: Callable[[str], bool],
    ) -> str | None:
        """Who has to go so that `model_id`, which is resident, gets KV; None if nobody may."""
        candidates = self._candidates(on_device, now_s, busy)
        victim = self._policy.kv_victim(model_id, candidates, now_s)
        if victim is not None:
            self.choices.for_one(model_id, "kv", candidates, victim, "evicted", now_s)
        return victim

    def idle_victim(
        self,
        worth: float,
        model_id: str,
        on_device: Iterable[ModelInstance],
        now_s: float,
        busy: Callable[[str], bool],
    ) -> str | None:
        """Who goes before cached KV of `model_id` that is worth so much a byte; None: nobody."""
        candidates = self._candidates(on_device, now_s, busy)
        victim = choose_idle_victim(model_id, worth, candidates, now_s, self._policy.params)
        if victim is not None:
            self.choices.for_one(model_id, "kv", candidates, victim, "evicted", now_s)
        return victim

    def note_unload(self, model: ModelInstance, now_s: float) -> None:
        """An operator, or a new catalog, sends a model away."""
        candidates = self._candidates([model], now_s, lambda model_id: False)
        self.choices.for_one("", "operator", candidates, model.model_id, "drains", now_s)

    def num_pages_kept(self, model: ModelInstance, hosted: Iterable[ModelInstance]) -> int:
        """Pages that the model's KV can never have: its own weights and those of pinned models."""
        return sum(
            run.num_pages
            for other in hosted
            if other is model or other.spec.pinned
            for run in other.runs
        )

    def _candidates(
        self, models: Iterable[ModelInstance], now_s: float, busy: Callable[[str], bool]
    ) -> list[Candidate]:
        # Cached KV counts as spare memory already, whoever goes.
        if now_s - self._counted_s >= RECOUNT_S:
            self._counted_s = now_s
            pages = np.flatnonzero(self._kv.evictable_mask()).tolist()
            owners = (self._pool.owner_of(page) for page in pages)
            self._cached = Counter(owner.model_id for owner in owners if owner is not None)
        return [self._candidate(model, self._cached[model.model_id], busy) for model in models]

    def _candidate(
        self, model: ModelInstance, num_cached_pages: int, busy: Callable[[str], bool]
    ) -> Candidate:
        assert model.index is not None
        kv_pages = max(0, self._pool.owned(Owner(model.model_id, "kv")) - num_cached_pages)
        return Candidate(
            model_id=model.model_id,
            num_pages=self._pool.owned(model.weights_owner) + kv_pages,
            num_bytes=model.index.total_bytes,
            demand=model.demand,
            reload_s=self._weight_store.estimate_s(model.index),
            weight=model.spec.weight,
            pinned=model.spec.pinned,
            busy=busy(model.model_id),
            draining=model.state == "draining",
            used=model.used,
            resident_since_s=model.resident_since_s,
            last_used_s=model.last_used_s,
            floors=model.spec.floors,
        )

    def _segment_pages(self, model: ModelInstance) -> list[int]:
        assert model.index is not None
        sizes = [segment.num_bytes for segment in model.index.segments]
        return [max(1, self._pool.pages_needed(size)) for size in sizes]
