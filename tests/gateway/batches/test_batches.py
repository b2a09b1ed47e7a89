"""Batches over HTTP: made of a file, answered line by line, cancelled, expired, resumed."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select, update

from gateway.batches import batch_run, batches_service
from gateway.batches.batch_input import MAX_LINES, MAX_MESSAGE_CHARS, InputCheck
from gateway.batches.batch_input import lines_of as lines_of_file
from gateway.batches.batch_output import line_id
from gateway.batches.batch_store import BatchStore
from gateway.errors import MODEL_NOT_FOUND, QUEUE_FULL, ApiError
from registry.accounts import api_keys, tenants
from registry.accounts.quotas import Limits
from registry.session import make_engine, reading, writing
from registry.state.batches import Batch
from tests.gateway.batches.conftest import batch_kit
from tests.gateway.edge_kit import (
    KEY,
    PRICES,
    Client,
    Kit,
    Running,
    client_of,
    key_record,
    silent,
    until,
)
from tests.gateway.files.file_kit import (
    OTHER_KEY,
    PLAIN_KEY,
    SCOPES,
    call,
    content,
    file_keys,
    objects_of,
    send,
    usage,
)
from tests.gateway.http.test_openapi_answers import check, document

ALL, CHATS = "/v1/batches", "/v1/chat/completions"


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 8}
    made = {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}
    return {**made, **changes}


def jsonl(lines: Iterable[Any]) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


async def begun(
    client: Client, lines: Iterable[Any], key: str = KEY, **fields: Any
) -> dict[str, Any]:
    file = await send(client, jsonl(lines), key)
    asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h", **fields}
    status, batch = await call(client, "POST", ALL, key, json=asked)
    assert (status, batch["status"]) == (200, "validating"), batch
    found: dict[str, Any] = batch
    return found


async def shown(client: Client, batch_id: str, key: str = KEY) -> dict[str, Any]:
    status, batch = await call(client, "GET", f"{ALL}/{batch_id}", key)
    assert status == 200, batch
    found: dict[str, Any] = batch
    return found


async def ended(client: Client, batch_id: str, key: str = KEY) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch = await shown(client, batch_id, key)
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def lines_of(client: Client, file_id: str | None) -> dict[str, Any]:
    """By custom id, each once."""
    if file_id is None:
        return {}
    status, data = await content(client, file_id)
    assert status == 200
    found = [json.loads(each) for each in data.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    return by_id


def speak_back(kit: Kit) -> None:
    kit.dispatcher.script = kit.speak("The game", one_by_one=False)


def posted_once(kit: Kit, batch_id: str, num_lines: int) -> None:
    ids = Counter(posting.request_id for posting in kit.ledger.posted)
    assert ids == {f"chatcmpl-{line_id(batch_id, n)}": 1 for n in range(num_lines)}


async def test_a_batch_is_answered_line_by_line(kit: Kit, client: Client) -> None:
    speak_back(kit)
    wrong = line("wrong", body={"model": "tiny", "messages": "none"})
    lines = [*(line(f"id-{n}") for n in range(20)), "", wrong]
    batch = await begun(client, lines, metadata={"a": "b"})
    assert batch["expires_at"] - batch["created_at"] == 86_400
    done = await ended(client, batch["id"])
    assert (done["status"], done["model"], done["metadata"]) == ("completed", "tiny", {"a": "b"})
    found = await document(client)
    check(found, ALL, 200, batch)
    check(found, f"{ALL}/{{batch_id}}", 200, done, "get")
    check(found, ALL, 200, (await call(client, "GET", ALL))[1], "get")
    assert done["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    assert done["completed_at"] >= done["finalizing_at"] >= done["in_progress_at"]
    output = await lines_of(client, done["output_file_id"])
    assert output.keys() == {f"id-{n}" for n in range(20)}
    answer = output["id-3"]
    assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
    assert answer["response"]["request_id"] == line_id(batch["id"], 3)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "The game"
    assert answer["response"]["body"]["object"] == "chat.completion"
    errors = await lines_of(client, done["error_file_id"])
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "messages"
    posted_once(kit, batch["id"], 20)
    asked = [running.principal for running in kit.dispatcher.requests]
    assert all(principal.is_batch and principal.window for principal in asked)
    assert {round(p.window.ends_s - p.window.began_s) for p in asked if p.window} == {86_400}
    assert any(p.window.behind_s > 0 for p in asked if p.window)
    status, body = await call(client, "POST", f"{ALL}/{batch['id']}/cancel")
    assert (status, body["error"]["param"]) == (400, "batch_id")
    assert "the batch is completed" in body["error"]["message"]
    _, file = await call(client, "GET", f"/v1/files/{done['output_file_id']}")
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
    settings = kit.edge.services.settings
    assert usage(settings).num_files == len(objects_of(settings)) == 3, "no segment is left"


@pytest.mark.parametrize(
    ("lines", "code", "number", "param"),
    [
        ([line("a"), "{"], "invalid_json_line", 2, None),
        ([line("a"), "", "[]"], "invalid_line", 3, None),
        ([line("a", url="/v1/embeddings")], "mismatched_endpoint", 1, "url"),
        ([line("a", method="GET")], "invalid_method", 1, "method"),
        ([line("")], "invalid_custom_id", 1, "custom_id"),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3, "custom_id"),
        ([line("a", body={"model": "tiny", "stream": True})], "unsupported_parameter", 1, "stream"),
        ([line("a"), line("b", body={"model": "other"})], "mismatched_model", 2, "model"),
        ([line("a", body=[])], "invalid_request", 1, "body"),
        ([line("a", body={"model": "none"})], "model_not_found", None, None),
        (["\n", " "], "empty_file", None, None),
        ([line("a", body={"model": "m" * 129})], "model_not_found", 1, "model"),
    ],
)
async def test_a_wrong_file_is_no_batch(
    kit: Kit, client: Client, lines: list[Any], code: str, number: int | None, param: str | None
) -> None:
    batch = await ended(client, (await begun(client, lines))["id"])
    assert (batch["status"], batch["failed_at"] is None) == ("failed", False)
    [error] = batch["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == (code, number, param), error
    assert kit.dispatcher.requests == []


async def test_a_file_of_empty_lines_is_not_read_to_its_end(kit: Kit, client: Client) -> None:
    batch = await ended(client, (await begun(client, ["\n" * (MAX_LINES + 1)]))["id"])
    assert batch["errors"]["data"][0]["code"] == "too_many_empty_lines"
    read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"\n" * 10_000

    check = InputCheck(pieces(), 100, CHATS)
    num_steps = 1
    while check.step():
        num_steps += 1
    assert num_steps == read == MAX_LINES // 10_000 + 1, "a step reads a piece"


async def test_heartbeats_do_not_wait_for_files(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, file_threads=1)
    kit.dispatcher.script = silent
    engine = make_engine(kit.edge.services.settings.registry_url)

    def beat_at() -> float:
        with reading(engine) as session:
            return session.scalars(select(Batch.heartbeat_at)).one() or 0.0

    async with client_of(kit) as client:
        batch = await begun(client, [line("a")])
        running = await kit.begun()
        is_over, threads = threading.Event(), kit.edge.batches._runner._parts.threads
        busy = asyncio.create_task(threads.write(is_over.wait))
        last_at = beat_at()
        await until(lambda: beat_at() > last_at)
        assert not busy.done()
        is_over.set()
        kit.speak("The game")(running)
        await ended(client, batch["id"])
    engine.dispose()


@pytest.mark.parametrize("state", ["validating", "finalizing"])
async def test_a_stop_does_not_wait_for_a_long_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Of a file that has no end, read or written."""
    kit = batch_kit(tmp_path)
    speak_back(kit)

    def pieces(*_: object) -> Iterator[bytes]:
        while True:
            yield b"x"

    name = "input_pieces" if state == "validating" else "segment_pieces"
    monkeypatch.setattr(BatchStore, name, pieces)
    engine = make_engine(kit.edge.services.settings.registry_url)
    async with client_of(kit) as client:
        batch = await begun(client, [line("a")])
        async with asyncio.timeout(5):
            while (await shown(client, batch["id"]))["status"] != state:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await until(lambda: kit.edge.batches._runner._running != {})
    with reading(engine) as session:
        assert session.execute(select(Batch.state, Batch.heartbeat_at)).one() == (state, None)
    engine.dispose()


async def test_long_errors_are_cut(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ApiError(MODEL_NOT_FOUND, "x" * 10_000)

    monkeypatch.setattr(batch_run, "find_model", refuse)
    batch = await ended(client, (await begun(client, [line("a")]))["id"])
    assert batch["errors"]["data"][0]["message"] == "x" * MAX_MESSAGE_CHARS


@pytest.mark.parametrize("has_time", [True, False])
async def test_what_a_stop_breaks_off_is_not_posted(tmp_path: Path, has_time: bool) -> None:
    """Lines that run may end; those that do not are made again, under the same id."""
    kit = batch_kit(tmp_path, batch_lines=2)
    kit.dispatcher.script = lambda running: running.say(kit.ids("The"))
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(5)])
        await until(lambda: len(kit.dispatcher.requests) == 2)
        [run] = kit.edge.batches._runner._running.values()
        closing = asyncio.create_task(kit.edge.batches.close(5.0 if has_time else 0.0))
        await until(lambda: run._lines.is_stopping)
        for running in kit.dispatcher.requests if has_time else ():
            running.say([kit.end_id])
            running.end("stop")
        await closing
        found = await shown(client, batch["id"])
        num_answered = 2 if has_time else 0
        assert (found["status"], found["request_counts"]["completed"]) == (
            "in_progress",
            num_answered,
        )
        assert [running.aborted for running in kit.dispatcher.requests] == [not has_time] * 2
        await until(lambda: len(kit.ledger.posted) + len(kit.ledger.voided) == 2)
        assert [posting.outcome for posting in kit.ledger.posted] == ["finished"] * num_answered


async def test_what_a_batch_is_made_of_is_checked(kit: Kit, client: Client) -> None:
    file = await send(client, jsonl([line("a")]))
    other = await send(client, b"x", purpose="evals")
    right = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
    for change, status, param in (
        ({"endpoint": "/v1/messages"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-1"}, 404, "id"),
        ({"input_file_id": other["id"]}, 400, "input_file_id"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after[seconds]",
        ),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata[...]"),
        ({"more": 1}, 400, "more"),
    ):
        given, body = await call(client, "POST", ALL, json={**right, **change})
        assert (given, body["error"]["param"]) == (status, param), body
    assert (await call(client, "POST", ALL, OTHER_KEY, json=right))[0] == 404


async def test_nobody_else_sees_it_and_lists_are_pages(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    ids = [(await begun(client, [line("a")]))["id"] for _ in range(3)]
    for method, path in (("GET", f"{ALL}/{ids[0]}"), ("POST", f"{ALL}/{ids[0]}/cancel")):
        status, body = await call(client, method, path, OTHER_KEY)
        assert (status, body["error"]["code"]) == (404, "not_found")
    assert (await call(client, "GET", ALL, OTHER_KEY))[1]["data"] == []
    _, page = await call(client, "GET", f"{ALL}?limit=2")
    assert ([b["id"] for b in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    _, page = await call(client, "GET", f"{ALL}?limit=2&after={ids[1]}")
    assert ([b["id"] for b in page["data"]], page["has_more"]) == (ids[:1], False)
    for query, param in (("limit=101", "limit"), ("after=x", "after"), ("order=asc", "order")):
        status, body = await call(client, "GET", f"{ALL}?{query}")
        assert (status, body["error"]["param"]) == (400, param)
    for batch_id in ids:
        await call(client, "POST", f"{ALL}/{batch_id}/cancel")
        await ended(client, batch_id)


async def test_a_key_bound_to_models_sees_batches_of_these_and_its_own(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path)
    bound = replace(
        key_record(PLAIN_KEY, "key_9", allowed_models=frozenset({"other"})), scopes=SCOPES
    )
    async with client_of(kit) as client:
        kit.use_keys(*file_keys()[:1], bound)
        speak_back(kit)
        batch_id = (await begun(client, [line("a")]))["id"]
        await ended(client, batch_id)
        for method, path in (("GET", f"{ALL}/{batch_id}"), ("POST", f"{ALL}/{batch_id}/cancel")):
            status, body = await call(client, method, path, PLAIN_KEY)
            assert (status, body["error"]["code"]) == (404, "not_found")
        assert (await call(client, "GET", ALL, PLAIN_KEY))[1]["data"] == []
        file = await send(client, jsonl([line("a")]), PLAIN_KEY)
        asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
        status, own = await call(client, "POST", ALL, PLAIN_KEY, json=asked)
        assert (await call(client, "GET", f"{ALL}/{own['id']}", PLAIN_KEY))[0] == status == 200
        done = await ended(client, own["id"])
        assert done["errors"]["data"][0]["code"] == "model_not_found"
        _, page = await call(client, "GET", ALL, PLAIN_KEY)
        assert [each["id"] for each in page["data"]] == [own["id"]]


async def test_who_makes_a_batch_may_read_its_file(kit: Kit, client: Client) -> None:
    file = await send(client, jsonl([line("a")]))
    asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
    status, body = await call(client, "POST", ALL, PLAIN_KEY, json=asked)
    assert (status, body["error"]["code"]) == (403, "permission_denied")
    assert "'files'" in body["error"]["message"]


async def test_responses_in_a_batch_are_not_stored(kit: Kit, client: Client) -> None:
    speak_back(kit)
    url = "/v1/responses"
    body = {"model": "tiny", "input": "Hello"}
    lines = [line("a", url=url, body=body), line("b", url=url, body={"model": "tiny"})]
    done = await ended(client, (await begun(client, lines, endpoint=url))["id"])
    answer = (await lines_of(client, done["output_file_id"]))["a"]["response"]["body"]
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "completed", False)
    assert (await call(client, "GET", f"{url}/{answer['id']}"))[0] == 404
    error = (await lines_of(client, done["error_file_id"]))["b"]["response"]["body"]["error"]
    assert error["param"] == "input"
    for field in ({"background": True}, {"previous_response_id": "resp_1"}, {"conversation": "c"}):
        wrong = [line("a", url=url, body={**body, **field})]
        done = await ended(client, (await begun(client, wrong, endpoint=url))["id"])
        assert done["errors"]["data"][0]["param"] == next(iter(field))


async def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, batch_lines=2)

    def some(running: Running) -> None:
        if len(kit.dispatcher.requests) <= 3:
            kit.speak("The game", one_by_one=False)(running)
        else:
            running.say(kit.ids("The"))

    kit.dispatcher.script = some
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(10)])
        await until(lambda: len(kit.dispatcher.requests) == 5)
        status, told = await call(client, "POST", f"{ALL}/{batch['id']}/cancel")
        assert (status, told["status"]) == (200, "cancelling")
        done = await ended(client, batch["id"])
        assert (done["status"], done["cancelled_at"] is None) == ("cancelled", False)
        output = await lines_of(client, done["output_file_id"])
        assert len(output) == done["request_counts"]["completed"] == 3
        assert [running.aborted for running in kit.dispatcher.requests[3:]] == [True, True]
        again = await call(client, "POST", f"{ALL}/{batch['id']}/cancel")
        assert again == (200, done), "it has ended"
        outcomes = Counter(posting.outcome for posting in kit.ledger.posted)
        assert outcomes == {"finished": 3, "disconnected": 2}, "what was broken off is billed"


async def test_lines_whose_time_is_up_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = batch_kit(tmp_path, batch_lines=2)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(5)])
        await until(lambda: len(kit.dispatcher.requests) == 2)
        kit.speak("The game")(kit.dispatcher.requests[0])
        await until(lambda: len(kit.dispatcher.requests) == 3)
        [run] = kit.edge.batches._runner._running.values()
        run.batch = run._lines._batch = replace(run.batch, expires_at=0.0)
        done = await ended(client, batch["id"])
        assert done["status"] == "expired"
        assert done["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
        errors = await lines_of(client, done["error_file_id"])
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert {each["response"] for each in errors.values()} == {None}


@pytest.mark.parametrize("has_expired", [False, True])
async def test_a_line_that_is_too_long_by_now_is_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_expired: bool
) -> None:
    """`max_body_bytes` was lowered after the file was checked."""
    kit = batch_kit(tmp_path, batch_lines=1)
    kit.dispatcher.script = silent
    monkeypatch.setattr(batch_run, "lines_of", lambda pieces, _: lines_of_file(pieces, 250))
    long = [{**line('b "\u00e9"'), "more": "x" * 300}, {"more": "x" * 300, **line("c")}]
    async with client_of(kit) as client:
        batch = await begun(client, [line("a"), *long])
        running = await kit.begun()
        if has_expired:
            [run] = kit.edge.batches._runner._running.values()
            run.batch = run._lines._batch = replace(run.batch, expires_at=0.0)
        kit.speak("The game")(running)
        done = await ended(client, batch["id"])
        assert done["status"] == ("expired" if has_expired else "completed")
        errors = await lines_of(client, done["error_file_id"])
        assert errors.keys() - {"a"} == {'b "\u00e9"', ""}
        code = "batch_expired" if has_expired else "invalid_json_line"
        assert {each["error"]["code"] for each in errors.values()} == {code}


async def test_refusals_that_pass_are_waited_for(kit: Kit, client: Client) -> None:
    speak_back(kit)
    kit.dispatcher.refusal = ApiError(QUEUE_FULL, "full", retry_after_s=0.01)
    batch = await begun(client, [line("a")])
    await until(lambda: kit.edge.batches._runner._running != {})
    await asyncio.sleep(0.1)
    kit.dispatcher.refusal = None
    done = await ended(client, batch["id"])
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_line_that_alone_exceeds_a_limit_is_answered(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path)
    mine, *others = file_keys()
    kit.use_keys(replace(mine, limits=Limits(tokens_per_minute=20)), *others)
    async with client_of(kit) as client:
        large = line("a")
        large["body"]["max_tokens"] = 100
        done = await ended(client, (await begun(client, [large]))["id"])
        assert done["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        error = (await lines_of(client, done["error_file_id"]))["a"]["response"]
        assert error["status_code"] == 429
        assert error["body"]["error"]["code"] == "rate_limit_exceeded"


async def test_a_budget_that_running_lines_hold_is_waited_for(tmp_path: Path) -> None:
    """It covers what one line may cost and what some do cost, and never two at a time."""
    kit = batch_kit(tmp_path, batch_lines=4)
    kit.dispatcher.script = kit.speak_slowly("The game")
    mine, *others = file_keys()
    kit.use_keys(replace(mine, limits=Limits(day_budget_nanos=700)), *others)
    lines = [line(f"id-{n}") for n in range(12)]
    for each in lines:
        each["body"]["max_tokens"] = 90
    async with client_of(kit) as client:
        done = await ended(client, (await begun(client, lines))["id"])
        cost = kit.ledger.posted[0].cost_nanos
        num_covered = sum(posting.outcome == "finished" for posting in kit.ledger.posted)
        assert 1 < num_covered == done["request_counts"]["completed"] < 12
        assert (num_covered + 1) * cost + 90 * PRICES.completion_nanos > 700, "all that it covers"
        errors = await lines_of(client, done["error_file_id"])
        codes = {each["response"]["body"]["error"]["code"] for each in errors.values()}
        assert codes == {"insufficient_quota"}


async def test_one_tenant_does_not_hold_all_that_run(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        first = [await begun(client, [line("a")]) for _ in range(4)]
        await kit.begun()
        speak_back(kit)
        other = await begun(client, [line("b")], OTHER_KEY)
        assert (await ended(client, other["id"], OTHER_KEY))["status"] == "completed"
        running = kit.edge.batches._runner._running.values()
        assert [run.batch.tenant_id for run in running].count("ten_1") == 1
        kit.speak("The game")(kit.dispatcher.requests[0])
        for batch in first:
            await ended(client, batch["id"])


async def test_a_revoked_key_cancels_its_batch(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, batch_lines=1)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(3)])
        running = await kit.begun()
        kit.use_keys(*file_keys()[1:])
        kit.speak("The game")(running)
        await until(lambda: not kit.edge.batches._runner._running)
        kit.use_keys(*file_keys())
        done = await ended(client, batch["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("cancelled", 1)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_key_that_is_not_read_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    kit = batch_kit(tmp_path, batch_lines=1, max_batches_running=int(has_begun))
    kit.dispatcher.script = silent
    engine = make_engine(kit.edge.services.settings.registry_url)
    with writing(engine, "test") as session:
        owner = tenants.create_tenant(session, "acme", now_at=1.0).id
        own_id = api_keys.create_key(session, owner, "key", now_at=1.0)[0].id
    engine.dispose()
    mine = replace(file_keys()[0], id=own_id, tenant_id=owner)
    kit.use_keys(mine)
    runner = kit.edge.batches._runner
    async with client_of(kit) as client:
        batch = await begun(client, [line("a"), line("b")])
        first = await kit.begun() if has_begun else None
        kit.use_keys()
        speak_back(kit)
        if first is not None:
            kit.speak("The game")(first)
        runner._max_running, unread = 1, asyncio.Event()
        monkeypatch.setattr(batch_run.log, "warning", lambda *_: unread.set())
        async with asyncio.timeout(5):
            await unread.wait()
        kit.use_keys(mine)
        done = await ended(client, batch["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 2)


async def test_zero_retention_cancels_a_batch(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, batch_lines=1)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(3)])
        running = await kit.begun()
        mine, *others = file_keys()
        kit.use_keys(replace(mine, response_retention_days=0), *others)
        kit.speak("The game")(running)
        await until(lambda: not kit.edge.batches._runner._running)
        kit.use_keys(mine, *others)
        done = await ended(client, batch["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("cancelled", 1)


async def test_a_batch_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed at its second commit: what it answered since is answered again, under
    the same ids, by whoever claims the batch next."""
    monkeypatch.setattr(batch_run, "SEGMENT_LINES", 3)
    real, num = BatchStore.commit, 0

    def killed(store: BatchStore, *about: Any) -> None:
        nonlocal num
        num += 1
        if num == 2:
            raise RuntimeError("kill -9")
        real(store, *about)

    monkeypatch.setattr(BatchStore, "commit", killed)
    kit = batch_kit(tmp_path, batch_lines=1)
    speak_back(kit)
    postings: list[str] = []

    async def post(posting: Any) -> None:
        """As the real ledger: an id is posted once."""
        postings.append(posting.request_id)

    monkeypatch.setattr(kit.ledger, "post", post)
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(9)])
        done = await ended(client, batch["id"])
        assert done["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
        output = await lines_of(client, done["output_file_id"])
        assert output.keys() == {f"id-{n}" for n in range(9)}
        assert set(postings) == {f"chatcmpl-{line_id(batch['id'], n)}" for n in range(9)}
        assert 9 < len(postings) <= 13, "some were answered twice, under the same id"
        assert usage(kit.edge.services.settings).num_files == 2
        kit.ledger.opened.clear()


async def test_who_was_silent_changes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "BEAT_S", 60.0)
    kit = batch_kit(tmp_path, batch_lines=1)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        batch = await begun(client, [line("a"), line("b")])
        first = await kit.begun()
        engine = make_engine(kit.edge.services.settings.registry_url)
        with writing(engine, "test") as session:
            session.execute(update(Batch).values(token="another", heartbeat_at=9e12))
        engine.dispose()
        kit.speak("The game")(first)
        await kit.begun()
        kit.speak("The game")(kit.dispatcher.requests[-1])
        await until(lambda: not kit.edge.batches._runner._running)
        found = await shown(client, batch["id"])
        assert (found["status"], found["request_counts"]["completed"]) == ("in_progress", 0)
        assert len(objects_of(kit.edge.services.settings)) == 1, "its segment is gone again"


async def test_openais_client(kit: Kit, client: Client) -> None:
    speak_back(kit)
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1", max_retries=0) as sdk:
        file = await sdk.files.create(file=jsonl([line("a")]), purpose="batch")
        batch = await sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await ended(client, batch.id)
        batch = await sdk.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        text = (await sdk.files.content(batch.output_file_id)).text
        assert json.loads(text)["custom_id"] == "a"
        assert [each.id async for each in sdk.batches.list()] == [batch.id]


async def test_a_file_stays_until_its_batch_has_ended(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    batch = await begun(client, [line("a")])
    path = f"/v1/files/{batch['input_file_id']}"
    status, body = await call(client, "DELETE", path)
    assert (status, body["error"]["code"]) == (409, "conflict")
    await call(client, "POST", f"{ALL}/{batch['id']}/cancel")
    await ended(client, batch["id"])
    assert (await call(client, "DELETE", path))[0] == 200


async def test_a_file_that_is_lost_fails_its_batch(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, max_batches_running=0)
    async with client_of(kit) as client:
        batch = await begun(client, [line("a")])
        for path in objects_of(kit.edge.services.settings):
            path.unlink()
        kit.edge.batches._runner._max_running = 1
        done = await ended(client, batch["id"])
        assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "invalid_file")


async def test_a_tenant_has_so_many_batches(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, max_batches=1, max_batches_running=0)
    async with client_of(kit) as client:
        batch = await begun(client, [line("a")])
        body = {
            "input_file_id": batch["input_file_id"],
            "endpoint": CHATS,
            "completion_window": "24h",
        }
        status, answer = await call(client, "POST", ALL, json=body)
        assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
        assert batches_service.WINDOW_S == 86_400


@pytest.mark.parametrize("quota", [{"files_quota_bytes": 1000}, {"max_files": 2}])
async def test_no_batch_is_begun_where_outputs_have_no_room(
    tmp_path: Path, quota: dict[str, int]
) -> None:
    kit = batch_kit(tmp_path, **quota)
    speak_back(kit)
    async with client_of(kit) as client:
        file = await send(client, jsonl([line("a" * 64), line("b" * 64)]))
        asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
        status, batch = await call(client, "POST", ALL, json=asked)
        assert status == 200
        done = await ended(client, batch["id"])
        found = usage(kit.edge.services.settings)
        assert found.num_files == 2, "what was answered is kept"
        assert found.num_bytes > 1000
        status, body = await call(client, "POST", ALL, json=asked)
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        assert "delete some files" in body["error"]["message"]
        await call(client, "DELETE", f"/v1/files/{done['output_file_id']}")
        assert (await call(client, "POST", ALL, json=asked))[0] == 200
