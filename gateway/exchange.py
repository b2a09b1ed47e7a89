"""One admitted request from the fair queue to its posting: the holding half of stages 9 and 10.

Comes in: a reservation and the dispatcher's events. Goes out: pieces (choice.py) for whoever writes
the answer, and exactly one closing, whatever happens: what settlement.py does with the outcome.

    running --finish, stop string, failure, client gone--> ended --close, abandon--> closed

The closing runs as a task of its own, so that a cancelled connection cannot cut it short, and it
first takes the worker's last event, which says what was really used. The table of outcomes:

    outcome        when                                       tokens billed
    finished       it came to its end or its stop string, or  prompt + generated up to there
                   to where its own form of answer costs too
                   much to be held any further
    disconnected   the client went away or did not read       prompt + generated until the abort
    failed         we failed, or its time was up, after       none
                   tokens were made
    (none: void)   it ended before any token                  none, limits refunded

A request for several choices has one outcome: finished where all are, and where one fails the
others are stopped. It is billed for its prompt once and for the tokens of all choices.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from engine.protocol import Usage
from gateway.answer.answer import UsageFigures
from gateway.answer.choice import Choice, Merged, Piece
from gateway.dispatch.joint import joint_usage
from gateway.ledger.settlement import (
    CLOSE_WAIT_S,
    Ending,
    Settled,
    Settlement,
    Surroundings,
    wait_for,
)
from gateway.limits.limits import Hold
from gateway.prepare.prepare import Prepared
from gateway.types import Principal, RunningRequest, Sink


class Exchange:
    """See the module. Made by `pipeline.Pipeline`, used by one consumer."""

    def __init__(
        self,
        prepared: Prepared,
        principal: Principal,
        hold: Hold,
        runnings: Sequence[RunningRequest],
        around: Surroundings,
        arrived_s: float,
    ) -> None:
        """`runnings`: the request's choices as the dispatcher runs them, in order."""
        self.request = prepared.request
        self._metrics = around.metrics
        self._tasks = around.tasks
        self._clocks = around.clocks
        self._arrived_s = arrived_s
        self.is_gone = False
        self.choices = [
            Choice(
                index,
                self.request,
                running,
                prepared.codec.pieces,
                prepared.new_parser(),
                self._opened,
                self._on_tokens,
            )
            for index, running in enumerate(runnings)
        ]
        self._merged = Merged(self.choices, self._is_gone)
        self._first: Piece | None = None
        self._failed = False
        self._first_token_s: float | None = None
        self._token_latency = around.metrics.inter_token_latency.of(self.request.model.name)
        self._closing: asyncio.Task[None] | None = None
        self._settlement = Settlement(self.request, principal, hold, around, arrived_s)

    @property
    def usage(self) -> UsageFigures:
        """What the client is told, once the text has ended."""
        cached = min(choice.usage.cached_tokens for choice in self.choices)
        return UsageFigures(len(self.request.prompt_token_ids), self._num_tokens, cached)

    @property
    def is_complete(self) -> bool:
        """The whole text of every choice has been made, so the answer is worth keeping."""
        return all(choice.is_complete for choice in self.choices)

    def client_gone(self) -> None:
        """The client went away: stop the worker within one step. Where we failed before that, it
        owes nothing."""
        self.is_gone = self.is_gone or not self._failed
        self._abort()

    async def ready(self, timeout_s: float) -> bool:
        """Whether there is something to begin with within the time. Takes nothing."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()

        def tell(is_ready: bool = True) -> None:
            if not waiter.done():
                waiter.set_result(is_ready)

        timer = loop.call_later(timeout_s, tell, False)
        try:
            for choice in self.choices:
                choice.running.listen(tell)
            return await waiter
        finally:
            timer.cancel()
            for choice in self.choices:
                choice.running.listen(None)

    async def begin(self) -> None:
        """Wait for the first tokens. Raises ApiError: until here it can still be an HTTP status."""
        self._first = await self._next()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it is made; ends early for a client that is gone. Raises ApiError."""
        if self._first is not None:
            yield self._first
        while not self._merged.is_over:
            if self.request.stream:  # What was yielded before has been sent.
                self._settlement.streamed(self._num_tokens)
            yield await self._next()

    async def push(self, send: Callable[[Piece], None], sink: Sink) -> None:
        """Hand the pieces on as they are made, while the client reads: what it does not read waits
        in the dispatcher's streams, where the bound is. Ends as `pieces` does. Raises ApiError.

        One choice is handed on by plain calls, as far as from the worker's message to the socket:
        they run inside the dispatcher, to which nothing is raised.
        """
        try:
            await self._push(send, sink)
        except Exception:  # an ApiError, or a bug: neither is the client's to pay for
            self._failed = True
            self._abort()
            raise

    async def _push(self, send: Callable[[Piece], None], sink: Sink) -> None:
        if len(self.choices) > 1:
            async for piece in self.pieces():
                send(piece)
                await sink.drained()
            return
        send(self._first or await self._next())
        if self._merged.is_over:
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        choice = self.choices[0]
        is_busy = False

        def on_event() -> None:
            nonlocal is_busy
            if is_busy or over.done():  # busy: an abort from within may bring the last event
                return
            is_busy = True
            try:
                self._hand_on(choice, send, sink)
            except Exception as error:  # noqa: BLE001  carried to who awaits below
                over.set_exception(error)
            else:
                if choice.has_ended:
                    over.set_result(None)
            is_busy = False

        sink.when_drained(on_event)
        choice.running.listen(on_event)
        try:
            await over
        finally:
            choice.running.listen(None)

    async def close(self) -> None:
        """Settle and post. Returns when that is durable, or goes on alone after CLOSE_WAIT_S."""
        await wait_for(self._close_once(), CLOSE_WAIT_S)

    def abandon(self) -> None:
        """Nobody takes the answer any further: close it, whatever state it is in."""
        if self._closing is None and not self._has_ended:
            self.is_gone = True
        self._close_once()

    def fail(self) -> None:
        """Not every choice could be queued: close what was begun, as our failure."""
        self._failed = True
        self._close_once()

    @property
    def _has_ended(self) -> bool:
        return self._failed or all(choice.has_ended for choice in self.choices)

    @property
    def _num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def _overflowed(self) -> bool:
        return any(choice.running.overflowed for choice in self.choices)

    @property
    def _queue_s(self) -> float:
        return max((choice.running.queue_s for choice in self.choices), default=0.0)

    def _abort(self) -> None:
        for choice in self.choices:
            choice.running.abort()

    async def _next(self) -> Piece:
        try:
            return await self._merged.next()
        except Exception:  # an ApiError, or a bug: neither is the client's to pay for
            self._failed = True
            self._abort()
            raise

    def _hand_on(self, choice: Choice, send: Callable[[Piece], None], sink: Sink) -> None:
        """All there is, unless the client does not read."""
        while choice.running.has_event and not sink.is_full:
            piece = choice.take(self._is_gone)
            if piece is None:
                return
            send(piece)
            if choice.has_ended:
                return
            self._settlement.streamed(choice.num_tokens)  # of the only one

    def _is_gone(self) -> bool:
        return self.is_gone

    async def _opened(self) -> None:
        """No token leaves before its open record is durable."""
        await self._settlement.opened()

    def _on_tokens(self, choice: Choice, num_tokens: int) -> None:
        now_s = self._clocks.now_s()
        if self._first_token_s is None:
            self._first_token_s = now_s
            first = self._metrics.time_to_first_token.of(self.request.model.name)
            first.observe(now_s - self._arrived_s)
        if choice.last_token_s is not None:
            self._token_latency.observe((now_s - choice.last_token_s) / num_tokens, num_tokens)
        choice.last_token_s = now_s

    def _close_once(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = self._tasks.spawn(self._close())
        return self._closing

    async def _close(self) -> None:
        """Stage 10."""
        await self._merged.stop()
        self._abort()
        for choice in self.choices:
            await choice.take_last_event()
        settled = self._outcome()
        outcome, completion_tokens = settled or (None, 0)
        succeeded = outcome == "finished" and self.is_complete
        await self._settlement.end(
            Ending(
                outcome,
                self._usage(),
                completion_tokens,
                self._queue_s,
                self._first_token_s,
                keeps_request=settled is None and self.is_gone,
                finish_reasons=[c.finish_reason for c in self.choices if succeeded],
            )
        )
        self._merged.let_go()

    def _usage(self) -> Usage:
        usages = [choice.usage for choice in self.choices]
        return joint_usage(usages) if usages else Usage(0, 0, 0, 0.0)

    def _outcome(self) -> tuple[Settled, int] | None:
        """(outcome, generated tokens it is billed or told by); None: no token was made."""
        num_text = self._num_tokens
        spent = any(c.num_tokens and c.has_spent_form for c in self.choices)
        if spent or (self.is_complete and not self._failed):
            return "finished", num_text
        if self.is_gone or self._overflowed:
            generated = sum(max(c.num_tokens, c.usage.generated_tokens) for c in self.choices)
            return ("disconnected", generated) if generated else None
        return ("failed", num_text) if num_text else None
