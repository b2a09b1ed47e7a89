"""Which model gets one more copy because its copies are busy while a worker rests (pure).

A worker takes many requests at once, so a model may keep one worker busy without anybody waiting,
and the worker beside it does nothing. Where each copy of a model has run MIN_RUNNING requests for
as long as a load takes, a worker that runs nothing loads the model too, if its free memory holds
it: that costs nobody, and the batches are halved. The copy leaves again as any surplus one
(relief.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.dispatch.policy.fleet_view import Demand, WorkerView, load_seconds

MIN_RUNNING = 4
"""Requests on each copy; fewer gain too little by parting."""
MIN_BUSY_S = 2.0
ROOM = 1.25
"""Of its weights, that must be free: KV has to fit beside them."""
AGAIN_S = 30.0
"""A worker is told the same at most so often: its own rules may be against it."""


@dataclass(frozen=True, slots=True)
class BusyModel:
    """`num_copies`: workers that have it, or are about to."""

    demand: Demand
    num_running: int
    num_copies: int

    @property
    def per_copy(self) -> float:
        """Requests that each copy runs."""
        return self.num_running / max(1, self.num_copies)


@dataclass(frozen=True, slots=True)
class Spread:
    """A load on a worker that rests. `load_s`: what it is expected to take."""

    model_id: str
    worker_id: str
    load_s: float


class Spreading:
    """Remembers since when models are busy, and what it has asked for."""

    def __init__(self) -> None:
        self._busy_since_s: dict[str, float] = {}
        self._asked_s: dict[tuple[str, str], float] = {}

    def decide(
        self, now_s: float, models: Sequence[BusyModel], resting: Mapping[str, WorkerView]
    ) -> list[Spread]:
        """At most one load a worker, the models with most requests a copy first. Call it every
        second or so. `resting`: workers that run nothing and load nothing."""
        busy = [model for model in models if model.per_copy >= MIN_RUNNING]
        names, since = [model.demand.model_id for model in busy], self._busy_since_s
        self._busy_since_s = {name: since.get(name, now_s) for name in names}
        self._asked_s = {key: at for key, at in self._asked_s.items() if now_s - at < AGAIN_S}
        busy.sort(key=lambda model: (-model.per_copy, model.demand.model_id))
        free = dict(resting)
        found = []
        for model in busy:
            chosen = self._worker_for(now_s, model.demand, free)
            if chosen is not None:
                found.append(chosen)
                del free[chosen.worker_id]
                self._asked_s[chosen.model_id, chosen.worker_id] = now_s
        return found

    def _worker_for(
        self, now_s: float, demand: Demand, free: Mapping[str, WorkerView]
    ) -> Spread | None:
        """Where it is warm, or else where it loads soonest."""
        name = demand.model_id
        busy_s = now_s - self._busy_since_s[name]
        options = []
        for worker_id, view in free.items():
            model = view.model(demand)
            load_s = load_seconds(model)
            if (
                model.state in ("cold", "warm")
                and view.free_bytes >= ROOM * model.weight_bytes
                and busy_s >= max(MIN_BUSY_S, load_s)
                and (name, worker_id) not in self._asked_s
            ):
                options.append((model.state != "warm", load_s, worker_id))
        if not options:
            return None
        _, load_s, worker_id = min(options)
        return Spread(name, worker_id, load_s)
