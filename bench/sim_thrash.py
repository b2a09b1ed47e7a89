"""Two models that do not fit together, asked for alternately: what the load budget makes of it.

    python -m bench.sim_thrash --output bench/results/sim-thrash.json [--seconds 100]

One device holds one of two models. They are asked for in turn by one tenant, or by two tenants at
once, each for one of them, at several rates, open loop; loads come from host memory or from the
disk. The product's dispatcher and engine run in simulated time. Figures of each case:

    swap_share     load seconds over all of the time; the budget is `max_load_share`, and over so
                   short a time `allowed_share`
    wait_max_s     the longest wait in the queue of a request that was served
    bound_s        what a wait may be: the bound of gathering, then the budget's pause after a load
                   of that length, the drain of the other, and the load
    refused_early  answered 503 before their time in the queue was up, with the expected time
    eta_error_s    of these: the expected time in the message less the time until the model really
                   was there; `retry_s` is what retry-after told, on purpose a little earlier
    wrongly_early  of these: the model was there before their time in the queue would have been up
    timeouts       answered 503 when their time in the queue was up
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.sim.client import SimClient
from bench.sim.devices import find_device
from bench.sim.packs import SimPacks
from bench.sim.run import Simulation
from bench.sim.types import Arrival, SimModel, SimTenant, World
from gateway.policy.load_budget import BURST_S
from gateway.settings import Settings

SHAPE = "meta-llama/Llama-3.1-8B"
RATES = (0.5, 2.0, 8.0)
KV_SHARE = 0.4
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 40
TIERS = ("host", "disk")
TENANTS = (1, 2)
TIMEOUTS_S = (60.0, 10.0)
SHOWN = (
    "swap_share",
    "wait_p50_s",
    "wait_max_s",
    "ttft_p99_s",
    "served",
    "refused_early",
    "eta_error_s_p50",
    "eta_error_s_p95",
    "wrongly_early",
    "timeouts",
)
_EXPECTED = re.compile(r"expected to be loaded in (\d+) s")
POLICIES: dict[str, dict[str, object]] = {
    "ours": {},
    "no bound": {"gather_wait_s": 0.0, "max_load_share": 1.0},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    tier: str
    tenants: int
    rate: float
    timeout_s: float
    policy: str


@dataclass(slots=True)
class Refusal:
    """A 503: when, in how long the model was said to be there, in how long to ask again, and when
    its time in the queue would have been up."""

    model: int
    at_s: float
    eta_s: float
    retry_s: float
    deadline_s: float
    early: bool


@dataclass(slots=True)
class Seen:
    """What clients saw."""

    refusals: list[Refusal] = field(default_factory=list)


def make_world(case: Case) -> World:
    """A device with room for one of the two models and its KV."""
    models = tuple(SimModel(name, SHAPE) for name in ("a", "b"))
    size = SimPacks(models).pack(0).index.total_bytes
    device = find_device("h100").figures
    host_bytes = 3 * size if case.tier == "host" else 0
    return World(
        workers=1,
        device=replace(device, memory_bytes=int(size * (1 + KV_SHARE)), host_bytes=host_bytes),
        models=models,
        tenants=tuple(SimTenant(f"t{number}") for number in range(case.tenants)),
        settings={"queue_timeout_s": case.timeout_s, **POLICIES[case.policy]},
    )


def arrivals(case: Case, seconds: float) -> list[Arrival]:
    """The models in turn, evenly spaced; each tenant has its model where there are two."""
    return [
        Arrival(
            at_s=1.0 + number / case.rate,
            tenant=number % case.tenants,
            model=number % 2,
            prompt=((number, PROMPT_TOKENS),),
            output_tokens=OUTPUT_TOKENS,
            max_tokens=OUTPUT_TOKENS + 1,
        )
        for number in range(round(seconds * case.rate))
    ]


def run_case(case: Case, seconds: float) -> dict[str, Any]:
    """Simulate it; the figures of the table."""
    world = make_world(case)
    seen = Seen()
    simulation = Simulation(world, arrivals(case, seconds))

    def ended(client: SimClient) -> None:
        if client.outcome != "refused":
            return
        now_s, deadline_s = simulation.loop.now_s, client.arrival.at_s + case.timeout_s
        early = now_s < deadline_s - 1e-6
        told = _EXPECTED.search(client.error)
        eta_s, retry_s = float(told[1]) if told else 0.0, client.retry_after_s or 0.0
        model = client.arrival.model
        seen.refusals.append(Refusal(model, now_s, eta_s, retry_s, deadline_s, early))

    simulation.on_end = ended
    simulation.start()
    simulation.loop.run(None)
    run = simulation.finish()
    records, settings = run.records, Settings(**world.settings)  # type: ignore[arg-type]
    waits = np.array(records.granted_s) - np.array(records.arrival_s)
    ttft = np.array(records.first_token_s) - np.array(records.arrival_s)
    served = waits[np.isfinite(waits)]
    loads = [swap for swap in run.swaps if swap.kind == "load"]
    load_s = sum(swap.duration_s for swap in loads)
    longest_s = max((swap.duration_s for swap in loads), default=0.0)
    early = [refusal for refusal in seen.refusals if refusal.early]
    errors, wrong = _against_truth(early, {m: _times(loads, m) for m in (0, 1)})
    return {
        "requests": len(records),
        "served": len(served),
        "swap_share": load_s / run.simulated_s,
        "budget_share": settings.max_load_share,
        "allowed_share": _allowed_share(settings.max_load_share, longest_s, run.simulated_s),
        "loads": len(loads),
        "load_s": longest_s,
        "wait_p50_s": _percentile(served, 50),
        "wait_max_s": float(served.max()) if len(served) else None,
        "bound_s": settings.gather_wait_s + longest_s / settings.max_load_share + 2 * longest_s,
        "ttft_p99_s": _percentile(ttft[np.isfinite(ttft)], 99),
        "refused_early": len(early),
        "timeouts": len(seen.refusals) - len(early),
        "eta_s_p50": _percentile(np.array([r.eta_s for r in early]), 50),
        "retry_s_p50": _percentile(np.array([r.retry_s for r in early]), 50),
        "eta_error_s_p50": _percentile(errors, 50),
        "eta_error_s_p95": _percentile(np.abs(errors), 95),
        "eta_unknown": len(early) - len(errors),
        "wrongly_early": wrong,
        "simulated_s": run.simulated_s,
    }


def _allowed_share(share: float, longest_s: float, simulated_s: float) -> float:
    """The budget over so short a time: a full bucket at the start, and two loads that are not
    charged beforehand, the one into free pages and one that nobody could estimate."""
    beyond_s = max(share * BURST_S, longest_s) + 2 * longest_s
    return share + beyond_s / simulated_s


def _times(loads: Sequence[Any], model: int) -> list[float]:
    return [swap.at_s for swap in loads if swap.model == model]


def _against_truth(
    early: Sequence[Refusal], there_s: dict[int, list[float]]
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], int]:
    """Told less real times, of refusals after which the model did come; and the wrong ones."""
    errors, wrong = [], 0
    for refusal in early:
        came_s = next((at_s for at_s in there_s[refusal.model] if at_s > refusal.at_s), None)
        if came_s is None:
            continue
        errors.append(refusal.eta_s - (came_s - refusal.at_s))
        wrong += came_s < refusal.deadline_s
    return np.array(errors, dtype=np.float64), wrong


def _percentile(values: Any, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }


def cases() -> list[Case]:
    """All of them."""
    return [
        Case(tier, tenants, rate, timeout_s, policy)
        for tier in TIERS
        for tenants in TENANTS
        for rate in RATES
        for timeout_s in TIMEOUTS_S
        for policy in POLICIES
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file after every case; the table goes to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim_thrash")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each case (100)")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for case in cases():
        if case.policy not in options.policy:
            continue
        figures = _rounded(run_case(case, options.seconds))
        rows.append({**{name: getattr(case, name) for name in Case.__slots__}, **figures})
        options.output.write_text(json.dumps({"cases": rows}, indent=1) + "\n", encoding="utf-8")
        print(_line(case, figures), flush=True)
    return 0


def _line(case: Case, figures: dict[str, Any]) -> str:
    words = f"{case.policy:<13} {case.tier} {case.tenants}t {case.rate:>4g}/s {case.timeout_s:g}s"
    shown = ((name, figures[name]) for name in SHOWN)
    return words + "".join(f" {n}={v:.3g}" if v is not None else f" {n}=-" for n, v in shown)


if __name__ == "__main__":
    sys.exit(main())
