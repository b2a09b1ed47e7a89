"""Which models are on the device: advances loads, drains and evictions through one table of states.

What the engine sees of residency; `poll` is called once a step and never blocks. The states and
their order are in `residency_state.py`, what happens to one unit in `units.py`.

    load_queue   loads in their order; who has to go for the head (room.py, policy/eviction.py)
    placement    the head claims its pages, and what is in the way is moved
    tiers        loaders start when the pages' fences have passed, and bring the bytes

A unit's pages are released only when no loader thread touches them any more; then they are fenced
by the pool like all others.

Does not know requests: `busy` and `drop_kv` are how it asks the engine about them. What is resident
is a unit (a pack), by whatever names it is hosted; `model_id` here is a unit's.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.errors import IntegrityError, RequestRefused
from engine.memory.page_pool import Owner, PagePool
from engine.packs.pack import PackIndex
from engine.packs.weights import WeightViews
from engine.parts import EngineParts
from engine.policy.eviction import EvictionParams, GreedyDual
from engine.policy.host_tier import RESIDENT_SHARE
from engine.protocol import ModelSpec, ModelStatus, ResidencyState, SwapChoice, SwapRecord
from engine.residency.load_queue import LoadQueue
from engine.residency.placement import Placer
from engine.residency.residency_state import (
    PLAIN_WISH,
    Hosted,
    ResidencyEvent,
    Wish,
    check_books,
    status_row,
)
from engine.residency.room import KvClaim, KvRoom, NoKv, Room, weights_of
from engine.residency.units import Busy, DropKv, Turn, Units

LEFT = "no longer in the catalog as it was"


class Residency:
    """Owned by the worker's step thread; the only other threads are the loaders in `tiers`."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        backend: Backend,
        kv: KvRoom | None = None,
        parts: EngineParts | None = None,
    ) -> None:
        parts = parts or EngineParts()
        kv = kv or NoKv(pool.num_pages)
        self._config = config
        self._pool = pool
        self._backend = backend
        policy = parts.eviction or GreedyDual(EvictionParams(starvation_s=config.starvation_s))
        self._half_lives = policy.params.half_lives
        self._tiers = parts.make_tiers(backend, config)
        self._units = Units(config, pool, backend, self._tiers, parts.packs)
        self._room = Room(pool, kv, self._tiers, policy)
        self._placer = Placer(pool, kv, backend, self._room)
        if policy.params.host_by_worth:
            self._tiers.value_by(self._host_worth)
        self._queue = LoadQueue(self._units, self._room, self._placer)
        self._num_tier_changes = -1
        self._now_s = 0.0
        self._unsettled = False  # some unit may have to leave that does not drain yet

    def set_catalog(self, specs: Sequence[ModelSpec]) -> list[str]:
        """Take over the whole list. A pack that cannot be used leaves its model `failed`.

        Returns the models whose pages must come back: no longer named, or with another pack. They
        should be drained; `poll` does it where the caller does not.
        """
        leaving: list[str] = []
        named = {spec.model_id: spec for spec in specs}
        for model in list(self._units.all()):
            if model.model_id in named:
                continue
            self._queue.call_off(model)
            if model.holds_pages:
                model.removed = True
                model.wanted_again = False
                leaving.append(model.model_id)
            else:
                self._units.remove(model)
        for model_id, spec in named.items():
            known = self._units.by_id.get(model_id)
            if known is None:
                self._units.add(spec)
                continue
            if spec.pack_dir != known.spec.pack_dir:
                self._queue.call_off(known)
            if self._units.update(known, spec):
                leaving.append(model_id)
        self._unsettled = True
        self._tiers.keep_only({m.index.revision for m in self._units.all() if m.index})
        if self._config.host_tier_when_crowded:
            self._choose_copies()
        for model in self._units.all():
            self._units.refresh(model)
        return leaving

    def _choose_copies(self) -> None:
        """Those that came in while there was room get their copies once it is crowded."""
        stay = [model.index for model in self._units.all() if not model.removed]
        packs = {index.revision: index.total_bytes for index in stay if index is not None}
        is_crowded = len(packs) > 1 and 2 * sum(packs.values()) > self._config.arena_bytes
        had, self._tiers.copies = self._tiers.copies, is_crowded
        if is_crowded and not had:
            for model in self._units.on_device():
                if model.state == "resident" and model.index is not None:
                    self._tiers.warm(model.index, model.pack_dir)

    def knows(self, model_id: str) -> bool:
        """Whether the model is in the catalog, or still leaving the device."""
        return model_id in self._units.by_id

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

    def request_load(self, model_id: str, now_s: float, wish: Wish = PLAIN_WISH) -> None:
        """Make the model resident as soon as it is its turn. Idempotent.

        A model whose pack is damaged stays failed until the catalog brings another pack. Nothing
        comes back for a prefetch that is on its way out.
        """
        model = self._get(model_id)
        if wish.to_host_tier:
            if model.state == "cold" and model.index is not None:
                self._tiers.warm(model.index, model.pack_dir)
            return
        if model.state == "draining" and not wish.prefetch:
            model.wanted_again, model.wish = not model.removed, wish
        if model.state == "failed" and model.retryable:
            model.move("cold")
        if model.state in ("cold", "warm"):
            self._queue.add(model, now_s, wish)
        elif model.state == "loading":
            self._queue.ask_again(model, now_s, wish)

    def begin_drain(self, model_id: str, now_s: float, reason: str) -> None:
        """Take the model off the device once what it runs has ended. Idempotent."""
        model = self._get(model_id)
        model.wanted_again = False
        self._queue.call_off(model)
        if model.state == "resident":
            self._room.note_unload(model, now_s)
        self._units.drain(model, now_s, reason)

    def touch(self, model_id: str, service_s: float, now_s: float, produced: bool = True) -> None:
        """The model has used the device for `service_s`. `produced`: a token came of it."""
        model = self._get(model_id)
        model.demand = model.demand.added(service_s, now_s, self._half_lives)
        model.used = model.used or produced
        model.last_used_s = now_s

    def touch_often(self, model_id: str, used: Sequence[tuple[float, float]]) -> None:
        """`touch` for many steps that gave tokens, each (now, service)."""
        model = self._get(model_id)
        model.demand = model.demand.added_often(used, self._half_lives)
        model.used = True
        model.last_used_s = used[-1][0]

    def waits_until_s(self, now_s: float, poll_s: float) -> float:
        """Until when `poll` has nothing to do, but for loads that end and units that fall idle.

        Where a load waits for room, which every poll may find, `now_s` + `poll_s`.
        """
        if self._unsettled or self._tiers_changed:
            return now_s
        until_s = now_s + poll_s if self._queue.is_waiting else math.inf
        for model in self._units.lists.moving.values():
            if model.job is not None or self._queue.count(model):
                continue
            if model.state != "draining" or model.views is None:
                return now_s
            until_s = min(until_s, model.drain_since_s + self._config.drain_timeout_s)
        return until_s

    def reject(self, model_id: str, reason: str) -> None:
        """A model that cannot be run: it fails, and its pages come back.

        One whose load is under way, or that drains, is only taken off the device.
        """
        model = self._get(model_id)
        self._queue.call_off(model)
        if model.state in ("cold", "warm", "resident"):
            self._units.fail(model, reason, False, [])
        else:
            self._units.drain(model, model.queued_at_s, reason)

    def make_kv_room(self, model_id: str, now_s: float, busy: Busy, drop_kv: DropKv) -> bool:
        """Evict one model for the KV of `model_id`. Only for when nothing runs, whoever is busy.

        False: nobody may go. True as well where a load gives back what it has claimed, or is under
        way: it may go when it has come.
        """
        if self._queue.hold():
            return True
        on_device = self._units.on_device()
        if any(model.state == "loading" or model.job is not None for model in on_device):
            return True
        victim = self._room.kv_victim(model_id, on_device, now_s, busy)
        if victim is None:
            return False
        model = self._get(victim)
        self._units.drain(model, now_s, f"KV of {model_id}")
        self._evict(model, Turn(now_s, busy, drop_kv))
        return True

    def num_pages_for_kv(self, model_id: str) -> int:
        """Pages the model's KV could have if every model that may leave had left."""
        kept = self._room.num_pages_kept(self._get(model_id), self._units.all())
        return self._pool.num_pages - kept

    def poll(
        self, now_s: float, busy: Busy, drop_kv: DropKv, claim: KvClaim | None = None
    ) -> list[ResidencyEvent]:
        """Advance everything. `drop_kv` must give back all KV pages of the model it names.

        A busy model that drains is evicted at `drain_timeout_s`; its requests are then the
        engine's to preempt (in `drop_kv`). Loads go on beside what `claim` may still need.
        """
        turn = Turn(now_s, busy, drop_kv)
        self._now_s = now_s
        self._room.claim = claim
        self._tiers.poll()
        if not (self._units.lists.moving or self._unsettled or self._tiers_changed):
            return turn.events
        self._unsettled = False
        for model in self._units.on_device():
            if model.job is not None and model.job.done:
                self._units.finish_load(model, turn)
            if model.removed or model.next_spec is not None:
                self._units.drain(model, now_s, LEFT)
            if model.state == "draining" and model.job is None:
                overdue = now_s - model.drain_since_s >= self._config.drain_timeout_s
                if model.views is None or overdue or not busy(model.model_id):
                    self._evict(model, turn)
        self._queue.serve(turn)
        for model in self._units.on_device():
            if model.state == "loading" and model.holds_pages and model.job is None:
                self._units.start(model, turn)
        if self._tiers_changed:
            self._num_tier_changes = self._tiers.num_changes
            for model in self._units.all():
                self._units.refresh(model)
        return turn.events

    @property
    def _tiers_changed(self) -> bool:
        return self._num_tier_changes != self._tiers.num_changes

    @property
    def num_moved_pages(self) -> int:
        """Pages of weights moved to make room, so far."""
        return self._placer.num_moved_pages

    @property
    def in_transition(self) -> bool:
        """Some unit loads or drains."""
        return bool(self._units.lists.moving)

    @property
    def num_moves(self) -> int:
        """Changes of units' states so far."""
        return self._units.lists.num_moves

    def pending_pages(self) -> int:
        """Pages that the next load waits for: KV should leave them alone."""
        return self._queue.num_pages_pending()

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
        swaps, self._units.swaps = self._units.swaps, []
        return swaps

    def take_choices(self) -> list[SwapChoice]:
        """Decisions about who leaves since the last call."""
        return self._room.choices.take()

    def status_rows(self, num_requests: Mapping[str, tuple[int, int]]) -> list[ModelStatus]:
        """A row for each model; `num_requests`: running and waiting by model."""
        return self._rows(self._units.by_id, num_requests)

    def noted_rows(self) -> list[ModelStatus]:
        """The same for those that are not cold, without requests."""
        return self._rows(self._units.lists.noted, {})

    @property
    def cold_bytes_per_s(self) -> float:
        """How fast models would come that are in no tier but the disk."""
        return self._tiers.cold_bytes_per_s

    def check_integrity(self) -> None:
        """Raises IntegrityError unless states, pages, jobs and the queue agree."""
        for model in self._units.all():
            pages = self._pool.owned(weights_of(model))
            check_books(model, pages, self._queue.count(model))
        owners = {o.model_id for o in self._pool.pages_by_owner() if o.kind == "weights"}
        if not owners <= self._units.by_id.keys():
            raise IntegrityError(f"pages of unknown models: {owners - self._units.by_id.keys()}")
        self._tiers.check_integrity()

    def close(self, keep_host_tier: bool = True) -> None:
        """Stop the loaders. The host tier stays for the next worker unless told otherwise."""
        self._tiers.close(keep_host_tier)

    def _rows(
        self, models: Mapping[str, Hosted], num_requests: Mapping[str, tuple[int, int]]
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
        model = self._units.by_revision(revision)
        if model is None:
            return 0.0
        worth = model.demand.rate(self._now_s, self._half_lives) * model.spec.weight
        return worth * RESIDENT_SHARE if model.state in ("resident", "loading") else worth

    def _get(self, model_id: str) -> Hosted:
        return self._units.get(model_id)

    def _evict(self, model: Hosted, turn: Turn) -> None:
        if self._units.evict(model, turn):
            self.request_load(model.model_id, turn.now_s, model.wish)
