"""Parts of a page that follow the running server: server-sent events, one stream a page.

A stream asks its page's fragments again and again, in a thread, and sends those that have changed,
as HTML that the page's own macros made; and a tick each time, by which the page says how old it is.
Whose session ends hears `signed-out` and no more. While nothing can be told (the database does not
answer) there is no tick, and the page says how old it is. How many there may be is streams.py's;
all of them end when the server stops.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec

RETRY_MS = 2000
_NOTHING = b": nothing new\n\n"

Look = Callable[[], Awaitable[Mapping[str, str] | None]]
"""The fragments now; None where the session has ended. Raises NoNews."""


class NoNews(Exception):
    """It cannot be told now how things are; perhaps the next time."""


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
