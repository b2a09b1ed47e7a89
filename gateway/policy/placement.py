"""Which worker loads which model (pure). The victims of a load are the worker's own choice.

A model is wanted where tickets wait for it and no worker offers a lease, or where it is pinned. Of
the wanted ones, in the order of their heads in the fair queue:

1. One claim per model at a time: no herd of workers loads the same model. A claim ends when the
   model is resident or failed there, when the worker is lost, or when it expires.
2. Room that costs nobody is taken at once: free pages, and pages of models that nobody uses.
3. A load that pushes a busy model out is claimed only if such loads stay within
   `max_load_share` of the worker's time: after one that takes t seconds the next waits t / share.
   So tickets of cold models always get their turn and swapping never eats the worker.
4. A second worker takes a model that is resident elsewhere only when the backlog would take
   longer than the load.

A model larger than every worker's arena is never claimed; `unplaceable` says why.

KV pressure: where a worker is out of KV memory while a model that nobody uses lies beside it, that
model goes (`relieve`), one at a time, the longest idle first.

Workers say nothing of models that are cold there; what a load of one takes follows from its size.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

UNKNOWN_LOAD_S = 1.0
"""Taken for a load that has never been timed."""
MIN_CLAIM_S = 5.0
MIN_IDLE_S = 1.0
"""A model goes for others' KV when nobody has used it for so long."""
CLAIM_LOADS = 4.0
"""A claim lives this many estimated loads, and MIN_CLAIM_S at least."""

_LOADABLE = frozenset({"cold", "warm"})


@dataclass(frozen=True, slots=True)
class Demand:
    """A model somebody waits for (or a pinned one, with num_waiting 0).

    weight_bytes  what it takes where a worker says nothing of it
    """

    model_id: str
    num_waiting: int
    backlog_s: float
    """Predicted service of its waiting tickets."""
    pinned: bool
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model on one worker. `idle`: nothing runs there, and it is not pinned; `idle_since_s` is
    since when."""

    state: str
    weight_bytes: int
    load_s: float
    idle: bool
    idle_since_s: float = 0.0


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
        """The model there, as told or as it must be."""
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


@dataclass(frozen=True, slots=True)
class Decision:
    """Load `model_id` on `worker_id`; from `relieve`: unload it there."""

    model_id: str
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Claim:
    worker_id: str
    expires_s: float
    weight_bytes: int


@dataclass(slots=True)
class _Room:
    """What one worker has left in this round: free bytes less its claims, bytes of idle models."""

    view: WorkerView
    free_bytes: int
    wanted: Container[str]
    _idle: dict[str, int] | None = field(default=None)
    _idle_bytes: int = 0

    def with_idle(self, model_id: str) -> int:
        """Free bytes and those of idle models other than this one."""
        if self._idle is None:
            self._idle = {
                name: model.weight_bytes
                for name, model in self.view.models.items()
                if model.idle and model.state == "resident" and name not in self.wanted
            }
            self._idle_bytes = sum(self._idle.values())
        return self.free_bytes + self._idle_bytes - self._idle.get(model_id, 0)


class Placer(Protocol):
    """Who loads what. `Placement` is ours; `bench/sim/baselines` has one it is compared with."""

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        workers: Sequence[WorkerView],
        wanted: Container[str] = frozenset(),
    ) -> list[Decision]:
        """Loads to start now."""
        ...

    def claim(self, now_s: float, demand: Demand, workers: Sequence[WorkerView]) -> Decision | None:
        """An operator's wish."""
        ...

    def drop_claims(self, now_s: float, state_of: Callable[[str, str], str | None]) -> None:
        """End claims that are done or too old."""
        ...

    def lose_worker(self, worker_id: str) -> None:
        """A worker is gone."""
        ...

    def claimed_on(self, model_id: str) -> str | None:
        """The worker that is to load the model."""
        ...


class Placement:
    """Claims and the loads' share of each worker's time."""

    def __init__(self, max_load_share: float) -> None:
        self._max_load_share = max_load_share
        self._claims: dict[str, _Claim] = {}
        self._next_forced_s: dict[str, float] = {}

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        workers: Sequence[WorkerView],
        wanted: Container[str] = frozenset(),
    ) -> list[Decision]:
        """Loads to start now. `demands` come in the order in which they should be served.

        Models that are `wanted` by somebody are not idle, whatever a worker says.
        """
        by_id = {worker.worker_id: worker for worker in workers}
        self.drop_claims(
            now_s, lambda w, model_id: by_id[w].state(model_id) if w in by_id else None
        )
        claimed: dict[str, int] = {}
        for claim in self._claims.values():
            claimed[claim.worker_id] = claimed.get(claim.worker_id, 0) + claim.weight_bytes
        rooms = [
            _Room(worker, max(0, worker.free_bytes - claimed.get(worker.worker_id, 0)), wanted)
            for worker in workers
        ]
        decisions = []
        for demand in demands:
            if demand.model_id in self._claims:
                continue
            found = self._place(now_s, demand, rooms)
            if found is not None:
                room, decision = found
                room.free_bytes = max(0, room.free_bytes - room.view.model(demand).weight_bytes)
                decisions.append(decision)
        return decisions

    def claim(self, now_s: float, demand: Demand, workers: Sequence[WorkerView]) -> Decision | None:
        """An operator's wish: place it now, whatever the share; None where it cannot be."""
        options = [w for w in workers if _loadable(w, demand, and_failed=True)]
        if not options or any(_resident(w, demand.model_id) for w in workers):
            return None
        worker = max(
            options,
            key=lambda w: (
                _Room(w, w.free_bytes, frozenset()).with_idle(demand.model_id),
                w.worker_id,
            ),
        )
        return self._claim(now_s, worker, demand, "the operator asked for it")

    def drop_claims(self, now_s: float, state_of: Callable[[str, str], str | None]) -> None:
        """End those that are done or too old. `state_of(worker, model)`: None: no such worker."""
        for model_id, claim in list(self._claims.items()):
            state = state_of(claim.worker_id, model_id)
            if state in (None, "resident", "failed") or now_s >= claim.expires_s:
                del self._claims[model_id]

    def lose_worker(self, worker_id: str) -> None:
        """Its claims are void."""
        self._claims = {m: c for m, c in self._claims.items() if c.worker_id != worker_id}
        self._next_forced_s.pop(worker_id, None)

    def claimed_on(self, model_id: str) -> str | None:
        """The worker that is to load the model, if a claim stands."""
        claim = self._claims.get(model_id)
        return None if claim is None else claim.worker_id

    def _place(
        self, now_s: float, demand: Demand, rooms: Sequence[_Room]
    ) -> tuple[_Room, Decision] | None:
        model_id = demand.model_id
        options = [
            (room, room.view.model(demand)) for room in rooms if _loadable(room.view, demand)
        ]
        if not options:
            return None
        copies = sum(_resident(room.view, model_id) for room in rooms)
        load_s = min(_load_s(model) for _, model in options)
        if copies and (demand.backlog_s / copies <= load_s or not demand.num_waiting):
            return None
        # A warm copy loads sooner than a cold one; then the emptier worker.
        options.sort(key=lambda o: (o[1].state != "warm", -o[0].free_bytes, o[0].view.worker_id))
        for room, model in options:
            if room.free_bytes >= model.weight_bytes:
                return room, self._claim(now_s, room.view, demand, "free pages")
        for room, model in options:
            if room.with_idle(model_id) >= model.weight_bytes:
                return room, self._claim(now_s, room.view, demand, "idle models make room")
        if copies or not demand.num_waiting:
            return None  # a replica, or a pin nobody waits for, pushes nobody out
        for room, model in options:
            worker_id = room.view.worker_id
            if now_s >= self._next_forced_s.get(worker_id, now_s) and not _moving(room.view):
                self._next_forced_s[worker_id] = now_s + _load_s(model) / self._max_load_share
                reason = "its turn against busy models"
                return room, self._claim(now_s, room.view, demand, reason)
        return None

    def _claim(self, now_s: float, worker: WorkerView, demand: Demand, reason: str) -> Decision:
        model = worker.model(demand)
        expires_s = now_s + max(MIN_CLAIM_S, CLAIM_LOADS * _load_s(model))
        self._claims[demand.model_id] = _Claim(worker.worker_id, expires_s, model.weight_bytes)
        return Decision(demand.model_id, worker.worker_id, reason)


def relieve(
    workers: Sequence[WorkerView], now_s: float, wanted: Container[str] = frozenset()
) -> list[Decision]:
    """Idle models that should make room for others' KV; one a worker, and none while one moves."""
    decisions = []
    for worker in workers:
        if not worker.kv_short or _moving(worker):
            continue
        idle = [
            (-model.idle_since_s, model_id)
            for model_id, model in worker.models.items()
            if model.state == "resident"
            and model.idle
            and model_id not in wanted
            and now_s - model.idle_since_s >= MIN_IDLE_S
        ]
        if idle:
            decisions.append(Decision(max(idle)[1], worker.worker_id, "others need KV memory"))
    return decisions


def unplaceable(weight_bytes: int, largest_arena_bytes: int) -> str | None:
    """Why no worker could ever hold a model; None if some could, or nothing is known (0)."""
    if not largest_arena_bytes or weight_bytes < largest_arena_bytes:
        return None
    return (
        f"its weights take {weight_bytes} bytes and the largest device budget is "
        f"{largest_arena_bytes}"
    )


def _load_s(model: ModelView) -> float:
    return model.load_s if model.load_s >= 0 else UNKNOWN_LOAD_S


def _loadable(worker: WorkerView, demand: Demand, *, and_failed: bool = False) -> bool:
    model = worker.model(demand)
    if model.weight_bytes >= worker.arena_bytes:
        return False
    return model.state in _LOADABLE or (and_failed and model.state == "failed")


def _resident(worker: WorkerView, model_id: str) -> bool:
    return worker.state(model_id) in ("resident", "loading")


def _moving(worker: WorkerView) -> bool:
    return any(model.state in ("loading", "draining") for model in worker.models.values())
