"""Stored responses over HTTP: continued, fetched, listed, deleted, and seen by nobody else."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from gateway.dialects.responses_wire import AskedResponse
from gateway.errors import WorkerLost
from gateway.state.response_store import ResponseStore
from registry.session import make_engine, reading, writing
from registry.state.responses import StoredResponse, num_responses
from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.dialects.test_responses import (
    ASK,
    TOOL,
    URL,
    ask,
    check_told_to_the_end,
    stream_of,
)
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record, make_kit, silent
from tests.migrated import migrated

OTHER_KEY = "test-key-of-another-tenant"
BOUND_KEY = "test-key-bound-to-other-models"


async def call(client: Client, method: str, path: str, key: str = KEY) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with client.session.request(method, client.base + path, headers=headers) as answer:
        return answer.status, await answer.json()


def prompt_of(kit: Kit) -> str:
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    text: str = kit.tokenizer.decode(ids, skip_special_tokens=False)
    return text


def objects_path(kit: Kit) -> Path:
    settings = kit.edge.services.settings
    return settings.objects_path(settings.data_path)


def rows(kit: Kit) -> int:
    engine = make_engine(kit.edge.services.settings.registry_url)
    with reading(engine) as session:
        num = num_responses(session, "ten_1")
    engine.dispose()
    return num


async def test_an_answer_is_stored_and_continued(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    status, first = await ask(client, instructions="Be brief.", metadata={"a": "b"})
    assert (status, first["store"], first["previous_response_id"]) == (200, True, None)
    assert await call(client, "GET", f"{URL}/{first['id']}") == (200, first)
    kit.dispatcher.script = kit.speak("is afoot")
    _, second = await ask(client, input="Go on", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(kit) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nThe game<|im_end|>\n"
        "<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    ), "without the instructions of the first"
    await ask(client, input="More", previous_response_id=second["id"], instructions="Anew.")
    assert prompt_of(kit).startswith("<|im_start|>system\nAnew.<|im_end|>\n<|im_start|>user\nHello")
    assert "is afoot<|im_end|>\n<|im_start|>user\nMore" in prompt_of(kit)
    assert rows(kit) == 3


async def test_a_stream_is_stored_before_its_last_event(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    add = ResponseStore.add

    def watched(store: ResponseStore, *about: Any) -> Any:
        stored = add(store, *about)
        seen.append(len(kit.ledger.posted))
        return stored

    monkeypatch.setattr(ResponseStore, "add", watched)
    kit.dispatcher.script = kit.speak("The game")
    events = await stream_of(client)
    check_told_to_the_end(events)
    last = events[-1]
    assert (last["type"], last["response"]["store"]) == ("response.completed", True)
    assert seen == [1], "after its posting"
    told = last["response"]
    assert await call(client, "GET", f"{URL}/{told['id']}") == (200, told)
    again = await stream_of(client, previous_response_id=told["id"], input="Go on")
    assert again[0]["response"]["previous_response_id"] == told["id"]
    assert "assistant\nThe game<|im_end|>" in prompt_of(kit)


async def test_a_loop_of_tools_goes_on_with_outputs_alone(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", HERMES, max_context=1024)
    migrated(kit.edge.services.settings.registry_url)
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\n{CALL}")
    async with client_of(kit) as client:
        _, first = await ask(client, tools=[TOOL])
        output = {
            "type": "function_call_output",
            "call_id": first["output"][-1]["call_id"],
            "output": "42",
        }
        kit.dispatcher.script = kit.speak("It is 42.")
        status, _ = await ask(
            client, tools=[TOOL], input=[output], previous_response_id=first["id"]
        )
        assert status == 200
    assert '<tool_call>{"name": "f", "arguments": {"a": "x y"}}</tool_call>' in prompt_of(kit)
    assert "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n" in prompt_of(kit)


async def test_without_store_nothing_is_kept(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a stateless request reads or writes nothing")

    for name in ("add", "claim", "earlier", "read", "withdraw"):
        monkeypatch.setattr(ResponseStore, name, fail)
    status, body = await ask(client, store=False)
    assert (status, body["store"]) == (200, False)
    assert (await stream_of(client, store=False))[-1]["response"]["store"] is False
    async with client.post(URL, {**ASK, "store": False}, idempotency_key="k") as answer:
        assert answer.status == 200
    assert (await client.chat())[0] == 200
    monkeypatch.undo()
    assert (await call(client, "GET", f"{URL}/{body['id']}"))[0] == 404
    assert rows(kit) == 0


async def test_a_continued_answer_need_not_be_stored(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    _, first = await ask(client)
    _, second = await ask(client, store=False, previous_response_id=first["id"])
    assert "The game" in prompt_of(kit)
    assert (await call(client, "GET", f"{URL}/{second['id']}"))[0] == 404


async def test_another_tenants_response_is_a_missing_one(kit: Kit, client: Client) -> None:
    kit.use_keys(
        key_record(),
        key_record(OTHER_KEY, "key_2", tenant_id="ten_2"),
        key_record(BOUND_KEY, "key_3", allowed_models=frozenset({"other"})),
    )
    _, mine = await ask(client)
    answers = set()
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
    ):
        for key, response_id in (
            (OTHER_KEY, mine["id"]),
            (BOUND_KEY, mine["id"]),
            (KEY, "resp_" + "0" * 32),
            (KEY, "x" * 500),
            (KEY, "a%00b"),
            (KEY, "%ed%b2%80"),
        ):
            status, body = await call(client, method, f"{URL}/{response_id}{path}", key)
            error = body["error"]
            begin, _, end = error["message"].partition("'")
            answers.add((status, error["code"], begin, end.rpartition("'")[2]))
    assert answers == {(404, "not_found", "no response has the id ", ": it may have expired")}
    told = set()
    for key, response_id in ((OTHER_KEY, mine["id"]), (KEY, "resp_" + "0" * 32)):
        request = {**ASK, "previous_response_id": response_id}
        async with client.post(URL, request, key) as answer:
            error = (await answer.json())["error"]
            told.add((answer.status, error["code"], error["param"]))
    assert told == {(404, "previous_response_not_found", "previous_response_id")}
    assert (await call(client, "GET", f"{URL}/{mine['id']}"))[0] == 200


async def test_what_comes_before_is_put_together_in_a_thread(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    after, names = AskedResponse.after, list[str]()

    def watched(asked: AskedResponse, *about: Any) -> AskedResponse:
        names.append(threading.current_thread().name)
        return after(asked, *about)

    monkeypatch.setattr(AskedResponse, "after", watched)
    _, first = await ask(client)
    status, _ = await ask(client, previous_response_id=first["id"])
    assert status == 200
    assert [name.partition("_")[0] for name in names] == ["state-read"]


async def test_a_deleted_response_is_gone_for_what_would_follow(kit: Kit, client: Client) -> None:
    _, first = await ask(client)
    _, second = await ask(client, previous_response_id=first["id"])
    status, body = await call(client, "DELETE", f"{URL}/{first['id']}")
    assert (status, body) == (200, {"id": first["id"], "object": "response", "deleted": True})
    assert (await call(client, "DELETE", f"{URL}/{first['id']}"))[0] == 404
    assert (await call(client, "GET", f"{URL}/{first['id']}"))[0] == 404
    assert (await call(client, "GET", f"{URL}/{second['id']}"))[0] == 200
    for response_id in (first["id"], second["id"]):
        status, body = await ask(client, previous_response_id=response_id)
        assert (status, body["error"]["code"]) == (404, "previous_response_not_found")
    assert len([path for path in objects_path(kit).glob("*/*/*/*") if path.is_file()]) == 1


async def test_a_folder_that_is_away_is_no_missing_response(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    _, told = await ask(client)
    root = objects_path(kit)
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    root.mkdir()
    for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        status, body = await call(client, method, f"{URL}/{told['id']}{path}")
        assert (status, body["error"]["code"]) == (503, "service_unavailable"), path
    status, body = await ask(client, previous_response_id=told["id"])
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    status, unstored = await ask(client)
    assert (status, unstored["store"]) == (200, False), "the answer is not lost"
    assert (await ask(client, background=True))[0] == 503
    root.rmdir()
    elsewhere.rename(root)
    assert await call(client, "GET", f"{URL}/{told['id']}") == (200, told)
    assert rows(kit) == 1


async def test_input_items_come_in_pages(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("Yes")
    items = [{"role": "user", "content": text} for text in "abc"]
    _, first = await ask(client, input=items)
    _, second = await ask(client, input="d", previous_response_id=first["id"])
    path = f"{URL}/{second['id']}/input_items"
    _, page = await call(client, "GET", f"{path}?order=asc")
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["a", "b", "c", "Yes", "d"]
    assert page["data"][0] == {
        "id": page["first_id"],
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}],
    }
    assert (page["object"], page["has_more"]) == ("list", False)
    assert len({item["id"] for item in page["data"]}) == 5
    found, after = [], ""
    for _ in range(3):
        _, page = await call(client, "GET", f"{path}?limit=2{after}")
        found += [item["content"][0]["text"] for item in page["data"]]
        after = f"&after={page['last_id']}"
    assert found == texts[::-1]
    assert page["has_more"] is False
    for wrong in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody", "before=x"):
        status, body = await call(client, "GET", f"{path}?{wrong}")
        assert (status, body["error"]["param"]) == (400, wrong.partition("=")[0])


async def test_pages_end_where_items_come_with_one_id(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("Yes")
    items = [{"role": "user", "id": "same", "content": text} for text in "abc"]
    _, first = await ask(client, input=items)
    _, second = await ask(client, input=items, previous_response_id=first["id"])
    path = f"{URL}/{second['id']}/input_items?limit=1&order=asc"
    found, after = [], ""
    for _ in range(7):
        _, page = await call(client, "GET", path + after)
        found += [item["id"] for item in page["data"]]
        after = f"&after={page['last_id']}"
    assert page["has_more"] is False
    assert len(set(found)) == 7


def days(kit: Kit, own: int | None) -> None:
    kit.use_keys(replace(key_record(), response_retention_days=own))


async def test_a_tenant_without_retention(kit: Kit, client: Client) -> None:
    _, before = await ask(client)
    days(kit, 0)
    for fields, told in (({}, None), ({"store": True}, "store")):
        async with client.post(URL, {**ASK, **fields}) as answer:
            assert answer.status == 200
            assert (await answer.json())["store"] is False
            assert answer.headers.get("x-polyhost-ignored") == told
    for param, value in (("previous_response_id", before["id"]), ("background", True)):
        status, body = await ask(client, **{param: value})
        assert (status, body["error"]["param"]) == (400, param)
        assert "no responses are stored" in body["error"]["message"]
    assert (await call(client, "GET", f"{URL}/{before['id']}"))[0] == 404, "hidden at once"
    days(kit, None)
    assert (await call(client, "GET", f"{URL}/{before['id']}"))[0] == 200


async def test_what_is_past_its_retention_is_missing(kit: Kit, client: Client) -> None:
    _, old = await ask(client)
    engine = make_engine(kit.edge.services.settings.registry_url)
    with writing(engine, "test") as session:
        session.execute(update(StoredResponse).values(created_at=StoredResponse.created_at - 8e5))
    engine.dispose()
    assert (await call(client, "GET", f"{URL}/{old['id']}"))[0] == 200
    days(kit, 9)
    assert (await call(client, "GET", f"{URL}/{old['id']}"))[0] == 404
    days(kit, 3650)
    assert (await call(client, "GET", f"{URL}/{old['id']}"))[0] == 200


async def test_over_its_quota_a_tenant_still_gets_answers(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", max_stored_responses=1)
    migrated(kit.edge.services.settings.registry_url)
    async with client_of(kit) as client:
        _, first = await ask(client)
        status, second = await ask(client)
        assert (first["store"], status, second["store"]) == (True, 200, False)
        assert (await stream_of(client))[-1]["response"]["store"] is False
        status, body = await ask(client, background=True)
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        await call(client, "DELETE", f"{URL}/{first['id']}")
        assert (await ask(client))[1]["store"] is True
    metrics = kit.edge.metrics.responses_stored
    assert metrics.labels("quota")._value.get() == 3


@pytest.mark.parametrize("error", [OperationalError("x", None, Exception()), OSError("full")])
async def test_a_store_that_fails_does_not_lose_the_answer(
    kit: Kit,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    kit.dispatcher.script = kit.speak("The game")
    monkeypatch.setattr(ResponseStore, "add", fail)
    status, body = await ask(client)
    assert (status, body["store"]) == (200, False)
    assert body["output"][0]["content"][0]["text"] == "The game"
    events = await stream_of(client)
    assert check_told_to_the_end(events) == events[-1]["response"]["output"]
    assert events[-1]["response"]["store"] is False
    assert "could not be stored" in caplog.text
    status, body = await ask(client, background=True)
    assert (status, body["error"]["code"]) == (503, "service_unavailable")


async def test_an_answer_that_failed_is_not_stored(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    last = (await stream_of(client))[-1]
    assert (last["type"], last["response"]["store"]) == ("response.failed", False)
    assert rows(kit) == 0


async def test_a_key_makes_a_request_once(kit: Kit, client: Client) -> None:
    async def send(key: str, **fields: Any) -> tuple[int, Any, str | None]:
        async with client.post(URL, {**ASK, **fields}, idempotency_key=key) as answer:
            text = await answer.text()
            body = text if fields.get("stream") else json.loads(text)
            return answer.status, body, answer.headers.get("idempotent-replayed")

    kit.dispatcher.script = kit.speak("The game")
    _, first, is_again = await send("k1")
    assert is_again is None
    assert await send("k1") == (200, first, "true")
    assert len(kit.dispatcher.requests) == 1
    status, body, _ = await send("k1", metadata={"a": "b"})
    assert (status, body["error"]["code"]) == (409, "idempotency_conflict")
    assert (await send("k2"))[1]["id"] != first["id"]
    assert (await send("x" * 256))[0] == 400

    _, stream, _ = await send("k3", stream=True)
    status, again, is_again = await send("k3", stream=True)
    assert (status, is_again) == (200, "true")
    lasts = [text.strip().rpartition("\ndata: ")[2] for text in (stream, again)]
    one, two = (json.loads(last)["response"] for last in lasts)
    assert one == two

    await call(client, "DELETE", f"{URL}/{first['id']}")
    status, body, _ = await send("k1")
    assert (status, body["error"]["code"]) == (409, "idempotency_conflict")


async def test_a_key_holds_where_what_its_request_followed_is_gone(
    kit: Kit, client: Client
) -> None:
    _, first = await ask(client)
    body = {**ASK, "previous_response_id": first["id"]}
    async with client.post(URL, body, idempotency_key="k") as answer:
        told = await answer.json()
    await call(client, "DELETE", f"{URL}/{first['id']}")
    async with client.post(URL, body, idempotency_key="k") as answer:
        assert (answer.status, await answer.json()) == (200, told)
    async with client.post(URL, body, idempotency_key="k2") as answer:
        assert answer.status == 404
    async with client.post(URL, ASK, idempotency_key="k2") as answer:
        assert answer.status == 200, "a request that was refused leaves no key"


async def test_a_replayed_stream_is_one(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    told = []
    for _ in range(2):
        async with client.post(URL, {**ASK, "stream": True}, idempotency_key="k") as answer:
            blocks = (await answer.text()).removesuffix("\n\n").split("\n\n")
        events = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        told.append(check_told_to_the_end(events))
    assert told[0] == told[1]


async def test_a_request_that_failed_may_be_sent_again(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    async with client.post(URL, ASK, idempotency_key="k") as answer:
        assert answer.status == 503
    kit.dispatcher.script = kit.speak("The game")
    async with client.post(URL, ASK, idempotency_key="k") as answer:
        assert answer.status == 200
    async with client.post(URL, {**ASK, "model": "nobody"}, idempotency_key="k2") as answer:
        assert answer.status == 404
    async with client.post(URL, ASK, idempotency_key="k2") as answer:
        assert answer.status == 200


async def test_while_the_first_runs_the_second_is_told_so(kit: Kit, client: Client) -> None:
    async def send() -> dict[str, Any]:
        async with client.post(URL, ASK, idempotency_key="k") as answer:
            body: dict[str, Any] = await answer.json()
            return body

    kit.dispatcher.script = silent
    first = asyncio.create_task(send())
    running = await kit.begun()
    async with client.post(URL, ASK, idempotency_key="k") as second:
        body = await second.json()
        assert (second.status, body["error"]["code"]) == (409, "idempotency_in_progress")
        assert second.headers["retry-after"] == "1"
    kit.speak("The game")(running)
    told = await first
    assert told["store"] is True
    assert await send() == told
    assert len(kit.dispatcher.requests) == 1


async def test_two_gateway_processes_share_responses(tmp_path: Path) -> None:
    """Two applications over one data folder."""
    one = make_kit(tmp_path / "tiny")
    migrated(one.edge.services.settings.registry_url)
    two = make_kit(tmp_path / "tiny")
    one.dispatcher.script = one.speak("The game")
    async with client_of(one) as first, client_of(two) as second:
        _, told = await ask(first)
        assert await call(second, "GET", f"{URL}/{told['id']}") == (200, told)
        await ask(second, previous_response_id=told["id"])
        assert "The game" in prompt_of(two)
        assert (await call(second, "DELETE", f"{URL}/{told['id']}"))[0] == 200
        assert (await call(first, "GET", f"{URL}/{told['id']}"))[0] == 404


async def test_openais_own_client(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("Yes.")
    async with openai.AsyncOpenAI(
        api_key=KEY, base_url=f"{client.base}/v1", max_retries=0, _strict_response_validation=True
    ) as sdk:
        first = await sdk.responses.create(model="tiny", input="Hi")
        async with sdk.responses.stream(
            model="tiny", input="And?", previous_response_id=first.id
        ) as stream:
            second = await stream.get_final_response()
        assert second.previous_response_id == first.id
        assert (await sdk.responses.retrieve(first.id)).output_text == "Yes."
        pages = sdk.responses.input_items.list(second.id, limit=2, order="asc")
        roles = [item.role async for item in pages]  # type: ignore[union-attr]
        assert roles == ["user", "assistant", "user"]
        await sdk.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.create(model="tiny", input="Hi", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError, match="only background"):
            await sdk.responses.cancel(second.id)
