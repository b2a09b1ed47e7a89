"""One live request: the one object that owns what it holds in the gateway, and its one clean-up.

    reserve   limits                 given back or settled
    at_end    its place among identical requests, memory for its answer: let go by a plain call
    submit    its parts (the choices of a text, the pieces of an encoder's inputs): requests to
              workers, which are aborted, and whose last events say what was really used
    open      its record in the ledger: posted or voided

Whatever happens, a client that goes away or a task that is cancelled at any `await` included, it is
closed exactly once. The closing runs as a task of its own, so that a cancelled connection cannot
cut it short. The table of outcomes:

    outcome        when                                     tokens billed            limits
    finished       all parts came to their end or stop      prompt + generated up    settled
                   string, or to where their form costs     to there
                   too much to be held any further
    disconnected   the client went away or did not read     prompt + generated       settled
                                                            until the abort
                   the time of a stream was up              prompt + what was sent   settled
    failed         the time of a whole answer was up        none                     settled: what
                                                                                     was made counts
                   we failed after tokens were made         none                     given back
    (none: void)   it ended before any token, an encoder    none                     given back; all
                   before all rows                                                   but the request
                                                                                     if it left or
                                                                                     its time was up
                   it is made again under the same id       none                     given back
                   (`Call.is_repeated`), and did not finish

What was sent before our time limit is billed, or whoever asks for more than the limit allows would
have it for nothing. A request has one outcome: finished where all parts are, and where one fails
the others are stopped. It is billed for its prompt once and for the tokens of all choices.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.protocol import Usage
from gateway.errors import DEADLINE_EXCEEDED, ApiError, ClientGone
from gateway.limits.limits import Limiter, LimitReservation
from gateway.metrics.counters import Times
from gateway.metrics.metrics import Metrics
from gateway.pricing.bill import bill
from gateway.pricing.policy.pricing import Billed, most_nanos
from gateway.protocols import UsageLedger
from gateway.types import Call, PartsEnd, PreparedRequest, Principal
from registry.money.ledger import OpenRecord, Posting

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 1.0
"""How long an answer waits for its posting. A slow disk must not hold answers back for ever; the
closing goes on without them."""


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
class Dependencies:
    """What every request uses and none owns."""

    ledger: UsageLedger
    metrics: Metrics
    tasks: TaskSet
    clocks: Clocks
    checkpoint_tokens: int = 64
    """Of a stream, between two checkpoints."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request. `outcome` None: nothing was made that anybody owes for.

    `completion_tokens`: those it is billed or reported by. `ttft_s`: until the first came.
    `finish_reasons`: of what ended as asked.
    """

    outcome: Billed | None
    usage: Usage
    completion_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    finish_reasons: Sequence[str] = ()


class Parts(Protocol):
    """The requests to workers that one request is made of: `TextParts` or `RowParts`."""

    @property
    def is_queued(self) -> bool:
        """The dispatcher has at least one of them."""

    @property
    def has_ended(self) -> bool:
        """Nothing more will be said."""

    def start(self) -> None:
        """Queue them. Raises ApiError."""

    def abort(self) -> None:
        """Stop the workers within one step."""

    async def end(self) -> PartsEnd:
        """Stop the workers, and take what each says last where that matters."""


class ActiveRequest:
    """See the module. Made by `pipeline.Pipeline`; it holds nothing yet."""

    def __init__(
        self,
        call: Call,
        request: PreparedRequest,
        principal: Principal,
        dependencies: Dependencies,
    ) -> None:
        self.call = call
        self.request = request
        self.principal = principal
        self.is_gone = False
        self.at_end = ExitStack()
        self._ledger = dependencies.ledger
        self._metrics = dependencies.metrics
        self._tasks = dependencies.tasks
        self._clocks = dependencies.clocks
        self._checkpoint_tokens = dependencies.checkpoint_tokens
        self._checkpointed = 0
        self._reservation: LimitReservation | None = None
        self._parts: Parts | None = None
        self._record: OpenRecord | None = None
        self._opening: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failed = False
        self._is_late = False
        self._first_token_s: float | None = None
        self._token_latency: Times | None = None  # an encoder has none

    # What it comes to hold, in this order.

    async def reserve(self, limiter: Limiter) -> None:
        """Hold its limits. Raises ApiError."""
        headers = self.call.answer_headers
        self._reservation = await limiter.reserve(self.principal, self.request, headers)

    def submit(self, parts: Parts) -> None:
        """Queue its parts. Raises ApiError where one is refused."""
        try:
            parts.start()
        finally:
            if parts.is_queued:
                self._parts = parts
        self.call.when_gone(self.client_gone)

    def open(self) -> None:
        """Begin its record in the ledger; its sync goes on while the workers compute."""
        self._record = open_record(self.request, self.principal, self._clocks.now_at())
        self._opening = asyncio.ensure_future(self._ledger.open(self._record))

    # What happens to it.

    def client_gone(self) -> None:
        """The client went away: stop the workers within one step. Where we failed before that, it
        owes nothing."""
        self.is_gone = self.is_gone or not self._failed
        if self._parts is not None:
            self._parts.abort()

    async def opened(self) -> None:
        """Returns once its record is durable: no token leaves before that. Raises ApiError."""
        assert self._opening is not None
        if self._opening.done():
            self._opening.result()
        else:
            await asyncio.shield(self._opening)

    def on_tokens(self, num_tokens: int, last_s: float | None) -> float:
        """So many came for a part that had its last at `last_s`. Returns when."""
        now_s = self._clocks.now_s()
        if self._first_token_s is None:
            self._first_token_s = now_s
            metrics, name = self._metrics, self.request.model.name
            metrics.time_to_first_token.of(name).observe(now_s - self.call.arrived_s)
            self._token_latency = metrics.inter_token_latency.of(name)
        if last_s is not None and self._token_latency is not None:
            self._token_latency.observe((now_s - last_s) / num_tokens, num_tokens)
        return now_s

    def streamed(self, num_tokens: int) -> None:
        """The client has been sent so many tokens of a stream: a checkpoint, now and then. What it
        was sent is billed even where nobody who could tell is left."""
        if num_tokens - self._checkpointed >= self._checkpoint_tokens:
            self._checkpointed = num_tokens
            self._ledger.checkpoint(self.request.request_id, num_tokens)

    @property
    def times_s(self) -> tuple[float, float]:
        """Since it arrived: until now, and until its first token."""
        arrived_s, first_s = self.call.arrived_s, self._first_token_s
        now_s = self._clocks.now_s()
        return now_s - arrived_s, (now_s if first_s is None else first_s) - arrived_s

    # How it ends.

    async def post_hit(self, completion_tokens: int) -> int:
        """Post a kept answer, before it is sent: it needs no open record. Returns what it costs.
        Raises ApiError where the ledger refuses: it is not served, and nothing is owed."""
        assert self._reservation is not None
        duration_s = self._clocks.now_s() - self.call.arrived_s
        ending = Outcome("cache_hit", Usage(0, 0, 0, 0.0), completion_tokens, ttft_s=duration_s)
        now_at = self._clocks.now_at()
        record = open_record(self.request, self.principal, now_at)
        said = self._posting(record, ending, "cache_hit", now_at, duration_s)
        try:
            await self._ledger.post(said)
        except Exception:
            await self._reservation.release()
            raise
        finally:  # Who is cancelled here is posted all the same.
            await self._reservation.settle(0, 0, said.cost_nanos, now_at)
        self._metrics.posted_cost.add(said.cost_nanos, self.request.model.name)
        return said.cost_nanos

    async def close(self) -> None:
        """Settle and post. Returns when that is durable, or goes on alone after CLOSE_WAIT_S."""
        if self._reservation is not None:
            await wait_for(self._close_once(self._reservation), CLOSE_WAIT_S)

    async def fail(self, error: Exception) -> None:
        """Close it by our failure, or for a client that is gone; as `close` does. The error is told
        after that, at most CLOSE_WAIT_S later: whoever tries again at once finds its place free."""
        self._failed = self._failed or not isinstance(error, ClientGone)
        is_late = isinstance(error, ApiError) and error.kind == DEADLINE_EXCEEDED
        self._is_late = self._is_late or is_late
        self.abandon()
        await self.close()

    def abandon(self) -> None:
        """Nobody takes the answer any further: let go of all, whatever state it is in."""
        has_ended = self._failed or (self._parts is not None and self._parts.has_ended)
        if self._closing is None and not has_ended:
            self.is_gone = True
        self.at_end.close()
        if self._reservation is not None:
            self._close_once(self._reservation)

    def _close_once(self, reservation: LimitReservation) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = self._tasks.spawn(self._close(reservation))
        return self._closing

    async def _close(self, reservation: LimitReservation) -> None:
        """Limits first: the client's next request must find them settled. Where there is no open
        record, no token has left: nothing is owed, whatever was made."""
        parts, request = self._parts, self.request
        if parts is None:
            await reservation.release()
            return
        if self._opening is None:  # Not all parts could be queued: workers may have begun others.
            self.open()
        ending = self._outcome(await parts.end())
        keeps_request = ending.outcome is None and (self.is_gone or self._is_late)
        is_again = self.call.is_repeated and not self._is_late
        is_void = is_again and ending.outcome != "finished"
        if is_void or (ending.outcome is not None and not await self._is_open()):
            ending = msgspec.structs.replace(ending, outcome=None)
        # Once for both: budgets count it in the period in which it is posted.
        ended_at, duration_s = self._clocks.now_at(), self._clocks.now_s() - self.call.arrived_s
        said = None
        if ending.outcome is not None:
            outcome = ending.outcome
            assert self._record is not None
            said = self._posting(self._record, ending, outcome, ended_at, duration_s)
        if said is not None and (ending.outcome != "failed" or self._is_late):
            used = request.num_prompt_tokens, said.completion_tokens, said.cost_nanos
            await reservation.settle(*used, ended_at)
        elif keeps_request:
            await reservation.settle(0, 0, 0, ended_at)
        else:
            await reservation.release()
        self._count(ending, duration_s, said)
        await self._is_open()  # Whatever became of it, post or void ends it.
        if said is None:
            await self._ledger.void(request.request_id)
        else:
            await self._ledger.post(said)
        # The parts have this: a circle, which keeps the prompt until the collector finds it.
        self._parts = None

    def _outcome(self, end: PartsEnd) -> Outcome:
        succeeded = end.is_complete and not self._failed
        num_tokens = end.num_tokens
        outcome: Billed = "failed"
        if succeeded or end.is_spent:
            outcome = "finished"
        elif self.is_gone or end.overflowed:
            outcome, num_tokens = "disconnected", end.num_generated
        elif self._is_late and self.request.stream and end.num_sent:
            outcome, num_tokens = "disconnected", end.num_sent
        if not succeeded and not num_tokens:
            return Outcome(None, end.usage, queue_s=end.queue_s)
        ended_as_asked = outcome == "finished" and end.is_complete
        reasons = end.finish_reasons if ended_as_asked else ()
        first_s = self._first_token_s
        ttft_s = 0.0 if first_s is None else first_s - self.call.arrived_s
        return Outcome(outcome, end.usage, num_tokens, end.queue_s, ttft_s, reasons)

    def _posting(
        self,
        record: OpenRecord,
        ending: Outcome,
        outcome: Billed,
        posted_at: float,
        duration_s: float,
    ) -> Posting:
        return bill(
            record,
            self.request.rates,
            outcome,
            ending.usage,
            ending.completion_tokens,
            kind=self.request.kind,
            posted_at=posted_at,
            is_encoder=self.request.encode is not None,
            queue_s=ending.queue_s,
            ttft_s=ending.ttft_s,
            duration_s=duration_s,
        )

    async def _is_open(self) -> bool:
        """A failure to open has been raised already."""
        assert self._opening is not None
        if not self._opening.done():
            await asyncio.wait([self._opening])
        return not self._opening.cancelled() and self._opening.exception() is None

    def _count(self, ending: Outcome, duration_s: float, said: Posting | None) -> None:
        metrics, name = self._metrics, self.request.model.name
        metrics.requests_ended.add(1, name, ending.outcome or "void")
        metrics.e2e_request_latency.of(name).observe(duration_s)
        metrics.request_queue_time.of(name).observe(ending.queue_s)
        if ending.outcome is not None:
            metrics.prompt_tokens.add(self.request.num_prompt_tokens, name)
            metrics.generation_tokens.add(ending.completion_tokens, name)
            self._count_text(ending, duration_s)
        if said is not None:
            metrics.posted_cost.add(said.cost_nanos, name)
        for reason in ending.finish_reasons:
            metrics.request_success.add(1, name, reason)

    def _count_text(self, ending: Outcome, duration_s: float) -> None:
        metrics, name = self._metrics, self.request.model.name
        metrics.prompt_length.of(name).observe(self.request.num_prompt_tokens)
        num_tokens = ending.completion_tokens
        if self._first_token_s is None:
            return  # an encoder's
        metrics.output_length.of(name).observe(num_tokens)
        metrics.prefill_time.of(name).observe(max(0.0, ending.ttft_s - ending.queue_s))
        decode_s = max(0.0, duration_s - ending.ttft_s)
        metrics.decode_time.of(name).observe(decode_s)
        if num_tokens > 1:
            metrics.time_per_output_token.of(name).observe(decode_s / (num_tokens - 1))


def open_record(request: PreparedRequest, principal: Principal, now_at: float) -> OpenRecord:
    """What is durable before the first token leaves."""
    num_prompt, num_output = request.num_prompt_tokens, request.max_tokens * request.num_choices
    return OpenRecord(
        request_id=request.request_id,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        model=request.model.name,
        revision=request.model.revision,
        prompt_tokens=num_prompt,
        opened_at=request.rates.at or now_at,
        reserved_nanos=most_nanos(request.rates, num_prompt, num_output),
    )
