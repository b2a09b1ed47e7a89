"""Pages for weights: how many a load needs, where they would lie, and who would have to go for it.

Puts pool, KV, tiers, planner and eviction policy together for `placement.py` and `residency.py`,
which act on the answers. Changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.memory.compaction import Picture, RunPlan, WeightRun, plan_runs
from engine.memory.page_pool import KV, Owner, PagePool
from engine.policy.eviction import (
    Candidate,
    EvictionPolicy,
    Newcomer,
    Victims,
    newcomer_score,
)
from engine.residency.residency_state import Hosted
from engine.residency.swap_choices import SwapChoices
from engine.residency.tiers import WeightTiers

# Counting cached KV by its owner takes milliseconds on a large device, too long for every step of
# a load that waits.
RECOUNT_S = 0.1


class KvRoom(Protocol):
    """What weights may ask of the KV of all units."""

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
    """KV for which units have left, until its request has ended.

    unit_id    the unit it is for: no load sends it away
    num_pages  what it may still need at the worst: loads leave so many alone
    """

    unit_id: str
    num_pages: int


class NoKv:
    """A KvRoom without caches: whatever KV pages there are stay where they are."""

    def __init__(self, num_pages: int) -> None:
        self._none = np.zeros(num_pages, dtype=np.bool_)

    def num_evictable(self) -> int:
        """None."""
        return 0

    def evictable_mask(self) -> npt.NDArray[np.bool_]:
        """None."""
        return self._none

    def evict(self, num_pages: int) -> int:
        """Nothing to evict."""
        return 0

    def clear(self, pages: Collection[int]) -> bool:
        """Nothing moves."""
        return not pages


def weights_of(model: Hosted) -> Owner:
    """The pool's name for a unit's weights."""
    return Owner(model.model_id, "weights")


def may_move(model: Hosted) -> bool:
    """Whether its weights may change their place: no loader writes them, and it is to stay."""
    return model.state == "resident" and model.views is not None


class Room:
    """Weights in one pool."""

    def __init__(
        self, pool: PagePool, kv: KvRoom, tiers: WeightTiers, policy: EvictionPolicy
    ) -> None:
        self._pool = pool
        self._kv = kv
        self._tiers = tiers
        self._policy = policy
        self.claim: KvClaim | None = None
        self.choices = SwapChoices(policy.params)
        self._cached: Counter[str] = Counter()
        self._counted_s = float("-inf")

    def num_pages_needed(self, model: Hosted) -> int:
        """Its weights and the first of its KV."""
        return sum(self._segment_pages(model)) + model.num_first_kv_pages

    def num_pages_pending(self, model: Hosted) -> int:
        """What it needs beyond the pages it has claimed already."""
        claimed = len(model.placement.claimed) if model.placement else 0
        return self.num_pages_needed(model) - claimed

    def num_pages_short(self, model: Hosted) -> int:
        """What it lacks though cached KV gave way and all fences passed; 0 or less: nothing.

        What a claim may still need is left to it. KV that others hold now is not counted for it,
        though they would have to give way: they may be there for long.
        """
        spare = self._pool.num_free + self._pool.num_fenced + self._kv.num_evictable()
        claimed = self.claim.num_pages if self.claim is not None else 0
        return self.num_pages_pending(model) + claimed - spare

    def why_never(self, model: Hosted, hosted: Iterable[Hosted]) -> str:
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
            f"needs {needed * page} bytes with its smallest KV, but the device budget is "
            f"{self._pool.num_pages * page} bytes, of which pinned models hold {num_pinned * page}"
        )

    def plan(self, model: Hosted, hosted: Iterable[Hosted], kv_stays: bool) -> RunPlan | None:
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
            fixed = (np.frombuffer(kinds, dtype=np.uint8) == KV) & ~evictable
        picture = Picture(kinds, evictable, movable, fixed)
        return plan_runs(picture, self._segment_pages(model), model.home)

    def victims(
        self,
        model: Hosted,
        num_pages: int,
        hosted: Iterable[Hosted],
        now_s: float,
        busy: Callable[[str], bool],
    ) -> Victims:
        """Who has to go so that `num_pages` more become free."""
        assert model.index is not None
        newcomer = Newcomer(
            model_id=model.model_id,
            num_bytes=model.index.total_bytes,
            demand=model.demand,
            reload_s=self._tiers.estimate_s(model.index),
            weight=model.spec.weight,
            queued_at_s=model.queued_at_s,
            backlog_s=model.wish.backlog_s,
            prefetch=model.wish.prefetch,
            forced=model.wish.forced,
            floors=model.spec.floors,
        )
        on_device = [other for other in hosted if other.state in ("resident", "draining")]
        candidates = self._candidates(on_device, now_s, busy)
        # The unit of a claim is not sent away for a load; one that drains already counts as room.
        claimed = self.claim.unit_id if self.claim is not None else None
        asked = [c for c in candidates if c.draining or c.model_id != claimed]
        victims = self._policy.victims(newcomer, num_pages, asked, now_s)
        score = newcomer_score(newcomer, now_s, self._policy.params)
        self.choices.for_load(
            newcomer,
            score,
            num_pages,
            candidates,
            victims,
            () if claimed is None else (claimed,),
            now_s,
        )
        return victims

    def kv_victim(
        self, model_id: str, on_device: Iterable[Hosted], now_s: float, busy: Callable[[str], bool]
    ) -> str | None:
        """Who has to go so that `model_id`, which is resident, gets KV; None if nobody may."""
        candidates = self._candidates(on_device, now_s, busy)
        victim = self._policy.kv_victim(model_id, candidates, now_s)
        if victim is not None:
            self.choices.for_one(model_id, "kv", candidates, victim, "evicted", now_s)
        return victim

    def note_unload(self, model: Hosted, now_s: float) -> None:
        """An operator, or a new catalog, sends a model away."""
        candidates = self._candidates([model], now_s, lambda model_id: False)
        self.choices.for_one("", "operator", candidates, model.model_id, "drains", now_s)

    def num_pages_kept(self, model: Hosted, hosted: Iterable[Hosted]) -> int:
        """Pages that the model's KV can never have: its own weights and those of pinned models."""
        return sum(
            run.num_pages
            for other in hosted
            if other is model or other.spec.pinned
            for run in other.runs
        )

    def _candidates(
        self, models: Iterable[Hosted], now_s: float, busy: Callable[[str], bool]
    ) -> list[Candidate]:
        # Cached KV counts as spare memory already, whoever goes.
        if now_s - self._counted_s >= RECOUNT_S:
            self._counted_s = now_s
            pages = np.flatnonzero(self._kv.evictable_mask()).tolist()
            owners = (self._pool.owner_of(page) for page in pages)
            self._cached = Counter(owner.model_id for owner in owners if owner is not None)
        return [self._candidate(model, self._cached[model.model_id], busy) for model in models]

    def _candidate(
        self, model: Hosted, num_cached_pages: int, busy: Callable[[str], bool]
    ) -> Candidate:
        assert model.index is not None
        kv_pages = max(0, self._pool.owned(Owner(model.model_id, "kv")) - num_cached_pages)
        return Candidate(
            model_id=model.model_id,
            num_pages=self._pool.owned(weights_of(model)) + kv_pages,
            num_bytes=model.index.total_bytes,
            demand=model.demand,
            reload_s=self._tiers.estimate_s(model.index),
            weight=model.spec.weight,
            pinned=model.spec.pinned,
            busy=busy(model.model_id),
            draining=model.state == "draining",
            used=model.used,
            resident_since_s=model.resident_since_s,
            last_used_s=model.last_used_s,
            floors=model.spec.floors,
        )

    def _segment_pages(self, model: Hosted) -> list[int]:
        assert model.index is not None
        sizes = [segment.num_bytes for segment in model.index.segments]
        return [max(1, self._pool.pages_needed(size)) for size in sizes]
