"""What a worker tells its gateways about the engine; see protocol.WorkerStatus."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.memory.kv_supply import PoolSupply
from engine.memory.page_pool import PagePool
from engine.protocol import Layout, Lease, ModelStatus, RequestService
from engine.protocol_status import MAX_CELLS
from engine.residency.hosting import Hosting
from engine.running.model_runner import ModelRunner
from engine.scheduling.charges import services
from engine.scheduling.scheduler import Scheduler
from engine.worker.leases import make_leases


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Implements `engine_like.EngineStatusLike`."""

    free_requests: int
    free_kv_bytes: int
    page_bytes: int
    num_pages: int
    pages: dict[str, int]
    models: list[ModelStatus]
    leases: list[Lease]
    counters: dict[str, float]
    cold_bytes_per_s: float = 0.0
    service: Sequence[RequestService] = ()


def make_status(
    config: EngineConfig,
    pool: PagePool,
    supply: PoolSupply,
    hosting: Hosting,
    scheduler: Scheduler,
    counters: Mapping[str, float],
) -> EngineStatus:
    """Residency, pages and what may be submitted, under hosted names."""
    queues = scheduler.queues()
    free_requests, free_bytes, leases = make_leases(config, pool, supply, hosting, queues)
    running = Counter(r.submit.model_id for queue in queues for r in queue.running)
    waiting = Counter(r.submit.model_id for queue in queues for r in queue.waiting)
    names = running.keys() | waiting.keys()
    units = hosting.residency.noted_rows()
    return EngineStatus(
        free_requests=free_requests,
        free_kv_bytes=free_bytes,
        page_bytes=pool.page_bytes,
        num_pages=pool.num_pages,
        pages=_pages(pool, hosting, scheduler),
        models=hosting.catalog.status_rows(units, {n: (running[n], waiting[n]) for n in names}),
        leases=leases,
        counters={
            **counters,
            "preemptions": float(scheduler.num_preemptions),
            "prefix_cache_queries": float(scheduler.num_prefix_queries),
            "prefix_cache_hits": float(scheduler.num_prefix_hits),
            "kv_evicted_pages": float(supply.kv.num_evicted_pages),
            "kv_moved_pages": float(supply.kv.num_moved_pages),
            "kv_compactions": float(supply.kv.num_compactions),
            "weights_moved_pages": float(hosting.residency.num_moved_pages),
            "native_units": float(
                sum(isinstance(r, ModelRunner) and r.is_native for r in hosting.runners.values())
            ),
        },
        cold_bytes_per_s=hosting.residency.cold_bytes_per_s,
        service=services(request for queue in queues for request in queue.running),
    )


def make_layout(pool: PagePool, hosting: Hosting) -> Layout:
    """Who lies where, under hosted names: one page of each of MAX_CELLS cells is looked at, the
    middle one, so that it costs the same however large the arena is."""
    owners: dict[str, int] = {}
    stretches: list[tuple[int, int]] = []
    num_cells = min(pool.num_pages, MAX_CELLS)
    # By identity: hashing owners would be most of the cost, and equal ones have equal names.
    known: dict[int, int] = {}
    for cell in range(num_cells):
        first = cell * pool.num_pages // num_cells
        end = (cell + 1) * pool.num_pages // num_cells
        owner = pool.owner_of((first + end) // 2)
        found = known.get(id(owner))
        if found is None:
            name = "free"
            if owner is not None:
                name = f"{hosting.catalog.label(owner.model_id)}/{owner.kind}"
            found = known[id(owner)] = owners.setdefault(name, len(owners))
        if stretches and stretches[-1][0] == found:
            stretches[-1] = (found, stretches[-1][1] + end - first)
        else:
            stretches.append((found, end - first))
    return Layout(list(owners), stretches)


def _pages(pool: PagePool, hosting: Hosting, scheduler: Scheduler) -> dict[str, int]:
    told: dict[tuple[str, str], int] = {
        (owner.model_id, owner.kind): count for owner, count in pool.pages_by_owner().items()
    }
    for queue in scheduler.queues():
        cached = 0 if queue.cache is None else queue.cache.num_cached_pages
        if cached:
            told[queue.unit_id, "kv"] -= cached
            told[queue.unit_id, "kv_cached"] = cached
    pages = hosting.catalog.pages(told)
    pages["free"] = pool.num_free + pool.num_fenced
    return pages
