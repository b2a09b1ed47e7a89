"""`python -m bench.sim_batch`: batch work beside a live trace, and the same trace without it.

    python -m bench.sim_batch --data DATA [--seeds 0 1 2] [--output FILE]

A tenant of class batch keeps LINES lines under way for each model, as whoever runs a batch does: a
new one comes when one ends. Each seed is a world and a cut of the trace; it is simulated without
that tenant, with it, and, to see what the class is worth, with the same lines as ordinary requests
of a tenant like the others. Figures are of live requests that came after WARM_S, and of devices
between WARM_S and the end of the trace:

    first token p50, p99   of live requests, in seconds from arrival
    per token p50, p99     of live requests
    use                    busy time of the devices over all time
    tokens                 prompt and generated tokens of requests that ended, live and batch, a
                           device-hour

Goals: p99 of the first token at most 1.05 times that without, use at least 95 %.
"""

import argparse
import json
import logging
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.sim.client import SimClient
from bench.sim.columns import Slo, columns
from bench.sim.devices import find_device
from bench.sim.run import Simulation
from bench.sim.spec import parse_workload
from bench.sim.types import Arrival, Run, SimTenant, World
from bench.sim.workloads import open_workload
from bench.sim.worlds import make_models, make_tenants

WARM_S = 20.0
LIVE_TENANTS = 8
LINES = 64
"""Lines under way for each model."""
OWN_TEXTS = 1 << 40
"""Contents of lines: no trace has so many."""
WAYS = ("without", "batch", "ordinary")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A live workload on a world of `models` models on `workers` devices."""

    trace: str
    workers: int
    models: int
    mix: str


SCENARIOS: Mapping[str, Scenario] = {
    "azure": Scenario("azure2023_conv:rate=2,minutes=2,max_tokens=exact", 1, 2, "large"),
    "servegen": Scenario("servegen:rate=2,minutes=2,max_tokens=exact", 1, 2, "large"),
    "swaps": Scenario("azure2023_conv:rate=1,minutes=4,max_tokens=exact", 1, 6, "large"),
}


class Backlog:
    """Lines of one tenant, LINES under way for each model until `until_s`."""

    def __init__(self, simulation: Simulation, tenant: int, seed: int, until_s: float) -> None:
        self._simulation = simulation
        self._tenant = tenant
        self._until_s = until_s
        self._rng = random.Random(f"lines {seed}")
        self._num_lines = 0
        simulation.on_end = self._ended
        simulation.loop.at(1.0, self._begin)

    def _begin(self) -> None:
        for model in range(len(self._simulation.run.world.models)):
            for _ in range(LINES):
                self._send(model)

    def _ended(self, client: SimClient) -> None:
        now_s = self._simulation.loop.now_s
        if client.arrival.tenant != self._tenant or now_s >= self._until_s:
            return
        wait_s = 0.0 if client.outcome in ("stop", "length") else 1.0
        self._simulation.loop.after(wait_s, lambda: self._send(client.arrival.model))

    def _send(self, model: int) -> None:
        """Prompts of 400 tokens in the median, answers of 200."""
        self._num_lines += 1
        prompt = min(4000, round(self._rng.lognormvariate(6.0, 0.6)) + 1)
        output = min(1500, round(self._rng.lognormvariate(5.3, 0.5)) + 1)
        pieces = ((OWN_TEXTS + self._num_lines, prompt),)
        now_s = self._simulation.loop.now_s
        self._simulation.send(Arrival(now_s, self._tenant, model, pieces, output, output))


def simulate(scenario: Scenario, data: Path, seed: int, way: str) -> dict[str, float]:
    """One run."""
    device = find_device("h100")
    line_tenant = SimTenant("lines", is_batch=way == "batch")
    world = World(
        workers=scenario.workers,
        device=device.figures,
        models=make_models(scenario.models, seed, scenario.mix),
        tenants=(*make_tenants(LIVE_TENANTS, seed), line_tenant),
        seed=seed,
        settings={**device.settings, "max_queue_per_tenant": 512, "max_queue_total": 4096},
    )
    spec = parse_workload(scenario.trace, data)
    arrivals = open_workload(spec, LIVE_TENANTS, scenario.models, seed)
    simulation = Simulation(world, arrivals)
    assert spec.minutes is not None
    until_s = 60.0 * spec.minutes
    if way != "without":
        Backlog(simulation, LIVE_TENANTS, seed, until_s)
    simulation.start()
    simulation.loop.run(until_s)
    at_end = simulation.run.samples[-1]
    num_ended = len(simulation.run.records)
    simulation.on_end = lambda client: None
    simulation.loop.run(until_s + 120.0)
    return figures(simulation.finish(), num_ended, until_s, at_end.at_s)


def figures(run: Run, num_ended: int, until_s: float, sampled_s: float) -> dict[str, float]:
    """`num_ended`: requests that had ended at `until_s`."""
    rows = columns(run.records, Slo())
    live = (rows.tenant < LIVE_TENANTS) & (rows.arrival_s >= WARM_S) & (rows.arrival_s < until_s)
    ended = (np.arange(len(rows.tenant)) < num_ended) & (rows.ended_s >= WARM_S) & rows.finished
    tokens = (rows.prompt_tokens + rows.output_tokens)[ended]
    of_live = (rows.tenant < LIVE_TENANTS)[ended]
    first = next(sample for sample in run.samples if sample.at_s >= WARM_S)
    last = next(sample for sample in run.samples if sample.at_s >= sampled_s)
    hours = run.world.workers * (until_s - WARM_S) / 3600.0
    device_s = run.world.workers * (last.at_s - first.at_s)
    return {
        "live requests": float(live.sum()),
        "live finished": float((live & rows.finished).sum()),
        "first token p50": float(np.nanpercentile(rows.ttft_s[live], 50)),
        "first token p99": float(np.nanpercentile(rows.ttft_s[live], 99)),
        "per token p50": float(np.nanpercentile(rows.tpot_s[live], 50)),
        "per token p99": float(np.nanpercentile(rows.tpot_s[live], 99)),
        "use": (last.busy_s - first.busy_s) / device_s,
        "live tokens an hour": float(tokens[of_live].sum()) / hours,
        "batch tokens an hour": float(tokens[~of_live].sum()) / hours,
        "tokens an hour": float(tokens.sum()) / hours,
        "preemptions": run.counters.get("preemptions", 0.0),
        "swaps": float(len(run.swaps)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a run, and medians over the seeds as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim_batch", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    logging.disable(logging.ERROR)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.scenarios:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
        for seed in options.seeds:
            for way in options.ways:
                runs[way].append(simulate(SCENARIOS[name], options.data, seed, way))
                print(name, seed, way, json.dumps(runs[way][-1]), file=sys.stderr, flush=True)
        found[name] = {way: _medians(each) for way, each in runs.items()}
        if "without" in runs and "batch" in runs:
            ratios = [
                have["first token p99"] / alone["first token p99"]
                for have, alone in zip(runs["batch"], runs["without"], strict=True)
            ]
            found[name]["batch"]["p99 over without"] = statistics.median(ratios)
    text = json.dumps(found, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    sys.exit(main())
