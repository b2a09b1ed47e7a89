"""Files over HTTP: sent, listed, read, deleted, seen by nobody else, bounded."""

import asyncio
import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from engine.objects.folder_store import FolderWriter
from gateway.files.file_body import FileForm
from gateway.files.file_store import FileStore
from gateway.settings.state_settings import DAY_S
from registry.session import make_engine, reading, writing
from registry.state.file_quota import FileUsage
from registry.state.files import StoredFile
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record, until
from tests.gateway.files.file_kit import (
    OTHER_KEY,
    PLAIN_KEY,
    SCOPES,
    call,
    content,
    file_kit,
    form,
    objects_of,
    send,
    usage,
)
from tests.gateway.http.test_openapi_answers import check, document

ALL = "/v1/files"


async def test_a_file_is_kept_listed_read_and_deleted(kit: Kit, client: Client) -> None:
    settings = kit.edge.services.settings
    data = os.urandom(3_000_001)
    file = await send(client, data, purpose="user_data")
    assert file["id"].startswith("file-")
    assert {**file, "id": "", "created_at": 0, "expires_at": 0} == {
        "id": "",
        "object": "file",
        "bytes": len(data),
        "created_at": 0,
        "expires_at": 0,
        "filename": "a.jsonl",
        "purpose": "user_data",
        "status": "processed",
        "status_details": None,
    }
    assert file["expires_at"] - file["created_at"] == 30 * DAY_S
    assert await call(client, "GET", f"{ALL}/{file['id']}") == (200, file)
    assert await content(client, file["id"]) == (200, data)
    url = f"{client.base}{ALL}/{file['id']}/content"
    key = {"authorization": f"Bearer {KEY}"}
    async with client.session.head(url, headers=key) as answer:
        assert (answer.status, answer.headers["content-length"]) == (200, str(len(data)))
    assert usage(settings) == FileUsage(1, len(data))
    assert [path.stat().st_size for path in objects_of(settings)] == [len(data)]
    assert [path.stat().st_mode & 0o777 for path in objects_of(settings)] == [0o600]
    gone = {"id": file["id"], "object": "file", "deleted": True}
    assert await call(client, "DELETE", f"{ALL}/{file['id']}") == (200, gone)
    status, body = await call(client, "GET", f"{ALL}/{file['id']}")
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "not_found", "id")
    assert (await content(client, file["id"]))[0] == 404
    assert (usage(settings), objects_of(settings)) == (FileUsage(), [])


async def test_nobody_else_sees_it(kit: Kit, client: Client) -> None:
    file = await send(client, b"mine")
    told = set()
    for method, path in (
        ("GET", f"{ALL}/ID"),
        ("DELETE", f"{ALL}/ID"),
        ("GET", f"{ALL}/ID/content"),
    ):
        for file_id in (file["id"], "file-" + "0" * 32, "a%00b", "%ED%B2%80"):
            status, body = await call(client, method, path.replace("ID", file_id), OTHER_KEY)
            assert status == 404
            told.add(body["error"]["message"].replace(file_id, "ID").split(".")[1])
    assert told == {" It may have expired or been deleted"}
    assert (await call(client, "GET", ALL, OTHER_KEY))[1]["data"] == []
    for method, path in (("GET", ALL), ("POST", ALL), ("GET", f"{ALL}/{file['id']}/content")):
        status, body = await call(client, method, path, PLAIN_KEY)
        assert (status, body["error"]["code"]) == (403, "permission_denied")
        assert "'files'" in body["error"]["message"]
    assert await content(client, file["id"]) == (200, b"mine")


async def test_anthropics_clients_have_no_files_here(kit: Kit, client: Client) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    for method, options in (("GET", {}), ("POST", {"data": form(b"data")})):
        status, body = await call(client, method, ALL, headers=headers, **options)
        assert (status, body["error"]["message"][:11]) == (404, "unknown URL")


async def test_lists_are_pages(kit: Kit, client: Client) -> None:
    files = [await send(client, b"x", purpose=p) for p in ("batch", "evals", "batch", "vision")]
    ids = [file["id"] for file in files]

    async def listed(query: str) -> tuple[list[str], bool]:
        status, page = await call(client, "GET", f"{ALL}?{query}")
        assert (status, page["object"]) == (200, "list"), page
        found = [file["id"] for file in page["data"]]
        assert [page["first_id"], page["last_id"]] == (
            [found[0], found[-1]] if found else [None] * 2
        )
        return found, page["has_more"]

    assert await listed("") == (ids[::-1], False)
    assert await listed("order=asc&limit=3") == (ids[:3], True)
    assert await listed(f"order=asc&limit=3&after={ids[2]}") == (ids[3:], False)
    assert await listed("purpose=batch") == ([ids[2], ids[0]], False)
    assert await listed("purpose=nothing") == ([], False)
    for query, param in (
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("order=up", "order"),
        ("after=file-1", "after"),
        ("purpose=%00", "purpose"),
        ("x=1", "x"),
    ):
        status, body = await call(client, "GET", f"{ALL}?{query}")
        assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "secret"}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after[seconds]",
        ),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"},
            "expires_after[seconds]",
        ),
        ({"more": "1"}, "more"),
        ({"purpose": "x" * 5000}, "purpose"),
    ],
)
async def test_what_is_said_of_a_file_is_checked(
    kit: Kit, client: Client, fields: dict[str, str], param: str
) -> None:
    status, body = await call(client, "POST", ALL, data=form(b"data", **fields))
    assert (status, body["error"]["param"]) == (400, param), body
    assert usage(kit.edge.services.settings) == FileUsage()
    assert objects_of(kit.edge.services.settings) == []


BOUNDARY = "boundary"


def raw(*parts: str, end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    return ("".join(f"--{BOUNDARY}\r\n{part}\r\n" for part in parts) + end).encode()


PURPOSE = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
HEAD = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
FILE = f"{HEAD}data"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (raw(PURPOSE), "file is required"),
        (raw(FILE), "purpose is required"),
        (raw(FILE, FILE, PURPOSE), "more than once"),
        (raw(PURPOSE, PURPOSE, FILE), "more than once"),
        (raw(FILE, PURPOSE, end=""), "last boundary"),
        (raw(HEAD, PURPOSE), "empty"),
        (raw(FILE.replace('"a"', '"a\x01"'), PURPOSE), "none of control"),
        (raw(FILE.replace('"a"', f'"{"a" * 256}"'), PURPOSE), "none of control"),
        (raw(FILE.replace('"a"', '"\xff"'), PURPOSE).replace(b"\xc3\xbf", b"\xff"), "UTF-8"),
        (b"no form at all", "malformed"),
        (b"", "last boundary"),
    ],
)
async def test_a_wrong_form_is_refused(kit: Kit, client: Client, body: bytes, words: str) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    status, answer = await call(client, "POST", ALL, data=body, headers=headers)
    assert status == 400
    assert words in answer["error"]["message"]
    assert usage(kit.edge.services.settings) == FileUsage()
    assert objects_of(kit.edge.services.settings) == []


async def test_forms_are_taken_apart_beside_the_event_loop(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = set()
    real = FileForm.feed

    def feed(form: FileForm, data: bytes) -> bytes:
        where.add(threading.current_thread() is threading.main_thread())
        return real(form, data)

    monkeypatch.setattr(FileForm, "feed", feed)
    nearly = f"\r\n--{BOUNDARY}x" * 150_000
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    body = io.BytesIO(raw(PURPOSE, HEAD + nearly))
    status, file = await call(client, "POST", ALL, data=body, headers=headers)
    assert (status, file["bytes"], where) == (200, len(nearly), {False})
    assert await content(client, file["id"]) == (200, nearly.encode())


async def test_a_short_boundary_is_refused(kit: Kit, client: Client) -> None:
    headers = {"content-type": "multipart/form-data; boundary=short12"}
    body = raw(FILE, PURPOSE).replace(BOUNDARY.encode(), b"short12")
    status, answer = await call(client, "POST", ALL, data=body, headers=headers)
    assert (status, "shorter than 8 bytes" in answer["error"]["message"]) == (400, True)


async def test_what_a_form_has_beside_its_file_is_bounded(kit: Kit, client: Client) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    told = []
    for size in (65_000, 66_000):
        body = raw(PURPOSE, FILE) + b"x" * size  # behind its end
        told.append(await call(client, "POST", ALL, data=body, headers=headers))
    assert [status for status, _ in told] == [200, 413]
    assert "beside its file" in told[1][1]["error"]["message"]
    assert usage(kit.edge.services.settings) == FileUsage(1, 4)


async def test_the_file_may_stand_before_its_purpose(kit: Kit, client: Client) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    status, file = await call(client, "POST", ALL, data=raw(FILE, PURPOSE), headers=headers)
    assert (status, file["filename"], file["bytes"]) == (200, "a", 4)
    status, body = await call(client, "POST", ALL, data=b"{}")
    assert (status, body["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_file_is_gone_when_it_expires_or_is_not_kept_any_longer(tmp_path: Path) -> None:
    kit = file_kit(tmp_path, file_retention_days=7)
    async with client_of(kit) as client:
        hour = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        short = await send(client, b"a", **hour)
        assert short["expires_at"] - short["created_at"] == 3600
        most = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592000"}
        long = await send(client, b"b", **most)
        assert long["expires_at"] - long["created_at"] == 7 * DAY_S, "no longer than the setting"
        engine = make_engine(kit.edge.services.settings.registry_url)
        with writing(engine, "test") as session:
            late = {"created_at": StoredFile.created_at - 3600, "expires_at": short["created_at"]}
            session.execute(update(StoredFile).where(StoredFile.id == short["id"]).values(late))
            old = {"created_at": StoredFile.created_at - 7 * DAY_S}
            session.execute(update(StoredFile).where(StoredFile.id == long["id"]).values(old))
        engine.dispose()
        for file in (short, long):
            assert (await call(client, "GET", f"{ALL}/{file['id']}"))[0] == 404
            assert (await content(client, file["id"]))[0] == 404
        assert (await call(client, "GET", ALL))[1]["data"] == []


@pytest.mark.parametrize("whose", ["tenant", "server"])
async def test_with_zero_retention_there_are_no_files(tmp_path: Path, whose: str) -> None:
    days = {"file_retention_days": 0} if whose == "server" else {}
    kit = file_kit(tmp_path, **days)
    own = 0 if whose == "tenant" else None
    async with client_of(kit) as client:
        if whose == "tenant":
            file = await send(client, b"a")
            kit.use_keys(replace(key_record(), scopes=SCOPES, response_retention_days=own))
            assert (await call(client, "GET", f"{ALL}/{file['id']}"))[0] == 404
        status, body = await call(client, "POST", ALL, data=form(b"b"))
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
        upload = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
        status, body = await call(client, "POST", "/v1/uploads", json=upload)
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
        assert (await call(client, "GET", ALL))[1]["data"] == []


async def test_a_file_may_be_too_large(tmp_path: Path) -> None:
    kit = file_kit(tmp_path, max_file_bytes=200_000, max_body_bytes=1000)
    settings = kit.edge.services.settings

    async def chunks() -> Any:
        yield raw(PURPOSE, HEAD + "x" * 150_000, end="")[:-2]
        for _ in range(20):
            yield b"x" * 50_000
        yield b"\r\n--boundary--\r\n"

    async with client_of(kit) as client:
        await send(client, b"x" * 200_000)
        told = []
        for size in (200_001, 5_000_000):
            told.append(await call(client, "POST", ALL, data=form(b"x" * size)))
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        told.append(await call(client, "POST", ALL, data=chunks(), headers=headers))
        for status, body in told:
            assert (status, body["error"]["code"]) == (413, "request_too_large"), body
            assert "larger than 200000 bytes" in body["error"]["message"]
        assert usage(settings) == FileUsage(1, 200_000)
        assert len(objects_of(settings)) == 1
        status, body = await call(client, "POST", "/v1/uploads", data=b"x" * 1001)
        assert status == 413, "other bodies are bounded as ever"


async def test_a_file_of_requests_has_a_bound_of_its_own(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.files.file_fields.MAX_BATCH_BYTES", 1000)
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    large = HEAD + "x" * 1001
    for parts in ((large, PURPOSE), (PURPOSE, large)):
        status, body = await call(client, "POST", ALL, data=raw(*parts), headers=headers)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
    await send(client, b"x" * 1001, purpose="evals")


async def test_a_tenant_has_so_many_bytes_and_files(tmp_path: Path) -> None:
    kit = file_kit(tmp_path, files_quota_bytes=10_000, max_files=3)
    settings = kit.edge.services.settings
    async with client_of(kit) as client:
        file = await send(client, b"x" * 6000)
        status, body = await call(client, "POST", ALL, data=form(b"x" * 4000))
        assert (status, body["error"]["type"]) == (429, "insufficient_quota")
        await send(client, b"x" * 6000, OTHER_KEY)
        await send(client, b"x")
        await send(client, b"x")
        status, body = await call(client, "POST", ALL, data=form(b"x"))
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        assert usage(settings) == FileUsage(3, 6002)
        await call(client, "DELETE", f"{ALL}/{file['id']}")
        await send(client, b"x" * 4000)
        assert usage(settings) == FileUsage(3, 4002)


async def leave(client: Client, before: Callable[[], bool]) -> None:
    """Send half of a file and go away once this holds."""
    host, port = client.base.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    begin = raw(PURPOSE, FILE, end="")[:-2]
    head = (
        f"POST {ALL} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: multipart/form-data; boundary={BOUNDARY}\r\ncontent-length: 9000000\r\n\r\n"
    )
    writer.write(head.encode() + begin + b"x" * 3_000_000)
    await writer.drain()
    await until(before)
    writer.close()


async def test_a_client_that_leaves_leaves_nothing(kit: Kit, client: Client) -> None:
    settings = kit.edge.services.settings
    await leave(client, lambda: sum(p.stat().st_size for p in objects_of(settings)) > 2_000_000)
    assert [path.name[0] for path in objects_of(settings)] in ([], ["."]), "nothing is seen of it"
    registry = kit.edge.services.metrics_registry
    counted = "polyhost_files_received_total", {"result": "disconnected"}
    await until(lambda: registry.get_sample_value(*counted) == 1)
    assert (usage(settings), objects_of(settings)) == (FileUsage(), [])


async def test_what_is_being_sent_is_reserved(tmp_path: Path) -> None:
    kit = file_kit(tmp_path, files_quota_bytes=10_000_000)
    settings = kit.edge.services.settings
    async with client_of(kit) as client:

        def is_reserved() -> bool:
            return usage(settings) == FileUsage(1, 9_000_000)

        await leave(client, is_reserved)
        refused = await call(client, "POST", ALL, data=form(b"x" * 9_500_000))
        assert refused[0] == 429, "whether or not the other one is gone by now"


@pytest.mark.parametrize("step", ["write", "finish"])
async def test_a_full_disk_leaves_nothing(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(FolderWriter, step)

    def full(writer: FolderWriter, *about: Any) -> Any:
        if step == "write" and writer._size_bytes < 1_000_000:
            return real(writer, *about)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = kit.edge.services.settings
    monkeypatch.setattr(FolderWriter, step, full)
    status, body = await call(client, "POST", ALL, data=form(os.urandom(3_000_000)))
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    assert "no space left" in body["error"]["message"]
    assert "/" not in body["error"]["message"]
    assert (usage(settings), objects_of(settings)) == (FileUsage(), [])
    monkeypatch.undo()
    await send(client, b"x")


async def test_where_a_commit_fails_the_object_stays_for_the_sweeper(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = FileStore.keep

    def lost(store: FileStore, *about: Any) -> Any:
        """The commit came through, its answer did not."""
        keep(store, *about)
        raise OperationalError("COMMIT", {}, Exception("the connection was lost"))

    monkeypatch.setattr(FileStore, "keep", lost)
    status, _ = await call(client, "POST", ALL, data=form(b"data"))
    assert status == 503
    [file] = (await call(client, "GET", ALL))[1]["data"]
    assert await content(client, file["id"]) == (200, b"data")
    assert usage(kit.edge.services.settings) == FileUsage(1, 4)


async def test_a_damaged_file_is_never_read_whole(kit: Kit, client: Client) -> None:
    settings = kit.edge.services.settings
    small = await send(client, b"data")
    objects_of(settings)[0].write_bytes(b"date")
    status, body = await content(client, small["id"])
    assert (status, b"damaged" in body) == (500, True)
    await call(client, "DELETE", f"{ALL}/{small['id']}")
    large = await send(client, b"x" * 3_000_000)
    [path] = objects_of(settings)
    path.write_bytes(b"x" * 2_999_999 + b"y")
    with pytest.raises(Exception, match="payload"):
        await content(client, large["id"])
    path.unlink()
    assert (await content(client, large["id"]))[0] == 404


async def test_only_so_many_files_come_at_a_time(tmp_path: Path) -> None:
    kit = file_kit(tmp_path, max_file_bodies=4)
    settings = kit.edge.services.settings
    async with client_of(kit) as client:
        busy: list[int] = []

        held = asyncio.create_task(leave(client, lambda: bool(busy)))
        await until(lambda: bool(objects_of(settings)))
        status, body = await call(client, "POST", ALL, data=form(b"x"))
        assert (status, body["error"]["code"]) == (429, "queue_full"), "one of the tenant's"
        await send(client, b"x", OTHER_KEY)
        busy.append(1)
        await held


async def test_openais_client(kit: Kit, client: Client) -> None:
    data = os.urandom(100_000)
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1", max_retries=0) as sdk:
        file = await sdk.files.create(
            file=("b.bin", data),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.filename, file.bytes, file.purpose) == ("b.bin", len(data), "user_data")
        assert file.expires_at == file.created_at + 3600
        assert (await sdk.files.retrieve(file.id)) == file
        assert (await sdk.files.content(file.id)).content == data
        for n in range(4):
            await sdk.files.create(file=f"{n}".encode(), purpose="evals")
        found = [each.bytes async for each in sdk.files.list(limit=2, order="asc")]
        assert found == [len(data), 1, 1, 1, 1]
        assert (await sdk.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match=f"No such File object: {file.id}"):
            await sdk.files.retrieve(file.id)
    with reading(make_engine(kit.edge.services.settings.registry_url)) as session:
        digests = set(session.execute(select(StoredFile.sha256)).scalars())
    assert digests == {hashlib.sha256(f"{n}".encode()).hexdigest() for n in range(4)}


async def test_the_openapi_document_tells_the_answers(kit: Kit, client: Client) -> None:
    found = await document(client)
    file = await send(client, b"data")
    check(found, ALL, 200, file)
    asked = {"bytes": 4, "filename": "a", "mime_type": "a/b", "purpose": "evals"}
    _, upload = await call(client, "POST", "/v1/uploads", json=asked)
    check(found, "/v1/uploads", 200, upload)
    path, told = f"/v1/uploads/{upload['id']}", "/v1/uploads/{upload_id}"
    status, part = await call(client, "POST", f"{path}/parts", data=form(b"data", field="data"))
    check(found, f"{told}/parts", status, part)
    asked = {"part_ids": [part["id"]]}
    status, done = await call(client, "POST", f"{path}/complete", json=asked)
    check(found, f"{told}/complete", status, done)
    one = f"{ALL}/{{file_id}}"
    for method, url, where in (
        ("GET", ALL, ALL),
        ("GET", f"{ALL}/{file['id']}", one),
        ("GET", f"{ALL}/file-1", one),
        ("DELETE", f"{ALL}/{file['id']}", one),
    ):
        status, body = await call(client, method, url)
        check(found, where, status, body, method.lower())
    forms = found["paths"][ALL]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert forms["schema"]["required"] == ["file", "purpose"]


@pytest.mark.parametrize("name", ["receive_timeout_s", "file_body_timeout_s"])
async def test_a_body_that_takes_too_long_leaves_nothing(tmp_path: Path, name: str) -> None:
    kit = file_kit(tmp_path, **{name: 0.3})
    settings = kit.edge.services.settings
    is_over = asyncio.Event()

    async def chunks() -> Any:
        """Bytes come all the time, or none after the first."""
        yield raw(PURPOSE, FILE, end="")[:-2]
        while not is_over.is_set():
            if name == "file_body_timeout_s":
                yield b"x"
            await asyncio.sleep(0.01)

    async with client_of(kit) as client:
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        status, body = await call(client, "POST", ALL, data=chunks(), headers=headers)
        is_over.set()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert (usage(settings), objects_of(settings)) == (FileUsage(), [])
