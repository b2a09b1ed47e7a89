"""Streams of background responses: while they are made, at another process, and afterwards."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.auth.auth import authenticate
from gateway.dialects import responses_answer
from gateway.dialects.responses_answer import replayed
from gateway.errors import QUEUE_FULL, SERVER_ERROR, UNAVAILABLE, ApiError, WorkerLost
from gateway.state import background, event_following, event_log
from gateway.state.event_following import Following, SoFar
from gateway.state.event_log import EventLog
from gateway.types import AnswerNote
from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.dialects.test_responses import ASK, TOOL, URL, ask, check_told_to_the_end
from tests.gateway.edge_kit import (
    KEY,
    Client,
    Kit,
    Running,
    client_of,
    key_record,
    make_kit,
    silent,
    until,
)
from tests.gateway.http.test_answer_counts import answers
from tests.gateway.state.test_background import cancel, delete, ended, queued
from tests.gateway.state.test_responses import OTHER_KEY, call, rows
from tests.migrated import migrated

Event = dict[str, Any]
STREAMED = {**ASK, "background": True, "stream": True}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.02)
    monkeypatch.setattr(event_following, "POLL_S", 0.02)


class Reader:
    """Events of one stream, read one by one."""

    def __init__(self, content: Any) -> None:
        self._content = content

    async def next(self) -> Event | None:
        """None: the stream has ended."""
        async with asyncio.timeout(5):
            while line := (await self._content.readline()).decode():
                if line.startswith("data: "):
                    return dict(json.loads(line.removeprefix("data: ")))
        return None

    async def rest(self) -> list[Event]:
        found = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found


@asynccontextmanager
async def created(client: Client, **fields: Any) -> AsyncIterator[Reader]:
    async with client.post(URL, {**STREAMED, **fields}) as answer:
        assert answer.status == 200, await answer.text()
        yield Reader(answer.content)


@asynccontextmanager
async def following(client: Client, response_id: str, query: str = "") -> AsyncIterator[Reader]:
    headers = {"authorization": f"Bearer {KEY}"}
    path = f"{client.base}{URL}/{response_id}?stream=true{query}"
    async with client.session.get(path, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        yield Reader(answer.content)


async def all_of(client: Client, response_id: str, after: int | None = None) -> list[Event]:
    query = "" if after is None else f"&starting_after={after}"
    async with following(client, response_id, query) as reader:
        return await reader.rest()


def check_whole(events: list[Event]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events[:3]]
    assert kinds == ["created", "queued", "in_progress"]
    states = [event["response"]["status"] for event in events[:3]]
    assert states == ["queued", "queued", "in_progress"]


async def test_a_stream_goes_on_without_its_reader(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    async with created(client) as reader:
        first = await reader.next()
        assert first is not None
        response_id = first["response"]["id"]
        assert first["response"]["status"] == "queued"
        running = await kit.begun()
        running.say(kit.ids("The"))
        seen = [first]
        while seen[-1]["type"] != "response.output_text.delta":
            event = await reader.next()
            assert event is not None
            seen.append(event)
    # The reader is gone; it goes on.
    async with following(client, response_id, f"&starting_after={len(seen) - 1}") as reader:
        running.say([*kit.ids(" game"), kit.end_id])
        running.end("stop")
        seen += await reader.rest()
    check_whole(seen)
    [item] = check_told_to_the_end(seen)
    assert item["content"][0]["text"] == "The game"
    assert not running.aborted
    told = await ended(client, response_id, "completed")
    assert (seen[-1]["type"], seen[-1]["response"]) == ("response.completed", told)
    assert await all_of(client, response_id) == seen
    for after in range(len(seen)):
        assert await all_of(client, response_id, after) == seen[after + 1 :]
    assert await all_of(client, response_id, len(seen) + 5) == []


@pytest.mark.parametrize("one_by_one", [True, False])
async def test_what_is_stored_is_told_as_it_was(tmp_path: Path, one_by_one: bool) -> None:
    kit = make_kit(tmp_path / "tiny", HERMES, max_context=1024)
    migrated(kit.edge.services.settings.registry_url)
    text = f"<think>\nhm, 日本\n</think>\n\nSo: 😀\n{CALL}"
    kit.dispatcher.script = kit.speak(text, one_by_one)
    async with client_of(kit) as client:
        include = ["reasoning.encrypted_content"]
        async with created(client, tools=[TOOL], include=include) as reader:
            live = await reader.rest()
        check_whole(live)
        kinds = [item["type"] for item in check_told_to_the_end(live)]
        assert kinds == ["reasoning", "message", "function_call"]
        assert await all_of(client, live[0]["response"]["id"]) == live


async def test_another_process_tells_the_rest_at_the_end(tmp_path: Path) -> None:
    one = make_kit(tmp_path / "tiny")
    migrated(one.edge.services.settings.registry_url)
    two = make_kit(tmp_path / "tiny")
    one.dispatcher.script = silent
    async with client_of(one) as first, client_of(two) as second:
        told = await queued(first)
        running = await one.begun()
        async with following(second, told["id"]) as reader:
            seen = [await reader.next(), await reader.next()]
            running.say(kit_ids := one.ids("The"))
            await ended(first, told["id"], "in_progress")
            async with following(first, told["id"]) as here:
                running.say([*one.ids(" game"), one.end_id])
                running.end("stop")
                live = await here.rest()
            assert seen + await reader.rest() == live
        check_whole(live)
        assert len(kit_ids) >= 1


@pytest.mark.parametrize("has_tokens", [True, False])
async def test_one_that_is_cancelled_ends_its_streams(
    kit: Kit, client: Client, has_tokens: bool
) -> None:
    kit.dispatcher.script = silent
    told = await queued(client)
    running = await kit.begun()
    async with following(client, told["id"]) as reader:
        seen = [await reader.next(), await reader.next()]
        if has_tokens:
            running.say(kit.ids("The"))
            seen += [await reader.next() for _ in range(4)]
        await cancel(client, told["id"])
        *others, last = await reader.rest()
    # Without tokens it is told as one that has begun: what is stored does not say.
    assert [e["type"] for e in others] == [] if has_tokens else ["response.in_progress"]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert last["sequence_number"] == len(seen) + len(others)
    again = await all_of(client, told["id"], 57)
    assert [event["sequence_number"] for event in again] == [58]


async def test_one_that_fails_says_so_in_its_last_event(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    async with created(client) as reader:
        live = await reader.rest()
    check_whole(live)
    check_told_to_the_end(live)
    assert live[-1]["type"] == "response.failed"
    assert live[-1]["response"]["error"]["code"] == "service_unavailable"
    await until(lambda: answers(kit).get((URL, "tiny", "service_unavailable", "server")) == 1)
    assert await all_of(client, live[0]["response"]["id"]) == live


async def test_one_that_is_deleted_ends_its_streams(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    told = await queued(client)
    async with following(client, told["id"]) as reader:
        assert await reader.next() is not None
        await delete(client, told["id"])
        assert len(await reader.rest()) == 1, "the other event of before"


async def test_what_passes_ends_no_stream_and_damage_says_so() -> None:
    kinds = [QUEUE_FULL, UNAVAILABLE, SERVER_ERROR]

    async def look() -> SoFar:
        raise ApiError(kinds.pop(0), "damaged")

    sink = SlowSink()
    await Following(None, look, asyncio.to_thread, 2, note := AnswerNote()).run(sink)
    assert not kinds
    assert (note.code, note.fault) == ("server_error", "server")
    [event] = [json.loads(part.partition(b"data: ")[2]) for part in sink.parts]
    told = {"code": "server_error", "message": "damaged", "param": None}
    assert event == {"type": "error", "sequence_number": 3, **told}


async def test_who_is_too_far_behind_goes_on_from_what_is_stored(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_HELD_BYTES", 1000)
    kit.dispatcher.script = silent
    told = await queued(client)
    running = await kit.begun()
    running.say(kit.ids("The game is"))
    await ended(client, told["id"], "in_progress")
    async with following(client, told["id"]) as reader:
        await reader.next()
        running.say([*kit.ids(" afoot"), kit.end_id])
        running.end("stop")
        rest = await reader.rest()
    whole = await all_of(client, told["id"])
    assert rest == whole[1:]
    check_whole(whole)
    [item] = check_told_to_the_end(whole)
    assert item["content"][0]["text"] == "The game is afoot"


async def test_a_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_HELD_BYTES", 100)
    log = EventLog()
    log.write(b'event: response.output_item.added\ndata: {"type":""}\n\n')
    for number in range(50):
        log.write(b'event: x.delta\ndata: {"type":"","delta":"%d"}\n\n' % number)
    assert log.num_events == 51
    assert sum(map(len, log._events)) <= 100
    assert log.cuts == [[len(str(number)) for number in range(50)]]


async def test_readers_that_leave_are_forgotten(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    told = await queued(client)
    running = await kit.begun()
    for _ in range(3):
        async with following(client, told["id"]) as reader:
            await reader.next()
    names = {"Following.run", "Retrieve.__call__"}

    def num_readers() -> int:
        found = (task.get_coro() for task in asyncio.all_tasks())
        return sum(getattr(each, "__qualname__", "") in names for each in found)

    await until(lambda: not num_readers())
    kit.speak("The game")(running)
    await ended(client, told["id"], "completed")


async def test_each_reader_is_counted_as_it_left(kit: Kit, client: Client) -> None:
    """And the one who asked is not the one who cancels."""
    kit.dispatcher.script = silent
    async with created(client) as one:
        first = await one.next()
        assert first is not None
        response_id = first["response"]["id"]
        (await kit.begun()).say(kit.ids("The"))
        await ended(client, response_id, "in_progress")
        async with following(client, response_id) as reader:
            assert await reader.next() is not None
        path = f"{URL}/{{response_id}}"
        await until(lambda: answers(kit).get((path, "", "client_gone", "client")) == 1)
        async with created(client) as other:
            left = await other.next()
            assert left is not None
        await until(lambda: answers(kit).get((URL, "tiny", "client_gone", "client")) == 1)
        for asked in (first, left):
            await cancel(client, asked["response"]["id"])
        await one.rest()
    await until(lambda: answers(kit).get((URL, "tiny", "ok", "none")) == 1)
    assert answers(kit)[URL, "tiny", "client_gone", "client"] == 1


async def test_a_refused_one_is_no_stream(kit: Kit, client: Client) -> None:
    async with client.post(URL, {**STREAMED, "model": "nobody"}) as answer:
        assert (answer.status, answer.content_type) == (404, "application/json")
    assert rows(kit) == 0


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=yes", "stream"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=1e3", "starting_after"),
        ("?starting_after=3", "starting_after"),
        ("?odd=1", "odd"),
        ("?stream=true", "stream"),
    ],
)
async def test_what_is_wrong_names_the_parameter(
    kit: Kit, client: Client, query: str, param: str
) -> None:
    """The last: it was answered at once."""
    kit.dispatcher.script = kit.speak("The game")
    _, told = await ask(client)
    status, body = await call(client, "GET", f"{URL}/{told['id']}{query}")
    assert (status, body["error"]["param"]) == (400, param)


class SlowSink:
    """A client that reads a part only when whoever writes waits for it."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_full = False

    def write(self, event: bytes) -> None:
        assert not self.is_full, "it was to wait"
        self.parts.append(event)
        self.is_full = True

    def when_drained(self, callback: Any) -> None:
        raise AssertionError

    async def drained(self) -> None:
        self.is_full = False


async def test_what_is_stored_is_made_in_threads_as_fast_as_it_is_read(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot, and so on and on.", True)
    told = await queued(client)
    await ended(client, told["id"], "completed")
    whole = await all_of(client, told["id"])
    threads: set[str] = set()

    def watched(*about: Any) -> Iterator[bytes]:
        for part in replayed(*about):
            threads.add(threading.current_thread().name.rpartition("_")[0])
            yield part

    monkeypatch.setattr(event_following, "replayed", watched)
    monkeypatch.setattr(responses_answer, "REPLAY_BYTES", 1)
    assert await all_of(client, told["id"]) == whole
    assert threads == {"state-read"}

    def when_gone(callback: Any) -> None:
        """It stays."""

    sink, headers = SlowSink(), {"authorization": f"Bearer {KEY}"}
    principal = authenticate(headers, kit.edge.services.directory, 0.0, "")
    answer = await kit.edge.responses.follow(principal, told["id"], 1, when_gone, AnswerNote())
    await answer.run(sink)
    assert len(sink.parts) == len(whole) - 2, "an event each, and none of before"


@pytest.mark.parametrize("has_ended", [True, False])
async def test_head_has_no_events(kit: Kit, client: Client, has_ended: bool) -> None:
    """What follows the head would be the next request's answer, behind a proxy another caller's."""
    kit.dispatcher.script = kit.speak("The game") if has_ended else silent
    told = await queued(client)
    await ended(client, told["id"], "completed" if has_ended else "queued")
    lines = f"Host: x\r\nAuthorization: Bearer {KEY}\r\n"
    asked = f"HEAD {URL}/{told['id']}?stream=true HTTP/1.1\r\n{lines}\r\n"
    then = f"GET /version HTTP/1.1\r\n{lines}Connection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(*client.base.removeprefix("http://").split(":"))
    writer.write((asked + then).encode())
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    writer.close()
    assert head.startswith(b"HTTP/1.1 200")
    assert b"text/event-stream" in head
    assert rest.startswith(b"HTTP/1.1 200")
    assert b'{"version"' in rest
    await cancel(client, told["id"])


async def test_another_tenants_is_a_missing_one(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    told = await queued(client)
    kit.use_keys(key_record(), key_record(OTHER_KEY, "key_2", tenant_id="ten_2"))
    status, _ = await call(client, "GET", f"{URL}/{told['id']}?stream=true", OTHER_KEY)
    assert status == 404


async def test_a_key_leads_to_the_same_events(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    told = []
    for _ in range(2):
        async with client.post(URL, STREAMED, idempotency_key="k") as answer:
            told.append(await Reader(answer.content).rest())
    assert told[0] == told[1]
    assert len(kit.dispatcher.requests) == 1


async def test_a_kept_answer_is_told_again_as_it_was(kit: Kit, client: Client) -> None:
    """It comes in one piece, with its last event."""
    kit.use_keys(key_record(cache_mode="exact"))
    kit.dispatcher.script = kit.speak("The game is afoot, and so on and on.")
    told = []
    for _ in range(2):
        async with created(client, temperature=0) as reader:
            live = await reader.rest()
        check_whole(live)
        check_told_to_the_end(live)
        assert await all_of(client, live[0]["response"]["id"]) == live
        told.append(live[-1]["response"]["output"][0]["content"])
    assert told[0] == told[1]
    assert len(kit.dispatcher.requests) == 1
    assert sum(event["type"].endswith(".delta") for event in live) > 1


async def test_openais_own_client(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("Yes, I do.")
    async with openai.AsyncOpenAI(
        api_key=KEY, base_url=f"{client.base}/v1", max_retries=0, _strict_response_validation=True
    ) as sdk:
        async with sdk.responses.stream(model="tiny", input="Hi", background=True) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "Yes, I do."
        async with sdk.responses.stream(response_id=final.id, starting_after=4) as stream:
            again = [event.sequence_number async for event in stream]
        assert again == [event.sequence_number for event in events[5:]]
        plain = await sdk.responses.retrieve(final.id, stream=True, starting_after=4)
        assert [event.sequence_number async for event in plain] == again
