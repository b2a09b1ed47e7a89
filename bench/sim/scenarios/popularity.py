"""A trace over a catalog that does not fit: how often each policy loads a model again.

A world is a trace, a number of models, and a device whose memory is a share of the catalog's bytes
(its host tier half of them). All baselines have our guards and our bound of starvation
(bench/sim/baselines/eviction.py). `reload_s` are loads of what the worker had before.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.sim.baselines.choose import OURS, Policy
from bench.sim.columns import Slo
from bench.sim.devices import find_device
from bench.sim.metrics import measure
from bench.sim.packs import SimPacks
from bench.sim.run import simulate
from bench.sim.scenarios.options import Figures, Options
from bench.sim.spec import parse_workload
from bench.sim.types import World
from bench.sim.workloads import open_workload
from bench.sim.worlds import make_models, make_tenants
from bench.stats import percentile

DEVICE, NUM_TENANTS = "h100", 8
HOST_SHARE = 0.5
KV_SHARE = 0.25
"""A device holds its largest model and this share of that for its KV, whatever its memory is."""
NUM_DRAWS = 2000
REFERENCE, BOUND = "evict=lru", "evict=belady"
POLICIES: tuple[str, ...] = (
    OURS,
    REFERENCE,
    "evict=lfu",
    "evict=size",
    "evict=idle",
    BOUND,
    "evict=never",
    "place=static",
)
COLUMNS: tuple[str, ...] = (
    "reload_s",
    "load_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "queue_p99_s",
    "goodput_tok_s",
    "good_share",
    "refused",
)


def names(options: Options) -> list[str]:
    """Every combination. Raises ValueError for a trace that is none."""
    for trace in options.traces:
        parse_workload(trace, options.data)
    return [
        f"popularity {trace} models={models} memory={memory:g}"
        for trace in options.traces
        for models in options.models
        for memory in options.memory
    ]


def make_world(num_models: int, memory: float, mix: str, policy: Policy, seed: int) -> World:
    """A device cut to its share of the catalog."""
    models = make_models(num_models, seed, mix)
    packs = SimPacks(models)
    sizes = [packs.pack(number).index.total_bytes for number in range(num_models)]
    memory_bytes = max(max(sizes) * (1 + KV_SHARE), memory * sum(sizes))
    device = find_device(DEVICE)
    return World(
        workers=1,
        device=replace(
            device.figures,
            memory_bytes=int(memory_bytes),
            host_bytes=int(HOST_SHARE * sum(sizes)),
        ),
        models=models,
        tenants=make_tenants(NUM_TENANTS, seed),
        seed=seed,
        settings={**device.settings, **policy.settings},
        policies=dict(policy.names),
    )


def run(name: str, policy: Policy, seed: int, options: Options) -> Figures:
    """One world under one policy."""
    _, trace, models, memory = name.split()
    num_models, share = int(models.partition("=")[2]), float(memory.partition("=")[2])
    world = make_world(num_models, share, options.mix, policy, seed)
    spec = parse_workload(trace, options.data)
    sizes = (len(world.tenants), len(world.models), world.seed)
    told = world.policies.get("evict") == "belady"
    future = open_workload(spec, *sizes) if told else None
    run = simulate(world, open_workload(spec, *sizes), future=future)
    tree, _ = measure(run, Slo())
    swaps, requests = tree["swaps"], tree["requests"]
    ttft, queue = tree["latency_s"]["ttft"] or {}, tree["latency_s"]["queue"] or {}
    return {
        "requests": requests["num"],
        "finished": requests["finished"],
        "refused": tree["refused"]["num"],
        "good_share": requests["good_share"] or 0.0,
        "goodput_tok_s": tree["throughput"]["goodput_tok_s"] or 0.0,
        "loads": swaps["loads"],
        "load_s": swaps["load_s"],
        "reloads": swaps["reloads"],
        "reload_s": swaps["reload_s"],
        "ttft_p50_s": ttft.get("p50"),
        "ttft_p99_s": ttft.get("p99"),
        "queue_mean_s": queue.get("mean"),
        "queue_p99_s": queue.get("p99"),
    }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each kind of ours against every baseline, over the worlds and seeds that have both."""
    by_policy: dict[str, dict[object, Mapping[str, Any]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], {})[row["scenario"], row["seed"]] = row
    ours = [name for name in by_policy if name.split("/")[0] == OURS]
    lines = [
        "reload seconds, wait, goodput (all worlds together), p99 of the first token (geometric "
        "mean); behind each 95 % of a bootstrap over the runs:"
    ]
    for mine in ours:
        for other in by_policy:
            if other == mine or (other in ours and other != OURS):
                continue
            pairs = list(_pairs(by_policy[mine], by_policy[other]))
            if pairs:
                figures = ", ".join(
                    f"{word} {_with_interval(pairs, ratio, key)}"
                    for word, ratio, key in (
                        ("reload", _ratio, "reload_s"),
                        ("p99", _geometric, "ttft_p99_s"),
                        ("wait", _ratio, "queue_mean_s"),
                        ("goodput", _ratio, "goodput_tok_s"),
                    )
                )
                lines.append(f"  {mine} / {other}: {figures} ({len(pairs)} runs)")
        lines += _saved(by_policy, mine)
    return lines


def _saved(by_policy: Mapping[str, Mapping[object, Mapping[str, Any]]], mine: str) -> Iterator[str]:
    """How much of what the bound saves of the reference's reload seconds."""
    least, most = by_policy.get(REFERENCE, {}), by_policy.get(BOUND, {})
    both = [place for place in by_policy[mine] if place in least and place in most]
    if both:
        reload_s = [
            sum(rows[place]["reload_s"] for place in both)
            for rows in (least, by_policy[mine], most)
        ]
        won, could = reload_s[0] - reload_s[1], reload_s[0] - reload_s[2]
        share = f"{won / could:.0%}" if could > 0 else "none"
        yield f"  {mine}: {share} of what {BOUND} saves of {REFERENCE}'s reload seconds"


Pairs = list[tuple[Mapping[str, Any], Mapping[str, Any]]]


def _pairs(
    mine: Mapping[object, Mapping[str, Any]], other: Mapping[object, Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((row, other[place]) for place, row in mine.items() if place in other)


def _with_interval(pairs: Pairs, ratio: Callable[[Pairs, str], float], key: str) -> str:
    """The ratio, and 95 % of what it is over as many pairs drawn with replacement."""
    draw = random.Random(0)
    drawn = (ratio(draw.choices(pairs, k=len(pairs)), key) for _ in range(NUM_DRAWS))
    known = [value for value in drawn if not math.isnan(value)]
    if not known:
        return "-"
    low, high = percentile(known, 0.025), percentile(known, 0.975)
    return f"{ratio(pairs, key):.3f} ({low:.3f} to {high:.3f})"


def _ratio(pairs: Pairs, key: str) -> float:
    both = [(mine[key], other[key]) for mine, other in pairs if None not in (mine[key], other[key])]
    below = sum(theirs for _, theirs in both)
    return sum(ours for ours, _ in both) / below if below else math.nan


def _geometric(pairs: Pairs, key: str) -> float:
    logs = [math.log(mine[key] / other[key]) for mine, other in pairs if mine[key] and other[key]]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
