"""Pages for weights: how many a model needs, taking them, and who would have to go for it.

Puts pool, tiers and the eviction policy together for `residency.py`, which acts on the answers.
Changes nothing but the pool, and that only in `take`.
"""

from collections.abc import Callable, Iterable, Sequence

from engine.errors import OutOfPages
from engine.page_pool import Owner, PagePool, PageRun
from engine.policy.eviction import (
    Candidate,
    EvictionParams,
    Newcomer,
    Victims,
    choose_kv_victim,
    choose_victims,
)
from engine.residency_state import Hosted
from engine.tiers import Tiers


def weights_of(model: Hosted) -> Owner:
    """The pool's name for a model's weights."""
    return Owner(model.model_id, "weights")


class Room:
    """Weights in one pool."""

    def __init__(self, pool: PagePool, tiers: Tiers, params: EvictionParams) -> None:
        self._pool = pool
        self._tiers = tiers
        self._params = params

    def num_pages_needed(self, model: Hosted) -> int:
        """Its weights and the first of its KV."""
        return sum(self._segment_pages(model)) + model.num_first_kv_pages

    def why_never(self, model: Hosted, hosted: Iterable[Hosted]) -> str:
        """Why it would not fit though all but the pinned models went; "" if it would."""
        pinned = [
            run
            for other in hosted
            if other.spec.pinned and other is not model and other.state != "draining"
            for run in other.runs
        ]
        num_pinned = sum(run.num_pages for run in pinned)
        needed = self.num_pages_needed(model)
        page = self._pool.page_bytes
        if needed + num_pinned > self._pool.num_pages:
            return (
                f"needs {needed * page} bytes with its smallest KV, but the device budget is "
                f"{self._pool.num_pages * page} bytes, of which pinned models hold "
                f"{num_pinned * page}"
            )
        gaps = _gaps(pinned, self._pool.num_pages)
        for length in self._segment_pages(model):  # first fit, as the pool does it
            place = next((i for i, gap in enumerate(gaps) if gap >= length), None)
            if place is None:
                return (
                    f"needs {length * page} bytes in one piece, and pinned models leave no such "
                    "hole: unload them, load this one first, or unpin one"
                )
            gaps[place] -= length
        return ""

    def take(self, model: Hosted) -> bool:
        """A run for each segment, if they and the first KV are free now."""
        if self._pool.num_free < self.num_pages_needed(model):
            return False
        try:
            model.runs = self._pool.alloc_runs(weights_of(model), self._segment_pages(model))
        except OutOfPages:
            return False
        return True

    def victims(
        self,
        model: Hosted,
        hosted: Iterable[Hosted],
        now_s: float,
        busy: Callable[[str], bool],
    ) -> Victims:
        """Who has to go before `take` can succeed; nobody while pages are on their way back."""
        assert model.index is not None
        short = self.num_pages_needed(model) - self._pool.num_free - self._pool.num_fenced
        if short <= 0 and self._pool.num_fenced:
            return Victims()
        newcomer = Newcomer(
            model_id=model.model_id,
            num_bytes=model.index.total_bytes,
            demand=model.demand,
            reload_s=self._tiers.estimate_s(model.index),
            weight=model.spec.weight,
            queued_at_s=model.queued_at_s,
        )
        candidates = [
            self._candidate(other, busy)
            for other in hosted
            if other.state in ("resident", "draining")
        ]
        # Enough pages but no run long enough: whoever goes next may open one.
        return choose_victims(newcomer, max(1, short), candidates, now_s, self._params)

    def kv_victim(
        self, model_id: str, on_device: Iterable[Hosted], now_s: float, busy: Callable[[str], bool]
    ) -> str | None:
        """Who has to go so that `model_id`, which is resident, gets KV; None if nobody may."""
        candidates = [self._candidate(model, busy) for model in on_device]
        return choose_kv_victim(model_id, candidates, now_s, self._params)

    def num_pages_kept(self, model: Hosted, hosted: Iterable[Hosted]) -> int:
        """Pages that the model's KV can never have: its own weights and those of pinned models."""
        return sum(
            run.num_pages
            for other in hosted
            if other is model or other.spec.pinned
            for run in other.runs
        )

    def _candidate(self, model: Hosted, busy: Callable[[str], bool]) -> Candidate:
        assert model.index is not None
        kv_pages = self._pool.owned(Owner(model.model_id, "kv"))
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
        )

    def _segment_pages(self, model: Hosted) -> list[int]:
        assert model.index is not None
        return [self._pool.pages_needed(segment.num_bytes) for segment in model.index.segments]


def _gaps(runs: Sequence[PageRun], num_pages: int) -> list[int]:
    """Lengths of what lies between runs, in the order of addresses."""
    gaps, end = [], 0
    for run in sorted(runs, key=lambda run: run.first):
        gaps.append(run.first - end)
        end = run.first + run.num_pages
    return [*gaps, num_pages - end]
