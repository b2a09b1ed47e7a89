"""The bell is heard at once, over a Redis that goes and comes, and never in anybody's way."""

import asyncio

import pytest

from gateway.store import bell
from gateway.store.bell import Bell
from tests.gateway.store.redis_kit import RedisServer


async def test_a_ring_is_heard(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell, "RETRY_S", 0.05)
    rung = asyncio.Queue[None]()
    listener = asyncio.create_task(
        Bell(redis_server.url, "a").listen(lambda: rung.put_nowait(None))
    )
    async with asyncio.timeout(20):
        await rung.get()  # what was rung before nobody has heard
        await asyncio.to_thread(Bell(redis_server.url, "another").ring)
        await asyncio.to_thread(Bell(redis_server.url, "a").ring)
        await rung.get()
        assert rung.empty()
        redis_server.stop()
        await asyncio.to_thread(Bell(redis_server.url, "a").ring)  # nobody to hear it: no matter
        redis_server.start()
        await rung.get()
        await asyncio.to_thread(Bell(redis_server.url, "a").ring)
        await rung.get()
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)
