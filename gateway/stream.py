"""Stage 9, the sending half: answers on their way to a client that may go away.

Comes in: the bytes of an answer, event by event, as answer.py writes them, or whole. Who pays for
it is exchange.py's.

A client that goes away shows only as an ASGI message, so one task per request waits for it
(`DisconnectWatch`) while the answer is made, streamed or not.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_SLICE_BYTES = 262_144


class DisconnectWatch:
    """Calls back once when the client goes away. Begin after the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    def start(self) -> None:
        """From now on `receive` belongs to the watch."""
        self._task = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """The answer is complete; who goes away now breaks nothing off."""
        if self._task is not None:
            self._task.cancel()

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client goes away, at once if it has."""
        if self.gone:
            callback()
        else:
            self._callbacks.append(callback)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for callback in self._callbacks:
            callback()


class ClientStalled(Exception):
    """The client holds the connection but has not read for too long."""


class WholeAnswer(Response):
    """A JSON answer, a slice at a time: one of megabytes does not lie in buffers for a client that
    does not read it. Raises ClientStalled where a slice takes longer than `write_timeout_s`.

    A part that is too large is cut; parts that are small are sent as they are. `close` is called
    when no more is sent, however that comes.
    """

    media_type = "application/json"

    def __init__(
        self,
        parts: Sequence[bytes],
        write_timeout_s: float,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._parts = parts
        self._write_timeout_s = write_timeout_s
        self._close = close
        self.init_headers({"content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this answer."""
        try:
            await self._send(send)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        now_s = asyncio.get_running_loop().time
        timer = asyncio.timeout(None)
        try:
            async with timer:
                for number, part in enumerate(self._parts, 1):
                    for at in range(0, len(part), _SLICE_BYTES):
                        timer.reschedule(now_s() + self._write_timeout_s)
                        body = part if len(part) <= _SLICE_BYTES else part[at : at + _SLICE_BYTES]
                        more = number < len(self._parts) or at + _SLICE_BYTES < len(part)
                        await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            if timer.expired():
                raise ClientStalled from error
            raise


class EventStream(Response):
    """Sends events as they come. `close` is called when no more are taken, however that comes.

    Raises ClientStalled where one event takes longer than `write_timeout_s` to send.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str],
        write_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._write_timeout_s = write_timeout_s
        # x-accel-buffering: a proxy in front must not hold events back.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this answer."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        now_s = asyncio.get_running_loop().time
        # One timer for the whole stream, armed while something is being sent.
        timer = asyncio.timeout(None)
        try:
            async with timer:
                await send(start)
                async for event in self._events:
                    timer.reschedule(now_s() + self._write_timeout_s)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    timer.reschedule(None)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError as error:
            if timer.expired():
                raise ClientStalled from error
            raise
        finally:
            self._close()
            await self._events.aclose()
