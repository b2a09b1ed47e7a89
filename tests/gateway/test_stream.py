"""Who notices that a client has gone, or does not read."""

import asyncio
from typing import Any

import pytest

from gateway.stream import ClientStalled, DisconnectWatch, WholeAnswer


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


async def test_a_whole_answer_goes_out_in_slices_and_waits_only_so_long() -> None:
    sent: list[Any] = []
    stuck = asyncio.Event()

    async def send(message: Any) -> None:
        if len(sent) == 3:
            await stuck.wait()
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is received here")

    body = bytes(range(256)) * 4096
    closed: list[str] = []
    stalled = WholeAnswer([body], 0.01, lambda: closed.append("stalled"))
    with pytest.raises(ClientStalled):
        await stalled({"type": "http"}, receive, send)
    assert closed == ["stalled"]
    stuck.set()
    sent.clear()
    await WholeAnswer([body[:10], body[10:]], 5.0)({"type": "http"}, receive, send)
    assert b"".join(message.get("body", b"") for message in sent) == body
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, True, False]
    assert (b"content-length", str(len(body)).encode()) in sent[0]["headers"]
