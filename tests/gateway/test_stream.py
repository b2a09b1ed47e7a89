"""Who notices that a client has gone."""

import asyncio
from typing import Any

from gateway.stream import DisconnectWatch


async def test_a_watch_calls_back_once_and_at_once_when_late() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    watch = DisconnectWatch(messages.get)
    calls: list[str] = []
    watch.when_gone(lambda: calls.append("early"))
    watch.start()
    await messages.put({"type": "http.request", "body": b"", "more_body": False})
    await asyncio.sleep(0.01)
    assert not watch.gone
    await messages.put({"type": "http.disconnect"})
    await asyncio.sleep(0.01)
    assert watch.gone
    watch.when_gone(lambda: calls.append("late"))
    assert calls == ["early", "late"]


async def test_a_stopped_watch_is_silent() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    watch = DisconnectWatch(messages.get)
    watch.stop()
    watch.start()
    await asyncio.sleep(0)
    watch.stop()
    await messages.put({"type": "http.disconnect"})
    await asyncio.sleep(0.01)
    assert not watch.gone
