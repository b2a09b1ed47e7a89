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
from collections.abc import AsyncIterator, Sequence

from engine.protocol import Usage
from gateway.answer import UsageFigures
from gateway.choice import Choice, Merged, Piece
from gateway.errors import ApiError
from gateway.joint import joint_usage
from gateway.limits import Hold
from gateway.prepare import Prepared
from gateway.settlement import CLOSE_WAIT_S, Ending, Settled, Settlement, Surroundings
from gateway.types import Principal, RunningRequest


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
                self._before_tokens,
            )
            for index, running in enumerate(runnings)
        ]
        self._merged = Merged(self.choices, lambda: self.is_gone)
        self._first: Piece | None = None
        self._failed = False
        self._first_token_s: float | None = None
        self._token_latency = around.metrics.inter_token_latency.labels(self.request.model.name)
        self._closing: asyncio.Task[None] | None = None
        self._settlement = Settlement(self.request, principal, hold, around, arrived_s)

    @property
    def usage(self) -> UsageFigures:
        """What the client is told, once the text has ended."""
        return UsageFigures(
            len(self.request.prompt_token_ids), self._num_tokens, self._usage().cached_tokens
        )

    @property
    def is_complete(self) -> bool:
        """The whole text of every choice has been made, so the answer is worth keeping."""
        return all(choice.is_complete for choice in self.choices)

    def client_gone(self) -> None:
        """The client went away: stop the worker within one step."""
        self.is_gone = True
        self._abort()

    async def begin(self) -> None:
        """Wait for the first tokens. Raises ApiError: until here it can still be an HTTP status."""
        self._first = await self._next()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it is made; ends early for a client that is gone. Raises ApiError."""
        if self._first is not None:
            yield self._first
        while not self._merged.is_over:
            yield await self._next()

    async def close(self) -> None:
        """Settle and post. Returns when that is durable, or goes on alone after CLOSE_WAIT_S."""
        await asyncio.wait({self._close_once()}, timeout=CLOSE_WAIT_S)

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
        except ApiError:
            self._failed = True
            self._abort()
            raise

    async def _before_tokens(self, choice: Choice, num_tokens: int) -> None:
        """No token leaves before its open record is durable."""
        await self._settlement.opened()
        now_s = self._clocks.now_s()
        if self._first_token_s is None:
            self._first_token_s = now_s
            first = self._metrics.time_to_first_token.labels(self.request.model.name)
            first.observe(now_s - self._arrived_s)
        if choice.last_token_s is not None:
            for _ in range(num_tokens):
                self._token_latency.observe((now_s - choice.last_token_s) / num_tokens)
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
