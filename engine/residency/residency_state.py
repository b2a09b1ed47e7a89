"""The residency of one hosted model: its states, what may follow what, and what it holds.

    cold      only on disk                      holds nothing
    warm      in the host tier too              holds nothing on the device
    loading   queued, or its bytes are coming   holds what it has claimed of its weight pages
    resident  can run                           holds weight pages, and KV as it runs
    draining  finishes what it runs, then goes  as before
    failed    not served; `reason` says why     holds nothing

Only `residency.py` moves a model between them.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.errors import IllegalTransition, IntegrityError, PackError
from engine.memory.compaction import Move, RunPlan
from engine.memory.kv_plan import plan_pack
from engine.memory.page_pool import PagePool, PageRun
from engine.packs.pack import PackIndex
from engine.packs.pack_source import PackSource
from engine.packs.weights import WeightViews
from engine.policy.eviction import Demand
from engine.protocol import LoadModel, ModelSpec, ModelStatus, ResidencyState, WarmModel
from engine.residency.tiers import LoadJob

TRANSITIONS: dict[ResidencyState, frozenset[ResidencyState]] = {
    # A fill that ends, or a pack the tier drops, moves a model between cold and warm.
    "cold": frozenset({"warm", "loading", "failed"}),
    "warm": frozenset({"cold", "loading", "failed"}),
    # Back to cold or warm: a queued load was called off. Draining: one that had begun.
    "loading": frozenset({"resident", "failed", "draining", "cold", "warm"}),
    # Failed: its weights came, but the modelling code does not take them.
    "resident": frozenset({"draining", "failed"}),
    "draining": frozenset({"cold", "warm"}),
    # A new pack under the model's name, or another try where the pack was not to blame.
    "failed": frozenset({"cold", "warm"}),
}

NO_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class Wish:
    """How a load is wanted; the words are those of protocol.LoadModel.

    to_host_tier  only into the host tier (protocol.WarmModel)
    """

    waited_s: float = 0.0
    backlog_s: float = 0.0
    prefetch: bool = False
    forced: bool = False
    to_host_tier: bool = False

    @classmethod
    def of(cls, message: LoadModel | WarmModel) -> "Wish":
        """What a gateway has asked for."""
        if isinstance(message, WarmModel):
            return cls(to_host_tier=True)
        return cls(message.waited_s, message.backlog_s, message.prefetch, message.forced)

    def with_newer(self, newer: "Wish") -> "Wish":
        """Asked for again: somebody waits if somebody waited; the newer figures hold."""
        return replace(
            newer,
            waited_s=max(self.waited_s, newer.waited_s),
            prefetch=self.prefetch and newer.prefetch,
            forced=self.forced or newer.forced,
        )


PLAIN_WISH = Wish()
EventKind = Literal["loaded", "evicted", "failed", "moved"]


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
    """What a load has of its plan; see `placement.py`.

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


class UnitLists:
    """Units in other states than cold, and those on their way: a catalog may name thousands, and
    nobody should have to look at all of them."""

    def __init__(self) -> None:
        self.noted: dict[str, Hosted] = {}
        self.moving: dict[str, Hosted] = {}
        """Loading or draining."""
        self.num_moves = 0

    def note(self, model: "Hosted") -> None:
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

    def forget(self, model: "Hosted") -> None:
        """The model is gone."""
        self.noted.pop(model.model_id, None)
        self.moving.pop(model.model_id, None)


@dataclass(slots=True, eq=False)
class Hosted:
    """One unit of the catalog (a pack) as this worker has it.

    lists               its worker's, which its changes of state keep
    index               None where the pack cannot be read (state failed)
    files_checked       its small files were found whole by an earlier load
    blob_stamp          identity of the blob file when the pack was last looked at
    next_spec           the catalog's newer entry, taken over once the old pack's pages are back
    removed             no longer in the catalog: forgotten once its pages are back
    wanted_again        a load was asked for while it drained
    wish                how its load is wanted, while one is
    retryable           a failed model whose pack is not to blame
    placement           pages it is claiming while it is the head of the load queue
    home                the runs it had when it was evicted last
    kv_stays            live KV that was in its way could not be moved: plan around it
    used                has produced a token since it was loaded
    num_first_kv_pages  KV pages without which loading it would be of no use
    """

    spec: ModelSpec
    lists: UnitLists = field(default_factory=UnitLists)
    index: PackIndex | None = None
    files_checked: bool = False
    blob_stamp: tuple[int, ...] = ()
    state: ResidencyState = "cold"
    reason: str = ""
    next_spec: ModelSpec | None = None
    removed: bool = False
    wanted_again: bool = False
    wish: Wish = PLAIN_WISH
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

    def move(self, state: ResidencyState, reason: str = "") -> None:
        """Change state. Raises IllegalTransition, changing nothing."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.model_id}: {self.state} -> {state}")
        self.state = state
        self.reason = reason
        self.lists.note(self)


def learn(model: Hosted, config: EngineConfig, pool: PagePool, packs: PackSource) -> Hosted:
    """Read the pack's index anew: cold if this worker can use it, else failed with the reason.

    What takes long to check is checked by the load, in a loader thread.
    """
    if model.state == "failed":
        model.move("cold")
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
        model.move("failed", str(error))
    return model


def check_books(model: Hosted, num_pages: int, num_queued: int) -> None:
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
    model: Hosted, kv_bytes: int, load_s: float, num_requests: tuple[int, int]
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
    plan = plan_pack(
        index.kv_groups, index.kv_dtype, config.block_tokens, pool.page_bytes, pool.num_pages
    )
    return plan.pages_for(min(config.load_kv_tokens, index.max_context))


@functools.lru_cache(maxsize=1 << 16)
def _path(folder: str) -> Path:
    """Making one takes longer than all else that is done for a cold model, and there may be
    thousands."""
    return Path(folder)
