"""A connection within one process: both of its ends, and nothing between them but a list.

What `ipc.Channel` is between processes, without frames, copies or an end that comes by itself. Each
message is heard in a turn of its own (`soon`), never inside the call that sent it: so neither side
is called while it is in the middle of something, just as with a socket.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

Soon = Callable[[Callable[[], None]], object]
"""Has a call made in another turn: the event loop's `call_soon`, or a simulation's."""


def call_soon(call: Callable[[], None]) -> object:
    """In the next turn of the running event loop."""
    return asyncio.get_running_loop().call_soon(call)


class LocalChannel(Generic[In, Out]):
    """One end. Implements ipc.MessageChannel."""

    silent_s = 0.0
    """The other end is never silent: where this process hangs, both do."""

    def __init__(self, soon: Soon) -> None:
        self.on_message: Callable[[In], None] = lambda message: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.closed = False
        self._soon = soon
        self._other: LocalChannel[Out, In] | None = None
        self._arrived: deque[In] = deque()

    def send(self, message: Out) -> None:
        """Have the other end hear it soon. On a connection that has ended it is dropped."""
        if self._other is not None and not self.closed:
            self._other._arrive(message)

    def close(self) -> None:
        """Say nothing more, and hear nothing more; what was said gets there."""
        self.closed = True
        if self._other is not None:
            self._other._soon(self._other._ended)

    def lose(self, reason: str) -> None:
        """End it as if it had broken."""
        if not self.closed:
            self.close()
            self.on_lost(reason)

    def _arrive(self, message: In) -> None:
        if not self._arrived:
            self._soon(self._hear)
        self._arrived.append(message)

    def _hear(self) -> None:
        """All that has come. One message that fails must not keep the others."""
        try:
            while self._arrived and not self.closed:
                self.on_message(self._arrived[0])
                self._arrived.popleft()
        except Exception:
            self._arrived.popleft()
            if self._arrived:
                self._soon(self._hear)
            raise

    def _ended(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_lost("it ended")


def local_pair(soon: Soon = call_soon) -> tuple[LocalChannel[Any, Any], LocalChannel[Any, Any]]:
    """The two ends of a new connection."""
    one: LocalChannel[Any, Any] = LocalChannel(soon)
    other: LocalChannel[Any, Any] = LocalChannel(soon)
    one._other, other._other = other, one
    return one, other
