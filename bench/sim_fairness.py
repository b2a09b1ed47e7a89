"""The fairness table: our order against the books' in worlds where tenants are unkind.

    python -m bench.sim_fairness --output sim-fairness.json [--seconds 120] [--scenario quiet ...]
                                 [--policy ours fcfs ...] [--seed 0]
    python -m bench.sim_fairness --output sim-fairness.json --table         prints what is there

Scenarios are those of bench/sim/fair_scenarios.py. A run is simulated until its last arrival; what
is counted ends there, for whoever asks too much still does. Figures of a run:

    gap_tokens    largest difference of two tenants' tokens (answers' twice) over weight, of those
                  compared, between two moments of which both wait all along: the VTC paper's
    gap_s, gap_over_bound   the same in service, and over the bound of docs/fairness.md
    shares        of the service of those compared
    ttft_p99_s    of the first of them; `alone_p99_s` without the others
    tokens_per_s  of all that ended until then. An order chooses whose requests these are, and
                  prompts are cheap beside answers: so this is no measure of what an order loses
    drained_per_s the same of requests that come in the first DRAINED_SHARE of the time, until all
                  have ended: the same requests under every order, and over FCFS's
    loads_s       by tenant: what loads have cost it, less what was paid back
    books_off     (tenants' + system's) / time of the device - 1
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.sim.batches import Floats
from bench.sim.columns import Columns, Slo, columns
from bench.sim.fair_metrics import largest_gap
from bench.sim.fair_scenarios import NAMES, Scenario, make
from bench.sim.run import Simulation
from bench.sim.types import Run

POLICIES = ("ours", "fcfs", "vtc_tokens", "round_robin", "quota:5")
SAMPLE_S = 0.25
WARM_UP_S = 20.0
"""First loads and the first wave are not counted in latencies and shares (of a short run, its first
quarter)."""
DRAINED_SHARE = 0.25

Row = dict[str, Any]


def run_one(name: str, policy: str, seconds: float, seed: int, *, alone: bool = False) -> Row:
    """One scenario under one policy."""
    scenario = make(name, seconds, seed)
    world = scenario.world
    if policy != "ours":
        world.policies["share"] = policy
    simulation = Simulation(world, scenario.arrivals(alone), SAMPLE_S)
    simulation.start()
    simulation.loop.run(scenario.until_s)
    run = simulation.finish()
    rows = columns(run.records, Slo())
    weights = np.array([tenant.weight for tenant in world.tenants])
    counters = run.counters
    warm_s = min(WARM_UP_S, seconds / 4)
    first = (rows.tenant == scenario.tenants[0]) & (rows.arrival_s >= warm_s)
    ttft = rows.ttft_s[first & np.isfinite(rows.ttft_s)]
    gap = largest_gap(run, weights, rows)
    used_s = counters["tenant_device_seconds"] + counters["system_device_seconds"]
    row: Row = {
        "scenario": name,
        "policy": policy,
        "alone": alone,
        "seconds": seconds,
        "seed": seed,
        "ttft_p50_s": _quantile(ttft, 0.5),
        "ttft_p99_s": _quantile(ttft, 0.99),
        "num_first": len(ttft),
        "tokens_per_s": _tokens(run, rows).sum() / seconds,
        "shares": _shares(run, scenario, weights, warm_s),
        "gap_tokens": _gap_tokens(run, rows, scenario, weights, warm_s),
        "gap_s": gap.gap_s if gap else 0.0,
        "gap_over_bound": gap.gap_s / gap.bound_s if gap else 0.0,
        "load_s": max((s.duration_s for s in run.swaps if s.kind == "load"), default=0.0),
        "num_loads": sum(s.kind == "load" for s in run.swaps),
        "loads_s": _loads(simulation),
        "books_off": used_s / counters["busy_seconds"] - 1,
        "utilisation": counters["busy_seconds"] / run.simulated_s,
    }
    if not alone:
        row["drained_per_s"] = _drained_per_s(name, policy, seconds * DRAINED_SHARE, seed)
    return row


def _drained_per_s(name: str, policy: str, seconds: float, seed: int) -> float:
    """Tokens a second until the last of the same requests has ended."""
    scenario = make(name, seconds, seed)
    if policy != "ours":
        scenario.world.policies["share"] = policy
    simulation = Simulation(scenario.world, scenario.arrivals(False), 1.0)
    simulation.start()
    simulation.loop.run(None)
    run = simulation.finish()
    rows = columns(run.records, Slo())
    return float(_tokens(run, rows).sum() / rows.ended_s.max())


def _quantile(values: Floats, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def _loads(simulation: Simulation) -> dict[str, float]:
    assert simulation.gateway is not None
    return dict(simulation.gateway.dispatcher.snapshot().accounts.load_s)


def _tokens(run: Run, rows: Columns) -> Floats:
    """By request that has ended: prompt tokens, and the answer's twice."""
    tokens = rows.prompt_tokens + 2.0 * rows.output_tokens
    return np.where(np.isfinite(rows.first_token_s), tokens, 0.0)


def _shares(run: Run, scenario: Scenario, weights: Floats, warm_s: float) -> list[float]:
    """Of the service after the warm-up, over what their weights say: 1 where it is as it should."""
    served = np.zeros(len(weights))
    begin = served.copy()
    for sample in run.samples:
        for tenant, seconds in sample.service_s.items():
            served[tenant] = seconds
        if sample.at_s <= warm_s:
            begin[:] = served
    gained = (served - begin)[list(scenario.tenants)]
    due = weights[list(scenario.tenants)]
    return list((gained / max(gained.sum(), 1e-9)) / (due / due.sum()))


def _gap_tokens(
    run: Run, rows: Columns, scenario: Scenario, weights: Floats, warm_s: float
) -> float:
    """As fair_metrics.largest_gap, in tokens and on its samples.

    A prompt counts with the first token, an answer evenly between its first token and its end;
    requests that run at the end of the simulation have no record and count for nobody.
    """
    times = np.array([sample.at_s for sample in run.samples])
    had = np.zeros((len(weights), len(times)))
    for number in np.flatnonzero(np.isfinite(rows.first_token_s)).tolist():
        begin, end = rows.first_token_s[number], rows.ended_s[number]
        done = np.clip((times - begin) / max(end - begin, 1e-9), 0.0, 1.0)
        tokens = rows.prompt_tokens[number] * (times >= begin)
        had[rows.tenant[number]] += tokens + 2 * rows.output_tokens[number] * done
    had /= weights[:, None]
    best = 0.0
    for place, one in enumerate(scenario.tenants):
        for other in scenario.tenants[place + 1 :]:
            low = high = None
            for number, sample in enumerate(run.samples):
                if not {one, other} <= set(sample.backlogged) or sample.at_s < warm_s:
                    low = high = None
                    continue
                apart = had[one, number] - had[other, number]
                low = apart if low is None else min(low, apart)
                high = apart if high is None else max(high, apart)
                best = max(best, high - low)
    return best


def table(rows: Sequence[Row]) -> str:
    """For people."""
    fcfs = {r["scenario"]: r["drained_per_s"] for r in rows if r["policy"] == "fcfs"}
    alone = {r["scenario"]: r["ttft_p99_s"] for r in rows if r["alone"]}
    head = "scenario     policy       p99 TTFT   /alone  gap tokens   gap s  /bound  tok/s/FCFS  "
    lines = [head + "share/due              loads paid             books"]
    for row in rows:
        name, p99 = row["scenario"], row["ttft_p99_s"]
        over = p99 / alone[name] if p99 and alone.get(name) else float("nan")
        own = row.get("drained_per_s", float("nan"))
        through = own / fcfs[name] if fcfs.get(name) else float("nan")
        shares = " ".join(f"{share:.3f}" for share in row["shares"])
        loads = " ".join(f"{t}:{s:.2f}" for t, s in sorted(row["loads_s"].items()))
        lines.append(
            f"{name:<12} {row['policy'] + (' alone' if row['alone'] else ''):<12} "
            f"{p99 or float('nan'):8.3f} {over:8.2f} {row['gap_tokens']:11.0f} "
            f"{row['gap_s']:7.2f} {row['gap_over_bound']:7.2f} {through:11.3f}  {shares:<22} "
            f"{loads:<22} {row['books_off']:+.1e}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the output file lacks, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim_fairness", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scenario", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    rows: list[Row] = []
    if options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    have = {(row["scenario"], row["policy"], row["alone"]) for row in rows}
    wanted = [(name, policy, False) for name in options.scenario for policy in options.policy]
    wanted += [(name, "ours", True) for name in options.scenario]
    for name, policy, alone in [] if options.table else wanted:
        if (name, policy, alone) in have:
            continue
        rows.append(run_one(name, policy, options.seconds, options.seed, alone=alone))
        rows.sort(key=lambda row: NAMES.index(row["scenario"]))
        text = json.dumps({"rows": rows}, indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
