"""The bound of docs/fairness.md, looked at after every event of random worlds.

    python -m bench.sim.gap_watch --seeds 1000 [--first 0]

A seed draws a world of one worker in which tenants of unlike weights ask for unlike things, some
of them too much, some in bursts, with odd settings of the engine, and models that do or do not all
fit.
After every tick of the worker each tenant's service so far is read off the engine itself, and of
each two tenants that both wait for something that the worker offers: how far has the difference of
their service over weight moved since they both began to? What must hold is

    largest move <= 2 (U + quantum + load)

U, quantum and load as `gap_bound_s` has them from the run: the bound grows with what
requests really cost, so it is known at the end, and the largest move over all events is compared.
"""

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from bench.sim.columns import Slo, columns
from bench.sim.devices import DEVICES
from bench.sim.fair_metrics import gap_bound_s
from bench.sim.run import Simulation
from bench.sim.scenarios.fairness import PATIENT, Draw, chat, fixed, stream
from bench.sim.types import Arrival, SimModel, SimTenant, World
from bench.sim.worker import SimWorker
from gateway.dispatch.dispatcher import Dispatcher

SHAPES = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B")
SECONDS = 5.0
MOST_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class Watched:
    """What a world showed. `ratio`: the largest move over the bound."""

    ratio: float
    gap_s: float
    bound_s: float
    num_events: int
    num_contended: int
    """Events in which two tenants waited for the worker."""
    books_off: float


class GapWatch:
    """Hung onto a simulation of one worker."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        tenants = simulation.run.world.tenants
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._ended_s = dict.fromkeys(self._weights, 0.0)
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}
        self.gap_s = 0.0
        self.num_events = self.num_contended = 0
        worker = simulation.workers[0]
        worker.on_tick = self._look

    def _look(self, worker: SimWorker) -> None:
        """Differences as they are now, for those who both wait."""
        gateway = self._simulation.gateway
        assert gateway is not None
        assert worker.process is not None
        self.num_events += 1
        waiting = _contending(gateway.dispatcher)
        if len(waiting) < 2:
            self._seen.clear()
            return
        self.num_contended += 1
        served = dict(gateway.dispatcher._book.service_s)
        for request in worker.process.engine.unfinished():
            name = request.submit.tenant_id
            served[name] = served.get(name, 0.0) + request.service_s
        seen: dict[tuple[str, str], tuple[float, float]] = {}
        for pair in combinations(sorted(waiting), 2):
            one, other = (served.get(name, 0.0) / self._weights[name] for name in pair)
            low, high = self._seen.get(pair, (one - other, one - other))
            seen[pair] = min(low, one - other), max(high, one - other)
            self.gap_s = max(self.gap_s, seen[pair][1] - seen[pair][0])
        self._seen = seen


def _contending(dispatcher: Dispatcher) -> list[str]:
    """Tenants that wait for a model that the worker offers, full or not."""
    offered = {name for worker in dispatcher._fleet for name in worker.offers}
    return dispatcher._queue.tenants_of(offered)


def watch(seed: int) -> Watched:
    """One world, to its end."""
    rng = random.Random(seed)
    world = _world(rng, seed)
    arrivals = sorted(_arrivals(rng, world, seed), key=lambda a: a.at_s)[:MOST_REQUESTS]
    simulation = Simulation(world, arrivals, sample_s=1.0)
    found = GapWatch(simulation)
    simulation.start()
    simulation.loop.run(600.0)
    run = simulation.finish()
    weights = np.array([tenant.weight for tenant in world.tenants])
    rows = columns(run.records, Slo())
    bound_s = gap_bound_s(rows, run.swaps, np.arange(len(weights)), weights)
    counters = run.counters
    used_s = counters["tenant_device_seconds"] + counters["system_device_seconds"]
    return Watched(
        found.gap_s / bound_s if bound_s else 0.0,
        found.gap_s,
        bound_s,
        found.num_events,
        found.num_contended,
        used_s / counters["busy_seconds"] - 1 if counters["busy_seconds"] else 0.0,
    )


def _world(rng: random.Random, seed: int) -> World:
    models = tuple(SimModel(f"m{n}", rng.choice(SHAPES)) for n in range(rng.choice([1, 1, 2, 3])))
    return World(
        1,
        replace(DEVICES["cpu-2"], memory_bytes=rng.choice([3 << 29, 4 << 30])),
        models,
        tuple(
            SimTenant(f"t{n}", rng.choice([0.5, 1.0, 2.0, 4.0])) for n in range(rng.randint(2, 5))
        ),
        seed=seed,
        settings={
            **PATIENT,
            "max_num_seqs": rng.choice([2, 4, 8, 16, 64]),
            "max_batch_tokens": rng.choice([64, 256, 1024]),
            "min_run_steps": rng.choice([1, 4]),
            "tenant_kv_share": rng.choice([0.3, 0.75, 1.0]),
            "prefix_cache": rng.random() < 0.5,
        },
    )


def _arrivals(rng: random.Random, world: World, seed: int) -> Iterator[Arrival]:
    lengths: list[Draw] = [fixed(16, 4), fixed(32, 40), fixed(300, 8), fixed(200, 60), chat]
    for tenant in range(len(world.tenants)):
        models = rng.sample(range(len(world.models)), rng.randint(1, len(world.models)))
        period_s = rng.choice([0.0, 2.0, 6.0])
        yield from stream(
            tenant,
            models,
            rng.choice([0.5, 4.0, 10.0, 30.0]),
            SECONDS,
            rng.choice(lengths),
            seed,
            _bursts(period_s),
        )


def _bursts(period_s: float) -> Callable[[float], bool]:
    """The first half of each period; 0: all the time."""
    return lambda now_s: not period_s or now_s % period_s < period_s / 2


def main(argv: Sequence[str] | None = None) -> int:
    """1 where the bound was broken, or the books do not add up."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.gap_watch", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    ratios: list[float] = []
    broken: list[int] = []
    worst_books = 0.0
    num_events = num_contended = 0
    for seed in range(options.first, options.first + options.seeds):
        found = watch(seed)
        ratios.append(found.ratio)
        worst_books = max(worst_books, abs(found.books_off))
        num_events += found.num_events
        num_contended += found.num_contended
        if found.ratio > 1 or abs(found.books_off) > 0.01:
            broken.append(seed)
            print(f"seed {seed}: {found}", flush=True)
    some = np.array([ratio for ratio in ratios if ratio]) if any(ratios) else np.zeros(1)
    print(
        f"{options.seeds} worlds, {num_events} events, {num_contended} of them with two who wait; "
        f"gap/bound: largest {some.max():.3f}, median {np.median(some):.3f}; books off by "
        f"{worst_books:.1e} at most; broken: {broken}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
