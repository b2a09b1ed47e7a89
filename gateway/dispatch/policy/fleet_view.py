"""Workers, models and demands as placement sees them, and what it answers (pure).

Workers say nothing of models that are cold there; what a load of one takes follows from its size.
`outlook` says what would have to leave a worker for a new model, for people.

What a look at a large fleet makes hundreds of is a named tuple: a frozen dataclass takes four times
as long to make.
"""

import math
from collections.abc import Container, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from gateway.dispatch.policy.reasons import LoadOutcome, Reason

UNKNOWN_LOAD_S = 1.0
"""Taken for a load that has never been timed."""

NEAREST = ("resident", "loading", "draining", "warm", "failed")
"""States of a model on a worker, from the nearest to serving; cold is what is left."""

_LOADABLE = frozenset({"cold", "warm"})
_NONE: frozenset[str] = frozenset()


class AskRate(Protocol):
    """How often a model is asked for, in asks a second."""

    def __call__(self, model_id: str, /) -> float: ...


def nobody_asks(model_id: str) -> float:
    """An AskRate where nothing is known."""
    del model_id
    return 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """A model somebody waits for (or a pinned one, with num_waiting 0).

    backlog_s     predicted service of its waiting tickets
    weight_bytes  what it takes where a worker says nothing of it
    oldest_s      arrival of the oldest ticket
    waited_s      of all its tickets together, up to now
    floors        (tenant, bytes) of tenants with a floor whose model it is
    """

    model_id: str
    num_waiting: int
    backlog_s: float
    pinned: bool
    weight_bytes: int = 0
    oldest_s: float = math.inf
    waited_s: float = 0.0
    floors: tuple[tuple[str, int], ...] = ()


class ModelView(NamedTuple):
    """A model on one worker. `idle`: nothing runs there, and it is not pinned; `idle_since_s` is
    since when. `held_bytes`: of its weights, what lies in pages of its own already. `floors`: as
    in Demand."""

    state: str
    weight_bytes: int
    load_s: float
    idle: bool
    idle_since_s: float = 0.0
    pinned: bool = False
    held_bytes: int = 0
    floors: tuple[tuple[str, int], ...] = ()
    runs_batch: bool = False
    """Requests of class batch run there: no reason not to be `idle`."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it. `kv_short`: a request lacks KV memory there.

    cold_bytes_per_s  at which models that are not in `models` would be loaded; 0: not known
    """

    worker_id: str
    free_bytes: int
    arena_bytes: int
    models: Mapping[str, ModelView]
    kv_short: bool = False
    cold_bytes_per_s: float = 0.0

    def model(self, demand: Demand) -> ModelView:
        """The model there, as reported or as it must be."""
        known = self.models.get(demand.model_id)
        if known is not None:
            return known
        rate = self.cold_bytes_per_s
        load_s = demand.weight_bytes / rate if rate > 0 and demand.weight_bytes else -1.0
        return ModelView("cold", demand.weight_bytes, load_s, idle=False)

    def state(self, model_id: str) -> str:
        """The model's state there."""
        known = self.models.get(model_id)
        return "cold" if known is None else known.state

    def has(self, model_id: str) -> bool:
        """Whether it is on the device, or on its way."""
        return self.state(model_id) in ("resident", "loading")

    def may_load(self, demand: Demand, *, and_failed: bool = False) -> bool:
        """Whether a load could be asked for there."""
        model = self.model(demand)
        if model.weight_bytes >= self.arena_bytes:
            return False
        return model.state in _LOADABLE or (and_failed and model.state == "failed")

    @property
    def is_moving(self) -> bool:
        """Some model comes or goes."""
        return any(model.state in ("loading", "draining") for model in self.models.values())


class LoadOption(NamedTuple):
    """A worker that could load the model, as it was when the load was decided.

    is_warm     from host memory; otherwise from disk
    load_s      what the load would take
    wait_s      until it could begin there
    loss_s      seconds of loads, its own and the way back of the models in demand that it pushes
                out; 0: it pushes none out
    free_bytes  free memory that no other load has been promised
    """

    worker_id: str
    outcome: LoadOutcome
    is_warm: bool
    load_s: float
    wait_s: float
    loss_s: float
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load `model_id` on `worker_id`; from relief.py (`relieve`, `surplus`), or where an operator
    wants its memory back: unload it there.

    forced     it pushes models in demand out, within the load budget
    waited_s   of its oldest ticket
    load_s     what the load is expected to take
    options    the worker beside others that could have loaded it, for the record
    """

    model_id: str
    worker_id: str
    reason: Reason
    forced: bool = False
    waited_s: float = 0.0
    backlog_s: float = 0.0
    load_s: float = 0.0
    num_waiting: int = 0
    options: tuple[LoadOption, ...] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a model that somebody waits for will be there, as far as can be said now.

    at_s       when it is expected to be resident (or one more copy of it); inf: it cannot be said
    reason     why no load has been started; empty: one has
    until_s    when it will be, if nothing changes before
    worker_id  where
    sure       what loads take there has been measured
    """

    model_id: str
    at_s: float
    reason: Reason | None = None
    until_s: float = 0.0
    worker_id: str = ""
    load_s: float = 0.0
    sure: bool = False


@dataclass(slots=True)
class WeightRoom:
    """One worker in one round: its free pages, and what would have to go for more.

    Claims of loads that have not got their pages are taken off: free pages first, then the models
    that are the first to go. Where requests lack KV memory no page is free for weights: what was
    given up for KV a moment ago would be taken by a load, and another model have to go for KV.
    """

    view: WorkerView
    claimed_bytes: int
    wanted: Container[str]
    asks_s: AskRate
    _leavers: list["_Leaver"] | None = field(default=None)
    _pinned_bytes: int | None = field(default=None)
    _has_floors: bool | None = field(default=None)

    @property
    def free_bytes(self) -> int:
        """Free pages that no load has been promised."""
        return max(0, self._spare_bytes)

    @property
    def _spare_bytes(self) -> int:
        """Below 0 where more has been promised than is free."""
        return (0 if self.view.kv_short else self.view.free_bytes) - self.claimed_bytes

    def loadable(self, demand: Demand) -> ModelView | None:
        """The model, where it would have room at least once all had left that may; else None.

        What is pinned or kept by others' floors stays however long somebody waits: a load against
        that would stand in the way of all loads behind it, again and again, and come to nothing.
        """
        model = self.view.model(demand)
        if model.state not in _LOADABLE or model.weight_bytes >= self.view.arena_bytes:
            return None
        if self._pinned_bytes is None:
            models = self.view.models.values()
            self._pinned_bytes = sum(other.held_bytes for other in models if other.pinned)
        stay_bytes = self._pinned_bytes
        for name in self._kept(demand):
            stay_bytes += self.view.models[name].held_bytes
        return model if model.weight_bytes <= self.view.arena_bytes - stay_bytes else None

    def _kept(self, demand: Demand) -> Set[str]:
        """What others' floors keep, if models leave in the order of `push_out`. The worker judges
        it anew (engine/residency/policy/eviction_rules.py), in its own order."""
        if self._has_floors is None:
            self._has_floors = any(model.floors for model in self.view.models.values())
        if not self._has_floors:
            return _NONE
        own = {tenant_id for tenant_id, _ in demand.floors}
        spare: dict[str, int] = {}
        floored = [leaver for leaver in self._ordered() if leaver.floors]
        for leaver in floored:
            for tenant_id, floor_bytes in leaver.floors:
                if tenant_id not in own:
                    spare[tenant_id] = spare.get(tenant_id, -floor_bytes) + leaver.num_bytes
        kept = set()
        for leaver in floored:
            tenants = [tenant_id for tenant_id, _ in leaver.floors if tenant_id in spare]
            if any(spare[tenant_id] < leaver.num_bytes for tenant_id in tenants):
                kept.add(leaver.model_id)
            else:
                for tenant_id in tenants:
                    spare[tenant_id] -= leaver.num_bytes
        return kept

    def push_out(self, model: ModelView, demand: Demand, share: float) -> "PushedOut | None":
        """What goes for the load of `model`, least loss first; None where even all would not do.

        A model is in demand where somebody waits for it or it runs, or where swapping it out and
        in again at the rate it is asked for would take more than `share` of the worker's time.
        """
        num_bytes, load_s = model.weight_bytes, load_seconds(model)
        spare, kept = self._spare_bytes, self._kept(demand)
        loss_s, worth, in_demand, used = 0.0, 0.0, 0, 0
        num_batch, batch_s = 0, 0.0
        for leaver in self._ordered():
            if spare >= num_bytes:
                break
            if leaver.model_id in kept:
                continue
            spare += leaver.num_bytes
            if spare <= 0:
                continue  # it goes for a load that was promised its pages before
            worth += leaver.asks_s * leaver.reload_s
            num_batch += leaver.runs_batch
            batch_s += leaver.runs_batch * leaver.reload_s
            both_s = load_s + leaver.reload_s
            if leaver.is_used or leaver.asks_s * both_s >= share:
                loss_s += both_s
                in_demand += 1
                used += leaver.is_used
        pushed = PushedOut(loss_s, worth, in_demand, used, num_batch, batch_s)
        return pushed if spare >= num_bytes else None

    def _ordered(self) -> list["_Leaver"]:
        if self._leavers is None:
            self._leavers = sorted(
                self._leaver(name, model)
                for name, model in self.view.models.items()
                if model.state == "resident" and not model.pinned
            )
        return self._leavers

    def _leaver(self, name: str, model: ModelView) -> "_Leaver":
        asks_s, reload_s, num_bytes = self.asks_s(name), load_seconds(model), model.weight_bytes
        is_used = not model.idle or name in self.wanted
        loss = asks_s * reload_s / max(1, num_bytes)
        about = (asks_s, reload_s, num_bytes, model.floors, model.runs_batch)
        return _Leaver(is_used, loss, name, *about)


class _Leaver(NamedTuple):
    """A resident model that may have to go. They go in their order, as tuples."""

    is_used: bool
    loss: float
    model_id: str
    asks_s: float
    reload_s: float
    num_bytes: int
    floors: tuple[tuple[str, int], ...]
    runs_batch: bool


class PushedOut(NamedTuple):
    """What a load would cost others.

    loss_s         seconds of loading, its own and the way back of those in demand that it pushes
                   out; 0: it costs nobody
    worth          of all that it pushes out: seconds of loading a second if each ask had to
                   bring its model back
    num_in_demand  how many these are
    num_used       of them, those that somebody waits for or that run something at this moment
    num_batch      how many run requests of class batch, which count for none of these; batch_s: and
                   what loading them again takes
    """

    loss_s: float
    worth: float
    num_in_demand: int
    num_used: int
    num_batch: int = 0
    batch_s: float = 0.0


def load_seconds(model: ModelView) -> float:
    """What a load is expected to take there."""
    return model.load_s if 0 <= model.load_s < math.inf else UNKNOWN_LOAD_S


Fit: TypeAlias = Literal["free", "evicts", "never"]


@dataclass(frozen=True, slots=True)
class MemoryOutlook:
    """free: it fits beside what is there; evicts: once `leavers` are gone; never: the arena is too
    small, or what is pinned leaves too little."""

    fit: Fit
    leavers: tuple[str, ...] = ()
    free_bytes: int = 0
    arena_bytes: int = 0


def outlook(view: WorkerView, num_bytes: int, asks_s: Mapping[str, float]) -> MemoryOutlook:
    """What would have to leave a worker for a model of so many bytes.

    In placement's order: what nobody uses first, then by the seconds of loading lost for each byte.
    When the load really comes the worker decides by what is asked for then, and weighs pins, floors
    and how long a model has been there (engine/residency/). `asks_s`: how often each model is asked
    for, in asks a second.
    """
    if num_bytes <= view.free_bytes:
        return MemoryOutlook("free", (), view.free_bytes, view.arena_bytes)

    def loss(row: tuple[str, ModelView]) -> tuple[bool, float, str]:
        name, model = row
        worth = asks_s.get(name, 0.0) * load_seconds(model) / max(1, model.weight_bytes)
        return not model.idle, worth, name

    may_go = [
        (name, model)
        for name, model in view.models.items()
        if model.state == "resident" and not model.pinned
    ]
    spare, leavers = view.free_bytes, []
    for name, model in sorted(may_go, key=loss):
        spare += model.weight_bytes
        leavers.append(name)
        if spare >= num_bytes:
            return MemoryOutlook("evicts", tuple(leavers), view.free_bytes, view.arena_bytes)
    return MemoryOutlook("never", (), view.free_bytes, view.arena_bytes)
