"""The dispatcher over 1 to 1,000 workers, in simulated time: `python -m bench.fleet`.

    python -m bench.fleet [scaling] [look] [day] [crowd] [choices] [shares] [--quick] --output FILE
    python -m bench.fleet split --data DATA [--seeds N...] --output FILE

    scaling   clients that ask all the time, a world of one worker against 10, 100 and 1,000 times
              as much of everything: output tokens a second of the second half of the run, over
              N times those of one (means over worlds, 32 of one worker)
    look      1,000 workers without free room, 100 models waited for: processor time of one look at
              placement. Three runs of the same looks: `each` is of all of them, `least` of each
              look's least, which leaves out what the machine did to one of the three
    day       1,000 workers, ten minutes, 500 requests a second
    crowd     one model that nobody has, asked for by 2,048 clients at once on 64 workers
    choices   100 workers: start and load seconds of the loads chosen among candidates, against
              those chosen among all workers
    shares    two workers, three tenants of weights 1, 2 and 4 that always wait: service of each,
              over its weight's share of all service
    split     traces on 1, 2 and 8 workers: reload seconds and first tokens of one fleet, of workers
              that get requests in turn, and of a static split of the models

Workers serve by rate (bench/sim/rate_worker.py), the dispatcher is the product's. All but the times
of `look`, `wall_s` and `cpu_s` are simulated and repeat exactly. Without a name all but `split` are
run; --quick is a tenth of each.
"""

import argparse
import gc
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import command, stats
from bench.sim import fleet_split
from bench.sim.fleet_world import Ask, FleetWorld, percentile
from bench.sim.rate_worker import Rates
from gateway.dispatch.policy.fleet_sight import AllWorkers, FleetSight
from gateway.dispatch.policy.fleet_view import AskRate, Demand
from gateway.dispatch.policy.placement import Placement
from gateway.server.process_setup import GC_THRESHOLDS
from gateway.settings.settings import Settings

GIB = 1 << 30
SETTINGS = Settings(
    max_queue_total=1 << 20,
    max_queue_per_tenant=1 << 20,
    worker_heartbeat_timeout_s=30.0,
    queue_timeout_s=60.0,
)
WEIGHTS = (1.0, 2.0, 4.0)
SWAPPED = "swapped"
SHARE_CASES: dict[str, tuple[Sequence[int], ...]] = {
    "one model": ([0], [0], [0]),
    "two models": ([0], [1], [1]),
    "own models": ([0], [1], [2]),
    SWAPPED: (range(24),) * 3,
}
"""Which models each tenant asks for, the first ones most. Six fit on a worker."""
SHARES_FROM_S = 120.0
"""By then who had its model first has paid back what it got while the others waited for theirs."""
CLIENTS, SWAPPED_CLIENTS = 200, 1000
"""Of each tenant; two workers take 128 requests. Where models are swapped most requests wait for
loads, and only those for models that are there contend."""
TRACES = ("arena27_multimodel:rate=0.6,minutes=10", "servegen:rate=0.6,minutes=10")
"""`rate`: of one worker."""
SPLIT_WORKERS = (1, 2, 8)
SPLIT_FIGURES = ("first_token_p99_s", "first_token_mean_s", "reload_s", "load_s")
POPULARITY = (0.28, 0.2, 0.16, 0.13, 0.12, 0.1, 0.01)
"""Of the seven models of one worker's world; six of them fit."""
MODEL_BYTES = 10 * GIB
COLD_BYTES = 12 * GIB
NUM_TENANTS = 16
NUM_WORKERS = (1, 10, 100, 1000)
LOOK_RUNS = 3
FIRST_LOOKS = 20
"""In which much of what waits has not been looked at yet."""

Row = dict[str, Any]


def sizes_of(num_workers: int) -> dict[str, int]:
    """As many models as so many worlds of one worker have."""
    return {f"m{n}": MODEL_BYTES for n in range(len(POPULARITY) * num_workers)}


def drawing(world: FleetWorld, num_workers: int) -> Callable[[], Ask]:
    """Requests over all these models."""
    rng, own = world.rng, range(len(POPULARITY))

    def draw() -> Ask:
        place = rng.randrange(num_workers) * len(POPULARITY) + rng.choices(own, POPULARITY)[0]
        return Ask(rng.randrange(NUM_TENANTS), f"m{place}", 256, rng.randrange(50, 150))

    return draw


@contextmanager
def settled() -> Iterator[None]:
    """Memory is looked through as in the server's process: what is there now, never again."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def now() -> tuple[float, float]:
    """Of the clock, and of this process."""
    return time.perf_counter(), time.process_time()


def figures(world: FleetWorld, seconds: float, began_s: tuple[float, float]) -> Row:
    """What a run came to, and what it took here since `now()` said so."""
    counts = [worker.counts for worker in world.workers]
    first = world.seen.first_token_s
    return {
        "workers": len(world.workers),
        "simulated_s": seconds,
        "wall_s": round(time.perf_counter() - began_s[0], 1),
        "cpu_s": round(time.process_time() - began_s[1], 1),
        "requests": sum(world.seen.ended.values()),
        "ended": dict(world.seen.ended),
        "tokens_per_s": round(world.seen.tokens / seconds, 1),
        "first_token_p50_s": round(percentile(first, 0.5), 3),
        "first_token_p99_s": round(percentile(first, 0.99), 3),
        "loads": sum(count.loads for count in counts),
        "statuses": sum(count.statuses for count in counts),
        "refused_by_workers": sum(count.refused for count in counts),
    }


def scaling(share: float) -> list[Row]:
    """Weak scaling, closed loop."""
    rows: list[Row] = []
    for num_workers in NUM_WORKERS:
        seconds = max(20.0, 120.0 * share)
        seeds = range(max(1, round(32 * share / num_workers)))
        runs = [_closed(num_workers, seconds, seed) for seed in seeds]
        row = runs[0] | {"tokens_per_s": statistics.mean(run["tokens_per_s"] for run in runs)}
        rows.append(row)
        one = rows[0]["tokens_per_s"] * num_workers
        row["of_n_times_one"] = round(row["tokens_per_s"] / one, 4)
        print(json.dumps(row), flush=True)
    return rows


def _closed(num_workers: int, seconds: float, seed: int) -> Row:
    world = FleetWorld(
        num_workers, sizes_of(num_workers), NUM_TENANTS, settings=SETTINGS, seed=seed
    )
    draw = drawing(world, num_workers)
    began_s = now()
    for _ in range(24 * num_workers):
        world.keep_asking(draw, seconds)
    with settled():
        world.loop.run(seconds / 2)
        before = world.seen.tokens
        world.loop.run(seconds)
    world.dispatcher.check_integrity()
    row = figures(world, seconds, began_s)
    return row | {"tokens_per_s": round(2 * (world.seen.tokens - before) / seconds, 1)}


def day(share: float) -> Row:
    """A thousand workers by the clock."""
    num_workers, seconds = 1000, 600.0 * share
    world = FleetWorld(num_workers, sizes_of(num_workers), NUM_TENANTS, settings=SETTINGS)
    began_s = now()
    world.arrive(drawing(world, num_workers), 0.5 * num_workers, seconds)
    with settled():
        world.loop.run(seconds)
    world.dispatcher.check_integrity()
    row = figures(world, seconds, began_s)
    print(json.dumps(row), flush=True)
    return row


def crowd(share: float) -> Row:
    """How long one model takes to be on as many workers as a crowd needs."""
    num_workers, seconds = 64, 120.0
    world = FleetWorld(num_workers, {"m": MODEL_BYTES}, NUM_TENANTS, settings=SETTINGS)
    began_s = now()
    copies: list[tuple[float, int]] = []

    def count() -> None:
        number = world.copies("m")
        if not copies or copies[-1][1] != number:
            copies.append((round(world.loop.now_s, 2), number))
        world.loop.after(0.05, count)

    world.loop.after(0.0, count)

    def ask() -> None:
        for number in range(max(256, int(4096 * share))):
            world.ask(Ask(number % NUM_TENANTS, "m", 256, 1000))

    world.loop.after(2.0, ask)
    world.loop.run(seconds)
    world.dispatcher.check_integrity()
    most = max(number for _, number in copies)
    row = figures(world, seconds, began_s) | {
        "asked_at_s": 2.0,
        "load_s": round(Rates().load_overhead_s + MODEL_BYTES / Rates().disk_bytes_per_s, 2),
        "most_copies": most,
        "copies": copies,
    }
    print(json.dumps(row), flush=True)
    return row


def full_world(num_workers: int, num_cold: int) -> FleetWorld:
    """Every worker has five to seven models and no room for another one; `cold0`... are nowhere."""
    names = sizes_of(num_workers)
    sizes = names | {f"cold{n}": COLD_BYTES for n in range(num_cold)}
    world = FleetWorld(num_workers, sizes, NUM_TENANTS, settings=SETTINGS)
    rng = world.rng
    for name in names:
        sizes[name] = rng.randrange(8 * GIB, 12 * GIB)
    world.loop.run(2.0)  # all have connected
    rest = iter(rng.sample(sorted(names), len(names)))
    for worker in world.workers:
        worker.preload(rest)
    world.loop.run(4.0)
    return world


def cold_demand(number: int, waited_s: float, now_s: float) -> Demand:
    """A model that is nowhere, and that one request has waited for since then."""
    oldest_s = now_s - waited_s
    return Demand(f"cold{number}", 1, 0.5, False, COLD_BYTES, oldest_s=oldest_s, waited_s=waited_s)


def ask_rates(world: FleetWorld) -> AskRate:
    """Asks a second of each model, from never to often."""
    rng = random.Random("rates")
    rates = {name: 10 ** rng.uniform(-4, 0) for name in sorted(world.sizes)}
    return lambda model_id: 0.0 if model_id.startswith("cold") else rates[model_id]


def look(share: float) -> Row:
    """Time of `decide`, with nothing started: every look is at all that waits."""
    runs = [_looks(max(50, int(500 * share))) for _ in range(LOOK_RUNS)]
    each_ms = [time_ms for times_ms in runs for time_ms in times_ms[FIRST_LOOKS:]]
    least_ms = [min(times_ms) for times_ms in zip(*runs, strict=True)][FIRST_LOOKS:]
    row = {
        "workers": 1000,
        "models_waiting": 100,
        "looks": len(least_ms),
        "runs": len(runs),
        "first_20_mean_ms": round(statistics.mean(runs[0][:FIRST_LOOKS]), 2),
    }
    for name, times_ms in (("each", each_ms), ("least", least_ms)):
        row[f"{name}_p50_ms"] = round(percentile(times_ms, 0.5), 2)
        row[f"{name}_p99_ms"] = round(percentile(times_ms, 0.99), 2)
    print(json.dumps(row), flush=True)
    return row


def _looks(num_looks: int) -> list[float]:
    """Milliseconds of each."""
    world = full_world(1000, 100)
    fleet, asks = world.dispatcher._fleet, ask_rates(world)
    now_s = world.loop.now_s
    wanted = frozenset(sizes_of(1000))  # somebody waits for whatever would have to leave
    placement = Placement(SETTINGS.max_load_share, 1e9)
    times_ms: list[float] = []
    gc.collect()
    for turn in range(num_looks):
        now_s += 0.05
        for worker in world.workers[turn % 2 :: 2]:  # statuses since the last look
            connected = fleet.connected(worker.worker_id)
            assert connected is not None
            fleet.update(connected, worker.status(), now_s)
        # Requests come and go: none waits for so long that its load pays.
        demands = [cold_demand(n, (now_s + n / 33) % 3.0, now_s) for n in range(100)]
        began_s = time.thread_time()
        found = placement.decide(now_s, demands, fleet.candidates, wanted, asks)
        times_ms.append((time.thread_time() - began_s) * 1e3)
        assert not found, found[0]
    assert len(placement.outlooks) > 90, "a look is to be about all that waits"
    return times_ms


def choices(share: float) -> Row:
    """What the loads chosen cost, of the same demands, among candidates and among all."""
    num_demands = max(100, int(1000 * share))
    world = full_world(100, num_demands)
    fleet, now_s, asks = world.dispatcher._fleet, world.loop.now_s, ask_rates(world)
    sights: dict[str, FleetSight] = {
        "candidates": fleet.candidates,
        "all": AllWorkers(fleet.candidates.all()),
    }
    sums: dict[str, float] = {}
    for name, sight in sights.items():
        placement = Placement(SETTINGS.max_load_share, SETTINGS.gather_wait_s)
        total_s = 0.0
        for first in range(0, num_demands, 4):
            at_s = now_s + first / 20
            demands = [cold_demand(n, 0.2, at_s) for n in range(first, first + 4)]
            found = placement.decide(at_s, demands, sight, frozenset(), asks)
            total_s += sum(decision.load_s for decision in found)
            total_s += sum(outlook.at_s - at_s for outlook in placement.outlooks.values())
            assert len(found) + len(placement.outlooks) == len(demands)
        sums[name] = round(total_s, 3)
    row: Row = {"workers": 100, "demands": num_demands, "start_and_load_s": sums}
    row["candidates_over_all"] = round(sums["candidates"] / sums["all"], 4)
    print(json.dumps(row), flush=True)
    return row


def shares(share: float) -> list[Row]:
    """Of three worlds each; of one where models are swapped."""
    rows = []
    for case in SHARE_CASES:
        seeds = range(1 if case == SWAPPED else 3)  # it takes ten times as long as the others
        runs = [_shares(case, SHARES_FROM_S + 600.0 * share, seed) for seed in seeds]
        worst = max(abs(value - 1.0) for run in runs for value in run)
        row: Row = {"case": case, "weights": WEIGHTS, "workers": 2, "seconds": 600.0 * share}
        row |= {"over_due": runs, "worst": round(worst, 4)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _shares(case: str, until_s: float, seed: int) -> list[float]:
    """Of each tenant: its part of all service, over its weight's part of all weights."""
    models = SHARE_CASES[case]
    sizes = {f"m{number}": MODEL_BYTES for own in models for number in own}
    world = FleetWorld(2, sizes, len(WEIGHTS), settings=SETTINGS, seed=seed)
    world.weigh(WEIGHTS)
    rng = world.rng

    def drawing_of(tenant: int) -> Callable[[], Ask]:
        own = models[tenant]

        def draw() -> Ask:
            name = f"m{own[int(len(own) * rng.random() ** 3)]}"
            return Ask(tenant, name, rng.choice((64, 256, 1024)), rng.randrange(50, 400))

        return draw

    for tenant in range(len(WEIGHTS)):
        for _ in range(SWAPPED_CLIENTS if case == SWAPPED else CLIENTS):
            world.keep_asking(drawing_of(tenant), until_s)
    world.loop.run(SHARES_FROM_S)
    before = _charged_s(world)
    world.loop.run(until_s)
    waiting = world.dispatcher.snapshot().waiting_by_tenant
    assert len(waiting) == len(WEIGHTS), "all of them always wait"
    got = [after - had for after, had in zip(_charged_s(world), before, strict=True)]
    due = [weight / sum(WEIGHTS) * sum(got) for weight in WEIGHTS]
    return [round(mine / ought, 4) for mine, ought in zip(got, due, strict=True)]


def _charged_s(world: FleetWorld) -> list[float]:
    """Service that each tenant has been charged: of requests that have ended, and of loads."""
    found = world.dispatcher.snapshot()
    loads_s = found.accounts.load_s
    return [
        found.service_s_by_tenant[name] + loads_s.get(name, 0.0)
        for name in sorted(found.service_s_by_tenant)
    ]


def split(
    share: float, data: Path, traces: Sequence[str], seeds: Sequence[int], workers: Sequence[int]
) -> list[Row]:
    """Every way on the same requests; `median` and spread of each figure over the seeds."""
    rows: list[Row] = []
    for trace in traces:
        for num_workers in workers:
            asks = [fleet_split.read_asks(trace, data, num_workers, seed) for seed in seeds]
            asks = [some[: max(10, int(len(some) * share))] for some in asks]
            for way in fleet_split.WAYS if num_workers > 1 else ["ours"]:
                runs = [
                    fleet_split.run(way, some, num_workers, seed)
                    for some, seed in zip(asks, seeds, strict=True)
                ]
                row: Row = {"trace": trace, "workers": num_workers, "way": way}
                row |= {name: stats.repeated([run[name] for run in runs]) for name in SPLIT_FIGURES}
                print(json.dumps(row), flush=True)
                rows.append(row | {"runs": runs})
    return rows


PARTS: dict[str, Callable[[float], Any]] = {
    "scaling": scaling,
    "look": look,
    "day": day,
    "crowd": crowd,
    "choices": choices,
    "shares": shares,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "split", []], metavar="PART")
    parser.add_argument("--quick", action="store_true", help="a tenth of each")
    parser.add_argument("--output", type=Path)
    add, words = parser.add_argument, "of split"
    add("--data", type=Path, metavar="DIR", help=f"{words}: folder of the traces")
    add("--trace", nargs="+", default=TRACES, metavar="WORDS", help=words)
    add("--seeds", type=int, nargs="+", default=range(5), metavar="N", help=f"{words} (0 to 4)")
    add("--workers", type=int, nargs="+", default=SPLIT_WORKERS, metavar="N", help=words)
    options = parser.parse_args(argv)
    if "split" in options.parts and options.data is None:
        parser.error("split needs --data, the folder of the traces")
    logging.disable(logging.ERROR)  # what workers and dispatcher say of themselves
    share = 0.1 if options.quick else 1.0
    of_split = (options.data, options.trace, options.seeds, options.workers)
    parts = PARTS | {"split": lambda share: split(share, *of_split)}
    result = {name: parts[name](share) for name in options.parts or PARTS}
    command.keep(result, options.output, "sim-fleet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
