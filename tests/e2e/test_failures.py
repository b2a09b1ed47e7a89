"""What goes wrong in a real server: bad input, a killed worker, damaged and dangerous models."""

import asyncio
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Prepared
from tests.e2e.server import DEMO_MODELS, NAMES, Server, polyhost, serving
from tests.e2e.test_chat import exported_rows

pytestmark = pytest.mark.e2e

CHAT = {"model": "sherlock", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def shared(
    prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    """One server for tests that leave it as they found it."""
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("failures"))
    with serving(data_dir) as server:
        yield server, prepared.key


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
    shared: tuple[Server, str], change: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    server, key = shared
    got, body, _ = await post(server, key, {**CHAT, **change})
    assert (got, body["error"]["code"]) == (status, code), body
    if param is not None:
        assert body["error"]["param"] == param
    assert body["error"]["message"]


async def test_malformed_and_oversized_bodies(shared: tuple[Server, str]) -> None:
    server, key = shared
    for body in (b"{", b"[]", b'{"model": "\xff"}', b"[" * 100_000):
        status, answer, _ = await post(server, key, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request"), body[:20]
    status, answer, _ = await post(server, key, b" " * (9 << 20))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_bad_keys_are_refused(shared: tuple[Server, str]) -> None:
    server, key = shared
    for wrong in ("", "sk-ph-nothing", key[:-1] + ("a" if key[-1] != "a" else "b")):
        status, body, _ = await post(server, wrong, CHAT)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_a_full_queue_is_429_with_retry_after(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    bounds = {
        "POLYHOST_MAX_QUEUE_TOTAL": "2",
        "POLYHOST_MAX_QUEUE_PER_TENANT": "2",
        "POLYHOST_MAX_NUM_SEQS": "1",
    }
    with serving(data_dir, **bounds) as server:
        long = {**CHAT, "model": "python", "max_tokens": 400, "temperature": 1, "seed": 1}
        results = await asyncio.gather(*(post(server, prepared.key, long) for _ in range(12)))
    statuses = Counter(status for status, _, _ in results)
    assert set(statuses) == {200, 429}
    for status, body, headers in results:
        if status == 429:
            assert body["error"]["code"] == "queue_full", (body, headers)
            assert float(headers["retry-after"]) > 0
    rows = exported_rows(data_dir)
    assert len(rows) == statuses[200]


async def test_a_revoked_key_stops_working_while_the_server_runs(
    prepared: Prepared, tmp_path: Path
) -> None:
    data_dir = prepared.copy_to(tmp_path)
    with serving(data_dir) as server:
        status, _, _ = await post(server, prepared.key, CHAT)
        assert status == 200
        public_id = prepared.key.split("-")[2]
        done = polyhost(data_dir, "keys", "revoke", public_id)
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + 10
        while (await post(server, prepared.key, CHAT))[0] == 200:
            assert time.monotonic() < deadline, "the revoked key still works"
        status, body, _ = await post(server, prepared.key, CHAT)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def stream_one(
    server: Server,
    key: str,
    session: aiohttp.ClientSession,
    body: dict[str, Any],
    begun: asyncio.Event,
) -> dict[str, Any]:
    """What one streaming client saw: chunks, whether it ended well, an error event's code."""
    seen: dict[str, Any] = {"id": "", "chunks": 0, "done": False, "error": "", "status": 0}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(
        server.url + "/v1/chat/completions", json={**body, "stream": True}, headers=headers
    ) as answer:
        seen["status"] = answer.status
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                seen["done"] = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                seen["error"] = event["error"]["code"]
                continue
            seen["id"] = event["id"]
            seen["chunks"] += bool(event["choices"] and event["choices"][0]["delta"].get("content"))
            if seen["chunks"] == 3:
                begun.set()
    return seen


async def test_killing_the_worker_under_load(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    # Two rows at a time: most requests have no token yet when the worker dies.
    with serving(data_dir, POLYHOST_MAX_NUM_SEQS="2") as server:
        body = {**CHAT, "max_tokens": 200, "temperature": 1.0}
        begun = asyncio.Event()
        async with aiohttp.ClientSession() as session:
            tasks = [
                asyncio.create_task(
                    stream_one(
                        server,
                        prepared.key,
                        session,
                        {**body, "model": NAMES[i % 3], "seed": i},
                        begun,
                    )
                )
                for i in range(24)
            ]
            await asyncio.wait_for(begun.wait(), 60)
            (pid,) = server.worker_pids()
            os.kill(pid, signal.SIGKILL)
            seen = await asyncio.gather(*tasks)
        metrics = server.metrics()
        for name in NAMES:
            polyhost(data_dir, "models", "unload", name)
        server.wait_until(lambda: _owned_pages(server) == 0)
    broken = [one for one in seen if one["error"]]
    whole = [one for one in seen if not one["error"]]
    assert all(one["status"] == 200 for one in seen)
    assert broken, "no stream had begun"
    assert len(whole) >= 12, seen
    for one in whole:
        assert one["done"]
        assert one["chunks"] > 0
    rows = Counter(row["request_id"] for row in exported_rows(data_dir))
    outcomes = {row["request_id"]: row for row in exported_rows(data_dir)}
    assert set(rows.values()) == {1}
    for one in whole:
        assert outcomes[one["id"]]["outcome"] == "finished"
    for one in broken:
        if one["chunks"]:
            assert outcomes[one["id"]]["outcome"] == "failed"
            assert outcomes[one["id"]]["cost_nanos"] == 0
    restarts = [v for k, v in metrics.items() if k.startswith("polyhost_worker_restarts_total")]
    assert sum(restarts) == 1


def _owned_pages(server: Server) -> float:
    return sum(
        value
        for key, value in server.metrics().items()
        if key.startswith("polyhost_arena_pages") and "free" not in key
    )


async def test_client_that_goes_away_is_billed_for_what_it_got(
    prepared: Prepared, tmp_path: Path
) -> None:
    data_dir = prepared.copy_to(tmp_path)
    with serving(data_dir) as server:
        async with aiohttp.ClientSession() as session:
            answer = await session.post(
                server.url + "/v1/chat/completions",
                json={**CHAT, "max_tokens": 450, "stream": True, "temperature": 1, "seed": 3},
                headers={"authorization": f"Bearer {prepared.key}"},
            )
            for _ in range(12):
                await answer.content.readline()
            answer.close()
        await asyncio.sleep(1.0)
        rows = exported_rows(data_dir)
    assert len(rows) == 1
    assert rows[0]["outcome"] in ("disconnected", "finished")
    assert 0 < rows[0]["completion_tokens"] <= 450


async def test_a_flipped_byte_is_never_served(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    with_packs = sorted((data_dir / "packs").glob("*/weights.bin"))
    for blob in with_packs:
        content = bytearray(blob.read_bytes())
        content[len(content) // 3] ^= 0x10
        blob.unlink()  # the copy shares its bytes with other tests
        blob.write_bytes(content)
    with serving(data_dir, "--host-tier", "0") as server:
        status, body, _ = await post(server, prepared.key, CHAT)
        assert (status, body["error"]["code"]) == (503, "model_failed")
        assert "is damaged" in body["error"]["message"], body


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [("pytorch_model.bin", b"\x80\x04", "pickle"), ("modeling_x.py", b"print(1)", "code")],
)
def test_dangerous_folders_are_refused_with_the_reason(
    prepared: Prepared, tmp_path: Path, file: str, content: bytes, code: str
) -> None:
    data_dir = prepared.copy_to(tmp_path)
    folder = tmp_path / "source"
    folder.mkdir()
    for path in (DEMO_MODELS / "sherlock").iterdir():
        if code != "pickle" or path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / file).write_bytes(content)
    if code == "code":
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
        (folder / "config.json").write_text(json.dumps(config))
    done = polyhost(data_dir, "models", "add", "danger", "--source", str(folder))
    assert done.returncode == 1
    assert code in done.stdout + done.stderr
    listed = polyhost(data_dir, "models", "show", "danger", "--json")
    assert json.loads(listed.stdout)["state"] == "failed"
