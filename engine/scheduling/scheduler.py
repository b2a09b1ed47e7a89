"""Which requests run in the next step, with every block they need reserved beforehand.

Holds the requests of all models (resident packs), in queues per model. A step runs one model's
batch; a step never allocates what was not reserved here. The order of means when the pool has no
page left: what is fenced comes back by itself, cached KV is evicted, sparse extents are compacted,
and only then a running request is preempted: its blocks are given back and it is computed again
later. Who that is says `policy/batching.py`; the oldest request of all always makes progress.

Who of those that wait is let in says `admission.py`: while the oldest request of a model waits for
memory or for a row, no younger request of another model is let in before it, but for a first
request or two of whoever has next to nothing here: they start beyond the rows. A step has no more
rows for it; the youngest requests of the tenants with most of them sit out, with their KV, until a
row is free.

Requests may have tokens in flight (`Request.num_pending`): they are scheduled as if these were
known. Does not load models and does not run them.

Requests of class batch are younger than all others (`Request.order`), and so the first to be
preempted. They have a step of their own, of any model, only where no other request can run; they
have rows beside others that decode, up to the length of a step that heavy tenants may fill, and
none while somebody else's prompt, of any model, is to be computed. Where rows are lacking they sit
out with their KV; where another request, or the weights of a model that is to come, lack memory,
they are preempted.

Encoder requests need no memory: nobody is preempted for them, nor they for others. At most
`max_num_seqs` of one model run at once, the others wait in order and count against `max_waiting`
like all others. A step takes STEP_TOKENS at most, so a request of thousands of inputs is cut over
many steps: requests of the same model share each of them, and other models run in between by their
tags. What a request has computed survives an eviction of its model.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Sequence

from engine.errors import IntegrityError, OutOfPages
from engine.memory import KvCache, KvMemory, RequestKv
from engine.protocol import FinishReason
from engine.request import BATCH_ORDER, Request
from engine.running import ScheduledRow
from engine.scheduling.admission import Admission
from engine.scheduling.policy.batching import (
    Holding,
    ModelWork,
    choose_model,
    choose_victim,
    lift,
    share_inputs,
    split_budget,
)
from engine.scheduling.queues import ModelQueue, TenantCounts, running_in

STEP_TOKENS = 512
"""Beyond this a step gains nothing on a CPU, where what layers put out no longer stays in its
caches, and everybody else waits longer for a turn. Texts of 6 to 40 tokens, a MiniLM's shape, one
quiet core: 2,891 tokens/s with 256, 3,070 with 512, 2,588 with 1024, 2,216 with 2048."""


class Scheduler:
    """All requests of a worker. Single-threaded."""

    def __init__(
        self,
        max_num_seqs: int,
        max_batch_tokens: int,
        min_run_steps: int,
        kv: KvMemory,
        tenant_kv_share: float = 1.0,
    ) -> None:
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._min_run_steps = min_run_steps
        # Models that are resident or have requests; of the others only the service they have had.
        self._queues: dict[str, ModelQueue] = {}
        self._tags: dict[str, float] = {}
        self._tenants = TenantCounts()
        self.num_batch = 0
        """Unfinished requests of class batch."""
        self._admission = Admission(self._queues, self._tenants, kv, max_num_seqs, tenant_kv_share)
        self._current: str | None = None
        self._steps_run = 0
        self._last_run: ModelQueue | None = None
        self._next_order = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        """Prompt tokens looked up in the prefix cache, and those found there."""

    def queue(self, instance_id: str) -> ModelQueue:
        """The model's queue, made where there is none."""
        queue = self._queues.get(instance_id)
        if queue is None:
            queue = ModelQueue(instance_id, tag=self._tags.pop(instance_id, 0.0))
            self._queues[instance_id] = queue
        return queue

    def queues(self) -> list[ModelQueue]:
        """Those of models that are resident or have requests."""
        return list(self._queues.values())

    def is_busy(self, instance_id: str) -> bool:
        """Whether the model has a request."""
        queue = self._queues.get(instance_id)
        return queue is not None and queue.num_unfinished > 0

    def is_live(self, instance_id: str) -> bool:
        """Whether the model has a request of another class than batch."""
        queue = self._queues.get(instance_id)
        return queue is not None and queue.is_live

    def leave_to_load(self, num_pages: int, now_s: float) -> None:
        """So many pages (0: none) are for a load that others than class batch wait for: requests of
        that class are preempted as far as they hold them, and take none of them."""
        self._admission.load_pages = num_pages
        while num_pages and num_pages > self._kv.num_obtainable and self._preempt_batch(now_s):
            pass

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, of all models."""
        return self._tenants.num_requests + self.num_batch

    def bind(self, queue: ModelQueue, cache: KvCache) -> None:
        """The model has become resident; what waited for its load can run."""
        if self._queues.setdefault(queue.instance_id, queue) is not queue:
            raise IntegrityError(f"{queue.instance_id} has two queues")
        queue.cache = cache
        queue.page_rates = cache.plan.page_rates()
        self._lift(queue)

    def unbind(self, queue: ModelQueue, now_s: float) -> None:
        """The model leaves: every running request waits again; its KV is given back."""
        for request in sorted(queue.running, key=lambda r: -r.order):
            self._preempt(queue, request, now_s)
        queue.cache = None
        for request in queue.waiting:
            self._admission.let_pass(request)
        self._drop_idle(queue)

    def forget(self, queue: ModelQueue) -> None:
        """Drop the queue of a model that is gone. It must be empty."""
        if queue.num_unfinished:
            raise IntegrityError(f"{queue.instance_id} still has requests")
        self._queues.pop(queue.instance_id, None)
        self._tags.pop(queue.instance_id, None)

    def has_work(self) -> bool:
        """Whether some resident model has a request."""
        return any(q.cache is not None and q.num_unfinished for q in self._queues.values())

    def find(self, keys: Collection[tuple[str, int]]) -> list[Request]:
        """Unfinished requests by (request_id, attempt). One walk over all of them."""
        queues = self._queues.values()
        return [request for queue in queues for request in queue.requests() if request.key in keys]

    def oldest_waiting(self) -> Request | None:
        """The request of a resident model that has waited longest for KV; none of class batch."""
        heads = [
            q.waiting[0]
            for q in self._queues.values()
            if q.cache is not None and not q.encodes and q.waiting and not q.waiting[0].is_batch
        ]
        return min(heads, key=lambda request: request.order, default=None)

    @property
    def only_encodes(self) -> bool:
        """Whether somebody found too little KV memory while nobody runs who could give any back.

        Encoders may go on for ever meanwhile.
        """
        queues = [q for q in self._queues.values() if q.cache is not None and not q.encodes]
        is_short = any(q.short is not None and not q.short.request.is_batch for q in queues)
        return is_short and not any(q.running for q in queues)

    def add(self, request: Request) -> None:
        """Queue a new request behind those of its model."""
        queue = self.queue(request.instance_id)
        self._next_order += 1
        request.order = self._next_order
        if request.is_batch:
            request.order += BATCH_ORDER
            if not queue.has_batch:
                active = [q.batch_tag for q in self._queues.values() if q.has_batch]
                queue.batch_tag = lift(queue.batch_tag, active)
            self.num_batch += 1
        else:
            if not queue.is_live:
                self._lift(queue)
            self._tenants.add(request.submit.tenant_id)
        insort(queue.waiting, request, key=_order)

    def schedule(self, now_s: float) -> tuple[ModelQueue, list[ScheduledRow]] | None:
        """The next step: a model and its rows, blocks reserved. None when nothing can run."""
        blocked: set[str] = set()
        while True:
            queues = [
                q
                for q in self._queues.values()
                if q.cache is not None and q.num_unfinished and q.instance_id not in blocked
            ]
            live = [q for q in queues if q.is_live] if self.num_batch else queues
            several = len(live) > 1
            work = [ModelWork(q.instance_id, q.tag, several and self._is_urgent(q)) for q in live]
            work = work or [ModelWork(q.instance_id, q.batch_tag) for q in queues]
            chosen = choose_model(work, self._current, self._steps_run, self._min_run_steps)
            if chosen is None:
                return None
            queue = self._queues[chosen]
            rows = self._rows(queue, now_s)
            if rows:
                self._note_runs(queue)
                return queue, rows
            blocked.add(chosen)

    def finish(self, request: Request, reason: FinishReason, now_s: float, error: str = "") -> None:
        """End a request and give its blocks back."""
        queue = self._queues[request.instance_id]
        if request.state == "running":
            queue.running.remove(request)
        else:
            queue.waiting.remove(request)
        self._give_back(queue, request, now_s)
        request.finish(reason, error)
        self._admission.let_pass(request)
        if request.is_batch:
            self.num_batch -= 1
        else:
            self._tenants.remove(request.submit.tenant_id, now_s)
        self._drop_idle(queue)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless states, queues and block tables agree."""
        tenants: Counter[str] = Counter()
        num_batch = 0
        for queue in self._queues.values():
            live: list[RequestKv] = []
            for request in queue.requests():
                expected = "running" if request in queue.running else "waiting"
                if request.state != expected:
                    raise IntegrityError(f"request {request.key} is booked as {request.state}")
                if expected == "waiting" and request.kv is not None and not request.kv.is_empty:
                    raise IntegrityError(f"waiting request {request.key} holds blocks")
                if not 0 <= request.num_computed <= request.num_tokens:
                    raise IntegrityError(f"request {request.key}: {request.num_computed} computed")
                if request.kv is not None and not request.kv.is_empty:
                    live.append(request.kv)
                num_batch += request.is_batch
                if not request.is_batch:
                    tenants[request.submit.tenant_id] += 1
            orders = [request.order for request in queue.waiting]
            if orders != sorted(orders):
                raise IntegrityError(f"{queue.instance_id}: requests wait in the order {orders}")
            if queue.cache is not None:
                queue.cache.check_integrity(live)
            elif live:
                raise IntegrityError(f"{queue.instance_id} is not resident but holds blocks")
        if num_batch != self.num_batch:
            raise IntegrityError(f"{self.num_batch} of class batch booked, {num_batch} found")
        shorts = [q.short for q in self._queues.values() if q.short is not None and not q.encodes]
        lacking = [s.request for s in shorts if s.needed is not None and not s.request.is_batch]
        running = running_in(q for q in self._queues.values() if not q.encodes)
        if lacking and any(request.is_batch for _, request in running):
            raise IntegrityError(f"{lacking[0].key} lacks memory while class batch runs")
        self._admission.check_integrity()
        self._tenants.check_integrity(tenants)

    def _is_urgent(self, queue: ModelQueue) -> bool:
        """Whether somebody with fewer requests here than the mean waits for a first token there."""
        starts = (r for r in queue.requests() if not r.is_batch)
        return self._tenants.num > 1 and any(map(self._tenants.is_light_start, starts))

    def _starts(self) -> bool:
        """Whether a prompt that is not of class batch is to be computed, of any resident model."""
        return any(
            request.order < BATCH_ORDER and _has_prompt(request)
            for queue in self._queues.values()
            if queue.cache is not None
            for request in queue.requests()
        )

    def _note_runs(self, queue: ModelQueue, num_steps: int = 1) -> None:
        """The model has run so many steps in a row."""
        before = self._steps_run if queue.instance_id == self._current else 0
        self._steps_run = before + num_steps
        self._current = queue.instance_id
        self._last_run = queue

    def _drop_idle(self, queue: ModelQueue) -> None:
        """A step looks at every queue, and a catalog may name thousands of models."""
        if queue.cache is None and not queue.num_unfinished:
            del self._queues[queue.instance_id]
            self._tags[queue.instance_id] = queue.tag

    def _encoder_rows(self, queue: ModelQueue) -> list[ScheduledRow]:
        num_live = sum(not request.is_batch for request in queue.running)
        while queue.waiting:
            request = queue.waiting[0]
            if (len(queue.running) if request.is_batch else num_live) >= self._max_num_seqs:
                break
            num_live += not request.is_batch
            request.cached_tokens = 0  # nor is anything looked up for it
            self._start(queue, request)
        return encoder_rows(queue.running, self._max_batch_tokens)

    def _rows(self, queue: ModelQueue, now_s: float) -> list[ScheduledRow]:
        if queue.encodes:
            return self._encoder_rows(queue)
        was_short = queue.short is not None
        while True:
            for request in self._admission.admit(queue, now_s):
                if was_short and not queue.running:
                    self._lift(queue)
                self._start(queue, request)
            if not self._give_way_to(queue, now_s):
                break
        # One whose last token is on its way only waits to be told so.
        running = [r for r in queue.running if not (r.is_complete or r.waits_for_token)]
        rows: list[ScheduledRow] = []
        assert queue.cache is not None
        running, wanted, granted = self._split(queue, running, now_s)
        for request, most, tokens in zip(running, wanted, granted, strict=True):
            first = request.num_computed
            if tokens < most:
                tokens = queue.cache.states.whole_blocks(first, tokens)
            if (
                tokens
                and request.state == "running"
                and self._reserve(queue, request, first + tokens, now_s)
            ):
                assert request.kv is not None
                queue.cache.begin_row(request.kv, first, first + tokens, now_s)
                source = request.pending_row if request.num_pending else -1
                rows.append(ScheduledRow(request, tokens, source))
        # Whoever was preempted to make room is mostly younger, but not where a tenant's share said
        # otherwise.
        return [row for row in rows if row.request.state == "running"]

    def _split(
        self, queue: ModelQueue, running: list[Request], now_s: float
    ) -> tuple[list[Request], list[int], list[int]]:
        """Who has a row of the next step, the tokens that it may have, and those that it has.

        Light tenants keep their rows, and their prompts are computed before those of heavy ones.
        """
        rank = self._tenants.rank
        if self.num_batch and any(r.order < BATCH_ORDER for r in running) and self._starts():
            running = [r for r in running if r.order < BATCH_ORDER]
        if len(running) > self._max_num_seqs:
            kept = sorted(range(len(running)), key=lambda place: rank(running[place]))
            running = [running[place] for place in sorted(kept[: self._max_num_seqs])]
        ranks = [rank(request) for request in running]
        wanted = [_row_tokens(queue, request) for request in running]
        most = self._max_batch_tokens
        is_shared = self._tenants.is_shared(now_s)
        if not is_shared and BATCH_ORDER not in ranks:
            return running, wanted, split_budget(wanted, most, ranks)
        beside = BATCH_ORDER in ranks and running[0].order < BATCH_ORDER
        pace = queue.batch_pace if BATCH_ORDER in ranks else queue.pace
        heavy_tokens = pace.heavy_tokens(wanted.count(1), most, is_batch=beside)
        heavy_rank = self._tenants.mean if is_shared else BATCH_ORDER
        granted = split_budget(wanted, most, ranks, heavy_rank, heavy_tokens)
        return running, wanted, granted

    def _start(self, queue: ModelQueue, request: Request) -> None:
        self._admission.let_pass(request)
        if request.cached_tokens is None:
            # What it finds again after a preemption, or in a later attempt, is nobody's hit.
            request.cached_tokens = request.num_computed
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += request.num_computed
        request.on("admit")
        queue.waiting.remove(request)
        insort(queue.running, request, key=_order)

    def _lift(self, queue: ModelQueue) -> None:
        """Neither idleness nor waiting for a load or for memory earns credit."""
        active = [
            q.tag
            for q in self._queues.values()
            if q is not queue and q.running and not q.running[0].is_batch
        ]
        if not active and self._last_run is not None:
            active = [self._last_run.tag]
        queue.tag = lift(queue.tag, active)

    def _victim(self) -> tuple[ModelQueue, Request]:
        """Who gives its memory back."""
        running = running_in(q for q in self._queues.values() if not q.encodes)
        if self.num_batch:
            last = max(running, key=lambda item: item[1].order)
            if last[1].is_batch:
                return last
        holdings = [Holding(request.submit.tenant_id, request.order) for _, request in running]
        share = self._admission.share()
        tenants = {holding.tenant_id for holding in holdings} if share.contended else set()
        held = {tenant_id: self._admission.live_pages(tenant_id) for tenant_id in tenants}
        return running[choose_victim(holdings, held, share)]

    def _give_way_to(self, queue: ModelQueue, now_s: float) -> bool:
        """Preempt the youngest of class batch where another request lacks memory. False: nothing
        to do, or nobody to preempt."""
        short = queue.short
        if short is None or short.needed is None or short.request.is_batch:
            return False
        return self._preempt_batch(now_s)

    def _preempt_batch(self, now_s: float) -> bool:
        """The youngest of class batch that runs; False: none does."""
        if not self.num_batch:
            return False
        running = running_in(q for q in self._queues.values() if not q.encodes)
        last = max(running, key=lambda item: item[1].order, default=None)
        if last is None or not last[1].is_batch:
            return False
        self._preempt(*last, now_s)
        return True

    def _reserve(self, queue: ModelQueue, request: Request, num_tokens: int, now_s: float) -> bool:
        """Blocks for the first `num_tokens` positions; False: not in this step."""
        cache = queue.cache
        assert cache is not None
        assert request.kv is not None
        while request.state == "running":
            try:
                cache.reserve(request.kv, num_tokens)
                return True
            except OutOfPages:
                freed, fenced = self._kv.reclaim()
                if freed:
                    continue
            missing = cache.pages_of(cache.demand(request.kv, num_tokens)) - fenced
            if missing <= 0:
                return False  # enough comes back when the steps in flight end
            if not self._kv.make_room(missing):
                victim_queue, victim = self._victim()
                self._preempt(victim_queue, victim, now_s)
        return False

    def _preempt(self, queue: ModelQueue, request: Request, now_s: float) -> None:
        queue.running.remove(request)
        request.num_lost = max(request.num_lost, request.num_computed)
        request.held_since_s = None
        request.on("preempt")
        self._give_back(queue, request, now_s)
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(queue.waiting, request, key=_order)

    def _give_back(self, queue: ModelQueue, request: Request, now_s: float) -> None:
        if request.kv is not None and not request.kv.is_empty:
            assert queue.cache is not None
            queue.cache.release(request.kv, now_s)
        if request.encoding is None:
            request.num_computed = 0


def _row_tokens(queue: ModelQueue, request: Request) -> int:
    """Tokens of the request that the next step may compute."""
    if queue.cache is None or request.kv is None:
        return request.num_runnable
    return queue.cache.states.row_tokens(request.kv, request.num_computed, request.num_runnable)


def _order(request: Request) -> int:
    return request.order


def _has_prompt(request: Request) -> bool:
    """Whether more than the token that was sampled last is to be computed before its next one."""
    return request.num_uncomputed > 1 or not (request.num_generated or request.num_pending)


def encoder_rows(running: Sequence[Request], max_tokens: int) -> list[ScheduledRow]:
    """The next step's inputs, oldest request first; empty where all have been launched. Those of
    class batch have steps of their own."""
    pending = [r for r in running if r.encoding is not None and r.num_computed < r.num_prompt]
    if pending and not pending[0].is_batch:
        pending = [r for r in pending if not r.is_batch]
    progress = [(r.encoding.ends, r.num_computed) for r in pending if r.encoding is not None]
    granted = share_inputs(progress, min(max_tokens, STEP_TOKENS))
    return [
        ScheduledRow(request, tokens)
        for request, tokens in zip(pending, granted, strict=True)
        if tokens
    ]
