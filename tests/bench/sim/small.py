"""Small worlds and workloads that tests of the simulator share."""

import random
from collections.abc import Iterator
from dataclasses import replace

from bench.sim.devices import DEVICES
from bench.sim.types import Arrival, SimModel, SimTenant, World

SHAPES = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "google/gemma-3-1b-it")
GIB = 1 << 30


def small_world(
    workers: int = 2, models: int = 5, settings: dict[str, object] | None = None
) -> World:
    """Devices that hold most of their models, but not all."""
    device = replace(DEVICES["l4"], memory_bytes=3 * GIB, host_bytes=4 * GIB)
    return World(
        workers,
        device,
        tuple(SimModel(f"m{n}", SHAPES[n % len(SHAPES)]) for n in range(models)),
        tuple(SimTenant(f"t{n}") for n in range(4)),
        settings=settings or {},
    )


def small_load(
    number: int, rate: float, seed: int = 1, models: int = 5, output: float = 60.0
) -> Iterator[Arrival]:
    """Poisson arrivals, some of which begin alike; a third runs into `max_tokens`."""
    rng = random.Random(seed)
    now_s = 0.0
    for n in range(number):
        now_s += rng.expovariate(rate)
        tokens = max(1, int(rng.expovariate(1 / output)))
        yield Arrival(
            at_s=now_s,
            tenant=rng.randrange(4),
            model=min(int(rng.expovariate(0.8)), models - 1),
            prompt=((rng.randrange(8), 64), (1000 + n, int(rng.expovariate(1 / 200)) + 3)),
            output_tokens=tokens,
            max_tokens=max(8, tokens + rng.choice([-4, 10, 10])),
        )
