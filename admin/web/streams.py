"""Answers that go on for a while: how many there may be, and that none outlives its session.

Live pages, talks in the playground and downloads. Of the first two a process has
`max_admin_streams`, a user `max_admin_streams_per_user` in it. One watch asks every second whose
sessions have ended, in whatever process, and at once after anything was changed by a page of this
one; their answers end then: a live page gets an event, all else breaks off, so that nobody takes
half a file for a whole one. Of the event loop alone.

A live page asks for its fragments again and again, in a thread, and sends those that have changed,
as HTML that the page's own macros made, and a tick each time, by which the page says how old it is.
A page whose session ends gets `signed-out` and no more. While nothing can be read (the database
does not answer) there is no tick. All of them end when the server stops.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientGone
from registry.errors import RegistryAway

WATCH_EVERY_S = 1.0
RETRY_MS = 2000
_NOTHING = b": nothing new\n\n"

logger = logging.getLogger(__name__)

Ended = Callable[[frozenset[str]], Awaitable[frozenset[str]]]
"""Of these sessions' tokens, those that hold no more."""
Look = Callable[[], Awaitable[Mapping[str, str] | None]]
"""The fragments now; None where the session has ended. Raises NoNews."""


class TooMany(Exception):
    """As many are open as may; the message names the bound."""


class SessionOver(ClientGone):
    """Nobody who may have the rest is there any more."""


@dataclass(eq=False, slots=True)
class StreamSlot:
    """One answer that goes on. `over` is set when its session has ended."""

    token: str
    user_id: str
    is_counted: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Streams:
    """Those of one process."""

    def __init__(self, max_total: int, max_per_user: int, ended: Ended) -> None:
        self._max_total = max_total
        self._max_per_user = max_per_user
        self._ended = ended
        self._places: set[StreamSlot] = set()
        self._by_user: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Of those that are counted."""
        return self._by_user.total()

    def take(self, token: str, user_id: str, is_counted: bool = True) -> StreamSlot:
        """A place, to be given back. Raises TooMany."""
        if is_counted and self.num_open >= self._max_total:
            raise TooMany(
                "the maximum number of live pages is open (max_admin_streams); close some"
            )
        if is_counted and self._by_user[user_id] >= self._max_per_user:
            raise TooMany(
                "you have too many live pages open (max_admin_streams_per_user); close some"
            )
        place = StreamSlot(token, user_id, is_counted)
        self._places.add(place)
        self._by_user[user_id] += is_counted
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return place

    def give_back(self, place: StreamSlot) -> None:
        """As often as one likes."""
        if place not in self._places:
            return
        self._places.remove(place)
        self._by_user[place.user_id] -= place.is_counted
        if not self._by_user[place.user_id]:
            del self._by_user[place.user_id]

    def look_now(self) -> None:
        """Something was changed here: perhaps a session has ended."""
        self._changed.set()

    async def guarded(
        self, place: StreamSlot, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """The chunks, as long as the session holds. Raises SessionOver."""
        over = asyncio.ensure_future(place.over.wait())
        coming: asyncio.Future[bytes | None] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(_next(chunks))
                await asyncio.wait((coming, over), return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    raise SessionOver
                data = coming.result()
                if data is None:
                    return
                yield data
        finally:
            over.cancel()
            if coming is not None and not coming.done():
                coming.cancel()
                with suppress(BaseException):
                    await coming
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    async def _watch(self) -> None:
        """Until nothing is open."""
        while self._places:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                ended = await self._ended(frozenset(place.token for place in self._places))
            except RegistryAway:
                continue  # it cannot be read; pages say how old they are
            except Exception:  # the watch goes on whatever happens: without it nothing ends
                logger.exception("cannot check for sessions that have ended")
                continue
            for place in self._places:
                if place.token in ended:
                    place.over.set()
        self._watching = None


class Made:
    """Chunks that are made in threads. `close` waits for the one that is being made: who leaves
    half-way leaves a thread in the database, and what it holds is given back when it is out."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            return next(self._chunks)

    def close(self) -> None:
        """Blocks. There are no more chunks then."""
        with self._lock:
            if isinstance(self._chunks, Generator):
                self._chunks.close()


class StreamedResponse(StreamingResponse):
    """An answer that goes on. `on_end` is called however it ends, also where nobody has taken a
    byte of it."""

    def __init__(
        self, chunks: AsyncIterator[bytes], media: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(chunks, headers=headers, media_type=media)
        self.body_iterator: AsyncIterator[bytes] = chunks
        self.on_end: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Who asks for the headers alone gets them, and nothing goes on."""
        try:
            if scope["method"] == "HEAD":
                begins = {"status": self.status_code, "headers": self.raw_headers}
                await send({"type": "http.response.start", **begins})
                await send({"type": "http.response.body", "body": b""})
            else:
                await super().__call__(scope, receive, send)
        finally:
            self.on_end()


class Download(StreamedResponse):
    """A file that is made, or read, in threads while it is sent."""

    def __init__(
        self,
        chunks: Iterator[bytes],
        name: str,
        media: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.made = Made(chunks)
        disposition = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(
            iterate_in_threadpool(self.made), media, {**disposition, **(headers or {})}
        )


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    """None: there are no more."""
    return await anext(chunks, None)


class NoNews(Exception):
    """The state cannot be read now; perhaps the next time."""


async def events(
    look: Look, every_s: float, stopping: Callable[[], bool], over: asyncio.Event
) -> AsyncIterator[bytes]:
    """The stream's bytes, until the session (`over`) or the server ends. The client may go at any
    time."""
    shown: dict[str, str] = {}
    yield b"retry: %d\n\n" % RETRY_MS
    while not stopping():
        try:
            found = None if over.is_set() else await look()
        except NoNews:
            yield _NOTHING  # finds out whether anybody listens
            await _rest(every_s, over)
            continue
        if found is None:
            yield _event("signed-out", {})
            return
        changed = {name: html for name, html in found.items() if shown.get(name) != html}
        shown.update(changed)
        if changed:
            yield _event("parts", changed)
        yield _event("tick", {})
        await _rest(every_s, over)


async def _rest(every_s: float, over: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(every_s):
            await over.wait()


def _event(name: str, data: Mapping[str, str]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
