"""GET /v1/responses/{id}?stream=true: the events of a background response, from a number on.

    at the process that makes it    as they come, from its log (event_log.py)
    at another process              the beginning; the rest when it has ended
    when it has ended               all, made again from what is stored, with the numbers they had

What is stored may be megabytes: its events are made in threads, a part when the client has taken
the one before.

Another process is told nothing of the events in between, so it looks every POLL_S whether the
response has ended. What was cancelled, or failed with its process, ends with `response.failed`,
whose number follows what the caller has; one that cannot be read, as its object is damaged, with
`error`. What passes (too many readers, no database) only makes the stream wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.dialects.responses_answer import NUM_BEFORE, Cut, error_event, queued_events, replayed
from gateway.errors import NOT_FOUND, QUEUE_FULL, UNAVAILABLE, ApiError
from gateway.state.event_log import EventLog
from gateway.types import AnswerNote, Sink

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class SoFar:
    """A response as it is told now. `cuts`: of one that has ended, see EventLog."""

    response: bytes
    is_active: bool
    cuts: list[list[Cut]] = field(default_factory=list)


Look: TypeAlias = Callable[[], Awaitable[SoFar]]
"""Raises ApiError where it cannot be read, or is gone."""

Step: TypeAlias = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""Does a piece of work in a thread."""


async def replay(
    parts: Iterator[bytes], step: Step, sink: Sink, is_gone: Callable[[], bool]
) -> None:
    """Write what is stored as fast as the client reads, until the client is gone."""
    while not is_gone() and (part := await step(lambda: next(parts, b""))):
        sink.write(part)
        if sink.is_full:
            await sink.drained()


class Following:
    """One reader of one response."""

    def __init__(
        self, log: EventLog | None, look: Look, step: Step, starting_after: int, note: AnswerNote
    ) -> None:
        """`log`: where this process makes it. `starting_after`: the last number that the reader
        has; -1: none. `note`: of the reader's request."""
        self._log = log
        self._look = look
        self._step = step
        self._note = note
        self._next = starting_after + 1
        self._is_gone = False
        self._gone = asyncio.Event()

    def stop(self) -> None:
        """The reader is gone."""
        self._is_gone = True
        self._gone.set()
        if self._log is not None:
            self._log.wake()

    async def run(self, sink: Sink) -> None:
        """Until the last event, or the reader is gone. A response that is deleted meanwhile ends
        the stream."""
        await self._run(sink)
        if self._is_gone:
            self._note.client_gone()

    async def _run(self, sink: Sink) -> None:
        if self._log is not None:
            self._next = await self._log.send(self._next, sink, lambda: self._is_gone)
            if self._log.has_last and self._next >= self._log.num_events:
                return
        while not self._is_gone:
            try:
                found = await self._look()
            except ApiError as error:
                if error.kind == NOT_FOUND:
                    return
                if error.kind not in (QUEUE_FULL, UNAVAILABLE):
                    self._note.fail(error.kind)
                    sink.write(error_event(self._next, error))
                    return
            else:
                if not found.is_active:
                    parts = replayed(found.response, found.cuts, self._next)
                    await replay(parts, self._step, sink, lambda: self._is_gone)
                    return
                if self._next < NUM_BEFORE:
                    sink.write(b"".join(queued_events(found.response)[self._next :]))
                    self._next = NUM_BEFORE
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._gone.wait()
        except TimeoutError:
            return
