"""The history as a whole: deeds and postings in the order of time, under one clock."""

import random
from dataclasses import replace

from admin.context.operator_context import OperatorContext
from bench.lived_in.events import events
from bench.lived_in.postings import Traffic
from bench.lived_in.world import DAY_S, NUM_DAYS, PRICES, RENAMED, World, some_facts
from registry.models.catalog import PackFacts

PER_DAY = 300.0


def write_history(
    context: OperatorContext,
    packs: dict[str, PackFacts],
    *,
    ends_at: float,
    num_days: float = NUM_DAYS,
    per_day: float = PER_DAY,
    seed: int = 0,
) -> World:
    """Into an empty registry: `num_days` up to `ends_at` (epoch seconds), about `per_day` postings
    each. `packs`: of hosted models, those on the disk; the others get facts without a pack."""
    names = [name for name in PRICES if name != RENAMED]
    known = {name: some_facts(name) for name in names} | packs
    world = World(
        replace(context, actor="bench"),
        random.Random(seed),
        ends_at - num_days * DAY_S,
        ends_at,
        known,
    )
    traffic = Traffic(world, per_day)
    for at, deed in events(world):
        traffic.run_until(at)
        world.now_at = at
        deed(world)
    traffic.run_until(ends_at)
    world.now_at = ends_at
    return world
