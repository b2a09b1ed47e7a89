"""One admitted request from the fair queue to its posting: the holding half of stages 9 and 10.

Comes in: a reservation and the dispatcher's events. Goes out: text for whoever writes the answer,
and exactly one closing, whatever happens: limits settled, ledger posted or voided.

    running --finish, stop string, failure, client gone--> ended --close, abandon--> closed

The closing runs as a task of its own, so that a cancelled connection cannot cut it short, and it
first takes the worker's last event, which says what was really used. The table of outcomes:

    outcome        when                                       tokens billed
    finished       it came to its end or its stop string      prompt + generated up to there
    disconnected   the client went away or did not read       prompt + generated until the abort
    failed         we failed, or its time was up, after       none
                   tokens were made
    (none: void)   it ended before any token                  none, limits refunded
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from engine.protocol import Finish, Usage
from gateway.detokenize import TextStream
from gateway.errors import (
    DEADLINE_EXCEEDED,
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
    WorkerLost,
)
from gateway.ledger import prices_of
from gateway.limits import Hold
from gateway.metrics import Metrics
from gateway.policy.pricing import cost_nanos
from gateway.prepare import Prepared
from gateway.services import UsageLedger
from gateway.stream import UsageFigures
from gateway.types import Principal, RunningRequest, TokenEvent
from registry.ledger import OpenRecord, Posting

log = logging.getLogger(__name__)

# How long an answer waits for its posting. A slow disk must not hold answers back for ever; the
# closing goes on without them.
CLOSE_WAIT_S = 1.0
RETRY_S = 1.0
"""What a client is told to wait whose worker was lost; the queue holds it until the restart."""

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


class Exchange:
    """See the module. Made by `pipeline.Pipeline`, used by one consumer."""

    def __init__(
        self,
        prepared: Prepared,
        principal: Principal,
        hold: Hold,
        running: RunningRequest,
        ledger: UsageLedger,
        metrics: Metrics,
        tasks: TaskSet,
        clocks: Clocks,
        arrived_s: float,
    ) -> None:
        self.request = prepared.request
        self._principal = principal
        self._hold = hold
        self._running = running
        self._events = aiter(running)
        self._ledger = ledger
        self._metrics = metrics
        self._tasks = tasks
        self._clocks = clocks
        self._arrived_s = arrived_s
        self._text = TextStream(
            prepared.codec.pieces,
            self.request.stop_strings,
            self.request.stop_token_ids,
            keep_leading_space=self.request.kind == "completion",
        )
        self._first = ""
        self._pieces: list[str] = []
        self._finish: Finish | None = None
        self._failure: ApiError | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._token_latency = metrics.inter_token_latency.labels(self.request.model.name)
        self._closing: asyncio.Task[None] | None = None
        self.is_gone = False
        # Begun now and awaited at the first token: its commit costs the first token nothing.
        self._opening = asyncio.ensure_future(self._open())

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how the text ended."""
        stopped = self._text.stopped or (self._finish is not None and self._finish.reason == "stop")
        return "stop" if stopped else "length"

    @property
    def usage(self) -> UsageFigures:
        """What the client is told, once the text has ended."""
        usage = self._usage()
        return UsageFigures(
            len(self.request.prompt_token_ids), self._text.num_tokens, usage.cached_tokens
        )

    @property
    def is_complete(self) -> bool:
        """The whole text has been made, so the answer is worth keeping."""
        if self._text.stopped:
            return True
        if self._failure is not None or self._running.overflowed:
            return False
        return self._finish is not None and self._finish.reason in ("stop", "length")

    def client_gone(self) -> None:
        """The client went away: stop the worker within one step."""
        self.is_gone = True
        self._running.abort()

    async def begin(self) -> None:
        """Wait for the first tokens. Raises ApiError: until here it can still be an HTTP status."""
        self._first = await self._next()

    async def texts(self) -> AsyncIterator[str]:
        """The answer as it is made; ends early for a client that is gone. Raises ApiError."""
        yield self._first
        while not self._has_ended:
            yield await self._next()

    async def close(self) -> None:
        """Settle and post. Returns when that is durable, or goes on alone after CLOSE_WAIT_S."""
        await asyncio.wait({self._close_once()}, timeout=CLOSE_WAIT_S)

    def abandon(self) -> None:
        """Nobody takes the answer any further: close it, whatever state it is in."""
        if self._closing is None and not self._has_ended:
            self.is_gone = True
        self._close_once()

    @property
    def _has_ended(self) -> bool:
        return self._text.stopped or self._finish is not None or self._failure is not None

    async def _next(self) -> str:
        try:
            text = await self._take(await anext(self._events))
        except ApiError as error:
            self._failure = error
            raise
        except (WorkerLost, StopAsyncIteration) as error:
            message = "the worker that was answering was lost: send the request again"
            self._failure = ApiError(UNAVAILABLE, message, retry_after_s=RETRY_S)
            raise self._failure from error
        self._pieces.append(text)
        return text

    async def _take(self, event: TokenEvent) -> str:
        text = ""
        if event.token_ids:
            await asyncio.shield(self._opening)
            self._observe(len(event.token_ids))
            text = self._text.push(event.token_ids)
        if event.finish is None:
            if self._text.stopped:
                self._running.abort()
            return text
        self._finish = event.finish
        if not self._text.stopped and event.finish.reason in ("error", "abort", "timeout"):
            self._check_end(event.finish)
        return text + self._text.finish()

    def _check_end(self, finish: Finish) -> None:
        """Raises ApiError where the end is neither the model's nor the client's doing."""
        if finish.reason == "error":
            log.error(
                "request %s: model %s failed: %s",
                self.request.request_id,
                self.request.model.name,
                finish.error,
            )
            raise ApiError(SERVER_ERROR, "the model failed while answering: send it again")
        if finish.reason == "timeout":
            message = "the request took longer than this server allows: ask for fewer tokens"
            raise ApiError(DEADLINE_EXCEEDED, message)
        if self._running.overflowed:
            raise ApiError(SERVER_ERROR, "the answer was broken off: it was not read in time")
        if not self.is_gone:
            raise ApiError(UNAVAILABLE, "the server is stopping: send the request again")

    def _observe(self, num_tokens: int) -> None:
        now_s = self._clocks.now_s()
        if self._first_token_s is None:
            self._first_token_s = now_s
            first = self._metrics.time_to_first_token.labels(self.request.model.name)
            first.observe(now_s - self._arrived_s)
        else:
            for _ in range(num_tokens):
                self._token_latency.observe((now_s - self._last_token_s) / num_tokens)
        self._last_token_s = now_s

    def _close_once(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = self._tasks.spawn(self._close())
        return self._closing

    async def _open(self) -> None:
        request, principal = self.request, self._principal
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

    async def _close(self) -> None:
        """Stage 10. Limits first: the client's next request must find them settled."""
        if self._finish is None:
            self._running.abort()
            await self._take_last_event()
        settled = self._outcome()
        if settled is None or settled[0] == "failed":
            gone_early = settled is None and self.is_gone
            await (self._hold.settle(0) if gone_early else self._hold.release())
        else:
            await self._hold.settle(len(self.request.prompt_token_ids) + settled[1])
        self._count(settled)
        # Whatever became of it, post or void ends it; a failure to open has been raised already.
        await asyncio.gather(self._opening, return_exceptions=True)
        if settled is None:
            await self._ledger.void(self.request.request_id)
        else:
            await self._ledger.post(self._posting(*settled))

    async def _take_last_event(self) -> None:
        """The worker's word on what was used. A lost worker leaves our own count."""
        try:
            async for event in self._events:
                self._finish = event.finish or self._finish
        except (ApiError, WorkerLost) as error:
            log.info("request %s: no last event: %s", self.request.request_id, error)

    def _usage(self) -> Usage:
        if self._finish is not None:
            return self._finish.usage
        return Usage(len(self.request.prompt_token_ids), 0, self._text.num_tokens, 0.0)

    def _outcome(self) -> tuple[Settled, int] | None:
        """(outcome, generated tokens it is billed or told by); None: no token was made."""
        num_text, num_made = self._text.num_tokens, self._usage().generated_tokens
        if self.is_complete:
            return "finished", num_text
        if self.is_gone or self._running.overflowed:
            generated = max(num_text, num_made)
            return ("disconnected", generated) if generated else None
        return ("failed", num_text) if num_text else None

    def _count(self, settled: tuple[Settled, int] | None) -> None:
        metrics, name = self._metrics, self.request.model.name
        duration_s = self._clocks.now_s() - self._arrived_s
        metrics.requests_ended.labels(name, settled[0] if settled else "void").inc()
        metrics.e2e_request_latency.labels(name).observe(duration_s)
        metrics.request_queue_time.labels(name).observe(self._running.queue_s)
        if settled is not None:
            metrics.prompt_tokens.labels(name).inc(len(self.request.prompt_token_ids))
            metrics.generation_tokens.labels(name).inc(settled[1])
        if self.is_complete:
            metrics.request_success.labels(name, self.finish_reason).inc()

    def _posting(self, outcome: Settled, completion_tokens: int) -> Posting:
        request, principal, usage = self.request, self._principal, self._usage()
        prompt_tokens = len(request.prompt_token_ids)
        cached_tokens = min(usage.cached_tokens, prompt_tokens)
        first_s = self._first_token_s
        return Posting(
            request_id=request.request_id,
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            model=request.model.name,
            revision=request.model.revision,
            kind=request.kind,
            outcome=outcome,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            cost_nanos=cost_nanos(
                prices_of(request.model), outcome, prompt_tokens, cached_tokens, completion_tokens
            ),
            service_s=usage.service_s,
            queue_s=self._running.queue_s,
            ttft_s=0.0 if first_s is None else first_s - self._arrived_s,
            duration_s=self._clocks.now_s() - self._arrived_s,
            posted_at=self._clocks.now_at(),
        )
