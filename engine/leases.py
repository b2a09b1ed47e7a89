"""What a worker can still take: leases from what the pool can really hold, and what is refused.

Every unfinished request is counted at its worst case (prompt + max_tokens), so that preemption is
the exception. All leases share one memory; the figures that bound them together come first.
"""

from collections.abc import Iterable, Mapping

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.model_runner import ModelRunner
from engine.page_pool import PagePool
from engine.protocol import Lease, Submit
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


def check_submit(
    request: Submit,
    config: EngineConfig,
    pool: PagePool,
    residency: Residency,
    runners: Mapping[str, ModelRunner],
    queues: Iterable[ModelQueue],
) -> None:
    """Raises RequestRefused for what cannot run; a lease is not asked for."""
    model_id = request.model_id
    if not residency.knows(model_id):
        raise RequestRefused("unknown_model", f"model {model_id!r} is not in the catalog")
    if residency.state(model_id) != "resident":
        state = residency.state(model_id)
        code = "draining" if state == "draining" else "not_resident"
        raise RequestRefused(code, f"model {model_id!r} is {state}")
    index = residency.index(model_id)
    total = len(request.prompt_token_ids) + request.max_tokens
    if not request.prompt_token_ids or request.max_tokens < 1 or total > index.max_context:
        raise RequestRefused(
            "context_length_exceeded",
            f"{len(request.prompt_token_ids)} prompt and {request.max_tokens} new tokens do "
            f"not fit a context of {index.max_context}",
        )
    num_kv_pages = runners[model_id].cache.pages_for(total)
    if num_kv_pages > residency.num_pages_for_kv(model_id):
        raise RequestRefused(
            "context_length_exceeded",
            f"{total} tokens need {num_kv_pages * pool.page_bytes} bytes of KV, more than the "
            "device has beside the model's weights and the pinned models",
        )
    if not all(0 <= token < index.vocab_size for token in request.prompt_token_ids):
        raise RequestRefused(
            "context_length_exceeded", f"a token id is outside 0..{index.vocab_size - 1}"
        )
    num_waiting = sum(len(queue.waiting) for queue in queues)
    if num_waiting >= config.max_waiting:
        raise RequestRefused("overloaded", f"{num_waiting} requests wait already")


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
