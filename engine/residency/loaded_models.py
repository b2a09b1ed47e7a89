"""The models of one worker: their states, what each of them holds, and what happens to one.

    cold      only on disk                      holds nothing
    warm      in the host tier too              holds nothing on the device
    loading   queued, or its bytes are coming   holds what it has claimed of its weight pages
    resident  can run                           holds weight pages, and KV as it runs
    draining  finishes what it runs, then goes  as before
    failed    not served; `reason` says why     holds nothing

A fill of the host tier that ends, or a pack that it drops, moves a model between cold and warm. An
instance is a pack with its KV, by whatever names it is hosted. `residency.py` says when something
happens, `load_queue.py` leads loads to their pages; both act through `LoadedModels`.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.backend import Backend
from engine.config import EngineConfig
from engine.errors import IllegalTransition, IntegrityError, PackError, RequestRefused
from engine.memory import KvPlan, Owner, PagePool, PageRun
from engine.pack import PackIndex
from engine.packs import LoadJob, PackSource, WeightStore, WeightViews, build_views
from engine.protocol import LoadModel, ModelSpec, ModelStatus, ResidencyState, SwapRecord, WarmModel
from engine.residency.compaction import Move, RunPlan
from engine.residency.policy.eviction_rules import Demand

InstanceEvent = Literal[
    "load", "loaded", "call_off", "drain", "evict", "fail", "retry", "fill", "drop"
]

TRANSITIONS: dict[ResidencyState, dict[InstanceEvent, ResidencyState]] = {
    "cold": {"fill": "warm", "load": "loading", "fail": "failed"},
    "warm": {"drop": "cold", "load": "loading", "fail": "failed"},
    "loading": {"loaded": "resident", "fail": "failed", "drain": "draining", "call_off": "cold"},
    # Failed: its weights came, but the modelling code does not take them.
    "resident": {"drain": "draining", "fail": "failed"},
    "draining": {"evict": "cold"},
    # A new pack under the model's name, or another try where the pack was not to blame.
    "failed": {"retry": "cold"},
}

NO_DEMAND = Demand()


EventKind = Literal["loaded", "evicted", "failed", "moved"]


Busy = Callable[[str], bool]
DropKv = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """How a load is wanted; the words are those of protocol.LoadModel. `to_host_tier`: only there
    (protocol.WarmModel)."""

    waited_s: float = 0.0
    backlog_s: float = 0.0
    prefetch: bool = False
    forced: bool = False
    is_batch: bool = False
    to_host_tier: bool = False

    @classmethod
    def of(cls, message: LoadModel | WarmModel) -> "LoadRequest":
        """What a gateway has asked for."""
        if isinstance(message, WarmModel):
            return cls(to_host_tier=True)
        about = message.waited_s, message.backlog_s, message.prefetch, message.forced
        return cls(*about, message.is_batch)

    @property
    def takes_leftovers(self) -> bool:
        """Nobody waits for it but class batch."""
        return self.prefetch or self.is_batch

    def with_newer(self, newer: "LoadRequest") -> "LoadRequest":
        """Asked for again: somebody waits if somebody waited; the newer figures hold."""
        return replace(
            newer,
            waited_s=max(self.waited_s, newer.waited_s),
            prefetch=self.prefetch and newer.prefetch,
            forced=self.forced or newer.forced,
            is_batch=self.is_batch and newer.is_batch,
        )


PLAIN_LOAD = LoadRequest()


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Something the engine has to act on. `reason`: why it failed or had to go.
    "moved": the weights lie elsewhere and have new views, which must be bound before the next step.
    """

    kind: EventKind
    model_id: str
    reason: str = ""


@dataclass(slots=True, eq=False)
class Placement:
    """What a load has of its plan; see `load_queue.Placer`.

    kv_left     pages of the plan in which KV still stands
    moves_left  weights of others that have not moved yet: all or none
    claimed     pages that are the load's own already
    """

    plan: RunPlan
    kv_left: set[int]
    moves_left: tuple[Move, ...]
    claimed: set[int] = field(default_factory=set)
    targets: set[int] = field(init=False)

    def __post_init__(self) -> None:
        """The pages that the moves write."""
        self.targets = {page for move in self.plan.moves for page in move.target.pages}


class InstanceLists:
    """Instances in other states than cold, and those on their way: a catalog may name thousands,
    and nobody should have to look at all of them."""

    def __init__(self) -> None:
        self.noted: dict[str, ModelInstance] = {}
        self.moving: dict[str, ModelInstance] = {}
        """Loading or draining."""
        self.num_moves = 0

    def note(self, model: "ModelInstance") -> None:
        """The model has changed its state."""
        self.num_moves += 1
        if model.state == "cold":
            self.noted.pop(model.model_id, None)
        else:
            self.noted[model.model_id] = model
        if model.state in ("loading", "draining"):
            self.moving[model.model_id] = model
        else:
            self.moving.pop(model.model_id, None)

    def forget(self, model: "ModelInstance") -> None:
        """The model is gone."""
        self.noted.pop(model.model_id, None)
        self.moving.pop(model.model_id, None)


@dataclass(slots=True, eq=False)
class ModelInstance:
    """One instance of the catalog (a pack) as this worker has it.

    lists               its worker's, which its changes of state keep
    index               None where the pack cannot be read (state failed)
    files_checked       its small files were found whole by an earlier load
    blob_stamp          identity of the blob file when the pack was last looked at
    next_spec           the catalog's newer entry, taken over once the old pack's pages are back
    removed             no longer in the catalog: forgotten once its pages are back
    wanted_again        a load was asked for while it drained
    load request                how its load is wanted, while one is
    retryable           a failed model whose pack is not to blame
    placement           pages it is claiming while it is the head of the load queue
    home                the runs it had when it was evicted last
    kv_stays            live KV that was in its way could not be moved: plan around it
    used                has produced a token since it was loaded
    num_first_kv_pages  KV pages without which loading it would be of no use
    """

    spec: ModelSpec
    lists: InstanceLists = field(default_factory=InstanceLists)
    index: PackIndex | None = None
    files_checked: bool = False
    blob_stamp: tuple[int, ...] = ()
    state: ResidencyState = "cold"
    reason: str = ""
    next_spec: ModelSpec | None = None
    removed: bool = False
    wanted_again: bool = False
    load_request: LoadRequest = PLAIN_LOAD
    retryable: bool = False
    runs: list[PageRun] = field(default_factory=list)
    placement: Placement | None = None
    home: tuple[PageRun, ...] = ()
    kv_stays: bool = False
    job: LoadJob | None = None
    views: WeightViews | None = None
    demand: Demand = NO_DEMAND
    used: bool = False
    queued_at_s: float = 0.0
    resident_since_s: float = 0.0
    last_used_s: float = 0.0
    drain_since_s: float = 0.0
    num_first_kv_pages: int = 0

    @property
    def model_id(self) -> str:
        """The name it is hosted under."""
        return self.spec.model_id

    @property
    def pack_dir(self) -> Path:
        """Where its pack lies."""
        return _path(self.spec.pack_dir)

    @property
    def holds_pages(self) -> bool:
        """Whether all pages of its weights are its own."""
        return bool(self.runs)

    @property
    def weights_owner(self) -> Owner:
        """The pool's name for its weights."""
        return Owner(self.model_id, "weights")

    def on(self, event: InstanceEvent, reason: str = "") -> None:
        """Change state. Raises IllegalTransition, changing nothing."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(f"{self.model_id}: {event} while {self.state}")
        self.state = state
        self.reason = reason
        self.lists.note(self)


def learn(
    model: ModelInstance, config: EngineConfig, pool: PagePool, packs: PackSource
) -> ModelInstance:
    """Read the pack's index anew: cold if this worker can use it, else failed with the reason.

    What takes long to check is checked by the load, in a loader thread.
    """
    if model.state == "failed":
        model.on("retry")
    model.index = None
    model.home = ()
    model.files_checked = False
    model.retryable = False
    model.blob_stamp = packs.stamp(model.pack_dir)
    try:
        index = packs.read(model.pack_dir)
        model.num_first_kv_pages = _first_kv_pages(index, config, pool)
        model.index = index
    except (PackError, ValueError) as error:
        model.on("fail", str(error))
    return model


def check_books(model: ModelInstance, num_pages: int, num_queued: int) -> None:
    """Raises IntegrityError unless the model's state, pages and job agree.

    `num_pages`: what the pool says its weights own; `num_queued`: its places in the load queue.
    """
    claimed = len(model.placement.claimed) if model.placement else 0
    waits = model.state == "loading" and not model.runs
    facts = {
        "owns other pages than it thinks": num_pages
        != claimed + sum(run.num_pages for run in model.runs),
        "is queued wrongly": num_queued != waits,
        "claims pages": model.placement is not None and not waits,
        "holds pages": model.holds_pages and model.state not in ("loading", "resident", "draining"),
        "holds none": not model.holds_pages
        and (model.state in ("resident", "draining") or model.job is not None),
        "has views": model.views is not None
        and (model.job is not None or model.state not in ("resident", "draining")),
        "has no views": model.views is None and model.state == "resident",
        "loads": model.job is not None and model.state not in ("loading", "draining"),
    }
    wrong = [fact for fact, holds in facts.items() if holds]
    if wrong:
        raise IntegrityError(f"{model.model_id} ({model.state}): {', '.join(wrong)}")


def status_row(
    model: ModelInstance, kv_bytes: int, load_s: float, num_requests: tuple[int, int]
) -> ModelStatus:
    """The model as a status tells it. `num_requests`: running and waiting."""
    return ModelStatus(
        model_id=model.model_id,
        state=model.state,
        weight_bytes=model.index.total_bytes if model.index else 0,
        kv_bytes_used=kv_bytes,
        num_running=num_requests[0],
        num_waiting=num_requests[1],
        load_s_estimate=load_s,
        reason=model.reason,
    )


def _first_kv_pages(index: PackIndex, config: EngineConfig, pool: PagePool) -> int:
    """Pages for `load_kv_tokens` positions. Raises ValueError where a block exceeds a page."""
    plan = KvPlan.of(index, config.block_tokens, pool)
    return plan.pages_for(min(config.load_kv_tokens, index.max_context))


@functools.lru_cache(maxsize=1 << 16)
def _path(folder: str) -> Path:
    """Making one takes longer than all else for a cold model, and there may be thousands."""
    return Path(folder)


@dataclass(frozen=True, slots=True)
class Turn:
    """One poll. `busy`: whether a model has requests but of class batch; `uses`: any at all."""

    now_s: float
    busy: Busy
    drop_kv: DropKv
    uses: Busy
    events: list[ResidencyEvent] = field(default_factory=list)


class LoadedModels:
    """All instances this worker knows. `by_id` is for reading; `swaps` are loads and evictions."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        backend: Backend,
        weight_store: WeightStore,
        packs: PackSource,
    ) -> None:
        self._config = config
        self._packs = packs
        self._pool = pool
        self._backend = backend
        self._weight_store = weight_store
        self._generation = 0
        self.by_id: dict[str, ModelInstance] = {}
        self.lists = InstanceLists()
        self.swaps: list[SwapRecord] = []

    def get(self, model_id: str) -> ModelInstance:
        """Raises RequestRefused for an unknown one."""
        model = self.by_id.get(model_id)
        if model is None:
            raise RequestRefused("unknown_model", f"unknown model {model_id!r}")
        return model

    def by_revision(self, revision: str) -> ModelInstance | None:
        """An instance with this pack. Looked for among those that are not cold, then all."""
        for models in (self.lists.noted, self.by_id):
            for model in models.values():
                if model.index is not None and model.index.revision == revision:
                    return model
        return None

    def all(self) -> Iterator[ModelInstance]:
        """Every instance."""
        return iter(self.by_id.values())

    def on_device(self) -> list[ModelInstance]:
        """Those whose weights own pages: all that a poll has to look at."""
        owners = self._pool.pages_by_owner()
        return [self.by_id[owner.model_id] for owner in owners if owner.kind == "weights"]

    def add(self, spec: ModelSpec) -> None:
        """A new entry of the catalog."""
        self.by_id[spec.model_id] = learn(
            ModelInstance(spec, self.lists), self._config, self._pool, self._packs
        )

    def remove(self, model: ModelInstance) -> None:
        """Forget an instance that holds nothing."""
        del self.by_id[model.model_id]
        self.lists.forget(model)

    def update(self, model: ModelInstance, spec: ModelSpec) -> bool:
        """A newer entry of a known instance, not queued; True if its pages must come back first."""
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

    def refresh(self, model: ModelInstance) -> None:
        """Cold or warm, as the host tier has it."""
        if model.state in ("cold", "warm") and model.index is not None:
            is_warm = self._weight_store.is_warm(model.index)
            if is_warm != (model.state == "warm"):
                model.on("fill" if is_warm else "drop")

    def start(self, model: ModelInstance, turn: Turn) -> None:
        """Have the loaders write the pages, once no step in flight can touch them any more."""
        assert model.index is not None
        if not all(self._pool.is_ripe(run.pages) for run in model.runs):
            return
        try:
            model.job = self._weight_store.start(
                model.index, model.pack_dir, self._offsets(model), not model.files_checked
            )
        except PackError as error:
            self.fail(model, str(error), False, turn.events)
            return
        model.reason = ""

    def finish_load(self, model: ModelInstance, turn: Turn) -> None:
        """The loaders are done: resident, or failed. One that drains is left to its eviction."""
        job, model.job = model.job, None
        assert job is not None
        assert model.index is not None
        try:
            tier = self._weight_store.finish(job, model.pack_dir)
        except (PackError, OSError) as error:
            if model.state != "draining":  # it goes anyway; another load would find the same
                self.fail(model, str(error), not isinstance(error, PackError), turn.events)
            return
        if model.state == "draining":
            return
        self._look(model)
        model.on("loaded")
        model.files_checked = True
        model.used = False
        model.resident_since_s = model.last_used_s = turn.now_s
        size = model.index.total_bytes
        self.swaps.append(SwapRecord(model.model_id, "load", tier, size, job.duration_s))
        turn.events.append(ResidencyEvent("loaded", model.model_id))

    def moved(self, model: ModelInstance, turn: Turn) -> None:
        """Its weights lie elsewhere now."""
        self._look(model)
        turn.events.append(ResidencyEvent("moved", model.model_id))

    def drain(self, model: ModelInstance, now_s: float, reason: str) -> None:
        """It is to leave the device; nothing happens to one that holds no pages."""
        if not model.holds_pages or model.state == "draining":
            return
        if model.job is not None:
            model.job.cancel()
        model.on("drain", reason)
        model.drain_since_s = now_s

    def evict(self, model: ModelInstance, turn: Turn) -> bool:
        """The end of a drain. True if the instance is wanted back."""
        if model.views is not None:
            turn.drop_kv(model.model_id)
        reason = model.reason
        self._release(model)
        model.on("evict")
        self.refresh(model)
        assert model.index is not None
        tier: Literal["host", "none"] = (
            "host" if self._weight_store.is_warm(model.index) else "none"
        )
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
        self, model: ModelInstance, reason: str, retryable: bool, events: list[ResidencyEvent]
    ) -> None:
        """Not served any more. No loader may be at work on it."""
        if model.runs:
            self._release(model)
        model.on("fail", reason)
        model.retryable = retryable
        model.blob_stamp = self._packs.stamp(model.pack_dir)
        events.append(ResidencyEvent("failed", model.model_id, reason))

    def _release(self, model: ModelInstance) -> None:
        if model.views is not None:
            model.home = tuple(model.runs)
        pages = [page for run in model.runs for page in run.pages]
        model.views = None
        model.runs = []
        self._pool.release(model.weights_owner, pages)

    def _look(self, model: ModelInstance) -> None:
        """Views of the weights where they lie now."""
        assert model.index is not None
        self._generation += 1
        model.views = build_views(
            self._backend.arena, model.index, self._offsets(model), self._generation
        )

    def _offsets(self, model: ModelInstance) -> list[int]:
        return [run.first * self._pool.page_bytes for run in model.runs]
