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
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from engine.protocol import Usage
from gateway.ledger import prices_of
from gateway.limits import Hold
from gateway.metrics import Metrics
from gateway.policy.pricing import cost_nanos
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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every exchange uses and none owns."""

    ledger: UsageLedger
    metrics: Metrics
    tasks: TaskSet
    clocks: Clocks


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
        # Begun now and awaited at the first token: its commit costs the first token nothing.
        self._opening = asyncio.ensure_future(self._open())

    async def opened(self) -> None:
        """Returns once the open record is durable. Raises ApiError where it cannot be."""
        await asyncio.shield(self._opening)

    async def end(self, ending: Ending) -> None:
        """Call once. Limits first: the client's next request must find them settled."""
        # Once for both: budgets count it in the period in which it is posted.
        ended_at = self._clocks.now_at()
        if ending.outcome is None or ending.outcome == "failed":
            if ending.keeps_request:
                await self._hold.settle(0, 0, 0, ended_at)
            else:
                await self._hold.release()
        else:
            num_prompt = len(self._request.prompt_token_ids)
            cost = self._cost_nanos(ending, ending.outcome)
            await self._hold.settle(num_prompt, ending.completion_tokens, cost, ended_at)
        self._count(ending)
        # Whatever became of it, post or void ends it; a failure to open has been raised already.
        await asyncio.gather(self._opening, return_exceptions=True)
        if ending.outcome is None:
            await self._ledger.void(self._request.request_id)
        else:
            await self._ledger.post(self._posting(ending, ending.outcome, ended_at))

    async def _open(self) -> None:
        request, principal = self._request, self._principal
        await self._ledger.open(
            OpenRecord(
                request_id=request.request_id,
                tenant_id=principal.tenant_id,
                key_id=principal.key_id,
                model=request.model.name,
                revision=request.model.revision,
                prompt_tokens=len(request.prompt_token_ids),
                opened_at=self._clocks.now_at(),
            )
        )

    def _count(self, ending: Ending) -> None:
        metrics, name = self._metrics, self._request.model.name
        duration_s = self._clocks.now_s() - self._arrived_s
        metrics.requests_ended.labels(name, ending.outcome or "void").inc()
        metrics.e2e_request_latency.labels(name).observe(duration_s)
        metrics.request_queue_time.labels(name).observe(ending.queue_s)
        if ending.outcome is not None:
            metrics.prompt_tokens.labels(name).inc(len(self._request.prompt_token_ids))
            metrics.generation_tokens.labels(name).inc(ending.completion_tokens)
        for reason in ending.finish_reasons:
            metrics.request_success.labels(name, reason).inc()

    def _cached_tokens(self, ending: Ending) -> int:
        return min(ending.usage.cached_tokens, len(self._request.prompt_token_ids))

    def _cost_nanos(self, ending: Ending, outcome: Settled) -> int:
        """What is billed: the budget is settled with it, and the posting says it."""
        return cost_nanos(
            prices_of(self._request.model),
            outcome,
            len(self._request.prompt_token_ids),
            self._cached_tokens(ending),
            ending.completion_tokens,
        )

    def _posting(self, ending: Ending, outcome: Settled, posted_at: float) -> Posting:
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
            cost_nanos=self._cost_nanos(ending, outcome),
            service_s=ending.usage.service_s,
            queue_s=ending.queue_s,
            ttft_s=0.0 if first_s is None else first_s - self._arrived_s,
            duration_s=self._clocks.now_s() - self._arrived_s,
            posted_at=posted_at,
        )
