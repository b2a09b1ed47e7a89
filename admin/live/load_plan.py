"""What the load of a model would take and what would leave for it, before anything is done.

The order is placement's (gateway/dispatch/policy/fleet_view.py): what nobody uses first, then by
the seconds of loading lost for each byte. When the load really comes, the worker decides by what is
asked for then, and weighs memory floors and how long a model has been there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext
from admin.live.fleet_watch import ask_fleet
from admin.operations import models
from engine.protocol import WorkerStatus
from gateway.dispatch.policy.fleet_view import Fit, MemoryOutlook, ModelView, WorkerView, outlook
from registry.errors import IllegalTransition

_ORDER: tuple[Fit, ...] = ("free", "evicts", "never")
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Leaver:
    """A model that would leave. `is_busy`: it leaves when its requests have ended; `load_s`: what
    its next load takes, None: not known."""

    model: str
    weight_bytes: int
    is_busy: bool
    requests_per_hour: float
    load_s: float | None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`worker` "": none is connected, or all have the model; `present`: those that have it.
    `load_s`: None where no load of it was timed. `pinned`: models there that never leave."""

    model: str
    weight_bytes: int
    present: tuple[str, ...]
    worker: str = ""
    fit: Fit = "free"
    free_bytes: int = 0
    arena_bytes: int = 0
    load_s: float | None = None
    leavers: list[Leaver] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)


@operation("models.read")
def plan_load(
    context: OperatorContext, name: str, workers: Sequence[WorkerStatus] | None = None
) -> LoadPlan:
    """On the worker where the least has to leave. `workers`: as they are now; None: the running
    server is asked. Raises NotFound, IllegalTransition for a model that is not ready, and
    RegistryError where no server runs."""
    model = models.show_model(context, name)
    if model.state != "ready":
        raise IllegalTransition(f"model {name!r} is {model.state}: only a ready one can be loaded")
    if workers is None:
        fleet = ask_fleet(context.data_dir)
        workers = [each.status for each in fleet.workers] if fleet else []
    rows = {w.worker_id: {row.model_id: row for row in w.models} for w in workers}
    there = [w for w in rows if name in rows[w] and rows[w][name].state in ("resident", "loading")]
    free = [w for w in workers if w.worker_id not in there]
    bare = LoadPlan(model.name, model.weight_bytes, tuple(there))
    looks = _look_at(context, free, model.weight_bytes)
    if not looks:
        return bare
    view, found = min(looks, key=lambda look: _rank(look[1]))
    rates = models.ask_rates(context, found.leavers)
    own = rows[view.worker_id].get(name)
    return LoadPlan(
        model.name,
        model.weight_bytes,
        tuple(there),
        view.worker_id,
        found.fit,
        found.free_bytes,
        found.arena_bytes,
        _known(own.load_s_estimate) if own else None,
        [_leaver(each, view.models[each], rates) for each in found.leavers],
        sorted(each for each, model_view in view.models.items() if model_view.pinned),
    )


@operation("models.read")
def best_outlook(
    context: OperatorContext, workers: Sequence[WorkerStatus], num_bytes: int
) -> MemoryOutlook | None:
    """On the worker where the least has to leave; None where no worker is connected."""
    looks = [found for _, found in _look_at(context, workers, num_bytes)]
    return min(looks, key=_rank, default=None)


def _look_at(
    context: OperatorContext, workers: Sequence[WorkerStatus], num_bytes: int
) -> list[tuple[WorkerView, MemoryOutlook]]:
    """Each worker, and what would have to leave it for so many bytes."""
    names = {row.model_id for worker in workers for row in worker.models}
    pinned, rates = models.pinned(context, names), models.ask_rates(context, names)
    views = [_view(worker, pinned) for worker in workers]
    return [(view, outlook(view, num_bytes, rates)) for view in views]


def _view(worker: WorkerStatus, pinned: Collection[str]) -> WorkerView:
    """KV that is only kept for reuse makes room without any model's leaving."""
    kept = sum(n for owner, n in worker.pages.items() if owner.endswith("/kv_cached"))
    return WorkerView(
        worker_id=worker.worker_id,
        free_bytes=(worker.pages.get("free", 0) + kept) * worker.page_bytes,
        arena_bytes=worker.num_pages * worker.page_bytes,
        models={
            row.model_id: ModelView(
                state=row.state,
                weight_bytes=row.weight_bytes,
                load_s=row.load_s_estimate,
                idle=not (row.num_running or row.num_waiting),
                pinned=row.model_id in pinned,
            )
            for row in worker.models
        },
    )


def _leaver(name: str, view: ModelView, rates: Mapping[str, float]) -> Leaver:
    per_hour = rates.get(name, 0.0) * _HOUR_S
    return Leaver(name, view.weight_bytes, not view.idle, per_hour, _known(view.load_s))


def _known(seconds: float) -> float | None:
    return seconds if seconds >= 0 else None


def _rank(look: MemoryOutlook) -> tuple[int, int]:
    return _ORDER.index(look.fit), len(look.leavers)
