"""Which requests run in the next step, with every block they need reserved beforehand.

Holds the requests of all models, in queues per model. A step runs one model's batch; a step never
allocates what was not reserved here. When the pool has no page left, the youngest running request
of any model is preempted: its blocks are given back and it is computed again later, so the oldest
always makes progress. While the oldest request of a model waits for memory, no younger request of
another model is let in before it.

Does not load models and does not run them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.batch import ScheduledRow
from engine.errors import IntegrityError, OutOfPages
from engine.kv_cache import KvCache
from engine.policy.batching import ModelWork, choose_model, lift, split_budget
from engine.protocol import FinishReason
from engine.request import Request


@dataclass(slots=True)
class ModelQueue:
    """Requests of one model. `tag` is the service it has had; `cache` is None unless resident.

    `short` says that the first waiting request found too little memory when it last was its turn.
    """

    model_id: str
    cache: KvCache | None = None
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    tag: float = 0.0
    short: bool = False

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def requests(self) -> Iterator[Request]:
        """All of them, running first."""
        yield from self.running
        yield from self.waiting


class Scheduler:
    """All requests of a worker. Single-threaded."""

    def __init__(
        self,
        max_num_seqs: int,
        max_batch_tokens: int,
        min_run_steps: int,
        reclaim: Callable[[], tuple[int, int]],
    ) -> None:
        """`reclaim` frees fenced pages whose steps have ended; returns (freed, still fenced)."""
        self._reclaim = reclaim
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._min_run_steps = min_run_steps
        self._queues: dict[str, ModelQueue] = {}
        self._by_key: dict[tuple[str, int], Request] = {}
        self._current: str | None = None
        self._steps_run = 0
        self._last_run: ModelQueue | None = None
        self._next_order = 0
        self.num_preemptions = 0

    def queue(self, model_id: str) -> ModelQueue:
        """The model's queue, made at first use."""
        return self._queues.setdefault(model_id, ModelQueue(model_id))

    def queues(self) -> list[ModelQueue]:
        """All queues."""
        return list(self._queues.values())

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, of all models."""
        return len(self._by_key)

    def bind(self, queue: ModelQueue, cache: KvCache) -> None:
        """The model has become resident; what waited for its load can run."""
        queue.cache = cache
        self._lift(queue)

    def forget(self, queue: ModelQueue) -> None:
        """Drop the queue of a model that is gone. It must be empty."""
        if queue.num_unfinished:
            raise IntegrityError(f"{queue.model_id} still has requests")
        del self._queues[queue.model_id]

    def has_work(self) -> bool:
        """Whether some resident model has a request."""
        return any(q.cache is not None and q.num_unfinished for q in self._queues.values())

    def find(self, key: tuple[str, int]) -> Request | None:
        """An unfinished request by (request_id, attempt)."""
        return self._by_key.get(key)

    def oldest_waiting(self) -> Request | None:
        """The request of a resident model that has waited longest."""
        heads = [q.waiting[0] for q in self._queues.values() if q.cache is not None and q.waiting]
        return min(heads, key=lambda request: request.order, default=None)

    def add(self, request: Request) -> None:
        """Queue a new request behind those of its model."""
        queue = self.queue(request.submit.model_id)
        if not queue.num_unfinished:
            self._lift(queue)
        self._next_order += 1
        request.order = self._next_order
        queue.waiting.append(request)
        self._by_key[request.key] = request

    def schedule(self) -> tuple[ModelQueue, list[ScheduledRow]] | None:
        """The next step: a model and its rows, blocks reserved. None when nothing can run."""
        blocked: set[str] = set()
        while True:
            work = [
                ModelWork(q.model_id, q.tag)
                for q in self._queues.values()
                if q.cache is not None and q.num_unfinished and q.model_id not in blocked
            ]
            chosen = choose_model(work, self._current, self._steps_run, self._min_run_steps)
            if chosen is None:
                return None
            self._steps_run = self._steps_run + 1 if chosen == self._current else 1
            self._current = chosen
            queue = self._queues[chosen]
            rows = self._rows(queue)
            if rows:
                self._last_run = queue
                return queue, rows
            blocked.add(chosen)

    def finish(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End a request and give its blocks back."""
        queue = self._queues[request.submit.model_id]
        if request.state == "running":
            queue.running.remove(request)
        else:
            queue.waiting.remove(request)
        self._give_back(queue, request)
        request.finish(reason, error)
        del self._by_key[request.key]

    def preempt_all(self, queue: ModelQueue) -> None:
        """Every running request of the model waits again; its KV is given back."""
        for request in sorted(queue.running, key=lambda r: -r.order):
            self._preempt(queue, request)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless states, queues and block tables agree."""
        seen = 0
        for queue in self._queues.values():
            live: list[int] = []
            for request in queue.requests():
                expected = "running" if request in queue.running else "waiting"
                if request.state != expected or self._by_key.get(request.key) is not request:
                    raise IntegrityError(f"request {request.key} is booked as {request.state}")
                if expected == "waiting" and request.block_table:
                    raise IntegrityError(f"waiting request {request.key} holds blocks")
                live.extend(request.block_table)
                seen += 1
            if queue.cache is not None:
                queue.cache.check_integrity(live)
            elif live:
                raise IntegrityError(f"{queue.model_id} is not resident but holds blocks")
        if seen != len(self._by_key):
            raise IntegrityError(f"{len(self._by_key)} requests booked, {seen} found")

    def _rows(self, queue: ModelQueue) -> list[ScheduledRow]:
        self._admit(queue)
        granted = split_budget([r.num_uncomputed for r in queue.running], self._max_batch_tokens)
        rows: list[ScheduledRow] = []
        # Oldest first: whoever is preempted to make room is younger, so never already in `rows`.
        for request, tokens in zip(list(queue.running), granted, strict=True):
            if (
                tokens
                and request.state == "running"
                and self._reserve(queue, request, request.num_computed + tokens)
            ):
                rows.append(ScheduledRow(request, tokens))
        return rows

    def _admit(self, queue: ModelQueue) -> None:
        cache = queue.cache
        assert cache is not None
        # Blocks that running requests of this model still lack for what they already hold.
        promised = sum(
            max(0, cache.blocks_for(len(r.token_ids)) - len(r.block_table)) for r in queue.running
        )
        was_short, queue.short = queue.short, False
        oldest_short = self._oldest_short()
        while queue.waiting and self._num_running() < self._max_num_seqs:
            request = queue.waiting[0]
            # One block more than it needs now, so that it is not preempted by its next token.
            needed = cache.blocks_for(len(request.token_ids) + 1)
            if request.order > oldest_short or promised + needed > cache.available_blocks():
                queue.short = True
                return
            promised += needed
            if was_short and not queue.running:
                self._lift(queue)
            queue.waiting.popleft()
            request.move("running")
            queue.running.append(request)
            queue.running.sort(key=lambda r: r.order)

    def _lift(self, queue: ModelQueue) -> None:
        """Neither idleness nor waiting for a load or for memory earns credit."""
        active = [q.tag for q in self._queues.values() if q.running and q is not queue]
        if not active and self._last_run is not None:
            active = [self._last_run.tag]
        queue.tag = lift(queue.tag, active)

    def _oldest_short(self) -> float:
        """Order of the oldest request that waits for memory; infinite if none does."""
        return min(
            (
                q.waiting[0].order
                for q in self._queues.values()
                if q.short and q.waiting and q.cache is not None
            ),
            default=math.inf,
        )

    def _num_running(self) -> int:
        return sum(len(q.running) for q in self._queues.values())

    def _reserve(self, queue: ModelQueue, request: Request, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` positions; False: not in this step."""
        assert queue.cache is not None
        missing = queue.cache.blocks_for(num_tokens) - len(request.block_table)
        while missing > 0:
            try:
                request.block_table.extend(queue.cache.alloc(missing))
                return True
            except OutOfPages:
                freed, fenced = self._reclaim()
                if freed:
                    continue
                if fenced:
                    return False  # enough may come back when the steps in flight end
                victim_queue, victim = max(
                    ((q, r) for q in self._queues.values() for r in q.running),
                    key=lambda pair: pair[1].order,
                )
                self._preempt(victim_queue, victim)
                if victim is request:
                    return False
        return True

    def _preempt(self, queue: ModelQueue, request: Request) -> None:
        queue.running.remove(request)
        request.move("waiting")
        self._give_back(queue, request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        queue.waiting.appendleft(request)

    def _give_back(self, queue: ModelQueue, request: Request) -> None:
        if request.block_table and queue.cache is not None:
            queue.cache.free(request.block_table)
        request.block_table = []
        request.num_computed = 0
