"""Two models that do not fit together, asked for alternately: what the load budget makes of it.

One device holds one of two models. They are asked for in turn by one tenant, or by two tenants at
once, each for one of them, at several rates, open loop; loads come from host memory or from the
disk. Figures of each case:

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

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.sim.baselines.choose import OURS, Policy
from bench.sim.batches import Floats
from bench.sim.client import SimClient
from bench.sim.devices import find_device
from bench.sim.packs import SimPacks
from bench.sim.run import Simulation
from bench.sim.scenarios.options import Figures, Options
from bench.sim.types import Arrival, SimModel, SimTenant, Swap, World
from gateway.dispatch.policy.load_budget import BURST_S
from gateway.settings.settings import Settings

SHAPE = "meta-llama/Llama-3.1-8B"
KV_SHARE = 0.4
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 40
SECONDS = 100.0
CASES: dict[str, tuple[str, int, float, float]] = {
    f"thrash {tier} {tenants}t {rate:g}/s {timeout_s:g}s": (tier, tenants, rate, timeout_s)
    for tier in ("host", "disk")
    for tenants in (1, 2)
    for rate in (0.5, 2.0, 8.0)
    for timeout_s in (60.0, 10.0)
}
"""By name: where loads come from, tenants, requests a second, seconds in the queue."""
POLICIES: tuple[str, ...] = (OURS, "ours/gather_wait_s=0,max_load_share=1")
COLUMNS: tuple[str, ...] = (
    "swap_share",
    "allowed_share",
    "wait_p50_s",
    "wait_max_s",
    "bound_s",
    "served",
    "refused_early",
    "eta_error_s_p50",
    "eta_error_s_p95",
    "wrongly_early",
    "timeouts",
)
_EXPECTED = re.compile(r"expected to be loaded in (\d+) s")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A 503: when, in how long the model was said to be there, in how long to ask again, and when
    its time in the queue would have been up."""

    model: int
    at_s: float
    eta_s: float
    retry_s: float
    deadline_s: float

    @property
    def is_early(self) -> bool:
        """Whether there was time left."""
        return self.at_s < self.deadline_s - 1e-6


def names(options: Options) -> list[str]:
    """All of them."""
    return list(CASES)


def run(name: str, policy: Policy, seed: int, options: Options) -> Figures:
    """Simulate one case; the seed is not used, for nothing is drawn."""
    tier, tenants, rate, timeout_s = CASES[name]
    world = _world(tier, tenants, timeout_s, policy)
    simulation = Simulation(world, _arrivals(tenants, rate, options.seconds or SECONDS))
    refusals: list[Refusal] = []

    def ended(client: SimClient) -> None:
        if client.outcome == "refused":
            told = _EXPECTED.search(client.error)
            eta_s, retry_s = float(told[1]) if told else 0.0, client.retry_after_s or 0.0
            arrival, now_s = client.arrival, simulation.loop.now_s
            refusals.append(Refusal(arrival.model, now_s, eta_s, retry_s, arrival.at_s + timeout_s))

    simulation.on_end = ended
    simulation.start()
    simulation.loop.run(None)
    run = simulation.finish()
    records, settings = run.records, Settings(**world.settings)  # type: ignore[arg-type]
    waits = np.array(records.granted_s) - np.array(records.arrival_s)
    served = waits[np.isfinite(waits)]
    loads = [swap for swap in run.swaps if swap.kind == "load"]
    longest_s = max((swap.duration_s for swap in loads), default=0.0)
    early = [refusal for refusal in refusals if refusal.is_early]
    errors, wrong = _against_truth(early, loads)
    share = settings.max_load_share
    # Over so short a time: a full bucket at the start, and two loads that are not charged
    # beforehand, the one into free pages and one that nobody could estimate.
    beyond_s = max(share * BURST_S, longest_s) + 2 * longest_s
    return {
        "requests": len(records),
        "served": len(served),
        "swap_share": sum(swap.duration_s for swap in loads) / run.simulated_s,
        "allowed_share": share + beyond_s / run.simulated_s,
        "loads": len(loads),
        "wait_p50_s": _percentile(served, 50),
        "wait_max_s": float(served.max()) if len(served) else None,
        "bound_s": settings.gather_wait_s + longest_s / share + 2 * longest_s,
        "refused_early": len(early),
        "timeouts": len(refusals) - len(early),
        "retry_s_p50": _percentile(np.array([r.retry_s for r in early]), 50),
        "eta_error_s_p50": _percentile(errors, 50),
        "eta_error_s_p95": _percentile(np.abs(errors), 95),
        "wrongly_early": wrong,
        "simulated_s": run.simulated_s,
    }


def _world(tier: str, tenants: int, timeout_s: float, policy: Policy) -> World:
    """A device with room for one of the two models and its KV."""
    models = tuple(SimModel(name, SHAPE) for name in ("a", "b"))
    size = SimPacks(models).pack(0).index.total_bytes
    memory, host = int(size * (1 + KV_SHARE)), 3 * size if tier == "host" else 0
    return World(
        workers=1,
        device=replace(find_device("h100").figures, memory_bytes=memory, host_bytes=host),
        models=models,
        tenants=tuple(SimTenant(f"t{number}") for number in range(tenants)),
        settings={"queue_timeout_s": timeout_s, **policy.settings},
        policies=dict(policy.names),
    )


def _arrivals(tenants: int, rate: float, seconds: float) -> Iterator[Arrival]:
    """The models in turn, evenly spaced; each tenant has its model where there are two."""
    for number in range(round(seconds * rate)):
        prompt = ((number, PROMPT_TOKENS),)
        at_s, tenant = 1.0 + number / rate, number % tenants
        yield Arrival(at_s, tenant, number % 2, prompt, OUTPUT_TOKENS, OUTPUT_TOKENS + 1)


def _against_truth(early: Sequence[Refusal], loads: Sequence[Swap]) -> tuple[Floats, int]:
    """Told less real times, of refusals after which the model did come; and the wrong ones."""
    errors, wrong = [], 0
    for refusal in early:
        there_s = (swap.at_s for swap in loads if swap.model == refusal.model)
        came_s = next((at_s for at_s in there_s if at_s > refusal.at_s), None)
        if came_s is not None:
            errors.append(refusal.eta_s - (came_s - refusal.at_s))
            wrong += came_s < refusal.deadline_s
    return np.array(errors, dtype=np.float64), wrong


def _percentile(values: Any, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None
