"""What happens to one unit: its changes of state, and the pages, views and records that go along.

A unit is a pack with its KV, by whatever names it is hosted. `residency.py` says when something
happens, `load_queue.py` leads loads to their pages; both act through here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.errors import PackError, RequestRefused
from engine.memory.page_pool import PagePool
from engine.packs.pack_source import PackSource
from engine.packs.weights import build_views
from engine.protocol import ModelSpec, ResidencyState, SwapRecord
from engine.residency.residency_state import Hosted, ResidencyEvent, UnitLists, learn
from engine.residency.room import weights_of
from engine.residency.tiers import WeightTiers

Busy = Callable[[str], bool]
DropKv = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """One poll: what it may ask the engine, and what came of it."""

    now_s: float
    busy: Busy
    drop_kv: DropKv
    events: list[ResidencyEvent] = field(default_factory=list)


class Units:
    """All units this worker knows. `by_id` is for reading; `swaps` are loads and evictions."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        backend: Backend,
        tiers: WeightTiers,
        packs: PackSource,
    ) -> None:
        self._config = config
        self._packs = packs
        self._pool = pool
        self._backend = backend
        self._tiers = tiers
        self._generation = 0
        self.by_id: dict[str, Hosted] = {}
        self.lists = UnitLists()
        self.swaps: list[SwapRecord] = []

    def get(self, model_id: str) -> Hosted:
        """Raises RequestRefused for an unknown one."""
        model = self.by_id.get(model_id)
        if model is None:
            raise RequestRefused("unknown_model", f"model {model_id!r} is not in the catalog")
        return model

    def by_revision(self, revision: str) -> Hosted | None:
        """A unit with this pack. Looked for among those that are not cold, then all."""
        for models in (self.lists.noted, self.by_id):
            for model in models.values():
                if model.index is not None and model.index.revision == revision:
                    return model
        return None

    def all(self) -> Iterator[Hosted]:
        """Every unit."""
        return iter(self.by_id.values())

    def on_device(self) -> list[Hosted]:
        """Those whose weights own pages: all that a poll has to look at."""
        owners = self._pool.pages_by_owner()
        return [self.by_id[owner.model_id] for owner in owners if owner.kind == "weights"]

    def add(self, spec: ModelSpec) -> None:
        """A new entry of the catalog."""
        self.by_id[spec.model_id] = learn(
            Hosted(spec, self.lists), self._config, self._pool, self._packs
        )

    def remove(self, model: Hosted) -> None:
        """Forget a unit that holds nothing."""
        del self.by_id[model.model_id]
        self.lists.forget(model)

    def update(self, model: Hosted, spec: ModelSpec) -> bool:
        """A newer entry of a known unit, not queued; True if its pages must come back first."""
        model.removed = False
        model.next_spec = None
        if spec.pack_dir == model.spec.pack_dir:
            model.spec = spec
            # The folder may have been registered anew under the same name.
            if model.state == "failed" and self._packs.stamp(model.pack_dir) != model.blob_stamp:
                learn(model, self._config, self._pool, self._packs)
            return False
        if model.holds_pages:
            model.next_spec = spec
            return True
        model.spec = spec
        learn(model, self._config, self._pool, self._packs)
        return False

    def refresh(self, model: Hosted) -> None:
        """Cold or warm, as the host tier has it."""
        if model.state in ("cold", "warm") and model.index is not None:
            state: ResidencyState = "warm" if self._tiers.is_warm(model.index) else "cold"
            if state != model.state:
                model.move(state)

    def start(self, model: Hosted, turn: Turn) -> None:
        """Have the loaders write the pages, once no step in flight can touch them any more."""
        assert model.index is not None
        if not all(self._pool.is_ripe(run.pages) for run in model.runs):
            return
        try:
            model.job = self._tiers.start(
                model.index, model.pack_dir, self._offsets(model), not model.files_checked
            )
        except PackError as error:
            self.fail(model, str(error), False, turn.events)
            return
        model.reason = ""

    def finish_load(self, model: Hosted, turn: Turn) -> None:
        """The loaders are done: resident, or failed. One that drains is left to its eviction."""
        job, model.job = model.job, None
        assert job is not None
        assert model.index is not None
        try:
            tier = self._tiers.finish(job, model.pack_dir)
        except (PackError, OSError) as error:
            if model.state != "draining":  # it goes anyway; another load would find the same
                self.fail(model, str(error), not isinstance(error, PackError), turn.events)
            return
        if model.state == "draining":
            return
        self._look(model)
        model.move("resident")
        model.files_checked = True
        model.used = False
        model.resident_since_s = model.last_used_s = turn.now_s
        size = model.index.total_bytes
        self.swaps.append(SwapRecord(model.model_id, "load", tier, size, job.duration_s))
        turn.events.append(ResidencyEvent("loaded", model.model_id))

    def moved(self, model: Hosted, turn: Turn) -> None:
        """Its weights lie elsewhere now."""
        self._look(model)
        turn.events.append(ResidencyEvent("moved", model.model_id))

    def drain(self, model: Hosted, now_s: float, reason: str) -> None:
        """It is to leave the device; nothing happens to one that holds no pages."""
        if not model.holds_pages or model.state == "draining":
            return
        if model.job is not None:
            model.job.cancel()
        model.move("draining", reason)
        model.drain_since_s = now_s

    def evict(self, model: Hosted, turn: Turn) -> bool:
        """The end of a drain. True if the unit is wanted back."""
        if model.views is not None:
            turn.drop_kv(model.model_id)
        reason = model.reason
        self._release(model)
        model.move("cold")
        self.refresh(model)
        assert model.index is not None
        tier: Literal["host", "none"] = "host" if self._tiers.is_warm(model.index) else "none"
        size, duration_s = model.index.total_bytes, turn.now_s - model.drain_since_s
        self.swaps.append(SwapRecord(model.model_id, "evict", tier, size, duration_s, reason))
        turn.events.append(ResidencyEvent("evicted", model.model_id, reason))
        again, model.wanted_again = model.wanted_again, False
        if model.removed:
            self.remove(model)
        elif model.next_spec is not None:
            model.spec, model.next_spec = model.next_spec, None
            learn(model, self._config, self._pool, self._packs)
        else:
            return again
        return False

    def fail(
        self, model: Hosted, reason: str, retryable: bool, events: list[ResidencyEvent]
    ) -> None:
        """Not served any more. No loader may be at work on it."""
        if model.runs:
            self._release(model)
        model.move("failed", reason)
        model.retryable = retryable
        model.blob_stamp = self._packs.stamp(model.pack_dir)
        events.append(ResidencyEvent("failed", model.model_id, reason))

    def _release(self, model: Hosted) -> None:
        if model.views is not None:
            model.home = tuple(model.runs)
        pages = [page for run in model.runs for page in run.pages]
        model.views = None
        model.runs = []
        self._pool.release(weights_of(model), pages)

    def _look(self, model: Hosted) -> None:
        """Views of the weights where they lie now."""
        assert model.index is not None
        self._generation += 1
        model.views = build_views(
            self._backend.arena, model.index, self._offsets(model), self._generation
        )

    def _offsets(self, model: Hosted) -> list[int]:
        return [run.first * self._pool.page_bytes for run in model.runs]
