"""Events of a background response while it is made, for those who read along. Stage 9's last step.

    events   0, 1, 2, ...    as the stream wrote them; an event's number is its place
    cuts                     how many characters and log-probabilities each delta had, item by item:
                             with these the events of a response that has ended are made again from
                             what is stored

The log lies in the process that makes the response, and ends with it. It holds a bounded number of
bytes; who is further behind than that goes on from what is stored at the end, as at another
process (event_following.py).
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.dialects.responses_answer import Cut
from gateway.types import Sink

MAX_HELD_BYTES = 16 << 20


class _Event(msgspec.Struct):
    type: str
    delta: str = ""
    logprobs: list[msgspec.Raw] = []


_decode = msgspec.json.Decoder(_Event).decode


class EventLog:
    """Of one response. Written and read on the event loop. Implements Sink."""

    is_full = False

    def __init__(self, on_write: Callable[[], None] = lambda: None) -> None:
        """`on_write`: called at the first event that is written after those of `begin`."""
        self._on_write: Callable[[], None] | None = on_write
        self._events: deque[bytes] = deque()
        self._num_dropped = self._num_bytes = 0
        self._changed = asyncio.Event()
        self.cuts: list[list[Cut]] = []
        """Of each item of the output, those of its deltas."""
        self.is_over = False
        self.has_last = False
        """The event that the stream ends with is in it."""

    @property
    def num_events(self) -> int:
        """Those that were dropped included."""
        return self._num_dropped + len(self._events)

    def begin(self, events: bytes) -> None:
        """What is told before anything is made."""
        self._add(events)

    def write(self, event: bytes) -> None:
        """See Sink. Any number of events."""
        if not event:
            return
        if self._on_write is not None:
            on_write, self._on_write = self._on_write, None
            on_write()
        self._add(event)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """See Sink: it is never full."""

    async def drained(self) -> None:
        """See Sink."""

    def end(self, last: bytes = b"") -> None:
        """Nothing more comes. `last`: what it ends with, where that is known."""
        if last:
            self._add(last)
        self.has_last = bool(last)
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Whoever reads looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def send(self, at: int, sink: Sink, is_gone: Callable[[], bool]) -> int:
        """Write the events from number `at` on, as they come, until the log is over, has dropped
        what comes next, or the reader is gone. Returns the number of the next event."""
        while not is_gone() and at >= self._num_dropped:
            if at < self.num_events:
                sink.write(self._events[at - self._num_dropped])
                at += 1
                if sink.is_full:
                    await sink.drained()
            elif self.is_over:
                break
            else:
                await self._changed.wait()
        return at

    def _add(self, events: bytes) -> None:
        for block in events.removesuffix(b"\n\n").split(b"\n\n"):
            head, _, data = block.partition(b"\ndata: ")
            event = block + b"\n\n"
            self._events.append(event)
            self._num_bytes += len(event)
            if head.endswith(b".output_item.added"):
                self.cuts.append([])
            elif head.endswith(b".delta"):
                found = _decode(data)
                length, num = len(found.delta), len(found.logprobs)
                self.cuts[-1].append((length, num) if num else length)
        while self._num_bytes > MAX_HELD_BYTES and len(self._events) > 1:
            self._num_bytes -= len(self._events.popleft())
            self._num_dropped += 1
        self.wake()
