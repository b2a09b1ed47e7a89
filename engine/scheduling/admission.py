"""Which waiting requests of a model may start: memory, rows, and their tenants' shares.

Comes in: the queue whose turn it is. Goes out: the requests that start now, with references on
what the prefix cache has of them. One that finds too little is noted (`ModelQueue.short`) and holds
up what came after it, except where rows are lacking: a tenant that has next to nothing here does
not wait for one (`TenantCounts`). It is looked at again only when that can have another
outcome, and looking changes nothing: waiting costs neither time nor anybody's place in the
cache.

Those of class batch start only where nobody else waits for memory or needs the row; for the rows
and shares of others they do not count, because they give way.

Moves no request between states, reserves nothing and preempts nobody: `scheduler.py` does.
"""

import math
from collections.abc import Collection, Mapping

from engine.errors import IntegrityError
from engine.memory import BlockDemand, Hit, KvCache, KvMemory
from engine.request import Request
from engine.scheduling.policy.batching import Share, may_start, share_of
from engine.scheduling.queues import ModelQueue, Short, TenantCounts, running_in

TAKEN_OVER_SHARE = 8
"""One request in so many rows may start beyond them, at most: the share of requests that leases
offer beyond the rows (`models/status.py`)."""


class Admission:
    """Reads the scheduler's queues; owns only who is held back."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        tenants: TenantCounts,
        kv: KvMemory,
        max_num_seqs: int,
        tenant_kv_share: float,
    ) -> None:
        """`tenants` and `queues` are the scheduler's own."""
        self._queues = queues
        self._tenants = tenants
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_running = max_num_seqs + min(
            max(1, max_num_seqs // TAKEN_OVER_SHARE), max_num_seqs - 1
        )
        self._tenant_kv_share = tenant_kv_share
        self.load_pages = 0
        """Pages that a load waits for: class batch leaves them alone."""
        # The tenant's request that its share holds back: none that came after it may pass it.
        self._held_back: dict[str, Request] = {}

    def admit(self, queue: ModelQueue, now_s: float) -> list[Request]:
        """Those that start now, oldest first; the caller moves them."""
        cache = queue.cache
        assert cache is not None
        short, queue.short = queue.short, None
        admitted: list[Request] = []
        if not queue.waiting:
            return admitted
        promised = _lacking(queue, cache)
        oldest_short, oldest_lacking = self._oldest_short()
        share = self.share()
        held: dict[str, float] = {}
        if share.contended:
            held = self._held_by_tenant({r.submit.tenant_id for r in queue.waiting})
        num_live, num_batch = self._num_running()
        spare = self._spare_pages(queue)
        for request in queue.waiting:
            if request.num_pending:
                break  # preempted just now: its last token comes first
            is_batch, tenant_id = request.is_batch, request.submit.tenant_id
            # Rows of class batch are no reason to wait: they sit out.
            num_running = num_live + num_batch if is_batch else num_live
            wanted = _pages_for(cache, request, request.num_tokens + 1) if share.contended else 0
            first = self._held_back.get(tenant_id)
            if not is_batch and first is not None and first.order < request.order:
                continue
            if not is_batch and not may_start(held, tenant_id, wanted, share):
                self._held_back[tenant_id] = request
                continue
            if request.order > oldest_short or num_running >= self._max_num_seqs:
                queue.short = queue.short or Short(request)
                if request.order > oldest_lacking or num_running >= self._max_running or is_batch:
                    break
                if not self._tenants.may_take_over(request):
                    continue
            known = short if short is not None and short.request is request else Short(request)
            # With nobody running there is nobody to leave pages for.
            alone = not num_live + num_batch
            left = 0 if alone else spare
            left += self.load_pages if is_batch else 0
            fits, found = _look(cache, known, promised, left, alone=alone)
            if not fits:
                queue.short = queue.short or found
                break
            assert request.kv is not None
            assert found.needed is not None
            promised += found.needed
            if is_batch:
                num_batch += 1
            else:
                held[tenant_id] = held.get(tenant_id, 0.0) + wanted
                num_live += 1
            request.num_computed = cache.match(request.kv, request.matchable_ids, now_s, found.hit)
            admitted.append(request)
        return admitted

    def let_pass(self, request: Request) -> None:
        """The request has started, ended, or cannot start: nobody needs to wait for it."""
        if self._held_back.get(request.submit.tenant_id) is request:
            del self._held_back[request.submit.tenant_id]
        queue = self._queues[request.instance_id]
        if queue.short is not None and queue.short.request is request:
            queue.short = None

    def share(self) -> Share:
        """What a tenant may hold now."""
        if self._tenant_kv_share >= 1 or self._tenants.num < 2:
            return Share(math.inf, contended=False)
        return share_of(self._kv.num_kv_pages(), self._tenant_kv_share, self._tenants.num)

    def check_integrity(self) -> None:
        """Raises IntegrityError where somebody waits for a request that does not wait."""
        shorts = [q.short.request for q in self._queues.values() if q.short is not None]
        if any(request.state != "waiting" for request in (*self._held_back.values(), *shorts)):
            raise IntegrityError("a request that does not wait holds others back")

    def _spare_pages(self, queue: ModelQueue) -> int:
        """Pages an admission leaves alone: a watermark, and what other models' requests lack."""
        lacking = self._kv.num_spare_pages
        for other in self._queues.values():
            if other is queue or other.cache is None or other.encodes:
                continue  # an encoder's requests have no KV
            if other.running:
                lacking += other.cache.pages_of(_lacking(other, other.cache))
        return lacking

    def _num_running(self) -> tuple[int, int]:
        """Those that are not of class batch, and those that are."""
        running = [r for q in self._queues.values() if not q.encodes for r in q.running]
        num_batch = sum(request.is_batch for request in running)
        return len(running) - num_batch, num_batch

    def _oldest_short(self) -> tuple[float, float]:
        """Orders of the oldest that waits for memory or a row, and of those of the oldest that has
        found too little memory; infinite if none does."""
        shorts = [q.short for q in self._queues.values() if q.short and q.cache is not None]
        oldest = min((short.request.order for short in shorts), default=math.inf)
        lacking = [short.request.order for short in shorts if short.needed is not None]
        return oldest, min(lacking, default=math.inf)

    def _held_by_tenant(self, tenants: Collection[str]) -> dict[str, float]:
        """KV pages of those of the tenants with a running request.

        What they hold, shared pages once, and what their requests are promised.
        """
        held: dict[str, float] = {}
        batch_pages: dict[str, float] = {}
        seen: set[tuple[str, str]] = set()
        for queue, request in running_in(q for q in self._queues.values() if not q.encodes):
            cache, tenant_id = queue.cache, request.submit.tenant_id
            if tenant_id not in tenants:
                continue
            assert cache is not None
            assert request.kv is not None
            if request.is_batch:
                pages = batch_pages.get(tenant_id, 0.0) + cache.live_pages_of(request.kv)
                batch_pages[tenant_id] = pages
                continue
            if (tenant_id, queue.instance_id) not in seen:
                seen.add((tenant_id, queue.instance_id))
                held[tenant_id] = held.get(tenant_id, 0.0) + cache.live_pages_of_tenant(tenant_id)
            if request.num_uncomputed > 1:
                whole = _pages_for(cache, request, request.num_tokens)
                lacking = whole - cache.live_pages_of(request.kv)
                held[tenant_id] += max(0.0, lacking)
        return {name: max(0.0, had - batch_pages.get(name, 0.0)) for name, had in held.items()}

    def live_pages(self, tenant_id: str) -> float:
        """KV pages that a tenant's running requests hold, shared ones counted once."""
        caches = [q.cache for q in self._queues.values() if q.cache is not None]
        return sum(cache.live_pages_of_tenant(tenant_id) for cache in caches)


def _pages_for(cache: KvCache, request: Request, num_tokens: int) -> int:
    return cache.pages_for(num_tokens, repeats=request.constrained is not None)


def _lacking(queue: ModelQueue, cache: KvCache) -> BlockDemand:
    """What running requests still need for the tokens they already have."""
    lacking = cache.demand(None, 0)
    for request in queue.running:
        assert request.kv is not None
        if request.num_tokens > request.kv.num_blocks * cache.plan.block_tokens:
            lacking += cache.demand(request.kv, request.num_tokens)
    return lacking


def _look(
    cache: KvCache, short: Short, promised: BlockDemand, spare_pages: int, alone: bool
) -> tuple[bool, Short]:
    """Whether the request fits now, and what was found; changes nothing but hashes.

    `short` is what was found last time, if somebody looked. It is believed while the hit cannot
    have grown: whoever runs ends some day, and then it is looked for anew.
    """
    request, hit, needed = short.request, short.hit, short.needed
    if (
        not (hit is None or needed is None or alone)
        and not cache.may_hit_more(hit)
        and not cache.fits(promised + needed, spare_pages, hit)
    ):
        return False, short
    kv = request.kv = request.kv or cache.new_kv(
        request.submit.tenant_id, repeats=request.constrained is not None
    )
    # One position more than it needs now, so that its next token does not preempt it.
    num_tokens = request.num_tokens + 1
    hit = cache.look(kv, request.matchable_ids)
    needed = cache.demand(kv, num_tokens, hit.num_tokens)
    fits = cache.fits(promised + needed, spare_pages, hit)
    if not fits and alone and hit.num_tokens:
        # Scattered over many extents a hit may keep more pages than it saves.
        hit, needed = Hit(), cache.demand(kv, num_tokens)
        fits = cache.fits(promised + needed, spare_pages)
    return fits, Short(request, hit, needed)
