"""Which models leave by the dispatcher's decision, and which never fit (pure).

A worker chooses the victims of a load itself. The dispatcher has a model leave in two cases: where
KV memory is short beside an idle model (`relieve`), and where a model has more copies than its rate
needs (`surplus`), which no single worker can know.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from gateway.dispatch.policy.fleet_view import (
    AskRate,
    LoadDecision,
    WorkerView,
    load_seconds,
    nobody_asks,
)

MIN_IDLE_S = 1.0
"""A model goes for others' KV when nobody has used it for so long."""
MIN_REPLICA_IDLE_S = 5.0
"""A surplus copy goes when nobody has used it for so long."""
REPLICA_IDLE_LOADS = 4.0
"""And for so many of its load times: what is wanted again soon would be loaded again."""
MOST_BUSY_SHARE = 0.5
"""The copies that stay are expected to be busy for no more than this share of their time."""
ENOUGH_FREE = 0.25
"""Of a worker's arena: where so much is free nobody needs the bytes of a surplus copy."""


def relieve(
    workers: Sequence[WorkerView],
    now_s: float,
    wanted: Container[str] = frozenset(),
    asks_s: AskRate = nobody_asks,
) -> list[LoadDecision]:
    """Idle models that should make room for others' KV; one a worker, and none while one moves.

    The one whose way back costs least for what it holds, at the rate it is asked for; of those that
    nobody asks for, the longest idle.
    """
    decisions = []
    for worker in workers:
        if not worker.kv_short or worker.is_moving:
            continue
        idle = [
            (
                asks_s(model_id) * load_seconds(model) / max(1, model.weight_bytes),
                model.idle_since_s,
                model_id,
            )
            for model_id, model in worker.models.items()
            if model.state == "resident"
            and model.idle
            and model_id not in wanted
            and now_s - model.idle_since_s >= MIN_IDLE_S
        ]
        if idle:
            decisions.append(LoadDecision(min(idle)[2], worker.worker_id, "kv"))
    return decisions


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """A resident model that runs nothing, on one worker. `free_share`: of the worker's arena, what
    is free and needed by nobody; 0 where a load or KV waits for memory there."""

    worker_id: str
    idle_since_s: float
    load_s: float
    free_share: float = 0.0


def surplus(
    model_id: str, num_copies: int, busy_share: float, idle: Sequence[IdleCopy], now_s: float
) -> LoadDecision | None:
    """A copy that is to leave, of `num_copies` resident ones; one at a time, never the last.

    busy_share   device seconds a second that the model takes, over all copies

    The longest idle one of those seen, where its bytes may be needed: what a burst has loaded then
    serves the next one. None while the rest would be busy for too much of their time.
    """
    if num_copies < 2 or busy_share > MOST_BUSY_SHARE * (num_copies - 1):
        return None
    gone = [
        copy
        for copy in idle
        if now_s - copy.idle_since_s >= max(MIN_REPLICA_IDLE_S, REPLICA_IDLE_LOADS * copy.load_s)
        and copy.free_share < ENOUGH_FREE
    ]
    if not gone:
        return None
    longest = min(gone, key=lambda copy: (copy.idle_since_s, copy.worker_id))
    return LoadDecision(model_id, longest.worker_id, "surplus replica")


def unplaceable(weight_bytes: int, largest_arena_bytes: int) -> str | None:
    """Why no worker could ever hold a model; None if some could, or nothing is known (0)."""
    if not largest_arena_bytes or weight_bytes < largest_arena_bytes:
        return None
    return (
        f"its weights take {weight_bytes} bytes, more than the largest device budget of "
        f"{largest_arena_bytes} bytes"
    )


def idle_room(worker: WorkerView, model_id: str) -> int:
    """Free bytes and those of idle models other than this one."""
    return worker.free_bytes + sum(
        model.weight_bytes
        for name, model in worker.models.items()
        if model.idle and model.state == "resident" and name != model_id
    )
