"""Which models are on the device: advances loads, drains and evictions through one table of states.

The doer beside `policy/eviction.py`: the policy names victims (through `room.py`), this class
drains and evicts them, has `tiers.py` bring the bytes and turns results into states. `poll` is
called once a step and never blocks. The states and their order are in `residency_state.py`.

Loads are served in the order they were asked for: the head of the queue takes pages as soon as they
are free, makes room by policy where they are not, and nobody overtakes it. A model's pages are
released only when no loader thread touches them any more; then they are fenced by the pool like all
others, and `poll` simply tries again once the engine has retired the fence.

Does not know requests: `busy` and `drop_kv` are how it asks the engine about them.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.errors import IntegrityError, PackError, RequestRefused
from engine.host_tier import HostTier
from engine.pack import PackIndex
from engine.page_pool import Owner, PagePool
from engine.policy.eviction import EvictionParams
from engine.protocol import ModelSpec, ModelStatus, ResidencyState, SwapRecord
from engine.residency_state import (
    Hosted,
    ResidencyEvent,
    blob_stamp,
    check_books,
    learn,
    status_row,
)
from engine.room import Room, weights_of
from engine.tiers import Tiers
from engine.weights import WeightViews, build_views

Busy = Callable[[str], bool]
DropKv = Callable[[str], None]

LEFT = "no longer in the catalog as it was"


class Residency:
    """Owned by the worker's step thread; the only other threads are the loaders in `tiers`."""

    def __init__(self, config: EngineConfig, pool: PagePool, backend: Backend) -> None:
        self._config = config
        self._pool = pool
        self._backend = backend
        self._params = EvictionParams(starvation_s=config.starvation_s)
        host = HostTier(Path(config.shm_dir), config.shm_prefix, config.host_tier_bytes)
        self._tiers = Tiers(backend, host, config.load_threads, config.verify_packs)
        self._room = Room(pool, self._tiers, self._params)
        self._hosted: dict[str, Hosted] = {}
        self._queue: deque[Hosted] = deque()
        self._swaps: list[SwapRecord] = []
        self._generation = 0
        self._num_tier_changes = -1

    def set_catalog(self, specs: Sequence[ModelSpec]) -> list[str]:
        """Take over the whole list. A pack that cannot be used leaves its model `failed`.

        Returns the models whose pages must come back: no longer named, or with another pack. They
        should be drained; `poll` does it where the caller does not.
        """
        leaving: list[str] = []
        named = {spec.model_id: spec for spec in specs}
        for model in list(self._hosted.values()):
            if model.model_id in named:
                continue
            self._call_off(model)
            if model.holds_pages:
                model.removed = True
                model.wanted_again = False
                leaving.append(model.model_id)
            else:
                del self._hosted[model.model_id]
        for model_id, spec in named.items():
            known = self._hosted.get(model_id)
            if known is None:
                self._hosted[model_id] = learn(Hosted(spec), self._config, self._pool)
            elif self._update(known, spec):
                leaving.append(model_id)
        self._tiers.keep_only({m.index.revision for m in self._hosted.values() if m.index})
        for model in self._hosted.values():
            self._refresh(model)
        return leaving

    def knows(self, model_id: str) -> bool:
        """Whether the model is in the catalog, or still leaving the device."""
        return model_id in self._hosted

    def index(self, model_id: str) -> PackIndex:
        """The pack's index. Raises RequestRefused where the model has none that can be read."""
        model = self._get(model_id)
        if model.index is None:
            raise RequestRefused("not_resident", f"model {model_id!r} failed: {model.reason}")
        return model.index

    def pack_dir(self, model_id: str) -> Path:
        """Where the pack lies."""
        return self._get(model_id).pack_dir

    def state(self, model_id: str) -> ResidencyState:
        """The model's state."""
        return self._get(model_id).state

    def reason(self, model_id: str) -> str:
        """Why the model is in its state; mostly of use for a failed one."""
        return self._get(model_id).reason

    def request_load(self, model_id: str, now_s: float) -> None:
        """Make the model resident as soon as it is its turn. Idempotent.

        A model whose pack is damaged stays failed until the catalog brings another pack.
        """
        model = self._get(model_id)
        if model.state == "draining":
            model.wanted_again = not model.removed
        if model.state == "failed" and model.retryable:
            model.move("cold")
        if model.state in ("cold", "warm"):
            model.move("loading", "waits for memory")
            model.queued_at_s = now_s
            self._queue.append(model)

    def begin_drain(self, model_id: str, now_s: float, reason: str) -> None:
        """Take the model off the device once what it runs has ended. Idempotent."""
        model = self._get(model_id)
        model.wanted_again = False
        self._call_off(model)
        self._drain(model, now_s, reason)

    def touch(self, model_id: str, service_s: float, now_s: float) -> None:
        """The model has used the device for `service_s`."""
        model = self._get(model_id)
        model.demand = model.demand.added(service_s, now_s, self._params.half_life_s)
        model.used = True
        model.last_used_s = now_s

    def reject(self, model_id: str, reason: str) -> None:
        """A model that is resident but cannot be run: it fails, and its pages come back."""
        self._fail(self._get(model_id), reason, False, [])

    def make_kv_room(self, model_id: str, now_s: float, busy: Busy, drop_kv: DropKv) -> bool:
        """Evict one model for the KV of `model_id`. Only for when nothing runs, whoever is busy.

        False: nobody may go. True as well while a load is under way: it may go when it has come.
        """
        on_device = self._on_device()
        if any(model.job is not None for model in on_device):
            return True
        victim = self._room.kv_victim(model_id, on_device, now_s, busy)
        if victim is None:
            return False
        self._drain(self._hosted[victim], now_s, f"KV of {model_id}")
        self._evict(self._hosted[victim], now_s, drop_kv, [])
        return True

    def num_pages_for_kv(self, model_id: str) -> int:
        """Pages the model's KV could have if every model that may leave had left."""
        kept = self._room.num_pages_kept(self._get(model_id), self._hosted.values())
        return self._pool.num_pages - kept

    def poll(
        self, now_s: float, busy: Busy, drop_kv: DropKv, hold_loads: bool = False
    ) -> list[ResidencyEvent]:
        """Advance everything. `drop_kv` must give back all KV pages of the model it names.

        A busy model that drains is evicted at `drain_timeout_s`; its requests are then the
        engine's to preempt (in `drop_kv`). With `hold_loads` no load takes pages or makes room.
        """
        events: list[ResidencyEvent] = []
        self._tiers.poll()
        for model in self._on_device():
            if model.job is not None and model.job.done:
                self._finish_load(model, now_s, events)
            if model.removed or model.next_spec is not None:
                self._drain(model, now_s, LEFT)
            if model.state == "draining" and model.job is None:
                overdue = now_s - model.drain_since_s >= self._config.drain_timeout_s
                if model.views is None or overdue or not busy(model.model_id):
                    self._evict(model, now_s, drop_kv, events)
        if not hold_loads:
            self._serve_queue(now_s, busy, drop_kv, events)
        if self._num_tier_changes != self._tiers.num_changes:
            self._num_tier_changes = self._tiers.num_changes
            for model in self._hosted.values():
                self._refresh(model)
        return events

    def pending_pages(self) -> int:
        """Pages that the next load waits for: KV should leave them alone."""
        return self._room.num_pages_needed(self._queue[0]) if self._queue else 0

    def weights(self, model_id: str) -> WeightViews:
        """Views of a model on the device. Raises RequestRefused where it is not there."""
        views = self._get(model_id).views
        if views is None:
            raise RequestRefused("not_resident", f"model {model_id!r} is not resident")
        return views

    def load_estimate_s(self, model_id: str) -> float:
        """Seconds a load would take from where the weights are now; -1 without a usable pack."""
        index = self._get(model_id).index
        return -1.0 if index is None else self._tiers.estimate_s(index)

    def take_swaps(self) -> list[SwapRecord]:
        """Loads and evictions finished since the last call."""
        swaps, self._swaps = self._swaps, []
        return swaps

    def status_rows(self, num_requests: Mapping[str, tuple[int, int]]) -> list[ModelStatus]:
        """A row for each model; `num_requests`: running and waiting by model."""
        return [
            status_row(
                model,
                self._pool.owned(Owner(model_id, "kv")) * self._pool.page_bytes,
                self.load_estimate_s(model_id),
                num_requests.get(model_id, (0, 0)),
            )
            for model_id, model in self._hosted.items()
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless states, pages, jobs and the queue agree."""
        for model in self._hosted.values():
            pages = self._pool.owned(weights_of(model))
            check_books(model, pages, self._queue.count(model))
        owners = {o.model_id for o in self._pool.pages_by_owner() if o.kind == "weights"}
        if not owners <= self._hosted.keys():
            raise IntegrityError(f"pages of unknown models: {owners - self._hosted.keys()}")
        self._tiers.check_integrity()

    def close(self, keep_host_tier: bool = True) -> None:
        """Stop the loaders. The host tier stays for the next worker unless told otherwise."""
        self._tiers.close(keep_host_tier)

    def _get(self, model_id: str) -> Hosted:
        model = self._hosted.get(model_id)
        if model is None:
            raise RequestRefused("unknown_model", f"model {model_id!r} is not in the catalog")
        return model

    def _update(self, model: Hosted, spec: ModelSpec) -> bool:
        """A newer catalog entry of a known model; True if its pages must come back first."""
        model.removed = False
        model.next_spec = None
        if spec.pack_dir == model.spec.pack_dir:
            model.spec = spec
            # The folder may have been registered anew under the same name.
            if model.state == "failed" and blob_stamp(model.pack_dir) != model.blob_stamp:
                learn(model, self._config, self._pool)
            return False
        self._call_off(model)
        if model.holds_pages:
            model.next_spec = spec
            return True
        model.spec = spec
        learn(model, self._config, self._pool)
        return False

    def _call_off(self, model: Hosted) -> None:
        """Take a load that has no pages yet out of the queue."""
        if model in self._queue:
            self._queue.remove(model)
            model.move("cold")
            self._refresh(model)

    def _drain(self, model: Hosted, now_s: float, reason: str) -> None:
        if model.state not in ("resident", "loading"):
            return
        if model.job is not None:
            model.job.cancel()
        model.move("draining", reason)
        model.drain_since_s = now_s

    def _evict(
        self, model: Hosted, now_s: float, drop_kv: DropKv, events: list[ResidencyEvent]
    ) -> None:
        if model.views is not None:
            drop_kv(model.model_id)
        reason = model.reason
        self._release(model)
        model.move("cold")
        self._refresh(model)
        assert model.index is not None
        tier: Literal["host", "none"] = "host" if self._tiers.is_warm(model.index) else "none"
        size, duration_s = model.index.total_bytes, now_s - model.drain_since_s
        self._swaps.append(SwapRecord(model.model_id, "evict", tier, size, duration_s, reason))
        events.append(ResidencyEvent("evicted", model.model_id, reason))
        if model.removed:
            del self._hosted[model.model_id]
        elif model.next_spec is not None:
            model.spec, model.next_spec = model.next_spec, None
            learn(model, self._config, self._pool)
        elif model.wanted_again:
            self.request_load(model.model_id, now_s)
        model.wanted_again = False

    def _release(self, model: Hosted) -> None:
        pages = [page for run in model.runs for page in run.pages]
        model.views = None
        model.runs = []
        self._pool.release(weights_of(model), pages)

    def _fail(
        self, model: Hosted, reason: str, retryable: bool, events: list[ResidencyEvent]
    ) -> None:
        if model.runs:
            self._release(model)
        model.move("failed", reason)
        model.retryable = retryable
        model.blob_stamp = blob_stamp(model.pack_dir)
        events.append(ResidencyEvent("failed", model.model_id, reason))

    def _finish_load(self, model: Hosted, now_s: float, events: list[ResidencyEvent]) -> None:
        job, model.job = model.job, None
        assert job is not None
        assert model.index is not None
        try:
            tier = self._tiers.finish(job, model.pack_dir)
        except (PackError, OSError) as error:
            if model.state == "draining":
                return  # it goes anyway; another load would find the same
            self._fail(model, str(error), not isinstance(error, PackError), events)
            return
        if model.state == "draining":
            return
        self._generation += 1
        model.views = build_views(
            self._backend.arena, model.index, self._offsets(model), self._generation
        )
        model.move("resident")
        model.used = False
        model.resident_since_s = model.last_used_s = now_s
        size = model.index.total_bytes
        self._swaps.append(SwapRecord(model.model_id, "load", tier, size, job.duration_s))
        events.append(ResidencyEvent("loaded", model.model_id))

    def _serve_queue(
        self, now_s: float, busy: Busy, drop_kv: DropKv, events: list[ResidencyEvent]
    ) -> None:
        while self._queue:
            model = self._queue[0]
            problem = self._room.why_never(model, self._hosted.values())
            if problem:
                self._queue.popleft()
                self._fail(model, problem, True, events)
            elif self._room.take(model):
                self._queue.popleft()
                self._start(model, events)
            else:
                self._make_room(model, now_s, busy, drop_kv, events)
                return

    def _start(self, model: Hosted, events: list[ResidencyEvent]) -> None:
        assert model.index is not None
        try:
            model.job = self._tiers.start(model.index, model.pack_dir, self._offsets(model))
        except PackError as error:
            self._fail(model, str(error), False, events)
            return
        model.reason = ""

    def _make_room(
        self,
        model: Hosted,
        now_s: float,
        busy: Busy,
        drop_kv: DropKv,
        events: list[ResidencyEvent],
    ) -> None:
        victims = self._room.victims(model, self._hosted.values(), now_s, busy)
        for model_id in (*victims.evict, *victims.drain):
            self._drain(self._hosted[model_id], now_s, f"room for {model.model_id}")
        for model_id in victims.evict:
            self._evict(self._hosted[model_id], now_s, drop_kv, events)

    def _on_device(self) -> list[Hosted]:
        """Models whose weights own pages: all that a poll has to look at."""
        owners = self._pool.pages_by_owner()
        return [self._hosted[owner.model_id] for owner in owners if owner.kind == "weights"]

    def _refresh(self, model: Hosted) -> None:
        """Cold or warm, as the host tier has it."""
        if model.state in ("cold", "warm") and model.index is not None:
            state: ResidencyState = "warm" if self._tiers.is_warm(model.index) else "cold"
            if state != model.state:
                model.move(state)

    def _offsets(self, model: Hosted) -> list[int]:
        return [run.first * self._pool.page_bytes for run in model.runs]
