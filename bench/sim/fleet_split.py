"""The same requests on one fleet, and on workers that stand alone (fleet mode).

    ours          one dispatcher over all workers
    round_robin   each worker with a dispatcher of its own and every model; of n, each n-th request
    static        the same, each model at home on one worker: dealt out by size, the largest first
    static_told   homes dealt out by the tokens that the models will make: it knows the future

All four have the product's dispatcher with its fair queue, its gathering and its load budget, so
what differs is which worker a request can go to. Lives here: the worlds and their figures. Does
not: which traces, and what is made of the figures (bench/fleet.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sim.baselines.placing import deal_homes
from bench.sim.batches import rng
from bench.sim.fleet_world import Ask, FleetWorld, percentile
from bench.sim.rate_worker import Rates
from bench.sim.spec import parse_workload
from bench.sim.workloads import open_workload
from gateway.settings.settings import Settings

GIB = 1 << 30
MODELS_PER_WORKER = 12
SIZES = (8 * GIB, 16 * GIB)
"""Weights of 8B models in one byte and in two; four to eight fit on a worker."""
NUM_TENANTS = 16
PROMPT_STEP = 64
"""Prompts are made longer to a multiple of this: few lists of tokens for many requests."""
LIMITS = "max_prompt=8192,max_output=2048,max_tokens=exact"
PATIENT = Settings(
    max_queue_total=1 << 20,
    max_queue_per_tenant=1 << 20,
    worker_heartbeat_timeout_s=30.0,
    queue_timeout_s=3600.0,
)
"""Nobody is refused, so that latencies are of all requests."""
DRAIN_S = 10.0
MOST_S = 4 * 3600.0

Timed = tuple[float, Ask]
Way = Callable[[Sequence[Timed], int, Mapping[str, int]], list[list[Timed]]]


def sizes_of(num_workers: int, seed: int) -> dict[str, int]:
    """Models of half the sizes each, in an order of the seed."""
    number = MODELS_PER_WORKER * num_workers
    order = rng(seed, "fleet sizes").permutation(number)
    return {f"m{place}": SIZES[int(order[place]) % len(SIZES)] for place in range(number)}


def read_asks(trace: str, data: Path, num_workers: int, seed: int) -> list[Timed]:
    """The trace's requests. A fleet of n gets n times its rate; the text says the rate of one.

    Raises WorkloadError.
    """
    spec = parse_workload(f"{trace},{LIMITS}", data)
    if spec.rate is not None:
        spec = parse_workload(f"{trace},{LIMITS},rate={spec.rate * num_workers}", data)
    arrivals = open_workload(spec, NUM_TENANTS, MODELS_PER_WORKER * num_workers, seed)
    return [
        (
            arrival.at_s,
            Ask(
                arrival.tenant,
                f"m{arrival.model}",
                -(-arrival.prompt_tokens // PROMPT_STEP) * PROMPT_STEP,
                arrival.output_tokens,
            ),
        )
        for arrival in arrivals
    ]


def _together(asks: Sequence[Timed], _number: int, _sizes: Mapping[str, int]) -> list[list[Timed]]:
    return [list(asks)]


def _in_turns(asks: Sequence[Timed], number: int, _sizes: Mapping[str, int]) -> list[list[Timed]]:
    return [list(asks[place::number]) for place in range(number)]


def _at_home(asks: Sequence[Timed], number: int, weights: Mapping[str, int]) -> list[list[Timed]]:
    homes = deal_homes(weights, [str(place) for place in range(number)])
    parts: list[list[Timed]] = [[] for _ in range(number)]
    for at_s, ask in asks:
        parts[int(homes[ask.model])].append((at_s, ask))
    return parts


def _told(asks: Sequence[Timed], number: int, sizes: Mapping[str, int]) -> list[list[Timed]]:
    tokens = Counter(dict.fromkeys(sizes, 0))
    for _, ask in asks:
        tokens[ask.model] += ask.output_tokens
    return _at_home(asks, number, tokens)


WAYS: dict[str, Way] = {
    "ours": _together,
    "round_robin": _in_turns,
    "static": _at_home,
    "static_told": _told,
}


def run(way: str, asks: Sequence[Timed], num_workers: int, seed: int) -> dict[str, Any]:
    """Figures of all requests, from the first to the last one's end."""
    sizes = sizes_of(num_workers, seed)
    parts = WAYS[way](asks, num_workers, sizes)
    each = num_workers // len(parts)
    worlds = [_run(part, each, sizes, seed) for part in parts]
    first = [value for world in worlds for value in world.seen.first_token_s]
    counts = [worker.counts for world in worlds for worker in world.workers]
    ended = sum((world.seen.ended for world in worlds), Counter[str]())
    return {
        "way": way,
        "workers": num_workers,
        "seed": seed,
        "requests": len(asks),
        "ended": dict(ended),
        "first_token_p50_s": round(percentile(first, 0.5), 3),
        "first_token_p99_s": round(percentile(first, 0.99), 3),
        "first_token_mean_s": round(sum(first) / len(first), 3),
        "loads": sum(count.loads for count in counts),
        "load_s": round(sum(count.load_s for count in counts), 1),
        "reloads": sum(count.reloads for count in counts),
        "reload_s": round(sum(count.reload_s for count in counts), 1),
        "ended_s": round(max(world.loop.now_s for world in worlds), 0),
    }


def _run(
    asks: Iterable[Timed], num_workers: int, sizes: Mapping[str, int], seed: int
) -> FleetWorld:
    """Until all have ended."""
    asks = list(asks)
    world = FleetWorld(num_workers, sizes, NUM_TENANTS, Rates(), PATIENT, seed)
    world.play(asks)
    until_s = asks[-1][0] if asks else 0.0
    while sum(world.seen.ended.values()) < len(asks):
        if world.loop.now_s > MOST_S:
            raise RuntimeError(f"{len(asks)} requests on {num_workers} workers do not end")
        until_s += DRAIN_S
        world.loop.run(until_s)
    world.dispatcher.check_integrity()
    return world
