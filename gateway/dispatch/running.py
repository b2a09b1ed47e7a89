"""What the pipeline holds while the dispatcher works: the events of one request, in order.

Stage 5 to stage 9. The dispatcher puts tokens in by plain calls on the event loop; one consumer
takes them out by `async for`. No task and no lock per token: a consumer that waits holds one
future, and tokens that came in while it was busy are handed over as one event.

Bounded: once more than `max_buffer_tokens` wait for a consumer that does not read, `put` says so
and takes no more tokens (the dispatcher aborts the request); the finish always gets in.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

from engine.protocol import Finish, TokenLogprobs
from gateway.types import TokenEvent

StreamEnd: TypeAlias = Finish | Exception


class RequestStream:
    """Implements `types.RunningRequest`. Used on one event loop, by one consumer."""

    def __init__(
        self,
        max_buffer_tokens: int,
        on_abort: Callable[[], None],
        queue_s: Callable[[], float],
    ) -> None:
        self._max_buffer_tokens = max_buffer_tokens
        self._on_abort: Callable[[], None] | None = on_abort
        self._queue_s: Callable[[], float] | None = queue_s
        self._queued_s = 0.0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._vectors = b""
        self._end: StreamEnd | None = None
        self._handed_over = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_event: Callable[[], None] | None = None
        self._attempt = 1
        self.overflowed = False
        """Whether tokens were dropped because nobody read them."""

    @property
    def attempt(self) -> int:
        """Which try the events belong to."""
        return self._attempt

    @property
    def queue_s(self) -> float:
        """Seconds in the fair queue, up to now or to the (latest) grant."""
        return self._queued_s if self._queue_s is None else self._queue_s()

    def abort(self) -> None:
        """Stop within one step; the last event follows. Harmless after the end."""
        if self._on_abort is not None:
            self._on_abort()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next tokens, or the finish with what was left. Raises what ended the request."""
        while (event := self.take()) is None:
            if self._handed_over:
                raise StopAsyncIteration
            await self._wait()
        return event

    @property
    def has_event(self) -> bool:
        """Something may be taken."""
        return bool(self._tokens) or (self._end is not None and not self._handed_over)

    def take(self) -> TokenEvent | None:
        """The next event if there is one, in order as by iteration. Raises what ended the request.

        None after the last one, too.
        """
        if self._end is None:
            return self._take() if self._tokens else None
        if isinstance(self._end, Exception) and self._tokens:
            return self._take()
        if self._handed_over:
            return None
        self._handed_over = True
        if isinstance(self._end, Exception):
            raise self._end
        return self._take(self._end)

    def listen(self, on_event: Callable[[], None] | None) -> None:
        """Be called whenever something may be taken, now if so: for a consumer without a task.
        None: no longer."""
        self._on_event = on_event
        if on_event is not None and (self._tokens or self._end is not None):
            on_event()

    # The dispatcher's side.

    def retry(self, attempt: int) -> None:
        """The events from now on are those of another try; no token has been put yet."""
        self._attempt = attempt

    def put(
        self,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Add tokens. False: the consumer is too slow, they were dropped."""
        if self.overflowed or self._end is not None:
            return False
        if len(self._tokens) + len(token_ids) > self._max_buffer_tokens:
            self.overflowed = True
            return False
        self._tokens.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._prompt_logprobs = prompt_logprobs or self._prompt_logprobs
        self._wake()
        return True

    def finish(self, end: StreamEnd, vectors: bytes = b"") -> None:
        """The last event, or what is raised in its place. The first one counts."""
        if self._end is None:
            self._queued_s = self.queue_s
            # The ticket's, which has this stream: a circle, which keeps the prompt until the
            # collector finds it.
            self._on_abort = self._queue_s = None
            self._end, self._vectors = end, vectors
            self._wake()

    def _take(self, finish: Finish | None = None) -> TokenEvent:
        event = TokenEvent(
            self._tokens,
            finish,
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
            b"" if finish is None else self._vectors,
        )
        self._tokens, self._logprobs, self._prompt_logprobs = [], [], ()
        if finish is not None:
            self._vectors = b""
        return event

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("a request's events have one consumer")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_event is not None:
            self._on_event()
