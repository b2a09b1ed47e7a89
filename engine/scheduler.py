"""Which requests run in the next step, with every block they need reserved beforehand.

Holds the requests of all units (resident packs), in queues per unit. A step runs one unit's batch;
a step never allocates what was not reserved here. The order of means when the pool has no page
left: what is fenced comes back by itself, cached KV is evicted, sparse extents are compacted, and
only then a running request is preempted: its blocks are given back and it is computed again later.
Who that is says `policy/kv_share.py`; the oldest request of all always makes progress.

While the oldest request of a unit waits for memory or for a row, no younger request of another unit
is let in before it.

Requests may have tokens in flight (`Request.num_pending`): they are scheduled as if these were
known. Does not load models and does not run them.
"""

import math
from bisect import insort
from collections import Counter

from engine.batch import ScheduledRow
from engine.errors import IntegrityError, OutOfPages
from engine.kv_cache import KvCache
from engine.model_queue import KvSupply, ModelQueue
from engine.policy.batching import ModelWork, choose_model, lift, split_budget
from engine.policy.kv_share import Holding, Share, choose_victim, may_start, share_of
from engine.protocol import FinishReason
from engine.request import Request
from engine.request_kv import RequestKv


class Scheduler:
    """All requests of a worker. Single-threaded."""

    def __init__(
        self,
        max_num_seqs: int,
        max_batch_tokens: int,
        min_run_steps: int,
        supply: KvSupply,
        tenant_kv_share: float = 1.0,
    ) -> None:
        self._supply = supply
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._min_run_steps = min_run_steps
        self._tenant_kv_share = tenant_kv_share
        self._queues: dict[str, ModelQueue] = {}
        self._by_key: dict[tuple[str, int], Request] = {}
        self._num_by_tenant: Counter[str] = Counter()
        # The tenant's request that its share holds back: none that came after it may pass it.
        self._held_back: dict[str, Request] = {}
        self._current: str | None = None
        self._steps_run = 0
        self._last_run: ModelQueue | None = None
        self._next_order = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        """Prompt tokens looked up in the prefix cache, and those found there."""

    def queue(self, unit_id: str) -> ModelQueue:
        """The unit's queue, made at first use."""
        return self._queues.setdefault(unit_id, ModelQueue(unit_id))

    def queues(self) -> list[ModelQueue]:
        """All queues."""
        return list(self._queues.values())

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, of all units."""
        return len(self._by_key)

    def bind(self, queue: ModelQueue, cache: KvCache) -> None:
        """The unit has become resident; what waited for its load can run."""
        queue.cache = cache
        self._lift(queue)

    def unbind(self, queue: ModelQueue, now_s: float) -> None:
        """The unit leaves: every running request waits again; its KV is given back."""
        for request in sorted(queue.running, key=lambda r: -r.order):
            self._preempt(queue, request, now_s)
        queue.cache = None
        queue.short_order = None
        for request in queue.waiting:
            self._let_pass(request)

    def forget(self, queue: ModelQueue) -> None:
        """Drop the queue of a unit that is gone. It must be empty."""
        if queue.num_unfinished:
            raise IntegrityError(f"{queue.unit_id} still has requests")
        del self._queues[queue.unit_id]

    def has_work(self) -> bool:
        """Whether some resident unit has a request."""
        return any(q.cache is not None and q.num_unfinished for q in self._queues.values())

    def find(self, key: tuple[str, int]) -> Request | None:
        """An unfinished request by (request_id, attempt)."""
        return self._by_key.get(key)

    def oldest_waiting(self) -> Request | None:
        """The request of a resident unit that has waited longest."""
        heads = [q.waiting[0] for q in self._queues.values() if q.cache is not None and q.waiting]
        return min(heads, key=lambda request: request.order, default=None)

    def add(self, request: Request) -> None:
        """Queue a new request behind those of its unit."""
        queue = self.queue(request.unit_id)
        if not queue.num_unfinished:
            self._lift(queue)
        self._next_order += 1
        request.order = self._next_order
        queue.waiting.append(request)
        self._by_key[request.key] = request
        self._num_by_tenant[request.submit.tenant_id] += 1

    def schedule(self, now_s: float) -> tuple[ModelQueue, list[ScheduledRow]] | None:
        """The next step: a unit and its rows, blocks reserved. None when nothing can run."""
        blocked: set[str] = set()
        while True:
            work = [
                ModelWork(q.unit_id, q.tag)
                for q in self._queues.values()
                if q.cache is not None and q.num_unfinished and q.unit_id not in blocked
            ]
            chosen = choose_model(work, self._current, self._steps_run, self._min_run_steps)
            if chosen is None:
                return None
            queue = self._queues[chosen]
            rows = self._rows(queue, now_s)
            if rows:
                self._steps_run = self._steps_run + 1 if chosen == self._current else 1
                self._current = chosen
                self._last_run = queue
                return queue, rows
            blocked.add(chosen)

    def finish(self, request: Request, reason: FinishReason, now_s: float, error: str = "") -> None:
        """End a request and give its blocks back."""
        queue = self._queues[request.unit_id]
        if request.state == "running":
            queue.running.remove(request)
        else:
            queue.waiting.remove(request)
        self._give_back(queue, request, now_s)
        request.finish(reason, error)
        self._let_pass(request)
        del self._by_key[request.key]
        self._num_by_tenant[request.submit.tenant_id] -= 1
        if not self._num_by_tenant[request.submit.tenant_id]:
            del self._num_by_tenant[request.submit.tenant_id]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless states, queues and block tables agree."""
        tenants: Counter[str] = Counter()
        for queue in self._queues.values():
            live: list[RequestKv] = []
            for request in queue.requests():
                expected = "running" if request in queue.running else "waiting"
                if request.state != expected or self._by_key.get(request.key) is not request:
                    raise IntegrityError(f"request {request.key} is booked as {request.state}")
                if expected == "waiting" and request.kv is not None and not request.kv.is_empty:
                    raise IntegrityError(f"waiting request {request.key} holds blocks")
                if not 0 <= request.num_computed <= request.num_tokens:
                    raise IntegrityError(f"request {request.key}: {request.num_computed} computed")
                if request.kv is not None and not request.kv.is_empty:
                    live.append(request.kv)
                tenants[request.submit.tenant_id] += 1
            orders = [request.order for request in queue.waiting]
            if orders != sorted(orders):
                raise IntegrityError(f"{queue.unit_id}: requests wait in the order {orders}")
            if queue.cache is not None:
                queue.cache.check_integrity(live)
            elif live:
                raise IntegrityError(f"{queue.unit_id} is not resident but holds blocks")
        if any(request.state != "waiting" for request in self._held_back.values()):
            raise IntegrityError("a request that does not wait holds others of its tenant back")
        if tenants.total() != len(self._by_key) or tenants != self._num_by_tenant:
            raise IntegrityError(f"{len(self._by_key)} requests booked, {tenants} found")

    def _rows(self, queue: ModelQueue, now_s: float) -> list[ScheduledRow]:
        self._admit(queue, now_s)
        # One whose last token is on its way only waits to be told so.
        running = [r for r in queue.running if not (r.is_complete or r.waits_for_token)]
        granted = split_budget([r.num_uncomputed for r in running], self._max_batch_tokens)
        rows: list[ScheduledRow] = []
        for request, tokens in zip(running, granted, strict=True):
            if (
                tokens
                and request.state == "running"
                and self._reserve(queue, request, request.num_computed + tokens, now_s)
            ):
                source = request.pending_row if request.num_pending else -1
                rows.append(ScheduledRow(request, tokens, source))
        # Whoever was preempted to make room is mostly younger, but not where a tenant's share said
        # otherwise.
        return [row for row in rows if row.request.state == "running"]

    def _admit(self, queue: ModelQueue, now_s: float) -> None:
        cache = queue.cache
        assert cache is not None
        was_short, queue.short_order = queue.short_order is not None, None
        if not queue.waiting:
            return
        # What running requests still lack for the tokens they already have.
        promised = cache.demand(None, 0)
        for running in queue.running:
            promised += cache.demand(running.kv, running.num_tokens)
        oldest_short = self._oldest_short()
        share = self._share()
        held = self._held_by_tenant() if share.contended else {}
        for request in list(queue.waiting):
            if request.num_pending:
                return  # preempted just now: its last token comes first
            tenant_id = request.submit.tenant_id
            wanted = cache.pages_for(request.num_tokens + 1) if share.contended else 0
            first = self._held_back.get(tenant_id)
            if first is not None and first.order < request.order:
                continue
            if not may_start(held, tenant_id, wanted, share):
                self._held_back[tenant_id] = request
                continue
            if request.order > oldest_short or self._num_running() >= self._max_num_seqs:
                queue.short_order = request.order
                return
            kv = request.kv = request.kv or cache.new_kv(tenant_id)
            request.num_computed = cache.match(kv, request.token_ids, now_s)
            # One position more than it needs now, so that its next token does not preempt it.
            needed = cache.demand(kv, request.num_tokens + 1)
            if not cache.fits(promised + needed, self._spare_pages(queue)):
                self._give_back(queue, request, now_s)
                queue.short_order = request.order
                return
            promised += needed
            held[tenant_id] = held.get(tenant_id, 0.0) + wanted
            if was_short and not queue.running:
                self._lift(queue)
            self._start(queue, request)

    def _let_pass(self, request: Request) -> None:
        """The request has started, ended, or cannot start: others of its tenant need not wait."""
        if self._held_back.get(request.submit.tenant_id) is request:
            del self._held_back[request.submit.tenant_id]

    def _start(self, queue: ModelQueue, request: Request) -> None:
        self._let_pass(request)
        if request.cached_tokens is None:
            # What it finds again after a preemption is its own doing, and nobody's hit.
            request.cached_tokens = request.num_computed
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += request.num_computed
        request.move("running")
        queue.waiting.remove(request)
        insort(queue.running, request, key=_order)

    def _spare_pages(self, queue: ModelQueue) -> int:
        """Pages an admission leaves alone: a watermark, and what other units' requests lack.

        Nothing where nobody runs: then there is nobody to leave them for.
        """
        if not self._num_running():
            return 0
        lacking = self._supply.num_spare_pages
        for other in self._queues.values():
            if other is not queue and other.cache is not None and other.running:
                demand = other.cache.demand(None, 0)
                for request in other.running:
                    demand += other.cache.demand(request.kv, request.num_tokens)
                lacking += other.cache.pages_of(demand)
        return lacking

    def _lift(self, queue: ModelQueue) -> None:
        """Neither idleness nor waiting for a load or for memory earns credit."""
        active = [q.tag for q in self._queues.values() if q.running and q is not queue]
        if not active and self._last_run is not None:
            active = [self._last_run.tag]
        queue.tag = lift(queue.tag, active)

    def _oldest_short(self) -> float:
        """Order of the oldest request that waits for memory or a row; infinite if none does."""
        return min(
            (
                q.short_order
                for q in self._queues.values()
                if q.short_order is not None and q.waiting and q.cache is not None
            ),
            default=math.inf,
        )

    def _num_running(self) -> int:
        return sum(len(q.running) for q in self._queues.values())

    def _share(self) -> Share:
        if self._tenant_kv_share >= 1 or len(self._num_by_tenant) < 2:
            return Share(math.inf, contended=False)
        num_tenants = len(self._num_by_tenant)
        return share_of(self._supply.num_kv_pages(), self._tenant_kv_share, num_tenants)

    def _held_by_tenant(self) -> dict[str, float]:
        """KV pages of every tenant with a running request: held, shared ones once, or promised."""
        held: dict[str, float] = {}
        for queue, request in self._running():
            cache, tenant_id = queue.cache, request.submit.tenant_id
            assert cache is not None
            assert request.kv is not None
            if tenant_id not in held:
                caches = [q.cache for q in self._queues.values() if q.cache is not None]
                held[tenant_id] = sum(c.live_pages_of_tenant(tenant_id) for c in caches)
            if request.num_uncomputed > 1:
                lacking = cache.pages_for(request.num_tokens) - cache.live_pages_of(request.kv)
                held[tenant_id] += max(0.0, lacking)
        return held

    def _holdings(self) -> list[Holding]:
        """What each running request holds, in the order of `_running`."""
        return [
            Holding(request.submit.tenant_id, request.order, queue.cache.live_pages_of(request.kv))
            for queue, request in self._running()
            if queue.cache is not None and request.kv is not None
        ]

    def _running(self) -> list[tuple[ModelQueue, Request]]:
        return [(queue, request) for queue in self._queues.values() for request in queue.running]

    def _reserve(self, queue: ModelQueue, request: Request, num_tokens: int, now_s: float) -> bool:
        """Blocks for the first `num_tokens` positions; False: not in this step."""
        cache = queue.cache
        assert cache is not None
        assert request.kv is not None
        while request.state == "running":
            try:
                cache.reserve(request.kv, num_tokens, now_s)
                return True
            except OutOfPages:
                freed, fenced = self._supply.reclaim()
                if freed:
                    continue
            missing = cache.pages_of(cache.demand(request.kv, num_tokens)) - fenced
            if missing <= 0:
                return False  # enough comes back when the steps in flight end
            if not self._supply.make_room(missing, now_s):
                running = self._running()
                victim_queue, victim = running[choose_victim(self._holdings(), self._share())]
                self._preempt(victim_queue, victim, now_s)
        return False

    def _preempt(self, queue: ModelQueue, request: Request, now_s: float) -> None:
        queue.running.remove(request)
        request.move("waiting")
        self._give_back(queue, request, now_s)
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(queue.waiting, request, key=_order)

    def _give_back(self, queue: ModelQueue, request: Request, now_s: float) -> None:
        if request.kv is not None and not request.kv.is_empty:
            assert queue.cache is not None
            queue.cache.release(request.kv, now_s)
        request.num_computed = 0


def _order(request: Request) -> int:
    return request.order
