"""What a worker tells its gateways about the engine: pages, models, and what it can still take.

Leases say what the pool can really hold. Every unfinished request is counted at its worst case
(prompt + max_tokens) in whole blocks, so that preemption is the exception; cached KV counts as
free, for it gives way. All leases share one memory; the figures that bound them together come
first. See protocol.WorkerStatus.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from engine.memory import KvPlan, PagePool
from engine.models.catalog import Catalog
from engine.models.model_manager import ModelManager
from engine.protocol import MAX_CELLS, Layout, Lease, WorkerStatus
from engine.running import ModelRunner
from engine.scheduling import ModelQueue, services

# Requests beyond the rows of a step that may wait in the worker, so that a slot that becomes free
# is filled in the next step and not after a round trip to the dispatcher.
LOOKAHEAD_SHARE = 8
# An encoder's request keeps nothing in the arena, and those that were taken in share each step.
# With more of them than a few pieces of large requests all places would be taken for as long as all
# of it lasts, and whoever comes next would wait for that (40 requests of 18,000 tokens: 115 s).
ENCODER_TOKENS = 16_384


def make_status(manager: ModelManager, counters: Mapping[str, float]) -> WorkerStatus:
    """Residency, pages and what may be submitted, under hosted names.

    What is the worker's to say (its names, lease_ttl_s, swaps, choices, layout) is empty.
    """
    pool, kv, scheduler = manager.pool, manager.kv, manager.scheduler
    queues = scheduler.queues()
    free_requests, free_bytes, leases = make_leases(manager)
    running = Counter(r.submit.model_id for queue in queues for r in queue.running)
    waiting = Counter(r.submit.model_id for queue in queues for r in queue.waiting)
    batch = Counter(r.submit.model_id for q in queues for r in q.requests() if r.is_batch)
    names = running.keys() | waiting.keys()
    counts = {name: (running[name], waiting[name], batch[name]) for name in names}
    instances = manager.residency.noted_rows()
    return WorkerStatus(
        epoch="",
        worker_id="",
        lease_ttl_s=0.0,
        swaps=[],
        free_requests=free_requests,
        free_kv_bytes=free_bytes,
        page_bytes=pool.page_bytes,
        num_pages=pool.num_pages,
        pages=_pages(manager),
        models=manager.catalog.status_rows(instances, counts),
        leases=leases,
        counters={
            **counters,
            "preemptions": float(scheduler.num_preemptions),
            "prefix_cache_queries": float(scheduler.num_prefix_queries),
            "prefix_cache_hits": float(scheduler.num_prefix_hits),
            "kv_evicted_pages": float(kv.num_evicted_pages),
            "kv_moved_pages": float(kv.num_moved_pages),
            "kv_compactions": float(kv.num_compactions),
            "state_snapshots": float(kv.num_snapshots),
            "weights_moved_pages": float(manager.residency.num_moved_pages),
            "native_units": float(
                sum(isinstance(r, ModelRunner) and r.is_native for r in manager.runners.values())
            ),
        },
        cold_bytes_per_s=manager.residency.cold_bytes_per_s,
        service=services(request for queue in queues for request in queue.running),
        batch_requests=batch.total(),
        batch_kv_bytes=batch_pages(queues) * pool.page_bytes,
    )


def make_layout(pool: PagePool, catalog: Catalog) -> Layout:
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
                name = f"{catalog.label(owner.model_id)}/{owner.kind}"
            found = known[id(owner)] = owners.setdefault(name, len(owners))
        if stretches and stretches[-1][0] == found:
            stretches[-1] = (found, stretches[-1][1] + end - first)
        else:
            stretches.append((found, end - first))
    return Layout(list(owners), stretches)


def _pages(manager: ModelManager) -> dict[str, int]:
    pool = manager.pool
    reported: dict[tuple[str, str], int] = {
        (owner.model_id, owner.kind): count for owner, count in pool.pages_by_owner().items()
    }
    for queue in manager.scheduler.queues():
        cached = 0 if queue.cache is None else queue.cache.num_cached_pages
        if cached:
            reported[queue.instance_id, "kv"] -= cached
            reported[queue.instance_id, "kv_cached"] = cached
    pages = manager.catalog.pages(reported)
    pages["free"] = pool.num_free + pool.num_fenced
    return pages


def make_leases(manager: ModelManager) -> tuple[int, int, list[Lease]]:
    """(free requests, free KV bytes, a lease for each hosted model whose instance is resident).

    As if there were no requests of class batch: they give way.
    """
    config, pool, kv = manager.config, manager.pool, manager.kv
    queues = manager.scheduler.queues()
    unfinished = sum(not request.is_batch for queue in queues for request in queue.requests())
    slots = config.max_num_seqs + max(1, config.max_num_seqs // LOOKAHEAD_SHARE) - unfinished
    free_requests = max(0, slots)
    free_pages = kv.num_obtainable + int(_held_by_batch(queues))
    free_pages -= manager.residency.pending_pages()
    for queue in queues:
        if queue.cache is not None:
            free_pages -= pages_still_needed(queue)
    if any(queue.is_live and not queue.encodes for queue in queues):
        free_pages -= kv.num_spare_pages  # admission leaves them to those that run
    free_pages = max(0, free_pages)
    encoder_tokens = max(0, ENCODER_TOKENS - _encoder_backlog(queues))
    leases: list[Lease] = []
    for queue in queues:
        if queue.cache is None or manager.residency.state(queue.instance_id) != "resident":
            continue
        plan = queue.cache.plan
        kv_tokens, block_tokens = encoder_tokens, 1
        if not queue.encodes:
            block_tokens = plan.block_tokens
            kv_tokens = blocks_in(plan, free_pages) * block_tokens
            if not plan.groups:  # what bounds its requests are their states alone
                longest = manager.runners[queue.instance_id].index.max_context
                kv_tokens = config.max_num_seqs * longest
        leases.extend(
            Lease(
                model_id=name,
                num_requests=free_requests,
                kv_tokens=kv_tokens,
                kv_bytes_per_token=queue.cache.bytes_per_token(),
                block_tokens=block_tokens,
                kv_bytes_per_sequence=plan.bytes_per_sequence(pool.page_bytes),
            )
            for name in manager.catalog.names(queue.instance_id)
        )
    return free_requests, free_pages * pool.page_bytes, leases


def _encoder_backlog(queues: Iterable[ModelQueue]) -> int:
    """Tokens of encoders' requests that no step has been launched for."""
    return sum(
        request.num_prompt - request.num_computed
        for queue in queues
        if queue.encodes
        for request in queue.requests()
        if not request.is_batch
    )


def batch_pages(queues: Iterable[ModelQueue]) -> int:
    """Pages that requests of class batch hold, and may yet take."""
    queues = [queue for queue in queues if queue.has_batch and queue.cache is not None]
    lacking = sum(pages_still_needed(queue, of_batch=True) for queue in queues)
    return lacking + math.ceil(_held_by_batch(queues))


def _held_by_batch(queues: Iterable[ModelQueue]) -> float:
    """Of these, what it holds: all that the model has, where nobody else runs, else the share of
    its blocks in their pages."""
    pages = 0.0
    for queue in queues:
        cache, running = queue.cache, queue.running
        if cache is None or not running or not running[-1].is_batch:
            continue
        if running[0].is_batch:
            pages += cache.num_live_pages
        else:
            held = (r.kv for r in running if r.is_batch and r.kv is not None)
            pages += sum(map(cache.live_pages_of, held))
    return pages


def pages_still_needed(queue: ModelQueue, *, of_batch: bool = False) -> int:
    """Pages that the instance's unfinished requests may yet take: of class batch, or the others."""
    cache = queue.cache
    assert cache is not None
    blocks = cache.demand(None, 0)
    for request in queue.requests():
        if request.is_batch != of_batch:
            continue
        held = request.kv if request.state == "running" else None
        versions = 1 if request.constrained is None else 2
        blocks += cache.demand(held, request.max_total_tokens, num_versions=versions)
    return cache.pages_of(blocks)


def blocks_in(plan: KvPlan, num_pages: int) -> int:
    """Blocks that requests of all lengths could have in so many pages, in every layer group; none
    where there is no such group. Their states come in addition."""
    if not plan.groups:
        return 0
    share = sum(group.pages_per_extent / group.blocks_per_extent for group in plan.groups)
    blocks = int(num_pages / share)
    while blocks and num_pages < sum(
        group.extents_for(blocks) * group.pages_per_extent for group in plan.groups
    ):
        # Whole extents: at least one group has an extent too much.
        blocks = max(
            (blocks - 1) // group.blocks_per_extent * group.blocks_per_extent
            for group in plan.groups
        )
    return blocks
