"""What a worker can still take: leases from what the pool can really hold.

Every unfinished request is counted at its worst case (prompt + max_tokens), so that preemption is
the exception. All leases share one memory; the figures that bound them together come first.
"""

from collections.abc import Mapping

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.page_pool import PagePool
from engine.protocol import Lease
from engine.residency import Residency
from engine.scheduler import ModelQueue

# Requests beyond the rows of a step that may wait in the worker, so that a slot that becomes free
# is filled in the next step and not after a round trip to the dispatcher.
LOOKAHEAD_SHARE = 8


def make_leases(
    config: EngineConfig,
    pool: PagePool,
    residency: Residency,
    runners: Mapping[str, ModelRunner],
    queues: Mapping[str, ModelQueue],
) -> tuple[int, int, list[Lease]]:
    """(free requests, free KV bytes, a lease for each resident model)."""
    unfinished = sum(queue.num_unfinished for queue in queues.values())
    slots = config.max_num_seqs + max(1, config.max_num_seqs // LOOKAHEAD_SHARE) - unfinished
    free_requests = max(0, slots)
    free_pages = pool.num_free + pool.num_fenced - residency.pending_pages()
    for queue in queues.values():
        if queue.cache is not None:
            free_pages -= _pages_still_needed(queue)
    free_pages = max(0, free_pages)
    leases = []
    for model_id, queue in queues.items():
        if queue.cache is None or residency.state(model_id) != "resident":
            continue
        plan = runners[model_id].cache.plan
        extents = free_pages // plan.pages_per_extent
        leases.append(
            Lease(
                model_id=model_id,
                num_requests=free_requests,
                kv_tokens=extents * plan.tokens_per_extent,
                kv_bytes_per_token=plan.bytes_per_token(pool.page_bytes),
            )
        )
    return free_requests, free_pages * pool.page_bytes, leases


def _pages_still_needed(queue: ModelQueue) -> int:
    """Pages that the model's unfinished requests may yet take."""
    cache = queue.cache
    assert cache is not None
    blocks = sum(
        max(0, cache.blocks_for(request.max_total_tokens) - len(request.block_table))
        for request in queue.requests()
    )
    missing = max(0, blocks - cache.num_free_blocks)
    return -(-missing // cache.plan.blocks_per_chunk) * cache.plan.pages_per_extent
