"""What a worker can still take: leases from what the pool can really hold, and what is refused.

Every unfinished request is counted at its worst case (prompt + max_tokens) in whole blocks, so that
preemption is the exception; cached KV counts as free, for it gives way. All leases share one
memory; the figures that bound them together come first.
"""

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.encoders.encoder_requests import check_encode
from engine.errors import RequestRefused
from engine.memory.kv_plan import KvPlan
from engine.memory.kv_supply import PoolSupply
from engine.memory.page_pool import PagePool
from engine.packs.pack import PackIndex
from engine.protocol import Lease, Submit
from engine.residency.hosting import Hosting
from engine.sampling.sampling_batch import check_sampling
from engine.scheduling.model_queue import ModelQueue

# Requests beyond the rows of a step that may wait in the worker, so that a slot that becomes free
# is filled in the next step and not after a round trip to the dispatcher.
LOOKAHEAD_SHARE = 8

# An encoder's request keeps nothing in the arena, and those that were taken in share each step.
# With more of them than a few pieces of large requests all places would be taken for as long as all
# of it lasts, and whoever comes next would wait for that (40 requests of 18,000 tokens: 115 s).
ENCODER_TOKENS = 16_384


def make_leases(
    config: EngineConfig,
    pool: PagePool,
    supply: PoolSupply,
    hosting: Hosting,
    queues: Iterable[ModelQueue],
) -> tuple[int, int, list[Lease]]:
    """(free requests, free KV bytes, a lease for each hosted model whose unit is resident)."""
    queues = list(queues)
    unfinished = sum(queue.num_unfinished for queue in queues)
    slots = config.max_num_seqs + max(1, config.max_num_seqs // LOOKAHEAD_SHARE) - unfinished
    free_requests = max(0, slots)
    free_pages = pool.num_free + pool.num_fenced + supply.kv.num_evictable()
    free_pages -= hosting.residency.pending_pages()
    for queue in queues:
        if queue.cache is not None:
            free_pages -= pages_still_needed(queue)
    if any(queue.num_unfinished and not queue.encodes for queue in queues):
        free_pages -= supply.num_spare_pages  # admission leaves them to those that run
    free_pages = max(0, free_pages)
    encoder_tokens = max(0, ENCODER_TOKENS - _encoder_backlog(queues))
    leases: list[Lease] = []
    for queue in queues:
        if queue.cache is None or hosting.residency.state(queue.unit_id) != "resident":
            continue
        plan = queue.cache.plan
        kv_tokens, block_tokens = encoder_tokens, 1
        if not queue.encodes:
            block_tokens = plan.block_tokens
            kv_tokens = blocks_in(plan, free_pages) * block_tokens
        leases.extend(
            Lease(
                model_id=name,
                num_requests=free_requests,
                kv_tokens=kv_tokens,
                kv_bytes_per_token=queue.cache.bytes_per_token(),
                block_tokens=block_tokens,
            )
            for name in hosting.catalog.names(queue.unit_id)
        )
    return free_requests, free_pages * pool.page_bytes, leases


def check_submit(
    request: Submit,
    config: EngineConfig,
    pool: PagePool,
    hosting: Hosting,
    queues: Iterable[ModelQueue],
) -> str:
    """The unit that would run it. Raises RequestRefused for what cannot; asks for no lease."""
    model_id, residency = request.model_id, hosting.residency
    unit_id = hosting.catalog.unit(model_id)
    state = residency.state(unit_id)
    if state != "resident":
        code = "draining" if state == "draining" else "not_resident"
        raise RequestRefused(code, f"model {model_id!r} is {state}")
    index = residency.index(unit_id)
    if request.encode is not None or index.task != "generate":
        check_encode(request, index)
    else:
        _check_generate(request, index, pool, hosting, unit_id)
    num_waiting = sum(len(queue.waiting) for queue in queues)
    if num_waiting >= config.max_waiting:
        raise RequestRefused("overloaded", f"{num_waiting} requests wait already")
    return unit_id


def _check_generate(
    request: Submit, index: PackIndex, pool: PagePool, hosting: Hosting, unit_id: str
) -> None:
    total = len(request.prompt_token_ids) + request.max_tokens
    if not request.prompt_token_ids or request.max_tokens < 1 or total > index.max_context:
        raise RequestRefused(
            "context_length_exceeded",
            f"{len(request.prompt_token_ids)} prompt and {request.max_tokens} new tokens do "
            f"not fit a context of {index.max_context}",
        )
    num_kv_pages = hosting.runners[unit_id].cache.pages_for(total)
    if num_kv_pages > hosting.residency.num_pages_for_kv(unit_id):
        raise RequestRefused(
            "context_length_exceeded",
            f"{total} tokens need {num_kv_pages * pool.page_bytes} bytes of KV, more than the "
            "device has beside the model's weights and the pinned models",
        )
    ids = request.prompt_token_ids
    if min(ids) < 0 or max(ids) >= index.vocab_size:
        raise RequestRefused(
            "context_length_exceeded", f"a token id is outside 0..{index.vocab_size - 1}"
        )
    try:
        logprobs = (request.logprobs, request.prompt_logprobs)
        check_sampling(request.sampling, index.vocab_size, *logprobs)
    except ValueError as error:
        raise RequestRefused("invalid_sampling", str(error)) from error


def _encoder_backlog(queues: Iterable[ModelQueue]) -> int:
    """Tokens of encoders' requests that no step has been launched for."""
    return sum(
        request.num_prompt - request.num_computed
        for queue in queues
        if queue.encodes
        for request in queue.requests()
    )


def pages_still_needed(queue: ModelQueue) -> int:
    """Pages that the unit's unfinished requests may yet take."""
    cache = queue.cache
    assert cache is not None
    blocks = cache.demand(None, 0)
    for request in queue.requests():
        held = request.kv if request.state == "running" else None
        blocks += cache.demand(held, request.max_total_tokens)
    return cache.pages_of(blocks)


def blocks_in(plan: KvPlan, num_pages: int) -> int:
    """Blocks that requests of all lengths could have in so many pages, in every layer group."""
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
