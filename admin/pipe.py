"""Between a request's events and the page that reads them, both on the event loop.

A `gateway.types.Sink` to whoever makes the events; the page iterates. Holds a bounded amount: from
MAX_BYTES on it says that it is full, and its writer waits.
"""

import asyncio
from collections.abc import Callable

MAX_BYTES = 1 << 16


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
