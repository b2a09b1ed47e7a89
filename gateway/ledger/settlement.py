"""How an admitted request ends, whatever it was: limits settled, posted or voided. Stage 10.

Comes in: a hold on limits and, once, the outcome. Goes out: one posting, or none. What was made
and what the client saw of it is exchange.py's (generated text) and encode_exchange.py's to say.

    outcome        when                                  tokens billed           limits
    finished       it came to its end                    what was used           settled
    disconnected   the client went away before that      used until the abort    settled
    failed         we failed after something was made    none                    given back
    (none: void)   it ended before anything was made     none                    given back, or
                   (and the client was to blame)                                 the tokens are
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from engine.protocol import Usage
from gateway.limits.limits import Hold
from gateway.metrics.metrics import Metrics
from gateway.policy.pricing import Consumption, Cost, cost_of, micros, most_nanos
from gateway.services import UsageLedger
from gateway.types import PreparedRequest, Principal
from registry.ledger import OpenRecord, Posting

log = logging.getLogger(__name__)

# How long an answer waits for its posting. A slow disk must not hold answers back for ever; the
# closing goes on without them.
CLOSE_WAIT_S = 1.0

Settled: TypeAlias = Literal["finished", "disconnected", "failed"]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Monotonic seconds for durations, epoch seconds for the ledger."""

    now_s: Callable[[], float]
    now_at: Callable[[], float]


class TaskSet:
    """Tasks that must outlive whoever started them. `drain` at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run to the end; a failure is logged, for nobody may be waiting."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def drain(self, timeout_s: float) -> None:
        """Wait for what runs, at most this long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("closing a request failed", exc_info=task.exception())


async def wait_for(task: "asyncio.Task[None]", timeout_s: float) -> None:
    """Returns when the task has ended or the time is up; raises nothing of the task's."""
    if task.done():
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def tell(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(timeout_s, tell)
    task.add_done_callback(tell)
    try:
        await waiter
    finally:
        timer.cancel()
        task.remove_done_callback(tell)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every exchange uses and none owns."""

    ledger: UsageLedger
    metrics: Metrics
    tasks: TaskSet
    clocks: Clocks
    checkpoint_tokens: int = 64
    """Of a stream, between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a request. `outcome` None: nothing was made that anybody owes for.

    `completion_tokens`: those it is billed or told by. `first_token_s`: when the first came.
    `keeps_request`: of a void one, the client is to blame, so it still counts as a request.
    `finish_reasons`: of what ended as asked.
    """

    outcome: Settled | None
    usage: Usage
    completion_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float | None = None
    keeps_request: bool = False
    finish_reasons: Sequence[str] = ()


class Settlement:
    """One request's open record, hold and posting."""

    def __init__(
        self,
        request: PreparedRequest,
        principal: Principal,
        hold: Hold,
        around: Surroundings,
        arrived_s: float,
    ) -> None:
        self._request = request
        self._principal = principal
        self._hold = hold
        self._ledger = around.ledger
        self._metrics = around.metrics
        self._clocks = around.clocks
        self._arrived_s = arrived_s
        self._checkpoint_tokens = around.checkpoint_tokens
        self._checkpointed = 0
        # Begun now and awaited at the first token: its sync goes on while the worker computes.
        self._opening = asyncio.ensure_future(around.ledger.open(self._open_record()))

    async def opened(self) -> None:
        """Returns once the open record is durable. Raises ApiError where it cannot be."""
        if self._opening.done():
            self._opening.result()
        else:
            await asyncio.shield(self._opening)

    def streamed(self, num_tokens: int) -> None:
        """The client has been sent so many tokens of a stream: a checkpoint, now and then. What it
        was sent is billed even where nobody who could tell is left."""
        if num_tokens - self._checkpointed >= self._checkpoint_tokens:
            self._checkpointed = num_tokens
            self._ledger.checkpoint(self._request.request_id, num_tokens)

    async def end(self, ending: Ending) -> None:
        """Call once. Limits first: the client's next request must find them settled. Where there is
        no open record, no token has left: nothing is owed, whatever was made."""
        if ending.outcome is not None and not await self._is_open():
            ending = replace(ending, outcome=None)
        # Once for both: budgets count it in the period in which it is posted.
        ended_at = self._clocks.now_at()
        cost = None if ending.outcome is None else self._cost(ending, ending.outcome)
        if cost is None or ending.outcome is None or ending.outcome == "failed":
            if ending.keeps_request:
                await self._hold.settle(0, 0, 0, ended_at)
            else:
                await self._hold.release()
        else:
            num_prompt = len(self._request.prompt_token_ids)
            await self._hold.settle(num_prompt, ending.completion_tokens, cost.cost_nanos, ended_at)
        self._count(ending)
        await self._is_open()  # Whatever became of it, post or void ends it.
        if cost is None or ending.outcome is None:
            await self._ledger.void(self._request.request_id)
        else:
            await self._ledger.post(self._posting(ending, ending.outcome, cost, ended_at))

    def _open_record(self) -> OpenRecord:
        request, principal = self._request, self._principal
        num_prompt = len(request.prompt_token_ids)
        return OpenRecord(
            request_id=request.request_id,
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            model=request.model.name,
            revision=request.model.revision,
            prompt_tokens=num_prompt,
            opened_at=request.rates.at or self._clocks.now_at(),
            reserved_nanos=most_nanos(
                request.rates, num_prompt, request.max_tokens * request.num_choices
            ),
        )

    async def _is_open(self) -> bool:
        """A failure to open has been raised already."""
        if not self._opening.done():
            await asyncio.wait([self._opening])
        return not self._opening.cancelled() and self._opening.exception() is None

    def _count(self, ending: Ending) -> None:
        metrics, name = self._metrics, self._request.model.name
        duration_s = self._clocks.now_s() - self._arrived_s
        metrics.requests_ended.add(1, name, ending.outcome or "void")
        metrics.e2e_request_latency.of(name).observe(duration_s)
        metrics.request_queue_time.of(name).observe(ending.queue_s)
        if ending.outcome is not None:
            metrics.prompt_tokens.add(len(self._request.prompt_token_ids), name)
            metrics.generation_tokens.add(ending.completion_tokens, name)
        for reason in ending.finish_reasons:
            metrics.request_success.add(1, name, reason)

    def _cached_tokens(self, ending: Ending) -> int:
        return min(ending.usage.cached_tokens, len(self._request.prompt_token_ids))

    def _cost(self, ending: Ending, outcome: Settled) -> Cost:
        """What is billed: the budget is settled with it, and the posting says it."""
        used = Consumption(
            len(self._request.prompt_token_ids),
            self._cached_tokens(ending),
            ending.completion_tokens,
            micros(ending.usage.service_s),
            micros(ending.usage.load_s),
            is_encoder=self._request.encode is not None,
        )
        return cost_of(self._request.rates, outcome, used)

    def _posting(self, ending: Ending, outcome: Settled, cost: Cost, posted_at: float) -> Posting:
        request, principal = self._request, self._principal
        prompt_tokens, completion_tokens = len(request.prompt_token_ids), ending.completion_tokens
        first_s = ending.first_token_s
        return Posting(
            request_id=request.request_id,
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            model=request.model.name,
            revision=request.model.revision,
            kind=request.kind,
            outcome=outcome,
            prompt_tokens=prompt_tokens,
            cached_tokens=self._cached_tokens(ending),
            completion_tokens=completion_tokens,
            cost_nanos=cost.cost_nanos,
            service_s=ending.usage.service_s,
            queue_s=ending.queue_s,
            ttft_s=0.0 if first_s is None else first_s - self._arrived_s,
            duration_s=self._clocks.now_s() - self._arrived_s,
            posted_at=posted_at,
            arrived_at=request.rates.at,
            prefill_s=ending.usage.prefill_s,
            decode_s=max(0.0, ending.usage.device_s - ending.usage.prefill_s),
            load_s=ending.usage.load_s,
            input_nanos=cost.input_nanos,
            cached_nanos=cost.cached_nanos,
            output_nanos=cost.output_nanos,
            service_nanos=cost.service_nanos,
            load_nanos=cost.load_nanos,
            list_nanos=cost.list_nanos,
        )
