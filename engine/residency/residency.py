"""Which models are on the device: advances loads, drains and evictions through one table of states.

What the engine sees of residency; `poll` is called once a step and never blocks. The states and
what happens to one model are in `loaded_models.py`.

    load_queue   loads in their order; who has to go for the head (weight_space.py, policy/), and
                 sending it away; `_evict` here ends drains and makes room for KV
    placement    the head claims its pages, and what is in the way is moved
    weight_store loaders start when the pages' fences have passed, and bring the bytes

A model's pages are released only when no loader thread touches them any more; then they are fenced
by the pool like all others.

Does not know requests: `busy` and `drop_kv` are how it asks the engine about them. What is resident
is a model (a pack), by whatever names it is hosted; `model_id` here is a model's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.backend import Backend
from engine.config import EngineConfig
from engine.errors import IntegrityError, RequestRefused
from engine.memory import Owner, PagePool
from engine.pack import PackIndex
from engine.packs import RESIDENT_SHARE, PackSource, WeightStore, WeightViews
from engine.protocol import ModelSpec, ModelStatus, ResidencyState, SwapChoice, SwapRecord
from engine.residency.load_queue import LoadQueue, Placer
from engine.residency.loaded_models import (
    PLAIN_LOAD,
    Busy,
    DropKv,
    LoadedModels,
    LoadRequest,
    ModelInstance,
    ResidencyEvent,
    Turn,
    check_books,
    status_row,
)
from engine.residency.policy.eviction import EvictionPolicy, GreedyDual
from engine.residency.policy.eviction_rules import EvictionParams
from engine.residency.weight_space import KvClaim, KvSpace, WeightSpace

LEFT = "no longer in the catalog as it was"


class Residency:
    """Owned by the worker's step thread; the only other threads are the loaders in
    `weight_store`."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        backend: Backend,
        packs: PackSource,
        weight_store: WeightStore,
        kv: KvSpace,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """`policy`: who leaves the device; None: policy/eviction.py as configured."""
        self._config = config
        self._pool = pool
        self._backend = backend
        policy = policy or GreedyDual(EvictionParams(starvation_s=config.starvation_s))
        self._half_lives = policy.params.half_lives
        self._weight_store = weight_store
        self._models = LoadedModels(config, pool, backend, self._weight_store, packs)
        self._space = WeightSpace(pool, kv, self._weight_store, policy)
        self._placer = Placer(pool, kv, backend, self._space)
        if policy.params.host_by_worth:
            self._weight_store.value_by(self._host_worth)
        self._queue = LoadQueue(self._models, self._space, self._placer)
        self._num_store_changes = -1
        self._now_s = 0.0
        self._unsettled = False  # some model may have to leave that does not drain yet

    def set_catalog(self, specs: Sequence[ModelSpec]) -> list[str]:
        """Take over the whole list. A pack that cannot be used leaves its model `failed`.

        Returns the models whose pages must come back: no longer named, or with another pack. They
        should be drained; `poll` does it where the caller does not.
        """
        leaving: list[str] = []
        named = {spec.model_id: spec for spec in specs}
        for model in list(self._models.all()):
            if model.model_id in named:
                continue
            self._queue.call_off(model)
            if model.holds_pages:
                model.removed = True
                model.wanted_again = False
                leaving.append(model.model_id)
            else:
                self._models.remove(model)
        for model_id, spec in named.items():
            known = self._models.by_id.get(model_id)
            if known is None:
                self._models.add(spec)
                continue
            if spec.pack_dir != known.spec.pack_dir:
                self._queue.call_off(known)
            if self._models.update(known, spec):
                leaving.append(model_id)
        self._unsettled = True
        self._weight_store.keep_only({m.index.revision for m in self._models.all() if m.index})
        if self._config.host_tier_when_crowded:
            self._choose_copies()
        for model in self._models.all():
            self._models.refresh(model)
        return leaving

    def _choose_copies(self) -> None:
        """Those that came in while there was room get their copies once it is crowded."""
        stay = [model.index for model in self._models.all() if not model.removed]
        packs = {index.revision: index.total_bytes for index in stay if index is not None}
        is_crowded = len(packs) > 1 and 2 * sum(packs.values()) > self._config.arena_bytes
        had, self._weight_store.copies = self._weight_store.copies, is_crowded
        if is_crowded and not had:
            for model in self._models.on_device():
                if model.state == "resident" and model.index is not None:
                    self._weight_store.warm(model.index, model.pack_dir)

    def knows(self, model_id: str) -> bool:
        """Whether the model is in the catalog, or still leaving the device."""
        return model_id in self._models.by_id

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

    def request_load(
        self, model_id: str, now_s: float, load_request: LoadRequest = PLAIN_LOAD
    ) -> None:
        """Make the model resident as soon as it is its turn. Idempotent.

        A model whose pack is damaged stays failed until the catalog brings another pack. Nothing
        comes back for a prefetch that is on its way out.
        """
        model = self._get(model_id)
        if load_request.to_host_tier:
            if model.state == "cold" and model.index is not None:
                self._weight_store.warm(model.index, model.pack_dir)
            return
        if model.state == "draining" and not load_request.prefetch:
            model.wanted_again, model.load_request = not model.removed, load_request
        if model.state == "failed" and model.retryable:
            model.on("retry")
        if model.state in ("cold", "warm"):
            self._queue.add(model, now_s, load_request)
        elif model.state == "loading":
            self._queue.ask_again(model, now_s, load_request)

    def begin_drain(self, model_id: str, now_s: float, reason: str) -> None:
        """Take the model off the device once what it runs has ended. Idempotent."""
        model = self._get(model_id)
        model.wanted_again = False
        self._queue.call_off(model)
        if model.state == "resident":
            self._space.note_unload(model, now_s)
        self._models.drain(model, now_s, reason)

    def touch(self, model_id: str, service_s: float, now_s: float, produced: bool = True) -> None:
        """The model has used the device for `service_s`. `produced`: a token came of it."""
        model = self._get(model_id)
        model.demand = model.demand.added(service_s, now_s, self._half_lives)
        model.used = model.used or produced
        model.last_used_s = now_s

    def reject(self, model_id: str, reason: str) -> None:
        """A model that cannot be run: it fails, and its pages come back.

        One whose load is under way, or that drains, is only taken off the device.
        """
        model = self._get(model_id)
        self._queue.call_off(model)
        if model.state in ("cold", "warm", "resident"):
            self._models.fail(model, reason, False, [])
        else:
            self._models.drain(model, model.queued_at_s, reason)

    def make_kv_space(self, model_id: str, now_s: float, busy: Busy, drop_kv: DropKv) -> bool:
        """Evict one model for the KV of `model_id`. Only for when nothing runs, whoever is busy.

        False: nobody may go. True as well where a load gives back what it has claimed, or is under
        way: it may go when it has come.
        """
        if self._queue.hold():
            return True
        on_device = self._models.on_device()
        if any(model.state == "loading" or model.job is not None for model in on_device):
            return True
        victim = self._space.kv_victim(model_id, on_device, now_s, busy)
        if victim is None:
            return False
        model = self._get(victim)
        self._models.drain(model, now_s, f"KV of {model_id}")
        self._evict(model, Turn(now_s, busy, drop_kv, busy))
        return True

    def evict_idle(
        self, worth: float, model_id: str, now_s: float, busy: Busy, drop_kv: DropKv
    ) -> None:
        """Evict one idle model that is worth less a byte than `worth`, that of cached KV of
        `model_id`; none while a load is under way, which finds its own room."""
        if self.in_transition:
            return
        victim = self._space.idle_victim(worth, model_id, self._models.on_device(), now_s, busy)
        if victim is not None:
            model = self._get(victim)
            self._models.drain(model, now_s, f"cached KV of {model_id}")
            self._evict(model, Turn(now_s, busy, drop_kv, busy))

    def num_pages_for_kv(self, model_id: str) -> int:
        """Pages the model's KV could have if every model that may leave had left."""
        kept = self._space.num_pages_kept(self._get(model_id), self._models.all())
        return self._pool.num_pages - kept

    def poll(
        self,
        now_s: float,
        busy: Busy,
        drop_kv: DropKv,
        claim: KvClaim | None = None,
        uses: Busy | None = None,
    ) -> list[ResidencyEvent]:
        """Advance everything. `drop_kv` must give back all KV pages of the model it names.
        `uses`: as `busy`, for loads that nobody but class batch waits for.

        A busy model that drains is evicted at `drain_timeout_s`; its requests are then the
        engine's to preempt (in `drop_kv`). Loads go on beside what `claim` may still need.
        """
        turn = Turn(now_s, busy, drop_kv, uses or busy)
        self._now_s = now_s
        self._space.claim = claim
        self._weight_store.poll()
        if not (self._models.lists.moving or self._unsettled or self._store_changed):
            return turn.events
        self._unsettled = False
        for model in self._models.on_device():
            if model.job is not None and model.job.done:
                self._models.finish_load(model, turn)
            if model.removed or model.next_spec is not None:
                self._models.drain(model, now_s, LEFT)
            if model.state == "draining" and model.job is None:
                overdue = now_s - model.drain_since_s >= self._config.drain_timeout_s
                if model.views is None or overdue or not busy(model.model_id):
                    self._evict(model, turn)
        self._queue.serve(turn)
        for model in self._models.on_device():
            if model.state == "loading" and model.holds_pages and model.job is None:
                self._models.start(model, turn)
        if self._store_changed:
            self._num_store_changes = self._weight_store.num_changes
            for model in self._models.all():
                self._models.refresh(model)
        return turn.events

    @property
    def _store_changed(self) -> bool:
        return self._num_store_changes != self._weight_store.num_changes

    @property
    def num_moved_pages(self) -> int:
        """Pages of weights moved to make room, so far."""
        return self._placer.num_moved_pages

    @property
    def in_transition(self) -> bool:
        """Some model loads or drains."""
        return bool(self._models.lists.moving)

    @property
    def num_moves(self) -> int:
        """Changes of models' states so far."""
        return self._models.lists.num_moves

    def pending_pages(self) -> int:
        """Pages that the next load waits for: KV should leave them alone."""
        return self._queue.num_pages_pending()

    def pages_waited_for(self) -> int:
        """The same, where requests of other classes than batch wait for that load; else 0."""
        return self._queue.num_pages_waited_for()

    def weights(self, model_id: str) -> WeightViews:
        """Views of a model on the device. Raises RequestRefused where it is not there."""
        views = self._get(model_id).views
        if views is None:
            raise RequestRefused("not_resident", f"model {model_id!r} is not resident")
        return views

    def load_estimate_s(self, model_id: str) -> float:
        """Seconds a load would take from where the weights are now; -1 without a usable pack."""
        index = self._get(model_id).index
        return -1.0 if index is None else self._weight_store.estimate_s(index)

    def take_swaps(self) -> list[SwapRecord]:
        """Loads and evictions finished since the last call."""
        swaps, self._models.swaps = self._models.swaps, []
        return swaps

    def take_choices(self) -> list[SwapChoice]:
        """Decisions about who leaves since the last call."""
        return self._space.choices.take()

    def status_rows(self, num_requests: Mapping[str, tuple[int, int]]) -> list[ModelStatus]:
        """A row for each model; `num_requests`: running and waiting by model."""
        return self._rows(self._models.by_id, num_requests)

    def noted_rows(self) -> list[ModelStatus]:
        """The same for those that are not cold, without requests."""
        return self._rows(self._models.lists.noted, {})

    @property
    def cold_bytes_per_s(self) -> float:
        """How fast models would come that are in no tier but the disk."""
        return self._weight_store.cold_bytes_per_s

    def check_integrity(self) -> None:
        """Raises IntegrityError unless states, pages, jobs and the queue agree."""
        for model in self._models.all():
            pages = self._pool.owned(model.weights_owner)
            check_books(model, pages, self._queue.count(model))
        owners = {o.model_id for o in self._pool.pages_by_owner() if o.kind == "weights"}
        if not owners <= self._models.by_id.keys():
            raise IntegrityError(f"pages of unknown models: {owners - self._models.by_id.keys()}")
        self._weight_store.check_integrity()

    def close(self, keep_host_tier: bool = True) -> None:
        """Stop the loaders. The host tier stays for the next worker unless told otherwise."""
        self._weight_store.close(keep_host_tier)

    def _rows(
        self, models: Mapping[str, ModelInstance], num_requests: Mapping[str, tuple[int, int]]
    ) -> list[ModelStatus]:
        return [
            status_row(
                model,
                self._pool.owned(Owner(model_id, "kv")) * self._pool.page_bytes,
                self.load_estimate_s(model_id),
                num_requests.get(model_id, (0, 0)),
            )
            for model_id, model in models.items()
        ]

    def _host_worth(self, revision: str) -> float:
        """What keeping a pack in the host tier is worth, a byte; see policy/host_tier.py."""
        model = self._models.by_revision(revision)
        if model is None:
            return 0.0
        worth = model.demand.rate(self._now_s, self._half_lives) * model.spec.weight
        return worth * RESIDENT_SHARE if model.state in ("resident", "loading") else worth

    def _get(self, model_id: str) -> ModelInstance:
        return self._models.get(model_id)

    def _evict(self, model: ModelInstance, turn: Turn) -> None:
        if self._models.evict(model, turn):
            self.request_load(model.model_id, turn.now_s, model.load_request)
