"""The same arrivals on the real server and in the simulator: how right the simulator is.

A recorded trace, thinned out and with its lengths scaled for a small machine, asks some models of
two shapes with room for all but one of them, so that they are swapped. The server gets it over
HTTP, each request at its time, streaming; answers have the tokens of the trace to the last one. The
simulator gets the same settings and the same arrivals, with prompts as long as the server counted
them (the chat template is in them). Before the trace each model is asked once, on both sides, and
not counted: modules and tokenizers are built then.

`worker_cpu_s` is the CPU time that the worker took in reality and the device's time in the
simulator: where these agree and latencies do not, the worker did not have its core when it wanted
it. The kernel says what share of that time it had (`core_share`), and a second simulation has the
device at that share of its speed: what is wrong with it is not the neighbours' fault.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, processes, servers, shapes, stats
from bench.client import ChatRequest, Target
from bench.prompts import PromptMaker
from bench.sim.devices import Device, read_device, slowed
from bench.sim.packs import SimPacks
from bench.sim.run import simulate
from bench.sim.spec import parse_workload
from bench.sim.types import OUTCOMES, Arrival, SimModel, SimTenant, World
from bench.sim.workloads import open_workload
from bench.sim_real import LoggedSwap, Played, pin_server, pin_this, play, swaps

MODELS = (
    SimModel("large-a", "HuggingFaceTB/SmolLM2-135M", "float32"),
    SimModel("large-b", "HuggingFaceTB/SmolLM2-135M", "float32"),
    SimModel("small", "karpathy/tinyllamas-42M", "float32"),
)
NUM_TENANTS = 2
KV_BYTES = 192 << 20
"""Room for KV beside the weights."""
TRACE = "azure2023_conv:rate=1.4,requests=60,scale=0.05,max_prompt=200,max_tokens=exact"
GOALS = {"ttft_p50_s": 0.15, "tok_s": 0.15, "ttft_p95_s": 0.30}
PAGE_BYTES = 1 << 20
WARM_UP_GAP_S = 5.0
"""From one warm-up request to the next, and to the trace."""
WARM_UP_TOKENS = 8
SAME_S = 1e-6


@dataclass(frozen=True, slots=True)
class Plan:
    """What both sides are given."""

    spec: str
    arrivals: list[Arrival]
    settings: dict[str, int]
    start_s: float


def make_plan(spec: str, data: Path | None, seed: int, num_workers: int = 1) -> Plan:
    """Warm-ups and the trace behind them. Raises ValueError, OSError."""
    tokens = WARM_UP_TOKENS
    arrivals = [
        Arrival(number * WARM_UP_GAP_S, 0, number, ((number, tokens),), tokens, tokens)
        for number in range(len(MODELS))
    ]
    start_s = len(MODELS) * WARM_UP_GAP_S
    for arrival in open_workload(parse_workload(spec, data), NUM_TENANTS, len(MODELS), seed):
        arrivals.append(arrival._replace(at_s=arrival.at_s + start_s))
    sizes = [SimPacks([model]).pack(0).index.total_bytes for model in MODELS]
    # All but the largest fit, with the KV of what runs; rounding to pages is half a page a segment.
    # Of several workers each has room for the largest alone, so that models are swapped there, too.
    room = sum(sizes) - max(sizes) + KV_BYTES
    if num_workers > 1:
        room = max(sizes) + min(KV_BYTES, min(sizes) * 3 // 4)
    settings = {
        "device_budget_bytes": room // PAGE_BYTES * PAGE_BYTES,
        "page_bytes": PAGE_BYTES,
        "host_tier_bytes": 0,
        "device_reserve_bytes": 0,
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_batch_tokens": 256,
        "queue_timeout_s": 600,
        "num_workers": num_workers,
    }
    return Plan(spec, arrivals, settings, start_s)


class Real:
    """The server with its models registered; each run starts it anew."""

    def __init__(self, plan: Plan, data_dir: Path, folders: Sequence[Path]) -> None:
        self._plan = plan
        self._polyhost = servers.Polyhost(data_dir, plan.settings)
        self._makers = [PromptMaker(folder) for folder in folders]
        for model, folder in zip(MODELS, folders, strict=True):
            self._polyhost.add_model(model.name, folder, model.dtype)
        tenants = [f"tenant{number}" for number in range(NUM_TENANTS)]
        self._keys = [self._polyhost.new_key(tenant) for tenant in tenants]
        self._logged = 0

    def run(self, seed: str) -> tuple[dict[str, Any], list[int]]:
        """Its figures, and the prompts' lengths as the server counts them."""
        asks = []
        for index, arrival in enumerate(self._plan.arrivals):
            text = self._makers[arrival.model].prompt(arrival.prompt_tokens, seed, index)
            request = ChatRequest(index, text, arrival.max_tokens)
            asks.append((arrival.at_s, (arrival.tenant, arrival.model), request))
        server = self._polyhost.serve(self._keys[0])
        with server.process:
            worker_pids = pin_server(server)
            targets = {
                (tenant, number): Target(model.name, server.url, model.name, key)
                for tenant, key in enumerate(self._keys)
                for number, model in enumerate(MODELS)
            }
            played = play(targets, asks, server.process.pid, worker_pids)
        log = server.process.read_log()
        new, self._logged = log[self._logged :], len(log)
        errors = sorted({result.error for result in played.results if result.error})
        if errors:
            raise processes.ServerFailed(f"requests failed: {', '.join(errors)}")
        figures = _real_figures(self._plan, played, swaps(new))
        return figures, [result.prompt_tokens for result in played.results]


def simulated(plan: Plan, prompt_tokens: Sequence[int], device: Device) -> dict[str, Any]:
    """The same in modelled time."""
    names = {"device_budget_bytes": "arena_bytes", "device_reserve_bytes": "reserve_bytes"}
    settings: dict[str, object] = {names.get(key, key): v for key, v in plan.settings.items()}
    world = World(
        workers=plan.settings["num_workers"],
        device=device.figures,
        models=MODELS,
        tenants=tuple(SimTenant(f"tenant{number}") for number in range(NUM_TENANTS)),
        settings=dict(device.settings) | settings,
    )
    arrivals = [
        arrival._replace(prompt=((number, tokens),))
        for number, (arrival, tokens) in enumerate(zip(plan.arrivals, prompt_tokens, strict=True))
    ]
    run = simulate(world, arrivals)
    rows = [row for row in run.rows() if run.records.arrival_s[row] >= plan.start_s - SAME_S]
    records = run.records
    failed = {OUTCOMES[records.outcome[row]] for row in rows} - {"length", "stop"}
    if failed:
        raise processes.ServerFailed(f"simulated requests ended by {', '.join(sorted(failed))}")
    loads = [swap for swap in run.swaps if swap.kind == "load" and swap.at_s >= plan.start_s]
    figures = _figures(
        plan,
        [
            (
                records.arrival_s[row],
                records.first_token_s[row],
                records.ended_s[row],
                records.output_tokens[row],
            )
            for row in rows
        ],
        [swap.duration_s for swap in loads],
    )
    # Warm-ups are in it on both sides; what a worker does between steps is in a step's overhead.
    all_loads_s = sum(swap.duration_s for swap in run.swaps if swap.kind == "load")
    return figures | {
        "steps": run.counters["engine_steps"],
        "worker_cpu_s": run.counters["engine_busy_seconds"] + all_loads_s,
    }


def _real_figures(plan: Plan, played: Played, logged: Sequence[LoggedSwap]) -> dict[str, Any]:
    rows: list[tuple[float, float, float, int]] = []
    for arrival, result in zip(plan.arrivals, played.results, strict=True):
        assert result.first_s is not None
        assert result.last_s is not None
        if result.completion_tokens != arrival.max_tokens:
            raise processes.ServerFailed(
                f"{result.completion_tokens} tokens in place of {arrival.max_tokens}"
            )
        if arrival.at_s >= plan.start_s:
            due_s, first_s, last_s = (
                moment - played.start_s for moment in (result.due_s, result.first_s, result.last_s)
            )
            rows.append((due_s, first_s, last_s, result.completion_tokens))
    loads = [swap.seconds for swap in logged if swap.kind == "load"][len(MODELS) :]
    # The server's own first loads are the warm-ups'.
    worker_s = played.cpu_s["worker"]
    return _figures(plan, rows, loads) | {
        "worker_cpu_s": worker_s,
        "core_share": played.core_share,
        "cpu_s": played.cpu_s,
        "with_warm_up_s": played.wall_s,
    }


def _figures(
    plan: Plan, rows: Sequence[tuple[float, float, float, int]], loads: Sequence[float]
) -> dict[str, Any]:
    """Rows are (due, first token, last token, tokens)."""
    rows = sorted(rows)
    ttft = [first - due for due, first, _, _ in rows]
    tpot = [(last - first) / (tokens - 1) for _, first, last, tokens in rows if tokens > 1]
    wall_s = max(last for _, _, last, _ in rows) - plan.start_s
    return {
        "requests": len(rows),
        "tokens": sum(tokens for *_, tokens in rows),
        "wall_s": wall_s,
        "ttft_p50_s": stats.percentile(ttft, 0.5),
        "ttft_p95_s": stats.percentile(ttft, 0.95),
        "tok_s": sum(tokens for *_, tokens in rows) / wall_s,
        "tpot_p50_s": stats.percentile(tpot, 0.5),
        "e2e_p50_s": stats.percentile([last - due for due, _, last, _ in rows], 0.5),
        "loads": len(loads),
        "load_p50_s": statistics.median(loads) if loads else 0.0,
        "ttft_s": [round(value, 4) for value in ttft],
    }


def compare(
    rounds: Sequence[dict[str, Any]], modelled: dict[str, Any], slower: dict[str, Any]
) -> dict[str, Any]:
    """Medians of the real rounds with their spread, beside both simulated figures."""
    found: dict[str, Any] = {}
    for name in (
        *("ttft_p50_s", "ttft_p95_s", "tok_s", "tpot_p50_s"),
        *("e2e_p50_s", "loads", "load_p50_s", "wall_s", "worker_cpu_s"),
    ):
        seen = stats.repeated([float(item[name]) for item in rounds])
        assert seen is not None
        error = modelled[name] / seen["median"] - 1.0 if seen["median"] else None
        goal = GOALS.get(name)
        found[name] = {
            "real": seen,
            "simulated": modelled[name],
            "error": error,
            "simulated_at_share": slower[name],
            "error_at_share": slower[name] / seen["median"] - 1.0 if seen["median"] else None,
            "goal": goal,
            "reached": None if goal is None or error is None else abs(error) <= goal,
        }
    return found


def table(found: dict[str, Any]) -> str:
    """A line a figure."""
    lines = [
        f"{'':<13}{'real':>8}{'(min-max)':>18}{'simulated':>11}{'error':>7}{'goal':>6}"
        f"{'at share':>10}{'error':>7}"
    ]
    for name, row in found.items():
        real_s = row["real"]
        spread = f"({real_s['min']:.3f}-{real_s['max']:.3f})"
        errors = [row["error"], row["error_at_share"]]
        error, other = ("" if value is None else f"{value:+.0%}" for value in errors)
        goal = "" if row["goal"] is None else f"{row['goal']:.0%}"
        missed = " MISSED" if row["reached"] is False else ""
        lines.append(
            f"{name:<13}{real_s['median']:>8.3f}{spread:>18}{row['simulated']:>11.3f}"
            f"{error:>7}{goal:>6}{row['simulated_at_share']:>10.3f}{other:>7}{missed}"
        )
    return "\n".join(lines)


def measure(
    data: Path, device_file: Path, repeats: int, seed: int, work_dir: Path, num_workers: int = 1
) -> dict[str, Any]:
    """Both sides. Raises ServerFailed, TimeoutError, OSError, ValueError."""
    device = read_device(device_file)
    plan = make_plan(TRACE, data, seed, num_workers)
    facts = machine.facts()
    rounds, lengths = _real_rounds(plan, work_dir, repeats, seed)
    modelled = simulated(plan, lengths, device)
    print(f"simulated: {_line(modelled)}", file=sys.stderr)
    share = statistics.median(figures["core_share"] for figures in rounds)
    slower = simulated(plan, lengths, Device(slowed(device.figures, share), device.settings))
    slower["worker_cpu_s"] *= share
    return {
        "benchmark": "sim_compare",
        "machine": facts,
        "trace": plan.spec,
        "settings": plan.settings,
        "models": [[model.name, model.shape, model.dtype] for model in MODELS],
        "device": json.loads(device_file.read_text(encoding="utf-8")),
        "prompt_tokens": lengths,
        "summary": compare(rounds, modelled, slower),
        "core_share": share,
        "rounds": rounds,
        "simulated": modelled,
        "simulated_at_share": slower,
    }


def _real_rounds(
    plan: Plan, work_dir: Path, repeats: int, seed: int
) -> tuple[list[dict[str, Any]], list[int]]:
    pin_this(1)
    rounds: list[dict[str, Any]] = []
    lengths: list[int] = []
    folders = []
    for number, model in enumerate(MODELS):  # a seed for each: two of one shape are two packs
        folders.append(work_dir / f"model-{model.shape.replace('/', '-')}-{number}")
        shapes.build_once(model.shape, folders[-1], number)
    with tempfile.TemporaryDirectory(prefix="data-", dir=work_dir) as data_dir:
        server = Real(plan, Path(data_dir), folders)
        for repeat in range(repeats):
            figures, lengths = server.run(f"{seed}/{repeat}")
            rounds.append(figures)
            print(f"real {repeat + 1}: {_line(figures)}", file=sys.stderr)
    return rounds, lengths


def _line(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3f}" for name, value in figures.items() if isinstance(value, float | int)
    )
