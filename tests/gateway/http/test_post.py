"""Answers on their way: who hears that a client has gone, does not read, or waits in silence."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.answer.answer import Chunks
from gateway.answer.choice import Piece
from gateway.dialects.dialect import HEARTBEAT
from gateway.errors import QUEUE_FULL, ApiError, WorkerLost
from gateway.http.post import ClientWatch, EventStream, WholeAnswer
from gateway.types import Sink
from tests.gateway.edge_kit import (
    KEY,
    Client,
    FakeConnection,
    Kit,
    Running,
    client_of,
    make_kit,
    serving,
    silent,
)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
URL = "/v1/chat/completions"


@pytest.fixture
async def kit(tmp_path: Path) -> Kit:
    return make_kit(tmp_path / "tiny")


class Sent:
    """What went out as ASGI messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def test_a_watch_calls_back_once_and_at_once_when_late() -> None:
    connection = FakeConnection()
    calls: list[str] = []
    watch = ClientWatch(connection)
    watch.when_gone(lambda: calls.append("early"))
    assert not watch.gone
    connection.leave()
    connection.leave()
    assert watch.gone
    watch.when_gone(lambda: calls.append("late"))
    assert calls == ["early", "late"]
    assert ClientWatch(connection).gone


def test_a_stopped_watch_is_silent() -> None:
    connection = FakeConnection()
    calls: list[str] = []
    watch = ClientWatch(connection)
    watch.when_gone(lambda: calls.append("gone"))
    watch.when_drained(lambda: calls.append("drained"))
    watch.stop()
    connection.leave()
    watch.on_gone()
    assert not calls


async def test_a_whole_answer_goes_out_in_slices() -> None:
    sent, body = Sent(), bytes(range(256)) * 4096
    await WholeAnswer([body[:10], body[10:]]).send(sent)
    assert sent.body == body
    assert [message["more_body"] for message in sent.messages[1:]] == [True] * 4 + [False]
    headers = sent.messages[0]["headers"]
    assert (b"content-length", str(len(body)).encode()) in headers


async def test_events_are_written_straight_to_the_connection() -> None:
    connection, sent = FakeConnection(), Sent()

    async def run(sink: Sink) -> None:
        sink.write(b"data: 1\n\n")
        sink.write(b"data: 2\n\n")

    await EventStream(run, ClientWatch(connection), 0.0).send(sent)
    assert connection.chunks == [b"data: 1\n\n", b"data: 2\n\n"]
    assert [message["type"] for message in sent.messages] == [
        "http.response.start",
        "http.response.body",
    ]
    assert sent.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("how", ["drain", "leave"])
async def test_who_writes_waits_for_a_client_that_does_not_read(how: str) -> None:
    connection, sent = FakeConnection(is_full=True), Sent()
    steps: list[str] = []

    async def run(sink: Sink) -> None:
        steps.append("waits")
        await sink.drained()
        steps.append("goes on")
        await sink.drained()

    task = asyncio.create_task(EventStream(run, ClientWatch(connection), 0.0).send(sent))
    await asyncio.sleep(0.01)
    assert steps == ["waits"]
    getattr(connection, how)()
    await task
    assert steps == ["waits", "goes on"]


async def test_a_silent_stream_says_that_it_is_there() -> None:
    connection, sent, over = FakeConnection(), Sent(), asyncio.Event()

    async def run(sink: Sink) -> None:
        sink.write(b"data: 1\n\n")
        await over.wait()

    task = asyncio.create_task(EventStream(run, ClientWatch(connection), 0.01).send(sent))
    while len(connection.chunks) < 3:  # noqa: ASYNC110  until the timer has fired
        await asyncio.sleep(0.005)
    connection.is_full = True  # nothing is piled up for who does not read
    await asyncio.sleep(0.03)
    num_written = len(connection.chunks)
    await asyncio.sleep(0.05)
    assert len(connection.chunks) == num_written
    over.set()
    await task
    assert connection.chunks[0] == b"data: 1\n\n"
    assert set(connection.chunks[1:]) == {HEARTBEAT}
    await asyncio.sleep(0.03)
    assert len(connection.chunks) == num_written


async def test_no_timer_is_left_by_a_stream_that_fails() -> None:
    connection, sent = FakeConnection(), Sent()

    async def run(sink: Sink) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await EventStream(run, ClientWatch(connection), 0.005).send(sent)
    await asyncio.sleep(0.03)
    assert connection.chunks == []
    assert len(sent.messages) == 1


async def test_a_long_wait_begins_the_stream_and_later_errors_are_events(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", stream_heartbeat_s=0.02)
    kit.dispatcher.script = silent
    async with client_of(kit) as client, client.post(URL, {**CHAT, "stream": True}) as answer:
        assert answer.status == 200
        assert await answer.content.readuntil(b"\n\n") == b": still here\n\n"
        kit.dispatcher.requests[0].fail(ApiError(QUEUE_FULL, "waited too long"))
        rest = (await answer.content.read()).decode()
        events = [line for line in rest.split("\n\n") if line and not line.startswith(":")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "queue_full"
        assert "[DONE]" not in rest
    assert not kit.ledger.posted
    assert len(kit.ledger.voided) == 1


async def test_a_long_wait_ends_in_an_answer(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", stream_heartbeat_s=0.02)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        sdk = openai.AsyncOpenAI(base_url=client.base + "/v1", api_key=KEY, max_retries=0)
        stream = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], n=2, stream=True
        )
        for number, running in enumerate(kit.dispatcher.requests):
            running.say([*kit.ids(f"word {number}"), kit.end_id])
            running.end("stop")
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["word 0", "word 1"]
        await sdk.close()


async def test_without_a_long_wait_errors_are_statuses(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", stream_heartbeat_s=30)
    error = ApiError(QUEUE_FULL, "full", retry_after_s=2)
    kit.dispatcher.script = lambda running: running.fail(error)
    async with client_of(kit) as client, client.post(URL, {**CHAT, "stream": True}) as answer:
        assert answer.status == 429
        assert answer.headers["retry-after-ms"] == "2000"


async def test_the_sdk_raises_what_fails_in_mid_stream(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The game"))
        running.fail(WorkerLost("gone"))

    kit.dispatcher.script = script
    async with openai.AsyncOpenAI(base_url=client.base + "/v1", api_key=KEY) as sdk:
        stream = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="worker that ran the request stopped") as raised:
            await _read(stream, texts)
        assert "".join(texts) == "The game"
        assert raised.value.code == "service_unavailable"


async def _read(stream: Any, texts: list[str]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")


async def test_a_stop_string_ends_a_stream_from_within_the_dispatcher(
    kit: Kit, client: Client
) -> None:
    """The abort brings the last event while the tokens before it are still being handed on."""
    kit.dispatcher.script = silent
    stream = asyncio.create_task(client.events(URL, {**CHAT, "stream": True, "stop": "afoot"}))
    await kit.dispatcher.came.wait()
    running = kit.dispatcher.requests[0]
    for text in ("The game", " is", " afoot", ", my dear Watson"):
        running.say(kit.ids(text))  # raises what the consumer raises
        await asyncio.sleep(0.01)
    events = await stream
    assert running.aborted
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    said = [e["choices"][0]["delta"].get("content", "") for e in events[:-1]]
    assert "".join(said).rstrip() == "The game is"
    assert kit.ledger.only.outcome == "finished"
    kit.check_closed()


async def test_a_bug_in_mid_stream_hurts_one_request_and_is_not_billed(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.dispatcher.script = silent
    real, broken = Chunks.piece, kit.ids("broken")

    def piece(chunks: Chunks, made: Piece) -> bytes:
        if "broken" in "".join(getattr(event, "text", "") for event in made.events):
            raise RuntimeError("a bug")
        return real(chunks, made)

    monkeypatch.setattr(Chunks, "piece", piece)
    stream = asyncio.create_task(client.events(URL, {**CHAT, "stream": True}))
    await kit.dispatcher.came.wait()
    kit.dispatcher.requests[0].say(kit.ids("The game"))
    await asyncio.sleep(0.02)
    kit.dispatcher.requests[0].say([*broken, *kit.ids(" and on")])
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream
    assert kit.dispatcher.requests[0].aborted
    await kit.edge.pipeline.drain(5)
    assert kit.ledger.only.outcome == "failed"
    assert kit.ledger.only.cost_nanos == 0
    kit.check_closed()


async def test_a_server_that_stops_finishes_its_streams(kit: Kit) -> None:
    kit.dispatcher.script = kit.speak_slowly("The game is afoot, my dear Watson.", 0.02)
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with serving(kit.app) as base:
            answer = await session.post(base + URL, json={**CHAT, "stream": True})
            await answer.content.readuntil(b"\n\n")
            reading = asyncio.create_task(answer.content.read())
        assert (await reading).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(base + "/health/live")
    assert kit.ledger.only.outcome == "finished"
    kit.check_closed()
