"""Reaching into a whole engine: what happens seldom by itself is made to happen at any moment.

Each function does what the engine's own parts do when memory is short, between two steps and with a
step perhaps in flight. This is the only place where tests of the whole engine touch its insides.
"""

import random
from collections import Counter
from typing import Protocol

from engine.engine import Engine
from engine.memory.page_pool import Owner, PageRun
from engine.residency.loaded_models import Turn
from engine.residency.weight_space import may_move

COUNTERS = (
    "preemptions",
    "steps_failed",
    "prefix_cache_hits",
    "kv_evicted_pages",
    "kv_moved_pages",
    "weights_moved_pages",
    "kv_compactions",
    "deadline_timeouts",
)


def count_events(engine: Engine, now_s: float) -> Counter[str]:
    """The engine's own counters of what happened to its memory."""
    counters = engine.status(now_s).counters
    return Counter({name: int(counters[name]) for name in COUNTERS})


def move_kv(engine: Engine, rng: random.Random) -> int:
    """Clear a random stretch, as a load does that wants these pages. 1 if anything had to go."""
    pool = engine.pool
    first = rng.randrange(pool.num_pages)
    pages = range(first, min(pool.num_pages, first + rng.randint(1, 1 + pool.num_pages // 3)))
    owners = {page: pool.owner_of(page) for page in pages}
    kv = [page for page, owner in owners.items() if owner is not None and owner.kind == "kv"]
    if not kv or not engine._kv.clear(pages):
        return 0
    assert all(pool.owner_of(page) is None for page in kv), "KV is still where it had to leave"
    return 1


def compact(engine: Engine) -> int:
    """Copy sparse extents together. 1 if there were any."""
    return int(engine._kv.compact(engine.pool.num_pages) > 0)


def move_weights(engine: Engine, rng: random.Random) -> int:
    """Move a segment of a resident model to free pages, as a placement does. 1 if one moved."""
    residency, pool = engine._manager.residency, engine.pool
    movable = [instance for instance in residency._models.on_device() if may_move(instance)]
    # A model of a placement in progress would be moved under its plan's feet; plans see that.
    if not movable:
        return 0
    instance = rng.choice(movable)
    segment = rng.randrange(len(instance.runs))
    source = instance.runs[segment]
    target = _free_run(engine, rng, source.num_pages)
    if target is None:
        return 0
    owner = instance.weights_owner
    pool.alloc_at(owner, target)
    pool.begin_copies()
    size = pool.page_bytes
    residency._backend.copy_within(
        [(source.first * size, target.first * size, source.num_pages * size)]
    )
    instance.runs[segment] = target
    pool.release(owner, source.pages)
    turn = Turn(0.0, lambda _: True, lambda _: None, lambda _: True)
    residency._models.moved(instance, turn)
    for event in turn.events:
        engine._manager._settle(engine._manager._now_s)
        engine._manager._bind_again(event.model_id)
    return 1


class Poisons(Protocol):
    """A backend that can overwrite memory."""

    def poison(self, offset: int, num_bytes: int) -> None:
        """With NaN, at once."""


def poison_what_is_freed(engine: Engine, backend: Poisons) -> None:
    """Overwrite each page the moment its fence has passed: nobody may look at it any more."""
    pool = engine.pool
    retire, size = pool.retire, pool.page_bytes

    def retire_and_poison(step: int) -> list[int]:
        pages = retire(step)
        for page in pages:
            backend.poison(page * size, size)
        return pages

    pool.retire = retire_and_poison  # type: ignore[method-assign]


def kv_pages(engine: Engine, instance_id: str) -> int:
    """Pages of a model's KV."""
    return engine.pool.owned(Owner(instance_id, "kv"))


def _free_run(engine: Engine, rng: random.Random, num_pages: int) -> PageRun | None:
    """A random run of free pages."""
    kinds = engine.pool.kinds()
    start = rng.randrange(engine.pool.num_pages)
    hole = bytes(num_pages)
    first = kinds.find(hole, start)
    if first < 0:
        first = kinds.find(hole)
    return None if first < 0 else PageRun(first, num_pages)
