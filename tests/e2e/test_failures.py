"""What goes wrong in a real server: bad input, a killed worker, damaged and dangerous models."""

import asyncio
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench import client
from bench.client import Answer
from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.folders import HOSTED, NAMES
from tests.e2e.server import owned_pages, polyhost, polyhost_json, serving, usage_rows
from tests.gateway.encoder_kit import WORDS

pytestmark = pytest.mark.e2e

CHAT = {"model": "sherlock", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


QUEUE = 12
NARROW = {
    # Two rows at a time: most requests have no token yet when the worker dies.
    "POLYHOST_MAX_NUM_SEQS": "2",
    "POLYHOST_MAX_QUEUE_PER_TENANT": str(QUEUE),
}


@pytest.fixture(scope="module")
def narrow(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of few rows and short queues, without a host tier, and one pack with a wrong bit."""
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("narrow"))
    damage(data_dir, prepared)
    with serving(data_dir, "--host-tier", "0", **NARROW) as running:
        yield running


def damage(data_dir: Path, prepared: Prepared) -> None:
    """Flip a bit in the weights of the model called damaged."""
    pack = polyhost_json(data_dir, "models", "show", "damaged")["pack"]
    blob = data_dir / "packs" / pack / "weights.bin"
    content = bytearray(blob.read_bytes())
    content[len(content) // 3] ^= 0x10
    blob.unlink()  # the copy shares its bytes with other tests
    blob.write_bytes(content)


async def post(
    server: Server, key: str, body: Any, path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.json(), answer.headers


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"max_tokens": 600}, 400, "context_length_exceeded", None),
        ({"max_tokens": "many"}, 400, "invalid_request", "max_tokens"),
        ({"messages": "hello"}, 400, "invalid_request", "messages"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_request", None),
        ({"temperature": -1}, 400, "invalid_request", "temperature"),
        ({"tools": [{"type": "function"}]}, 400, "invalid_request", "tools[0].function"),
        ({"n": 99}, 400, "invalid_request", "n"),
        ({"made_up": 1}, 400, "unsupported_parameter", "made_up"),
    ],
)
async def test_bad_input_gets_the_error_object(
    prepared: Prepared,
    server: Server,
    change: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
) -> None:
    key = prepared.key
    got, body, _ = await post(server, key, {**CHAT, **change})
    assert (got, body["error"]["code"]) == (status, code), body
    if param is not None:
        assert body["error"]["param"] == param
    assert body["error"]["message"]


async def test_malformed_and_oversized_bodies(prepared: Prepared, server: Server) -> None:
    key = prepared.key
    for body in (b"{", b"[]", b'{"model": "\xff"}', b"[" * 100_000):
        status, answer, _ = await post(server, key, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request"), body[:20]
    status, answer, _ = await post(server, key, b" " * (9 << 20))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_bad_keys_are_refused(prepared: Prepared, server: Server) -> None:
    key = prepared.key
    for wrong in ("", "sk-ph-nothing", key[:-1] + ("a" if key[-1] != "a" else "b")):
        status, body, _ = await post(server, wrong, CHAT)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_a_full_queue_is_429_with_retry_after(prepared: Prepared, narrow: Server) -> None:
    long = {**CHAT, "model": "python", "max_tokens": 30, "temperature": 1, "seed": 1}
    key = prepared.keys["crowd"]
    results = await asyncio.gather(*(post(narrow, key, long) for _ in range(3 * QUEUE)))
    statuses = Counter(status for status, _, _ in results)
    assert set(statuses) == {200, 429}
    assert statuses[200] >= QUEUE
    for status, body, headers in results:
        if status == 429:
            assert body["error"]["code"] == "queue_full", (body, headers)
            assert float(headers["retry-after"]) > 0
    narrow.wait_until(narrow.has_posted)
    assert len(usage_rows(narrow.data_dir, tenant="crowd")) == statuses[200]


async def test_a_revoked_key_stops_working_while_the_server_runs(
    prepared: Prepared, server: Server
) -> None:
    key = prepared.keys["revoked"]
    status, _, _ = await post(server, key, CHAT)
    assert status == 200
    done = polyhost(server.data_dir, "keys", "revoke", key.split("-")[2])
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 10
    while (await post(server, key, CHAT))[0] == 200:
        assert time.monotonic() < deadline, "the revoked key still works"
    status, body, _ = await post(server, key, CHAT)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def begin(
    server: Server, key: str, session: aiohttp.ClientSession, bodies: Sequence[Mapping[str, Any]]
) -> tuple[list[Answer], "asyncio.Future[Any]"]:
    """Streams, of which one has begun: what each has seen so far, and the end of all."""
    seen = [Answer() for _ in bodies]
    ended = asyncio.gather(
        *(
            client.ask(session, server.url, key, {**body, "stream": True}, one, timeout_s=300)
            for body, one in zip(bodies, seen, strict=True)
        )
    )
    async with asyncio.timeout(60):
        while not any(one.chunks >= 3 for one in seen):  # noqa: ASYNC110  nothing tells when
            await asyncio.sleep(0.01)
    return seen, ended


async def embed_until(
    server: Server, key: str, killed: asyncio.Event, answered: asyncio.Semaphore
) -> list[tuple[int, dict[str, Any]]]:
    """Embeddings, one request after the other, until one has come back after the kill."""
    got: list[tuple[int, dict[str, Any]]] = []
    while True:
        inputs = [" ".join(WORDS[: 1 + (len(got) + n) % 13]) for n in range(40)]
        body = {"model": "embed", "input": inputs, "encoding_format": "base64"}
        was_killed = killed.is_set()
        status, answer, _ = await post(server, key, body, "/v1/embeddings")
        got.append((status, answer))
        answered.release()
        if was_killed:
            return got


async def test_killing_the_worker_under_load(prepared: Prepared, narrow: Server) -> None:
    """Chats and embeddings under way: every request ends once, and pays for what it got."""
    key = prepared.keys["killed"]
    body = {**CHAT, "max_tokens": 120, "temperature": 1.0}
    killed, answered = asyncio.Event(), asyncio.Semaphore(0)
    bodies = [with_usage({**body, "model": NAMES[i % 3], "seed": i}) for i in range(QUEUE)]
    async with client.new_session() as session:
        embeddings = [
            asyncio.create_task(embed_until(narrow, prepared.key, killed, answered))
            for _ in range(8)
        ]
        for _ in range(5):
            await asyncio.wait_for(answered.acquire(), 60)
        seen, ended = await begin(narrow, key, session, bodies)
        (pid,) = narrow.worker_pids()
        os.kill(pid, signal.SIGKILL)
        killed.set()
        await ended
        embedded = [pair for pairs in await asyncio.gather(*embeddings) for pair in pairs]
    metrics = narrow.metrics()
    for name in (*NAMES, *HOSTED):
        polyhost(narrow.data_dir, "models", "unload", name)
    narrow.wait_until(lambda: owned_pages(narrow) == 0)
    narrow.wait_until(narrow.has_posted)
    rows = usage_rows(narrow.data_dir)
    assert set(Counter(row["request_id"] for row in rows).values()) == {1}
    posted = {row["request_id"]: row for row in rows}
    check_chats(seen, posted)
    check_embeddings(embedded, posted)
    restarts = [v for k, v in metrics.items() if k.startswith("worker_restarts_total")]
    assert sum(restarts) == 1


def check_chats(seen: Sequence[Answer], posted: Mapping[str, Any]) -> None:
    for one in seen:
        assert (one.status, one.end) == (200, "done"), one
        assert one.chunks > 0
        row = posted[one.request_id]
        assert row["outcome"] == "finished"
        assert row["cost_nanos"] > 0
        assert (row["prompt_tokens"], row["completion_tokens"]) == one.told


async def test_a_stream_outlives_its_worker(prepared: Prepared, narrow: Server) -> None:
    """Cut in mid-answer, on a server of one worker: the text is that of an undisturbed answer."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.1, "seed": 5, "frequency_penalty": 0.4},
    ]
    bodies = [with_usage({**CHAT, "max_tokens": 200, **kind}) for kind in kinds]
    key = prepared.keys["killed"]
    async with client.new_session() as session:
        undisturbed, ended = await begin(narrow, key, session, bodies)
        await ended
        before = narrow.metrics()["request_resumes_total"]
        seen, ended = await begin(narrow, key, session, bodies)
        assert all(one.end == "" for one in seen), "too late to cut"
        cut = [one.chunks for one in seen]
        (pid,) = narrow.worker_pids()
        os.kill(pid, signal.SIGKILL)
        await ended
    assert [one.end for one in seen] == ["done", "done"], seen
    assert [one.text for one in seen] == [one.text for one in undisturbed]
    assert [one.told for one in seen] == [one.told for one in undisturbed]
    assert all(one.chunks > chunks for one, chunks in zip(seen, cut, strict=True))
    assert narrow.metrics()["request_resumes_total"] > before
    narrow.wait_until(narrow.has_posted)
    rows = usage_rows(narrow.data_dir, tenant="killed")
    assert set(Counter(row["request_id"] for row in rows).values()) == {1}
    check_chats(seen, {row["request_id"]: row for row in rows})


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    """The same, for a stream that ends with its usage."""
    return {**body, "stream_options": {"include_usage": True}}


def check_embeddings(answers: list[tuple[int, dict[str, Any]]], posted: Mapping[str, Any]) -> None:
    statuses = Counter(status for status, _ in answers)
    assert set(statuses) <= {200, 503}
    assert statuses[200] >= 5
    whole = set()
    for status, body in answers:
        if status == 503:
            assert body["error"]["code"] == "service_unavailable"
            continue
        assert len(body["data"]) == 40
        row = posted[body["id"]]
        assert (row["kind"], row["outcome"]) == ("embedding", "finished")
        assert row["prompt_tokens"] == body["usage"]["prompt_tokens"]
        whole.add(body["id"])
    # What was not answered was not paid for.
    assert {id for id, row in posted.items() if row["kind"] == "embedding"} == whole


async def test_client_that_goes_away_is_billed_for_what_it_got(
    prepared: Prepared, server: Server
) -> None:
    body = {**CHAT, "max_tokens": 450, "stream": True, "temperature": 1, "seed": 3}
    async with client.new_session() as session:
        await client.ask(session, server.url, prepared.keys["gone"], body, Answer(), leaves_after=5)
    found: list[dict[str, Any]] = []

    def is_posted() -> bool:
        found[:] = usage_rows(server.data_dir, tenant="gone")
        return bool(found)

    server.wait_until(is_posted)
    server.wait_until(server.has_posted)
    (row,) = usage_rows(server.data_dir, tenant="gone")
    assert row["outcome"] in ("disconnected", "finished")
    assert 0 < row["completion_tokens"] <= 450


async def test_a_flipped_byte_is_never_served(prepared: Prepared, narrow: Server) -> None:
    for _ in range(2):
        status, body, _ = await post(narrow, prepared.key, {**CHAT, "model": "damaged"})
        assert (status, body["error"]["code"]) == (503, "model_failed")
        assert "is damaged" in body["error"]["message"], body
    status, _, _ = await post(narrow, prepared.key, CHAT)
    assert status == 200  # nobody else's matter
