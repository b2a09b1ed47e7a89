"""Who waits for the ledger's records, and for how long (stage 10, beside ledger.py).

A record's `Tag` names who waits until it is durable. Those who wait for their open record have the
same time, all of them, so one timer is enough for all. What is written is ledger.py's.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator

from gateway.errors import UNAVAILABLE, ApiError

BUSY_WAIT_S = 5.0
"""What a client is told to wait where nothing new is taken."""


class Tag:
    """Of a record: who waits until it is durable, and which request it ends."""

    __slots__ = ("ends", "waiter")

    def __init__(self, waiter: "asyncio.Future[None] | None", ends: str | None) -> None:
        self.waiter, self.ends = waiter, ends


class _Done:
    """Nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


DONE = _Done()


class Openings:
    """`on_late(request_id)` is called for each that was not opened within `timeout_s`, when whoever
    waits has been told."""

    def __init__(self, timeout_s: float, on_late: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._waiting: deque[tuple[float, str, asyncio.Future[None]]] = deque()
        """(until when, request, who waits), the earliest first."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, request_id: str, opening: "asyncio.Future[None]") -> None:
        """It has its time from now on."""
        while self._waiting and self._waiting[0][2].done():
            self._waiting.popleft()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._timeout_s
        self._waiting.append((until_s, request_id, opening))
        if self._timer is None:
            self._timer = loop.call_at(until_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._waiting and (self._waiting[0][2].done() or self._waiting[0][0] <= now_s):
            _, request_id, opening = self._waiting.popleft()
            if not opening.done():
                fail(opening, behind())
                self._on_late(request_id)
        self._timer = loop.call_at(self._waiting[0][0], self._look) if self._waiting else None


def fail(future: "asyncio.Future[None]", error: BaseException) -> None:
    """Whoever waits gets the error; nobody may."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # Logged already; a caller that was cancelled never asks for it.


def behind() -> ApiError:
    """The answer where nothing new is taken."""
    message = "the usage ledger is behind and takes nothing new: try again later"
    return ApiError(UNAVAILABLE, message, retry_after_s=BUSY_WAIT_S)
