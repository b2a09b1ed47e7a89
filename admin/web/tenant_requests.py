"""Requests that a page sends itself, for its user, as a key: the way of any other from there on.

`request_as` is called in a page's thread; the pipeline works on the event loop. A streamed answer
goes through a `Pipe` (a `gateway.types.Sink` to the pipeline), which holds a bounded amount: from
MAX_BYTES on it says that it is full, and its writer waits.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from gateway.answer.answer import error_event
from gateway.auth.auth import principal_of_key
from gateway.errors import INVALID_API_KEY, ApiError, ClientGone
from gateway.pipeline.edge import Edge
from gateway.types import Call, EventAnswer, RequestKind

TIMEOUT_S = 60.0
MAX_BYTES = 1 << 16


def request_as(
    edge: Edge, loop: asyncio.AbstractEventLoop, kind: RequestKind, body: bytes, key_id: str
) -> bytes:
    """The whole answer. Raises ApiError as a caller would get it, TimeoutError, ClientGone.

    Who may ask as this key is the caller's to have asked (admin/operations/keys.py).
    """
    future = asyncio.run_coroutine_threadsafe(_request(edge, kind, body, key_id), loop)
    try:
        return future.result(TIMEOUT_S)
    except TimeoutError:
        future.cancel()
        raise


async def events_as(
    edge: Edge,
    streaming: set[asyncio.Task[None]],
    kind: RequestKind,
    body: bytes,
    key_id: str,
) -> AsyncIterator[bytes]:
    """The events of a streamed answer, as a caller would get them; an error is the last event.

    Whoever stops reading is a client that went away: what came until then is billed. `streaming`
    holds the request as long as it runs.
    """
    pipe = Pipe()
    task = asyncio.create_task(_stream(edge, kind, body, key_id, pipe))
    streaming.add(task)
    task.add_done_callback(streaming.discard)
    task.add_done_callback(lambda _: pipe.end())
    try:
        async for part in pipe:
            yield part
        await task
    finally:
        pipe.leave()


async def _stream(edge: Edge, kind: RequestKind, body: bytes, key_id: str, pipe: "Pipe") -> None:
    try:
        call = _call(edge, kind, body, key_id, pipe.when_gone)
        answer = await edge.pipeline.handle(call)
        try:
            if isinstance(answer, EventAnswer):
                await answer.run(pipe)
            else:
                raise TypeError("a page asked for a stream")
        finally:
            answer.close()
    except ApiError as error:
        pipe.write(error_event(error))
    except ClientGone:
        pass  # what came until then is billed


async def _request(edge: Edge, kind: RequestKind, body: bytes, key_id: str) -> bytes:
    call = _call(edge, kind, body, key_id, lambda leave: None)
    answer = await edge.pipeline.handle(call)
    try:
        if isinstance(answer, EventAnswer):
            raise TypeError("a page asks for whole answers")
        return b"".join(answer.parts)
    finally:
        answer.close()


def _call(
    edge: Edge,
    kind: RequestKind,
    body: bytes,
    key_id: str,
    when_gone: Callable[[Callable[[], None]], None],
) -> Call:
    """Raises ApiError where the key is not let in."""
    principal = principal_of_key(edge.services.directory, key_id, edge.clocks.now_at())
    if principal is None:
        raise ApiError(
            INVALID_API_KEY,
            "the key is not active: it was revoked, has expired, or its tenant is disabled",
        )

    async def whole_body() -> bytes:
        return body

    return Call(
        kind=kind,
        headers={},
        client="",
        receive_body=whole_body,
        http_id=os.urandom(16).hex(),
        arrived_s=edge.clocks.now_s(),
        when_gone=when_gone,
        principal=principal,
    )


class Pipe:
    """One streamed answer."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._came = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._on_drained: Callable[[], None] | None = None
        self._on_gone: list[Callable[[], None]] = []
        self._has_ended = False
        self._is_gone = False

    @property
    def is_full(self) -> bool:
        """The page does not read."""
        return self._num_bytes > MAX_BYTES

    def write(self, event: bytes) -> None:
        """Of no use once the page is gone."""
        if self._is_gone:
            return
        self._parts.append(event)
        self._num_bytes += len(event)
        if self.is_full:
            self._drained.clear()
        self._came.set()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call it whenever the page reads again, or is gone."""
        self._on_drained = callback

    async def drained(self) -> None:
        """Returns when it is not full."""
        await self._drained.wait()

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call it when the page goes away, at once if it has."""
        if self._is_gone:
            callback()
        else:
            self._on_gone.append(callback)

    def end(self) -> None:
        """No more events come."""
        self._has_ended = True
        self._came.set()

    def leave(self) -> None:
        """The page reads no more. Who has read to the end breaks nothing off."""
        self._is_gone = True
        callbacks, self._on_gone = self._on_gone, []
        if not self._has_ended:
            for callback in callbacks:
                callback()
        self._emptied()

    def __aiter__(self) -> "Pipe":
        return self

    async def __anext__(self) -> bytes:
        """All that has come meanwhile, at least one event."""
        await self._came.wait()
        if not self._parts:
            raise StopAsyncIteration
        data = b"".join(self._parts)
        if not self._has_ended:
            self._came.clear()
        self._emptied()
        return data

    def _emptied(self) -> None:
        self._parts.clear()
        self._num_bytes = 0
        was_full = not self._drained.is_set()
        self._drained.set()
        if self._on_drained is not None and (was_full or self._is_gone):
            self._on_drained()
