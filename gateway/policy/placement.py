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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """A model somebody waits for (or a pinned one, with num_waiting 0)."""

    model_id: str
    num_waiting: int
    backlog_s: float
    """Predicted service of its waiting tickets."""
    pinned: bool


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model on one worker. `idle`: nothing waits for it or runs there, and it is not pinned;
    `idle_s` is since when."""

    state: str
    weight_bytes: int
    load_s: float
    idle: bool
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it. `kv_short`: a request lacks KV memory there."""

    worker_id: str
    free_bytes: int
    arena_bytes: int
    models: Mapping[str, ModelView]
    kv_short: bool = False


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


class Placement:
    """Claims and the loads' share of each worker's time."""

    def __init__(self, max_load_share: float) -> None:
        self._max_load_share = max_load_share
        self._claims: dict[str, _Claim] = {}
        self._next_forced_s: dict[str, float] = {}

    def decide(
        self, now_s: float, demands: Sequence[Demand], workers: Sequence[WorkerView]
    ) -> list[Decision]:
        """Loads to start now. `demands` come in the order in which they should be served."""
        self._drop_claims(now_s, workers)
        decisions = []
        for demand in demands:
            if demand.model_id in self._claims:
                continue
            decision = self._place(now_s, demand, [self._less_claims(w) for w in workers])
            if decision is not None:
                decisions.append(decision)
        return decisions

    def _less_claims(self, worker: WorkerView) -> WorkerView:
        """The worker with what its claimed models will take already gone from its free pages."""
        claimed = sum(
            worker.models[model_id].weight_bytes
            for model_id, claim in self._claims.items()
            if claim.worker_id == worker.worker_id and model_id in worker.models
        )
        return replace(worker, free_bytes=max(0, worker.free_bytes - claimed))

    def claim(self, now_s: float, model_id: str, workers: Sequence[WorkerView]) -> Decision | None:
        """An operator's wish: place it now, whatever the share; None where it cannot be."""
        options = [w for w in workers if _loadable(w, model_id, and_failed=True)]
        if not options or any(_resident(w, model_id) for w in workers):
            return None
        worker = max(options, key=lambda w: (_room(w, model_id), w.worker_id))
        return self._claim(now_s, worker, model_id, "the operator asked for it")

    def lose_worker(self, worker_id: str) -> None:
        """Its claims are void."""
        self._claims = {m: c for m, c in self._claims.items() if c.worker_id != worker_id}
        self._next_forced_s.pop(worker_id, None)

    def claimed_on(self, model_id: str) -> str | None:
        """The worker that is to load the model, if a claim stands."""
        claim = self._claims.get(model_id)
        return None if claim is None else claim.worker_id

    def _place(
        self, now_s: float, demand: Demand, workers: Sequence[WorkerView]
    ) -> Decision | None:
        model_id = demand.model_id
        options = [w for w in workers if _loadable(w, model_id)]
        if not options:
            return None
        copies = sum(_resident(w, model_id) for w in workers)
        load_s = min(_load_s(w.models[model_id]) for w in options)
        if copies and (demand.backlog_s / copies <= load_s or not demand.num_waiting):
            return None
        # A warm copy loads sooner than a cold one; then the emptier worker.
        options.sort(key=lambda w: (w.models[model_id].state != "warm", -w.free_bytes, w.worker_id))
        for worker in options:
            if worker.free_bytes >= worker.models[model_id].weight_bytes:
                return self._claim(now_s, worker, model_id, "free pages")
        for worker in options:
            if _room(worker, model_id) >= worker.models[model_id].weight_bytes:
                return self._claim(now_s, worker, model_id, "idle models make room")
        if copies or not demand.num_waiting:
            return None  # a replica, or a pin nobody waits for, pushes nobody out
        for worker in options:
            if now_s >= self._next_forced_s.get(worker.worker_id, now_s) and not _moving(worker):
                took_s = _load_s(worker.models[model_id])
                self._next_forced_s[worker.worker_id] = now_s + took_s / self._max_load_share
                return self._claim(now_s, worker, model_id, "its turn against busy models")
        return None

    def _claim(self, now_s: float, worker: WorkerView, model_id: str, reason: str) -> Decision:
        load_s = _load_s(worker.models[model_id])
        expires_s = now_s + max(MIN_CLAIM_S, CLAIM_LOADS * load_s)
        self._claims[model_id] = _Claim(worker.worker_id, expires_s)
        return Decision(model_id, worker.worker_id, reason)

    def _drop_claims(self, now_s: float, workers: Sequence[WorkerView]) -> None:
        by_id = {worker.worker_id: worker for worker in workers}
        for model_id, claim in list(self._claims.items()):
            worker = by_id.get(claim.worker_id)
            model = None if worker is None else worker.models.get(model_id)
            done = model is None or model.state in ("resident", "failed")
            if done or now_s >= claim.expires_s:
                del self._claims[model_id]


def relieve(workers: Sequence[WorkerView]) -> list[Decision]:
    """Idle models that should make room for others' KV; one a worker, and none while one moves."""
    decisions = []
    for worker in workers:
        idle = [
            (model.idle_s, model_id)
            for model_id, model in worker.models.items()
            if model.state == "resident" and model.idle and model.idle_s >= MIN_IDLE_S
        ]
        if worker.kv_short and idle and not _moving(worker):
            decisions.append(Decision(max(idle)[1], worker.worker_id, "others need KV memory"))
    return decisions


def unplaceable(model_id: str, workers: Sequence[WorkerView]) -> str | None:
    """Why no worker could ever hold the model; None if some could, or nothing is known."""
    views = [(w, w.models[model_id]) for w in workers if model_id in w.models]
    if not views or any(model.weight_bytes < w.arena_bytes for w, model in views):
        return None
    largest = max(w.arena_bytes for w, _ in views)
    needed = views[0][1].weight_bytes
    return f"its weights take {needed} bytes and the largest device budget is {largest}"


def _load_s(model: ModelView) -> float:
    return model.load_s if model.load_s >= 0 else UNKNOWN_LOAD_S


def _loadable(worker: WorkerView, model_id: str, *, and_failed: bool = False) -> bool:
    model = worker.models.get(model_id)
    if model is None or model.weight_bytes >= worker.arena_bytes:
        return False
    return model.state in _LOADABLE or (and_failed and model.state == "failed")


def _resident(worker: WorkerView, model_id: str) -> bool:
    model = worker.models.get(model_id)
    return model is not None and model.state in ("resident", "loading")


def _moving(worker: WorkerView) -> bool:
    return any(model.state in ("loading", "draining") for model in worker.models.values())


def _room(worker: WorkerView, model_id: str) -> int:
    idle = sum(
        model.weight_bytes
        for other, model in worker.models.items()
        if other != model_id and model.idle and model.state == "resident"
    )
    return worker.free_bytes + idle
