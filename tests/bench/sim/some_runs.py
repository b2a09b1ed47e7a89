"""Runs made by hand, for the tests of the report."""

import math

from bench.sim.devices import DEVICES
from bench.sim.types import OUTCOMES, RecordOutcome, Run, Sample, SimModel, SimTenant, Swap, World


def a_world(weights: tuple[float, ...] = (1.0, 1.0), models: int = 2, workers: int = 1) -> World:
    """Tenants of these weights on H100s."""
    return World(
        workers,
        DEVICES["h100"],
        tuple(SimModel(f"model{n}", "Qwen/Qwen2.5-0.5B") for n in range(models)),
        tuple(SimTenant(f"tenant{n}", weight) for n, weight in enumerate(weights)),
    )


def add_record(
    run: Run,
    *,
    tenant: int = 0,
    model: int = 0,
    worker: int = 0,
    outcome: RecordOutcome = "stop",
    arrival_s: float = 0.0,
    queue_s: float = 0.0,
    ttft_s: float = math.nan,
    ended_s: float = 0.0,
    prompt: int = 100,
    cached: int = 0,
    output: int = 0,
    service_s: float = 0.0,
) -> None:
    """One ended request."""
    records = run.records
    records.tenant.append(tenant)
    records.model.append(model)
    records.worker.append(worker)
    records.outcome.append(OUTCOMES.index(outcome))
    records.arrival_s.append(arrival_s)
    records.granted_s.append(arrival_s + queue_s)
    records.first_token_s.append(arrival_s + ttft_s)
    records.ended_s.append(ended_s)
    records.prompt_tokens.append(prompt)
    records.cached_tokens.append(cached)
    records.output_tokens.append(output)
    records.service_s.append(service_s)


def add_sample(
    run: Run,
    at_s: float,
    service_s: dict[int, float],
    backlogged: tuple[int, ...] = (),
    busy_s: float = 0.0,
) -> None:
    """The world at one moment."""
    pages = {"free": 60, "weights": 30, "kv": 8, "cached": 2}
    run.samples.append(Sample(at_s, pages, 3, 2, busy_s, service_s, backlogged))


def a_run(seed: int = 1, scale: float = 1.0) -> Run:
    """A hundred seconds on two workers: two tenants that wait all the time, and some swaps."""
    run = Run(a_world((1.0, 3.0), workers=2), simulated_s=100.0)
    for number in range(200):
        at_s = number / 2
        add_record(
            run,
            tenant=number % 2,
            model=(number // 3 + seed) % 2,
            worker=number // 2 % 2,
            arrival_s=at_s,
            queue_s=0.1,
            ttft_s=0.5 * scale * (1 + number % 4),
            ended_s=at_s + 0.5 * scale * (1 + number % 4) + 19 * 0.05,
            cached=40,
            output=20,
            service_s=0.4,
        )
    for second in range(101):
        add_sample(run, float(second), {0: 0.25 * second, 1: 0.75 * second}, (0, 1), 1.5 * second)
    run.swaps += [
        Swap(5.0, 0, 0, "load", "disk", 2.0, 1000),
        Swap(9.0, 0, 0, "evict", "host", 0.001, 1000),
        Swap(20.0, 0, 0, "load", "host", 0.5, 1000),
        Swap(25.0, 1, 0, "load", "disk", 1.5, 1000),
    ]
    run.counters |= {
        "busy_seconds": 150.0,
        "tenant_device_seconds": 147.0,
        "system_device_seconds": 3.0,
    }
    run.wall_s = 12.5 * seed
    return run
