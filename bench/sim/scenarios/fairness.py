"""Worlds in which tenants are unkind to one another, and how fairly each of them is served.

    overload      two tenants ask for more than there is, one twice as often (VTC paper, figure 3)
    lengths       two tenants that both ask too much: short answers against long (its figure 6)
    weights       three tenants of weights 1, 2 and 4 that all ask too much
    quiet         a tenant of few requests beside a flood on the same model
    other_model   the same, on two models that are both there
    cold          the quiet tenant wants one cold model after another, the flood stays on its own
    spray         the flood wants one cold model after another, the quiet tenant stays on its own
    re_entry      two tenants; one is away for half of each minute

A run is simulated until its last arrival; what is counted ends there, for whoever asks too much
still does. Figures of a run:

    gap_tokens      largest difference of two tenants' tokens (answers' twice) over weight, between
                    two moments of which both wait all along: the VTC paper's
    gap_s, gap_over_bound   the same in service, and over the bound of docs/fairness.md
    shares          of the service, over what the weights say
    ttft_p99_s      of the first tenant; `alone_p99_s` without the others (of ours only)
    drained_per_s   tokens a second of requests that come in the first DRAINED_SHARE of the time,
                    until all have ended: the same requests under every order
    loads_s         by tenant: what loads have cost it, less what was paid back
    books_off       (tenants' + system's) / time of the device - 1
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge

import numpy as np

from bench.sim.baselines.choose import OURS, Policy
from bench.sim.batches import Floats
from bench.sim.columns import Columns, Slo, columns
from bench.sim.devices import DEVICES
from bench.sim.fair_metrics import largest_gap
from bench.sim.run import Simulation
from bench.sim.scenarios.options import Figures, Options
from bench.sim.types import Arrival, Run, SimModel, SimTenant, World

LLAMA, SMALL = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"
PATIENT: dict[str, object] = {
    "max_queue_per_tenant": 20_000,
    "max_queue_total": 40_000,
    "queue_timeout_s": 3_600.0,
    "request_timeout_s": 7_200.0,
}
"""Nobody is refused: what is measured is the order."""
SECONDS = 120.0
SAMPLE_S = 0.25
WARM_UP_S = 20.0
"""First loads and the first wave are not counted in latencies and shares (of a short run, its first
quarter)."""
DRAINED_SHARE = 0.25
POLICIES: tuple[str, ...] = (
    OURS,
    "share=fcfs",
    "share=vtc_tokens",
    "share=round_robin",
    "share=quota:5",
)
COLUMNS: tuple[str, ...] = (
    "ttft_p50_s",
    "ttft_p99_s",
    "alone_p99_s",
    "gap_tokens",
    "gap_s",
    "gap_over_bound",
    "drained_per_s",
    "num_loads",
    "books_off",
)

Draw = Callable[[random.Random], tuple[int, int]]


def fixed(prompt: int, output: int) -> Draw:
    """Always these lengths."""
    return lambda rng: (prompt, output)


def chat(rng: random.Random) -> tuple[int, int]:
    """Log-normal, means of about 350 and 130 tokens."""
    return 1 + int(min(4000, rng.lognormvariate(5.4, 0.9))), 1 + int(
        min(800, rng.lognormvariate(4.5, 0.8))
    )


def stream(
    tenant: int,
    models: Sequence[int],
    rate: float,
    seconds: float,
    lengths: Draw,
    seed: int,
    on: Callable[[float], bool] = lambda now_s: True,
) -> Iterator[Arrival]:
    """Poisson arrivals of one tenant, over its models in turns, while it is `on`."""
    rng = random.Random(f"{seed} {tenant}")
    now_s, number = 0.0, 0
    while (now_s := now_s + rng.expovariate(rate)) < seconds:
        if not on(now_s):
            continue
        prompt, output = lengths(rng)
        content = 1 + tenant * 10**7 + number
        model = models[number % len(models)]
        number += 1
        # What the model says before its end; the client allows for as much again.
        yield Arrival(now_s, tenant, model, ((content, prompt),), output, 2 * output + 16)


@dataclass(frozen=True, slots=True)
class Asker:
    """What one tenant asks for: of which models, how often, how much, and when."""

    models: Sequence[int]
    rate: float
    lengths: Draw
    on: Callable[[float], bool] = lambda now_s: True


@dataclass(frozen=True, slots=True)
class Scenario:
    """A device, its models, and a tenant for each asker."""

    device: str
    models: tuple[str, ...]
    askers: tuple[Asker, ...]
    weights: tuple[float, ...] = (1, 1)
    settings: Mapping[str, object] = field(default_factory=dict)

    def world(self, policy: Policy) -> World:
        """Under a policy."""
        return World(
            1,
            DEVICES[self.device],
            tuple(SimModel(f"m{n}", shape) for n, shape in enumerate(self.models)),
            tuple(SimTenant(f"t{n}", weight) for n, weight in enumerate(self.weights)),
            settings={**PATIENT, **self.settings, **policy.settings},
            policies=dict(policy.names),
        )

    def arrivals(self, seconds: float, seed: int, alone: bool = False) -> Iterator[Arrival]:
        """In order; `alone`: of the first tenant only."""
        streams = [
            stream(tenant, one.models, one.rate, seconds, one.lengths, seed, one.on)
            for tenant, one in enumerate(self.askers[: 1 if alone else None])
        ]
        return merge(*streams, key=lambda arrival: arrival.at_s)


_QUIET, _FLOOD = Asker([0], 2.0, chat), Asker([0], 25.0, fixed(512, 256))
# Two of the eight large models fit beside the small one.
_COLD, _COLD_MODELS = range(1, 9), (SMALL, *[LLAMA] * 8)
_COLD_ARENA = {"arena_bytes": 44 << 30}
SCENARIOS: dict[str, Scenario] = {
    "overload": Scenario(
        "l4",
        (LLAMA,),
        (Asker([0], 5.0, fixed(256, 256)), Asker([0], 10.0, fixed(256, 256))),
    ),
    "lengths": Scenario(
        "l4", (LLAMA,), (Asker([0], 12.0, fixed(64, 64)), Asker([0], 4.0, fixed(512, 256)))
    ),
    # Few rows: what outstanding grants blur is small against what is shared out.
    "weights": Scenario(
        "l4", (LLAMA,), (Asker([0], 3.0, chat),) * 3, (1, 2, 4), {"max_num_seqs": 16}
    ),
    "quiet": Scenario("a100-80g", (LLAMA,), (_QUIET, _FLOOD)),
    "other_model": Scenario("a100-80g", (LLAMA, SMALL), (Asker([1], 2.0, chat), _FLOOD)),
    "cold": Scenario(
        "a100-80g",
        _COLD_MODELS,
        (Asker(_COLD, 0.25, chat), Asker([0], 60.0, chat)),
        settings=_COLD_ARENA,
    ),
    "spray": Scenario(
        "a100-80g", _COLD_MODELS, (_QUIET, Asker(_COLD, 10.0, chat)), settings=_COLD_ARENA
    ),
    "re_entry": Scenario(
        "l4",
        (LLAMA,),
        (Asker([0], 6.0, chat, lambda now_s: now_s % 60 < 30), Asker([0], 6.0, chat)),
    ),
}


def names(options: Options) -> list[str]:
    """All of them."""
    return list(SCENARIOS)


def run(name: str, policy: Policy, seed: int, options: Options) -> Figures:
    """One scenario under one policy. Raises KeyError for a name that is none."""
    scenario, seconds = SCENARIOS[name], options.seconds or SECONDS
    world = scenario.world(policy)
    weights = np.array(scenario.weights)
    warm_s = min(WARM_UP_S, seconds / 4)
    simulation, run, rows = _simulated(world, scenario.arrivals(seconds, seed), seconds)
    ttft = _first_tokens(rows, warm_s)
    gap = largest_gap(run, weights, rows)
    counters = run.counters
    used_s = counters["tenant_device_seconds"] + counters["system_device_seconds"]
    assert simulation.gateway is not None
    found: Figures = {
        "ttft_p50_s": _quantile(ttft, 0.5),
        "ttft_p99_s": _quantile(ttft, 0.99),
        "num_first": len(ttft),
        "tokens_per_s": float(_tokens(rows).sum()) / seconds,
        "shares": _shares(run, weights, warm_s),
        "gap_tokens": _gap_tokens(run, rows, weights, warm_s),
        "gap_s": gap.gap_s if gap else 0.0,
        "gap_over_bound": gap.gap_s / gap.bound_s if gap else 0.0,
        "num_loads": sum(s.kind == "load" for s in run.swaps),
        "loads_s": dict(simulation.gateway.dispatcher.snapshot().accounts.load_s),
        "books_off": used_s / counters["busy_seconds"] - 1,
    }
    if policy.text == OURS:
        alone = scenario.arrivals(seconds, seed, alone=True)
        _, _, rows = _simulated(world, alone, seconds)
        found["alone_p99_s"] = _quantile(_first_tokens(rows, warm_s), 0.99)
    first = scenario.arrivals(seconds * DRAINED_SHARE, seed)
    _, _, rows = _simulated(world, first, None, 1.0)
    found["drained_per_s"] = float(_tokens(rows).sum() / rows.ended_s.max())
    return found


def _simulated(
    world: World, arrivals: Iterator[Arrival], until_s: float | None, sample_s: float = SAMPLE_S
) -> tuple[Simulation, Run, Columns]:
    simulation = Simulation(world, arrivals, sample_s)
    simulation.start()
    simulation.loop.run(until_s)
    run = simulation.finish()
    return simulation, run, columns(run.records, Slo())


def _first_tokens(rows: Columns, warm_s: float) -> Floats:
    """Of the first tenant, after the warm-up."""
    first = (rows.tenant == 0) & (rows.arrival_s >= warm_s)
    return np.asarray(rows.ttft_s[first & np.isfinite(rows.ttft_s)])


def _quantile(values: Floats, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def _tokens(rows: Columns) -> Floats:
    """By request that has ended: prompt tokens, and the answer's twice."""
    tokens = rows.prompt_tokens + 2.0 * rows.output_tokens
    return np.asarray(np.where(np.isfinite(rows.first_token_s), tokens, 0.0))


def _shares(run: Run, weights: Floats, warm_s: float) -> list[float]:
    """Of the service after the warm-up, over what their weights say: 1 where it is as it should."""
    served = np.zeros(len(weights))
    begin = served.copy()
    for sample in run.samples:
        for tenant, seconds in sample.service_s.items():
            served[tenant] = seconds
        if sample.at_s <= warm_s:
            begin[:] = served
    gained = served - begin
    return list((gained / max(gained.sum(), 1e-9)) / (weights / weights.sum()))


def _gap_tokens(run: Run, rows: Columns, weights: Floats, warm_s: float) -> float:
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
    for one in range(len(weights)):
        for other in range(one + 1, len(weights)):
            low = high = None
            for number, sample in enumerate(run.samples):
                if not {one, other} <= set(sample.backlogged) or sample.at_s < warm_s:
                    low = high = None
                    continue
                apart = float(had[one, number] - had[other, number])
                low = apart if low is None else min(low, apart)
                high = apart if high is None else max(high, apart)
                best = max(best, high - low)
    return best
