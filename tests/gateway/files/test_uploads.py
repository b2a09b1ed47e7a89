"""Uploads over HTTP: parts in any order, joined once, bounded, cancelled, expired."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import update

from gateway.files.file_store import FileStore
from gateway.files.uploads_service import UPLOAD_S
from registry.session import make_engine, writing
from registry.state import uploads
from registry.state.file_quota import FileUsage
from registry.state.uploads import FileUpload
from tests.gateway.edge_kit import KEY, Client, Kit, client_of
from tests.gateway.files.file_kit import (
    OTHER_KEY,
    call,
    content,
    file_kit,
    form,
    objects_of,
    send,
    usage,
)

ALL = "/v1/uploads"


async def created(client: Client, num_bytes: int, key: str = KEY, **fields: Any) -> dict[str, Any]:
    asked = {"bytes": num_bytes, "filename": "a.jsonl", "mime_type": "text/plain", **fields}
    status, body = await call(client, "POST", ALL, key, json={"purpose": "user_data", **asked})
    assert (status, body["object"], body["status"]) == (200, "upload", "pending"), body
    found: dict[str, Any] = body
    return found


async def add(client: Client, upload_id: str, data: bytes, key: str = KEY) -> tuple[int, Any]:
    made = form(data, field="data")
    return await call(client, "POST", f"{ALL}/{upload_id}/parts", key, data=made)


async def complete(
    client: Client, upload_id: str, part_ids: list[str], **fields: Any
) -> tuple[int, Any]:
    asked = {"part_ids": part_ids, **fields}
    return await call(client, "POST", f"{ALL}/{upload_id}/complete", json=asked)


async def test_parts_become_a_file(kit: Kit, client: Client) -> None:
    settings = kit.edge.services.settings
    parts = [os.urandom(1_500_000), os.urandom(7), os.urandom(1_100_000)]
    whole = b"".join(parts)
    upload = await created(client, len(whole))
    assert upload["expires_at"] - upload["created_at"] == UPLOAD_S
    assert (upload["bytes"], upload["filename"], upload["file"]) == (len(whole), "a.jsonl", None)
    sent = await asyncio.gather(*(add(client, upload["id"], part) for part in reversed(parts)))
    ids = [body["id"] for _, body in reversed(sent)]
    assert sent[0][1].keys() == {"id", "object", "created_at", "upload_id"}
    assert usage(settings) == FileUsage(1, len(whole)), "it was reserved with the upload"
    md5 = hashlib.md5(whole).hexdigest()
    status, wrong = await complete(client, upload["id"], ids[::-1], md5=md5)
    assert (status, wrong["error"]["param"]) == (400, "md5")
    status, done = await complete(client, upload["id"], ids, md5=md5)
    assert (status, done["status"], done["file"]["bytes"]) == (200, "completed", len(whole))
    assert await content(client, done["file"]["id"]) == (200, whole)
    assert await complete(client, upload["id"], ids, md5=md5) == (200, done), "asked once more"
    assert [path.stat().st_size for path in objects_of(settings)] == [len(whole)]
    assert usage(settings) == FileUsage(1, len(whole))
    for answer in (
        await add(client, upload["id"], b"more"),
        await call(client, "POST", f"{ALL}/{upload['id']}/cancel"),
    ):
        assert answer[0] == 400
        assert "completed" in answer[1]["error"]["message"]


async def test_an_upload_is_cancelled(kit: Kit, client: Client) -> None:
    settings = kit.edge.services.settings
    upload = await created(client, 10)
    _, part = await add(client, upload["id"], b"x" * 10)
    status, body = await call(client, "POST", f"{ALL}/{upload['id']}/cancel")
    assert (status, body) == (200, {**upload, "status": "cancelled"})
    assert await call(client, "POST", f"{ALL}/{upload['id']}/cancel") == (200, body)
    assert (usage(settings), objects_of(settings)) == (FileUsage(), [])
    for answer in (
        await add(client, upload["id"], b"x"),
        await complete(client, upload["id"], [part["id"]]),
    ):
        assert (answer[0], "cancelled" in answer[1]["error"]["message"]) == (400, True)


async def test_nobody_else_sees_it(kit: Kit, client: Client) -> None:
    upload = await created(client, 10)
    path = f"{ALL}/{upload['id']}"
    assert (await add(client, upload["id"], b"x", OTHER_KEY))[0] == 404
    body = {"part_ids": ["part_1"]}
    assert (await call(client, "POST", f"{path}/complete", OTHER_KEY, json=body))[0] == 404
    status, answer = await call(client, "POST", f"{path}/cancel", OTHER_KEY)
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert (await add(client, "upload_1", b"x"))[0] == 404
    assert usage(kit.edge.services.settings) == FileUsage(1, 10)


async def test_what_is_completed_is_checked(kit: Kit, client: Client) -> None:
    upload, other = await created(client, 8), await created(client, 8)
    ids = [(await add(client, upload["id"], b"data"))[1]["id"] for _ in range(3)]
    foreign = (await add(client, other["id"], b"data"))[1]["id"]
    for part_ids, words in (
        ([ids[0]], "4 bytes"),
        (ids, "12 bytes"),
        ([ids[0], ids[0]], "twice"),
        ([ids[0], foreign], "no part"),
        ([ids[0], "part_1"], "no part"),
        ([], "part_ids"),
    ):
        status, body = await complete(client, upload["id"], part_ids)
        assert (status, words in body["error"]["message"]) == (400, True), body
    assert (await complete(client, upload["id"], ids[:2], md5="xyz"))[0] == 400
    assert (await complete(client, upload["id"], ids[:2]))[0] == 200, "a part may be left out"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"bytes": 0}, 400, "bytes"),
        ({"bytes": 9_000_000_000}, 413, None),
        ({"bytes": 201 << 20, "purpose": "batch"}, 413, None),
        ({"purpose": "x"}, 400, "purpose"),
        ({"filename": ""}, 400, "filename"),
        ({"filename": "a\nb"}, 400, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "expires_after[seconds]"),
        ({"more": 1}, 400, "more"),
    ],
)
async def test_what_an_upload_is_made_for_is_checked(
    kit: Kit, client: Client, fields: dict[str, Any], status: int, param: str | None
) -> None:
    asked = {"bytes": 1, "filename": "a", "mime_type": "a/b", "purpose": "evals", **fields}
    given, body = await call(client, "POST", ALL, json=asked)
    assert (given, body["error"]["param"]) == (status, param)


async def test_parts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.files.uploads_service.MAX_PART_BYTES", 1000)
    monkeypatch.setattr(uploads, "MAX_PARTS", 3)
    kit = file_kit(tmp_path, files_quota_bytes=4000)
    settings = kit.edge.services.settings
    async with client_of(kit) as client:
        upload = await created(client, 2000)
        status, body = await add(client, upload["id"], b"x" * 1001)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert usage(settings) == FileUsage(1, 2000)
        for _ in range(3):
            assert (await add(client, upload["id"], b"x" * 900))[0] == 200
        assert usage(settings) == FileUsage(1, 2700), "all parts count"
        status, body = await add(client, upload["id"], b"x")
        assert (status, "3 parts" in body["error"]["message"]) == (400, True)
        status, body = await call(client, "POST", "/v1/files", data=form(b"x" * 2000))
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        status, body = await call(
            client,
            "POST",
            ALL,
            json={"bytes": 2000, "filename": "a", "mime_type": "a/b", "purpose": "evals"},
        )
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")


async def test_a_part_that_goes_beyond_the_quota_is_refused(tmp_path: Path) -> None:
    kit = file_kit(tmp_path, files_quota_bytes=3000)
    settings = kit.edge.services.settings
    async with client_of(kit) as client:
        upload = await created(client, 2000)
        ids = [(await add(client, upload["id"], b"x" * 1000))[1]["id"] for _ in range(2)]
        status, body = await add(client, upload["id"], b"x" * 1000)
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        assert usage(settings) == FileUsage(1, 2000)
        assert (await complete(client, upload["id"], ids))[0] == 200
        assert usage(settings) == FileUsage(1, 2000)


async def test_an_upload_expires(kit: Kit, client: Client) -> None:
    upload = await created(client, 4)
    _, part = await add(client, upload["id"], b"data")
    engine = make_engine(kit.edge.services.settings.registry_url)
    with writing(engine, "test") as session:
        session.execute(update(FileUpload).values(expires_at=FileUpload.created_at))
    engine.dispose()
    for answer in (
        await add(client, upload["id"], b"x"),
        await complete(client, upload["id"], [part["id"]]),
    ):
        assert (answer[0], "expired" in answer[1]["error"]["message"]) == (400, True)


async def test_two_requests_complete_it_once(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waiting = FileStore.complete, asyncio.Event()
    loop, num = asyncio.get_running_loop(), 0

    def held(store: FileStore, *about: Any) -> Any:
        """The two arrive here before either of them goes on."""
        nonlocal num
        num += 1
        if num == 2:
            loop.call_soon_threadsafe(waiting.set)
        asyncio.run_coroutine_threadsafe(waiting.wait(), loop).result(10)
        return real(store, *about)

    monkeypatch.setattr(FileStore, "complete", held)
    upload = await created(client, 4)
    _, part = await add(client, upload["id"], b"data")
    one, two = await asyncio.gather(
        *(complete(client, upload["id"], [part["id"]]) for _ in range(2))
    )
    assert (one[0], one) == (200, two), "both have the one file"
    settings = kit.edge.services.settings
    assert usage(settings) == FileUsage(1, 4)
    assert len(objects_of(settings)) == 1


async def test_openais_client_uploads_in_chunks(kit: Kit, client: Client) -> None:
    data = os.urandom(2_500_000)
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1", max_retries=0) as sdk:
        upload = await sdk.uploads.upload_file_chunked(
            file=data,
            filename="b.bin",
            bytes=len(data),
            mime_type="application/octet-stream",
            purpose="user_data",
            part_size=1_000_000,
            md5=hashlib.md5(data).hexdigest(),
        )
        assert upload.file is not None
        assert (upload.status, upload.file.bytes) == ("completed", len(data))
        assert (await sdk.files.content(upload.file.id)).content == data
        other = await sdk.uploads.create(
            bytes=1, filename="c", mime_type="text/plain", purpose="evals"
        )
        assert (await sdk.uploads.cancel(other.id)).status == "cancelled"
    await send(client, b"x")
