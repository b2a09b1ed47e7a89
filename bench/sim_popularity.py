"""The popularity sweep: our eviction and placement against each baseline, over worlds and traces.

    python -m bench.sim_popularity DATA --output sweep.json --jobs 2
    python -m bench.sim_popularity DATA --output sweep.json --trace servegen:rate=4,requests=3000 \
        --memory 0.2 0.4 --models 20 40 --seeds 0 1 2 --policy ours evict=lru evict=belady
    python -m bench.sim_popularity --output sweep.json --table          prints what is there

A world is a trace, a number of models and of workers, and a size of the device: all workers'
memory together as a share of the catalog's bytes. Each world is run with each policy on the same
requests. What has been run is in the output file and is not run again, so a sweep that was
interrupted, or is asked for more, goes on.

    ours, evict=NAME, place=NAME          the policies of bench/sim/baselines
    ours/gather_s=1,eviction_margin=2     the same with settings of gateway or engine, or with
                                          parameters of our eviction

All baselines have our guards and our bound of starvation (bench/sim/baselines/eviction.py). The
table has reload seconds (loads of what the worker had before), all load seconds, first tokens,
waits, goodput within the SLO and refusals, then ours against each other policy over all worlds.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.sim.baselines.choose import OURS, parse_policies
from bench.sim.columns import Slo
from bench.sim.devices import find_device
from bench.sim.metrics import measure
from bench.sim.packs import SimPacks
from bench.sim.run import simulate
from bench.sim.spec import parse_workload
from bench.sim.types import DeviceFigures, SimModel, World
from bench.sim.workloads import open_workload
from bench.sim.worlds import MIXES, make_models, make_tenants

TRACES = ("arena27_multimodel:requests=3000", "servegen:rate=3,requests=3000")
POLICIES = (
    OURS,
    "evict=lru",
    "evict=lfu",
    "evict=size",
    "evict=idle",
    "evict=belady",
    "evict=never",
    "place=static",
)
REFERENCE = "evict=lru"
BOUND = "evict=belady"
KV_SHARE = 0.25
"""A device holds its largest model and this share of that for its KV, whatever `--memory` says."""

Figures = dict[str, float]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `memory`, `host`: shares of the catalog's bytes, over all workers together."""

    trace: str
    models: int
    mix: str
    workers: int
    memory: float
    host: float
    device: str
    tenants: int
    seed: int
    policy: str

    @property
    def key(self) -> str:
        """Its name in the output file."""
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def place(self) -> tuple[object, ...]:
        """The world, whatever the seed and the policy."""
        return tuple(v for k, v in asdict(self).items() if k not in ("seed", "policy"))


def parse_policy(text: str) -> tuple[dict[str, str], dict[str, object]]:
    """Policies by kind, and settings. Raises ValueError that says what there is."""
    name, _, more = text.partition("/")
    policies: dict[str, str] = {}
    for part in name.split("+"):
        kind, equals, chosen = part.partition("=")
        if part != OURS:
            if not equals:
                raise ValueError(f"{text!r}: write {OURS}, evict=NAME or place=NAME")
            policies[kind] = chosen
    parse_policies(policies)
    settings: dict[str, object] = {}
    for item in filter(None, more.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: write NAME=VALUE after the slash")
        settings[key] = json.loads(value)
    return policies, settings


def make_world(cell: Cell) -> World:
    """Devices cut to the cell's share of its catalog."""
    policies, settings = parse_policy(cell.policy)
    models = make_models(cell.models, cell.seed, cell.mix)
    device = find_device(cell.device)
    return World(
        workers=cell.workers,
        device=_cut(device.figures, models, cell),
        models=models,
        tenants=make_tenants(cell.tenants, cell.seed),
        seed=cell.seed,
        settings={**device.settings, **settings},
        policies=policies,
    )


def _cut(device: DeviceFigures, models: Sequence[SimModel], cell: Cell) -> DeviceFigures:
    packs = SimPacks(models)
    sizes = [packs.pack(number).index.total_bytes for number in range(len(models))]
    least = max(sizes) * (1 + KV_SHARE)
    memory = max(least, cell.memory * sum(sizes) / cell.workers)
    host = cell.host * sum(sizes) / cell.workers
    return replace(device, memory_bytes=int(memory), host_bytes=int(host))


def run_cell(cell: Cell, data: Path | None, slo: Slo) -> Figures:
    """Simulate it; the figures of the table."""
    logging.disable(logging.ERROR)
    world = make_world(cell)
    spec = parse_workload(cell.trace, data)
    sizes = (len(world.tenants), len(world.models), world.seed)
    told = world.policies.get("evict") == "belady"
    run = simulate(
        world,
        open_workload(spec, *sizes),
        future=open_workload(spec, *sizes) if told else None,
    )
    tree, _ = measure(run, slo)
    swaps, requests = tree["swaps"], tree["requests"]
    ttft, queue = tree["latency_s"]["ttft"], tree["latency_s"]["queue"]
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
        "ttft_p50_s": ttft["p50"] if ttft else math.nan,
        "ttft_p99_s": ttft["p99"] if ttft else math.nan,
        "queue_mean_s": queue["mean"] if queue else math.nan,
        "queue_p99_s": queue["p99"] if queue else math.nan,
        "queue_max_s": queue["max"] if queue else math.nan,
        "utilisation": tree["device"]["utilisation"] or 0.0,
        "simulated_s": run.simulated_s,
    }


def sweep(
    cells: Iterable[Cell], data: Path | None, slo: Slo, jobs: int, output: Path
) -> dict[str, Row]:
    """Run what the output file lacks; it is written after every cell."""
    rows = read_rows(output)
    left = [cell for cell in cells if cell.key not in rows]
    for cell, figures in _figures(left, data, slo, jobs):
        rows[cell.key] = {**asdict(cell), "figures": figures}
        output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"slo": asdict(slo), "cells": _sorted(rows)}, indent=1)
        output.write_text(text + "\n", encoding="utf-8")
        print(f"{cell.key}: reload {figures['reload_s']:.1f} s", file=sys.stderr, flush=True)
    return rows


def _figures(
    cells: Sequence[Cell], data: Path | None, slo: Slo, jobs: int
) -> Iterator[tuple[Cell, Figures]]:
    if jobs < 2:
        for cell in cells:
            yield cell, run_cell(cell, data, slo)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(run_cell, cell, data, slo): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()


def read_rows(output: Path) -> dict[str, Row]:
    """Cells of an earlier sweep, by key; none where there is no file."""
    if not output.exists():
        return {}
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    return {Cell(**{k: v for k, v in c.items() if k != "figures"}).key: c for c in cells}


def _sorted(rows: Mapping[str, Row]) -> list[Row]:
    """Figures to six digits: the last ones differ between machines."""
    return [
        {**rows[key], "figures": {k: float(f"{v:.6g}") for k, v in rows[key]["figures"].items()}}
        for key in sorted(rows)
    ]


# The table.

COLUMNS = (
    ("reload_s", "reload s", "{:9.1f}"),
    ("load_s", "load s", "{:9.1f}"),
    ("ttft_p50_s", "TTFT p50", "{:9.3f}"),
    ("ttft_p99_s", "p99", "{:9.2f}"),
    ("queue_p99_s", "wait p99", "{:9.2f}"),
    ("goodput_tok_s", "goodput", "{:9.1f}"),
    ("good_share", "good", "{:9.3f}"),
    ("refused", "refused", "{:9.1f}"),
)


def table(cells: Iterable[Cell], rows: Mapping[str, Row]) -> str:
    """A block for each world (means over its seeds), then ours against the others over all."""
    worlds: dict[tuple[object, ...], dict[str, list[Figures]]] = {}
    for cell in cells:
        row = rows.get(cell.key)
        if row is not None:
            found = worlds.setdefault(cell.place, {}).setdefault(cell.policy, [])
            found.append(row["figures"])
    lines = []
    means: dict[tuple[object, ...], dict[str, Figures]] = {}
    for place, policies in worlds.items():
        trace, models, mix, workers, memory, host, device, _ = place
        lines.append(
            f"{trace}: {models} models ({mix}), {workers} x {device}, memory {memory:g} and host "
            f"tier {host:g} of the catalog"
        )
        lines.append(" " * 34 + "".join(f"{title:>10}" for _, title, _ in COLUMNS))
        means[place] = {name: _mean(found) for name, found in policies.items()}
        for name, figures in means[place].items():
            cut = [form.format(figures[key]).rjust(10) for key, _, form in COLUMNS]
            lines.append(f"  {name:<32}" + "".join(cut))
        lines.append("")
    return "\n".join(lines + _verdicts(means))


def _mean(found: Sequence[Figures]) -> Figures:
    return {key: sum(figures[key] for figures in found) / len(found) for key in found[0]}


def _verdicts(means: Mapping[tuple[object, ...], Mapping[str, Figures]]) -> list[str]:
    """Each kind of ours against every baseline, over the worlds that have both."""
    names = list(dict.fromkeys(name for policies in means.values() for name in policies))
    ours = [name for name in names if name.split("/")[0] == OURS]
    lines = [
        "reload seconds (all worlds together), p99 of the first token (geometric mean), goodput:"
    ]
    for mine in ours:
        for other in (
            name for name in names if name != mine and (name not in ours or name == OURS)
        ):
            pairs = [(p[mine], p[other]) for p in means.values() if mine in p and other in p]
            if not pairs:
                continue
            lines.append(
                f"  {mine} / {other}: reload {_ratio(pairs, 'reload_s'):.3f}, "
                f"p99 {_geometric(pairs, 'ttft_p99_s'):.3f}, "
                f"wait {_ratio(pairs, 'queue_mean_s'):.3f}, "
                f"goodput {_ratio(pairs, 'goodput_tok_s'):.3f} ({len(pairs)} worlds)"
            )
        both = [p for p in means.values() if {mine, REFERENCE, BOUND} <= p.keys()]
        if both:
            won = sum(p[REFERENCE]["reload_s"] - p[mine]["reload_s"] for p in both)
            most = sum(p[REFERENCE]["reload_s"] - p[BOUND]["reload_s"] for p in both)
            share = f"{won / most:.0%}" if most > 0 else "none"
            lines.append(f"  {mine}: {share} of what {BOUND} saves of {REFERENCE}'s reload seconds")
    return lines


def _ratio(pairs: Sequence[tuple[Figures, Figures]], key: str) -> float:
    below = sum(other[key] for _, other in pairs)
    return sum(mine[key] for mine, _ in pairs) / below if below else math.nan


def _geometric(pairs: Sequence[tuple[Figures, Figures]], key: str) -> float:
    logs = [math.log(mine[key] / other[key]) for mine, other in pairs if mine[key] and other[key]]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


# The command.


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Every combination of what was asked for."""
    return [
        Cell(
            trace=trace,
            models=models,
            mix=options.mix,
            workers=workers,
            memory=memory,
            host=options.host,
            device=options.device,
            tenants=options.tenants,
            seed=seed,
            policy=policy,
        )
        for trace in options.trace
        for models in options.models
        for workers in options.workers
        for memory in options.memory
        for policy in options.policy
        for seed in options.seeds
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 it makes no sense."""
    options = _parser().parse_args(argv)
    slo = Slo(options.slo_ttft, options.slo_tpot)
    try:
        for policy in options.policy:
            parse_policy(policy)
        for trace in options.trace:
            parse_workload(trace, options.data)
        cells = cells_of(options)
    except ValueError as error:
        print(f"sim_popularity: {error}", file=sys.stderr)
        return 2
    if options.table:
        rows = read_rows(options.output)
    else:
        rows = sweep(cells, options.data, slo, options.jobs, options.output)
    print(table(cells, rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sim_popularity")
    add = parser.add_argument
    add("data", type=Path, nargs="?", metavar="DATA", help="folder of the traces")
    add("--output", type=Path, required=True, metavar="FILE", help="JSON, kept from run to run")
    add("--table", action="store_true", help="run nothing, print what is there")
    add("--trace", nargs="+", default=list(TRACES), metavar="WORDS", help="docs/simulator.md")
    add("--models", type=int, nargs="+", default=[25], metavar="N", help="hosted models (25)")
    add("--mix", choices=sorted(MIXES), default="mixed", help="their shapes (mixed)")
    add("--workers", type=int, nargs="+", default=[1], metavar="N", help="workers (1)")
    add("--memory", type=float, nargs="+", default=[0.2, 0.35, 0.5], metavar="SHARE")
    add("--host", type=float, default=0.5, metavar="SHARE", help="host tier (0.5)")
    add("--device", default="h100", metavar="NAME|FILE", help="whose figures, its memory cut")
    add("--tenants", type=int, default=8, metavar="N", help="tenants (8)")
    add("--seeds", type=int, nargs="+", default=[0, 1], metavar="N", help="of world and workload")
    add("--policy", nargs="+", default=list(POLICIES), metavar="NAME[/KEY=VALUE,...]")
    add("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    add("--slo-ttft", type=float, default=Slo().ttft_s, metavar="SECONDS", help="first token")
    add("--slo-tpot", type=float, default=Slo().tpot_s, metavar="SECONDS", help="each further one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
