"""The worlds of `fuzz.py`, drawn by a seed: what there is, who asks, how often what goes wrong."""

import random
from dataclasses import dataclass, replace

from bench.sim.devices import DEVICES
from bench.sim.types import Arrival, SimModel, SimTenant, World

MIB = 1 << 20
SHAPES = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "google/gemma-3-1b-it")


@dataclass(slots=True)
class Trouble:
    """How often each thing happens, as this seed has it: mean seconds between two, 0 for never."""

    crash_s: float
    gateway_s: float
    break_s: float
    pause_s: float
    operator_s: float
    slow_loads: float
    failed_loads: float
    late_fences: int
    slow_messages: float


def make_trouble(rng: random.Random) -> Trouble:
    """How often what goes wrong."""

    def often(*choices: float) -> float:
        return rng.choice([0.0, *choices])

    return Trouble(
        crash_s=often(2.0, 8.0),
        gateway_s=often(0.0, 6.0, 15.0),
        break_s=often(0.0, 4.0),
        pause_s=often(1.0, 5.0),
        operator_s=often(1.0, 5.0),
        slow_loads=often(0.2, 0.8),
        failed_loads=often(0.0, 0.05, 0.3),
        late_fences=rng.choice([0, 0, 1, 3]),
        slow_messages=often(0.02, 0.3),
    )


def make_world(rng: random.Random, seed: int) -> World:
    """Memory too small for its models, and odd settings."""
    workers = rng.choice([1, 1, 2, 3])
    models = tuple(
        SimModel(f"model-{n}", rng.choice(SHAPES[:2] if rng.random() < 0.8 else SHAPES))
        for n in range(rng.randint(1, 6))
    )
    if rng.random() < 0.2:
        models = (replace(models[0], pinned=True), *models[1:])
    tenants = tuple(
        SimTenant(
            f"tenant-{n}",
            weight=rng.choice([0.5, 1.0, 1.0, 4.0]),
            requests_per_minute=rng.choice([None, None, None, 20]),
            tokens_per_minute=rng.choice([None, None, None, 20_000]),
        )
        for n in range(rng.randint(1, 4))
    )
    tenants = (*tenants, SimTenant("asker"))  # of the last requests, without limits
    device = replace(
        DEVICES[rng.choice(["l4", "cpu-2"])],
        memory_bytes=rng.choice([600, 1300, 1600, 2600]) * MIB,
        host_bytes=rng.choice([0, 400, 1200, 8000]) * MIB,
    )
    interval_s = rng.choice([0.05, 0.1])
    settings: dict[str, object] = {
        "page_bytes": 2 * MIB,
        "max_num_seqs": rng.choice([1, 2, 4, 16]),
        "max_batch_tokens": rng.choice([64, 256, 1024]),
        "max_waiting": rng.choice([1, 4, 256]),
        "min_run_steps": rng.choice([1, 4]),
        "steps_ahead": rng.choice([0, 1]),
        "prefix_cache": rng.random() < 0.8,
        "tenant_kv_share": rng.choice([0.3, 0.75, 1.0]),
        "kv_low_watermark": rng.choice([0.0, 0.02]),
        "drain_timeout_s": rng.choice([0.2, 10.0]),
        "starvation_s": rng.choice([0.3, 2.0]),
        "status_interval_s": interval_s,
        "worker_heartbeat_timeout_s": rng.choice([21 * interval_s, 15.0]),
        "max_queue_total": rng.choice([20, 1024]),
        "max_queue_per_tenant": rng.choice([10, 20]),
        "queue_timeout_s": rng.choice([2.0, 60.0, 60.0]),
        "request_timeout_s": rng.choice([2.0, 30.0, 100.0]),
        "max_load_share": rng.choice([0.2, 0.9]),
        "fair_share_max_lead_s": rng.choice([0.5, 30.0]),
        "latency_s": rng.choice([1e-4, 5e-3]),
    }
    return World(workers, device, models, tenants, seed, settings)


def make_arrivals(rng: random.Random, world: World) -> list[Arrival]:
    """Some dozens of requests within seconds."""
    now_s = 0.0
    arrivals = []
    rate = rng.choice([3.0, 10.0])
    longest = rng.choice([200, 1000, 6000])
    for number in range(rng.randint(10, 60)):
        now_s += rng.expovariate(rate)
        shared = (rng.randrange(4), rng.choice([16, 100, 500]))
        own = (1000 + number, rng.randint(1, longest))
        output = rng.choice([0, 1, rng.randint(2, 40), rng.randint(40, 800)])
        arrivals.append(
            Arrival(
                at_s=now_s,
                tenant=rng.randrange(len(world.tenants) - 1),
                model=min(rng.randrange(len(world.models)), rng.randrange(len(world.models))),
                prompt=rng.choice([(own,), (shared, own)]),
                output_tokens=output,
                max_tokens=max(1, output + rng.choice([-5, 1, 50, 400])),
                abort_after_s=rng.choice([-1.0, -1.0, -1.0, 0.0, rng.uniform(0.0, 3.0)]),
            )
        )
    return arrivals
