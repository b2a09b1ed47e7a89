"""The table of outcomes: every request ends in one posting or in none, and holds nothing after."""

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.protocol import FinishReason, SamplingParams
from gateway.errors import UNAVAILABLE, ApiError, WorkerLost
from gateway.pipeline.active_request import TaskSet
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import (
    KEY,
    Client,
    FakeConnection,
    Kit,
    Running,
    key_record,
    parse_events,
    silent,
)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
URL = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def connection(client: Client, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """A request over a bare socket, so that a test can drop it at any moment."""
    host, port = client.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = (
        f"POST {URL} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_finished(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot!")
    _, body = await client.chat()
    posting = kit.ledger.only
    assert kit.ledger.opened[0].request_id == posting.request_id == body["id"]
    assert posting.outcome == "finished"
    assert posting.prompt_tokens == body["usage"]["prompt_tokens"]
    assert posting.completion_tokens == body["usage"]["completion_tokens"]
    assert posting.cost_nanos == 2 * posting.prompt_tokens + 5 * posting.completion_tokens
    assert (posting.service_s, posting.queue_s) == (0.25, 0.125)
    assert 0 < posting.ttft_s <= posting.duration_s
    assert (posting.tenant_id, posting.key_id, posting.kind) == ("ten_1", "key_1", "chat")


@pytest.mark.parametrize("bad_s", [math.nan, math.inf, 1e305])
async def test_a_time_that_is_none_is_settled_and_posted_as_nothing(
    kit: Kit, client: Client, bad_s: float
) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("the end is"))
        running.end("length", service_s=bad_s)

    kit.dispatcher.script = script
    await client.chat(max_tokens=3)
    posting = kit.ledger.only
    assert (posting.outcome, posting.service_s, posting.service_nanos) == ("finished", 0.0, 0)
    assert posting.cost_nanos == 2 * posting.prompt_tokens + 5 * posting.completion_tokens
    kit.check_closed()


async def test_length_and_cached_tokens(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("the end is"))
        running.end("length", cached_tokens=4)

    kit.dispatcher.script = script
    _, body = await client.chat(max_tokens=3)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    posting = kit.ledger.only
    paid = 2 * (posting.prompt_tokens - 4) + 4 + 5 * posting.completion_tokens
    assert (posting.cached_tokens, posting.cost_nanos) == (4, paid)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("one_by_one", [True, False])
async def test_a_stop_string_cuts_text_and_bill(
    kit: Kit, client: Client, stream: bool, one_by_one: bool
) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot! More.", one_by_one)
    body = {**CHAT, "stop": ["afoot", "More"], "stream_options": {"include_usage": True}}
    if stream:
        events = await client.events(URL, body)
        chunks = [e["choices"][0] for e in events[:-2]]
        text = "".join(c["delta"].get("content", "") for c in chunks)
        reason, usage = chunks[-1]["finish_reason"], events[-2]["usage"]
    else:
        _, answer = await client.chat(stop=["afoot", "More"])
        text = answer["choices"][0]["message"]["content"]
        reason, usage = answer["choices"][0]["finish_reason"], answer["usage"]
    assert (text, reason) == ("The game is ", "stop")
    ids = kit.ids("The game is afoot! More.")
    needed = next(n for n in range(99) if "afoot" in kit.tokenizer.decode(ids[:n]))
    assert usage["completion_tokens"] == needed == kit.ledger.only.completion_tokens
    assert kit.ledger.only.outcome == "finished"


async def test_a_stop_string_ends_the_workers_work(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = lambda running: running.say(kit.ids("The game is afoot! More."))
    status, body = await client.chat(stop="game")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "The ")
    assert kit.dispatcher.requests[0].aborted


async def test_what_the_engine_is_asked(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    await client.chat(temperature=0.5, top_p=0.9, seed=7, max_tokens=9)
    request = kit.dispatcher.requests[-1].request
    assert request.sampling == SamplingParams(0.5, 0.9, 7)
    assert (request.max_tokens, request.stop_token_ids) == (9, [kit.end_id])
    await client.chat(top_p=0)
    request = kit.dispatcher.requests[-1].request
    assert 0 < request.sampling.top_p < 1e-6
    assert request.max_tokens == 32
    await client.chat()
    assert kit.dispatcher.requests[-1].request.sampling.seed != request.sampling.seed
    await client.chat("the game is " * 38)
    request = kit.dispatcher.requests[-1].request
    assert request.max_tokens == 256 - len(request.prompt_token_ids) < 32


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_waiting(kit: Kit, client: Client, stream: bool) -> None:
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": stream}):
        running = await kit.begun()
    await kit.settled()
    assert running.aborted
    assert kit.ledger.voided == [running.request.request_id]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_after_tokens(kit: Kit, client: Client, stream: bool) -> None:
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": stream}) as reader:
        running = await kit.begun()
        running.say(kit.ids("The game"))
        if stream:
            await reader.readuntil(b"content")
        else:
            await asyncio.sleep(0.05)
    await kit.settled()
    assert running.aborted
    posting = kit.ledger.only
    assert (posting.outcome, posting.completion_tokens) == ("disconnected", running.num_sent)
    assert posting.cost_nanos == 2 * posting.prompt_tokens + 5 * posting.completion_tokens


async def test_tokens_made_until_the_abort_are_billed(kit: Kit, client: Client) -> None:
    """The worker's last word counts, not what we had seen when the client went away."""
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": True}) as reader:
        running = await kit.begun()
        running.say(kit.ids("The game"))
        await reader.readuntil(b"content")
        running.num_sent += 3
    await kit.settled()
    assert kit.ledger.only.completion_tokens == running.num_sent


@pytest.mark.parametrize("error", [WorkerLost("gone"), ApiError(UNAVAILABLE, "no worker")])
async def test_our_failure_before_tokens(kit: Kit, client: Client, error: Exception) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=1)))
    kit.dispatcher.script = lambda running: running.fail(error)
    status, body = await client.chat()
    assert status == 503
    assert body["error"]["type"] == "server_error"
    await kit.settled()
    assert kit.ledger.posted == []
    kit.dispatcher.script = kit.speak("x")
    assert (await client.chat())[0] == 200


async def test_a_lost_worker_is_worth_another_try(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The game is"))
        running.fail(WorkerLost("gone"))

    kit.dispatcher.script = script
    async with client.post(URL, CHAT) as answer:
        assert answer.status == 503
        assert "retry-after" in answer.headers
        assert (await answer.json())["error"]["code"] == "service_unavailable"
    await kit.settled()
    assert kit.ledger.only.outcome == "failed"


@pytest.mark.parametrize("way", ["lost", "error", "stopping"])
async def test_our_failure_after_tokens(kit: Kit, client: Client, way: str) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The game is"))
        if way == "lost":
            running.fail(WorkerLost("gone"))
        else:
            reason: FinishReason = "error" if way == "error" else "abort"
            end = functools.partial(running.end, reason, error="CUDA on fire")
            asyncio.get_running_loop().call_later(0.1, end)

    kit.dispatcher.script = script
    events = await client.events(URL, CHAT)
    assert events[-1]["error"]["type"] == "server_error"
    assert "fire" not in json.dumps(events)
    assert "[DONE]" not in events
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == "The game is"
    posting = kit.ledger.only
    assert (posting.outcome, posting.cost_nanos) == ("failed", 0)
    assert posting.completion_tokens == len(kit.ids("The game is"))
    status, _ = await client.chat()
    assert status == (500 if way == "error" else 503)


async def test_a_form_that_costs_too_much_to_go_on_with_is_the_clients(
    kit: Kit, client: Client
) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The game is"))
        end = functools.partial(running.end, "refused", error="too many expressions")
        asyncio.get_running_loop().call_later(0.1, end)

    kit.dispatcher.script = script
    events = await client.events(URL, CHAT)
    error = events[-1]["error"]
    assert error["code"] == "invalid_constraint"
    assert "too many expressions" in error["message"]
    posting = kit.ledger.only
    assert posting.outcome == "finished"
    assert posting.completion_tokens == len(kit.ids("The game is"))
    assert posting.cost_nanos > 0
    status, body = await client.chat()
    assert (status, body["error"]["code"]) == (400, "invalid_constraint")


async def test_a_client_that_does_not_read(kit: Kit, client: Client) -> None:
    kit.dispatcher.max_buffer_tokens = 4

    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        asyncio.get_running_loop().call_later(0.1, flood, running)

    def flood(running: Running) -> None:
        running.say(kit.ids("The game is afoot!"))
        running.stream.abort()

    kit.dispatcher.script = script
    events = await client.events(URL, CHAT)
    assert "not read" in events[-1]["error"]["message"]
    posting = kit.ledger.only
    assert (posting.outcome, posting.completion_tokens) == (
        "disconnected",
        kit.dispatcher.requests[0].num_sent,
    )


async def test_no_token_leaves_before_its_open_record(kit: Kit, client: Client) -> None:
    kit.ledger.delay_s = 0.5
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": True}) as reader:
        running = await kit.begun()
        running.say(kit.ids("The"))
        reading = asyncio.create_task(reader.readuntil(b"content"))
        await asyncio.sleep(0.1)
        assert kit.ledger.opened == []
        assert not reading.done()
        await reading
        assert len(kit.ledger.opened) == 1
        running.end("length")
    await kit.settled()


async def test_a_ledger_that_takes_nothing_new(kit: Kit, client: Client) -> None:
    kit.ledger.open_error = ApiError(UNAVAILABLE, "behind", retry_after_s=5)
    kit.dispatcher.script = lambda running: running.say(kit.ids("The game is afoot!"))
    status, body = await client.chat()
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    await kit.settled()
    assert kit.dispatcher.requests[0].aborted
    assert kit.ledger.posted == []


async def test_a_slow_ledger_does_not_hold_answers_back(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    task = asyncio.create_task(client.chat())
    running = await kit.begun()
    running.say(kit.ids("The"))
    await asyncio.sleep(0.05)
    kit.ledger.delay_s = 1.6
    running.end("length")
    assert (await task)[0] == 200
    assert kit.ledger.posted == []
    await kit.settled()


async def test_cancelled_tasks_are_closed_in_the_background(kit: Kit) -> None:
    """A server that cancels its handlers, as at the end of a shutdown."""
    kit.dispatcher.script = silent
    for stream in (True, False):
        for num_tokens in (0, 2):
            for records in (kit.ledger.opened, kit.ledger.posted, kit.ledger.voided):
                records.clear()
            scope, receive, send = asgi_request({**CHAT, "stream": stream})
            task = asyncio.create_task(kit.app(scope, receive, send))
            running = await kit.begun()
            if num_tokens:
                running.say(kit.ids("The game is")[:num_tokens])
                await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await kit.settled()
            assert running.aborted
            assert len(kit.ledger.posted) == (1 if num_tokens else 0)
            kit.check_closed()
    await kit.edge.close(1)


def asgi_request(body: dict[str, Any], path: str = URL) -> tuple[dict[str, Any], Any, Any]:
    """The three arguments of an ASGI call, from a client that stays."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        del message

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        "state": {"connection": FakeConnection()},
    }
    return scope, receive, send


async def test_who_does_not_read_and_leaves_ends_the_request(kit: Kit) -> None:
    scope, receive, send = asgi_request({**CHAT, "stream": True})
    connection = scope["state"]["connection"]
    ids = kit.ids("The game is afoot!")
    kit.dispatcher.script = lambda running: running.say(ids[:1])
    task = asyncio.create_task(kit.app(scope, receive, send))
    running = await kit.begun()
    while not connection.chunks:  # noqa: ASYNC110  until the first token was handed on
        await asyncio.sleep(0.005)
    connection.is_full = True
    running.say(ids[1:2])
    running.say(ids[2:3])
    assert len(connection.chunks) == 1  # with the role and the first token
    connection.drain()
    assert len(connection.chunks) == 2  # what had come meanwhile, in one
    connection.is_full = True
    running.say(ids[3:4])
    connection.leave()
    await asyncio.wait_for(task, 5)
    await kit.settled()
    assert kit.ledger.only.outcome == "disconnected"
    assert kit.ledger.only.completion_tokens == 4
    assert running.aborted
    kit.check_closed()
    await kit.edge.close(1)


async def test_limits_are_settled_before_the_answer_ends(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(max_concurrency=1, tokens_per_minute=400)))
    kit.dispatcher.script = kit.speak("The game is afoot!")
    for _ in range(5):
        assert (await client.chat())[0] == 200
        events = await client.events(URL, CHAT)
        assert events[-1] == "[DONE]"


async def test_limit_headers_and_refusals(kit: Kit, client: Client) -> None:
    limits = Limits(requests_per_minute=2, tokens_per_minute=10_000, max_concurrency=5)
    kit.use_keys(key_record(limits=limits))
    kit.dispatcher.script = kit.speak("x")
    async with client.post(URL, CHAT) as answer:
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert answer.headers["x-ratelimit-limit-tokens"] == "10000"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 10_000
        assert answer.headers["x-ratelimit-reset-requests"].startswith("1m")
    await client.chat()
    async with client.post(URL, CHAT) as answer:
        assert answer.status == 429
        assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(answer.headers["retry-after"]) <= 61
        assert 0 < int(answer.headers["retry-after-ms"]) <= 61_000
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(kit.dispatcher.requests) == 2


async def test_concurrency_and_requests_that_never_fit(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(max_concurrency=1, tokens_per_minute=60)))
    async with client.post(URL, {**CHAT, "max_tokens": 100}) as answer:
        assert answer.status == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
    kit.dispatcher.script = silent
    first = asyncio.create_task(client.chat(max_tokens=1))
    running = await kit.begun()
    async with client.post(URL, {**CHAT, "max_tokens": 1}) as answer:
        assert answer.status == 429
        assert "concurrent requests" in (await answer.json())["error"]["message"]
    running.say([kit.end_id])
    running.end("stop")
    assert (await first)[0] == 200


async def test_the_cache(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot!")
    body = {**CHAT, "temperature": 0}
    results, texts = [], []
    for headers in ({}, {"x_polyhost_cache_mode": "exact"}, {"x_polyhost_cache_mode": "exact"}):
        async with client.post(URL, body, **headers) as answer:
            results.append(answer.headers.get("x-polyhost-cache"))
            texts.append((await answer.json())["choices"])
    assert results == [None, "miss", "hit"]
    assert texts[0] == texts[1] == texts[2]
    assert len(kit.dispatcher.requests) == 2
    hit = kit.ledger.posted[-1]
    assert (hit.outcome, hit.service_s) == ("cache_hit", 0.0)
    assert hit.cost_nanos == hit.prompt_tokens + hit.completion_tokens
    events = await client.events(
        URL, {**body, "stream_options": {"include_usage": True}}, x_polyhost_cache_mode="exact"
    )
    assert events[-1] == "[DONE]"
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
    assert text == "The game is afoot!"
    assert events[-2]["usage"]["completion_tokens"] == hit.completion_tokens
    assert len(kit.dispatcher.requests) == 2


async def test_what_the_cache_keeps_apart(kit: Kit, client: Client) -> None:
    other = key_record("another-key", "key_2", cache_mode="exact", tenant_id="ten_2")
    kit.use_keys(key_record(cache_mode="exact"), other)
    kit.dispatcher.script = kit.speak("x")
    asks: list[tuple[str, dict[str, Any], str]] = [
        (KEY, {"temperature": 0}, "miss"),
        (KEY, {"temperature": 0, "seed": 5}, "hit"),
        ("another-key", {"temperature": 0}, "miss"),
        (KEY, {"temperature": 0, "max_tokens": 3}, "miss"),
        (KEY, {"temperature": 0, "stop": "y"}, "miss"),
        (KEY, {"temperature": 1, "seed": 5}, "miss"),
        (KEY, {"temperature": 1, "seed": 5}, "hit"),
        (KEY, {"temperature": 1, "seed": 6}, "miss"),
        (KEY, {"temperature": 1}, "bypass"),
    ]
    for key, fields, expected in asks:
        async with client.post(URL, {**CHAT, **fields}, key=key) as answer:
            assert answer.headers["x-polyhost-cache"] == expected, (key, fields)
    async with client.post(URL, CHAT, x_polyhost_cache_mode="semantic") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "x-polyhost-cache-mode"


async def test_failed_answers_are_not_kept(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(cache_mode="exact"))

    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost("gone"))

    kit.dispatcher.script = script
    assert (await client.chat(temperature=0))[0] == 503
    kit.dispatcher.script = kit.speak("fine")
    _, body = await client.chat(temperature=0)
    assert body["choices"][0]["message"]["content"] == "fine"


async def test_pieces_of_a_stream_are_sent_as_they_come(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    ids = kit.ids("The game is afoot!")
    async with connection(client, {**CHAT, "stream": True}) as reader:
        running = await kit.begun()
        for token in ids:
            running.say([token])
            event = parse_events(_payload(await reader.readuntil(b"\n\n\r\n")))[-1]
            text = kit.tokenizer.decode([token])
            assert event["choices"][0]["delta"]["content"] == text
        running.end("length")
        rest = await reader.readuntil(b"[DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
    await kit.settled()


def _payload(raw: bytes) -> bytes:
    """The events of a chunk, without HTTP's head and chunk sizes."""
    return raw[raw.index(b"data: ") :].rstrip(b"\r\n") + b"\n\n"


async def test_tasks_that_fail_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("disk full")

    tasks = TaskSet()
    tasks.spawn(fail())
    await tasks.drain(1)
    await asyncio.sleep(0)
    assert "disk full" in caplog.text
    assert len(tasks) == 0
