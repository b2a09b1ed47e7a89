"""A connection within one process: both of its ends, and nothing between them but a list.

What `ipc.Channel` is between processes, without frames, copies or an end that comes by itself. A
message is heard in another turn of the event loop (`soon`), never inside the call that sent it: so
neither side is called while it is in the middle of something, just as with a socket. Answers, and
answers to these, are heard in the same turn.
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


class _Said:
    """What both ends have said and not heard, in order."""

    def __init__(self, soon: Soon) -> None:
        self._soon = soon
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_due = False

    def add(self, call: Callable[[Any], None], about: object) -> None:
        """`call(about)`, to be made in another turn."""
        self._calls.append((call, about))
        if not self._is_due:
            self._is_due = True
            self._soon(self._run)

    def _run(self) -> None:
        """One that fails keeps none of the others from being made."""
        try:
            while self._calls:
                call, about = self._calls.popleft()
                call(about)
            self._is_due = False
        finally:
            if self._is_due:
                self._soon(self._run)


class LocalChannel(Generic[In, Out]):
    """One end. Implements ipc.MessageChannel."""

    silent_s = 0.0
    """The other end is never silent: where this process hangs, both do."""

    def __init__(self, said: _Said) -> None:
        self.on_message: Callable[[In], None] = lambda message: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.closed = False
        self._said = said
        self._other: LocalChannel[Out, In] | None = None

    def send(self, message: Out) -> None:
        """Have the other end hear it soon. On a connection that has ended it is dropped."""
        if self._other is not None and not self.closed:
            self._said.add(self._other._hear, message)

    def close(self) -> None:
        """Say nothing more, and hear nothing more; what was said gets there."""
        self.closed = True
        if self._other is not None:
            self._said.add(self._other._end, "it ended")

    def lose(self, reason: str) -> None:
        """End it as if it had broken."""
        if not self.closed:
            self.close()
            self.on_lost(reason)

    def _hear(self, message: In) -> None:
        if not self.closed:
            self.on_message(message)

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self.on_lost(reason)


def local_pair(soon: Soon = call_soon) -> tuple[LocalChannel[Any, Any], LocalChannel[Any, Any]]:
    """The two ends of a new connection."""
    said = _Said(soon)
    one: LocalChannel[Any, Any] = LocalChannel(said)
    other: LocalChannel[Any, Any] = LocalChannel(said)
    one._other, other._other = other, one
    return one, other
