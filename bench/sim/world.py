"""A world made ready to run: the objects of `types.World`, as the product has them.

Settings go by name to where they belong: fields of the gateway's Settings, of EngineConfig, or of
both. What the device decides (arena, host tier) comes from its figures unless a setting says it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.sim.baselines.choose import DispatchPolicies, make_eviction
from bench.sim.baselines.eviction import Future
from bench.sim.baselines.placing import deal_homes
from bench.sim.device import Roofline
from bench.sim.loop import Loop
from bench.sim.packs import SimPacks, pack_dir
from bench.sim.parts import Answers, LoadFigures
from bench.sim.types import DeviceFigures, Workload, World
from bench.sim.worker import SimWorker, Site, WorkerFaults
from engine.config import EngineConfig, WorkerConfig
from engine.residency.policy.eviction import EvictionPolicy, GreedyDual
from engine.residency.policy.eviction_rules import EvictionParams
from gateway.settings.settings import Settings
from gateway.types import BatchWindow, HostedModel, Principal
from registry.accounts.quotas import Limits

ANY_ENDPOINT = "ipc://simulated"
OWN_SETTINGS = {"latency_s": 2e-4, "posting_s": 5e-3, "restart_s": 2.0, "request_s": 0.0}
"""Settings of the simulation itself: one way of a message, a posting, a process's start, and what
the gateway's HTTP, template and tokenizer take before a request is queued."""

DAY_S = 86_400.0
"""The window of every batch."""
EVICTION = "eviction_"
"""Settings of a world that begin so are parameters of our eviction (policy/eviction.py)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a run needs that does not change."""

    settings: Settings
    config: EngineConfig
    site: Site
    models: list[HostedModel]
    policies: DispatchPolicies
    principals: list[Principal]
    latency_s: float
    posting_s: float
    restart_s: float
    request_s: float


def roofline(device: DeviceFigures) -> Roofline:
    """What a step costs there: the figures that both have, by name."""
    return Roofline(**{item.name: getattr(device, item.name) for item in fields(Roofline)})


def set_up(world: World, answers: Answers, future: Workload | None = None) -> Stage:
    """Raises ValueError for a setting that nobody has, KeyError for an unknown shape."""
    packs = SimPacks(world.models)
    config = _engine_config(world)
    gateway_names = {field.name for field in fields(Settings)}
    known = gateway_names | set(EngineConfig.__struct_fields__) | set(OWN_SETTINGS)
    known |= {EVICTION + item.name for item in fields(EvictionParams)}
    unknown = sorted(set(world.settings) - known)
    if unknown:
        raise ValueError(f"no setting is called {unknown[0]!r}")
    settings = Settings(
        **{name: value for name, value in world.settings.items() if name in gateway_names}  # type: ignore[arg-type]
    )
    device = world.device
    site = Site(
        packs=packs,
        roofline=roofline(device),
        loads=LoadFigures(
            rates={"disk": device.disk_bytes_per_s, "host": device.host_bytes_per_s},
            overhead_s=device.load_overhead_s,
        ),
        answers=answers,
        eviction=_eviction(world, config, future),
    )
    own = {name: _number(world, name, default) for name, default in OWN_SETTINGS.items()}
    return Stage(
        settings=settings,
        config=config,
        site=site,
        models=[
            HostedModel(
                name=model.name,
                revision=packs.pack(number).index.revision,
                pack_dir=pack_dir(number),
                max_context=packs.pack(number).index.max_context,
                vocab_size=packs.pack(number).index.vocab_size,
                created_at=0,
                pinned=model.pinned,
                weight_bytes=packs.pack(number).index.total_bytes,
            )
            for number, model in enumerate(world.models)
        ],
        principals=[
            Principal(
                tenant_id=tenant.name,
                key_id=tenant.name,
                scopes=frozenset(),
                limits=Limits(tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0),
                weight=tenant.weight,
                is_batch=tenant.is_batch,
                window=BatchWindow(0.0, DAY_S) if tenant.is_batch else None,
            )
            for tenant in world.tenants
        ],
        policies=DispatchPolicies(world.policies, _homes(world, packs)),
        **own,
    )


def make_workers(
    world: World,
    stage: Stage,
    loop: Loop,
    faults: Callable[[int], WorkerFaults | None] = lambda number: None,
) -> list[SimWorker]:
    """All workers of the world; none has been started."""
    workers = []
    for number in range(world.workers):
        config = WorkerConfig(
            worker_id=worker_id(number),
            endpoint=ANY_ENDPOINT,
            engine=stage.config,
            status_interval_s=stage.settings.status_interval_s,
            lease_ttl_s=stage.settings.lease_ttl_s,
            integrity_interval_s=0.0,
        )
        workers.append(SimWorker(number, loop, stage.site, config, faults(number)))
    return workers


def worker_id(number: int) -> str:
    """The worker's name."""
    return f"w{number}"


def start_times(world: World) -> list[float]:
    """Workers do not start at the very same moment: their heartbeats would stay in step."""
    rng = random.Random(f"starts {world.seed}")
    return [rng.random() * 0.1 for _ in range(world.workers)]


def _engine_config(world: World) -> EngineConfig:
    names = set(EngineConfig.__struct_fields__)
    chosen: dict[str, object] = {
        "arena_bytes": world.device.memory_bytes,
        "host_tier_bytes": world.device.host_bytes,
        "shm_prefix": "simulated",
        # A step's tensors are not modelled, so nothing can be said of what lies beside the arena.
        "reserve_bytes": 0,
    }
    chosen |= {name: value for name, value in world.settings.items() if name in names}
    return EngineConfig(**chosen)  # type: ignore[arg-type]


def _eviction(world: World, config: EngineConfig, future: Workload | None) -> EvictionPolicy | None:
    """None: the product's own as it is."""
    chosen: dict[str, Any] = {
        name.removeprefix(EVICTION): float(str(value))
        for name, value in world.settings.items()
        if name.startswith(EVICTION)
    }
    params = replace(EvictionParams(starvation_s=config.starvation_s), **chosen)
    baseline = make_eviction(
        world.policies,
        params,
        None if future is None else Future(future, len(world.models)),
        {Path(pack_dir(number)).name: number for number in range(len(world.models))},
    )
    return GreedyDual(params) if chosen and baseline is None else baseline


def _homes(world: World, packs: SimPacks) -> dict[str, str]:
    """Where each model would be at home if every one had a worker of its own."""
    sizes = {m.name: packs.pack(n).index.total_bytes for n, m in enumerate(world.models)}
    return deal_homes(sizes, [worker_id(number) for number in range(world.workers)])


def _number(world: World, name: str, default: float) -> float:
    value = world.settings.get(name, default)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is no number: {value!r}")
    return float(value)
