"""Batches over HTTP: made of a file, answered line by line, cancelled, expired, resumed."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import update

from gateway.batches import batch_run, batches_service
from gateway.batches.batch_output import line_id
from gateway.batches.batch_store import BatchStore
from gateway.errors import QUEUE_FULL, ApiError
from registry.session import make_engine, writing
from registry.state.batches import Batch
from tests.gateway.batches.conftest import batch_kit
from tests.gateway.batches.lines_kit import (
    ALL,
    CHATS,
    begun,
    ended,
    jsonl,
    line,
    lines_of,
    posted_once,
    shown,
    speak_back,
)
from tests.gateway.edge_kit import KEY, Client, Kit, Running, client_of, key_record, silent, until
from tests.gateway.files.file_kit import (
    OTHER_KEY,
    PLAIN_KEY,
    SCOPES,
    call,
    file_keys,
    objects_of,
    send,
    usage,
)
from tests.gateway.http.test_openapi_answers import check, document


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


async def test_refusals_that_pass_are_waited_for(kit: Kit, client: Client) -> None:
    speak_back(kit)
    kit.dispatcher.refusal = ApiError(QUEUE_FULL, "full", retry_after_s=0.01)
    batch = await begun(client, [line("a")])
    await until(lambda: kit.edge.batches._runner._running != {})
    await asyncio.sleep(0.1)
    kit.dispatcher.refusal = None
    done = await ended(client, batch["id"])
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


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
