"""Conversations over HTTP: kept, extended by responses, seen by nobody else."""

import asyncio
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import openai
import pytest

from gateway.errors import WorkerLost
from gateway.state import background
from registry.accounts.quotas import Limits
from tests.gateway.dialects.test_responses import ASK, URL, ask, stream_of
from tests.gateway.edge_kit import KEY, Client, Kit, key_record, silent
from tests.gateway.sealing_kit import seal_of
from tests.gateway.state.test_background import ended
from tests.gateway.state.test_responses import OTHER_KEY, call, days, prompt_of, rows

ALL = "/v1/conversations"
THIRD_KEY = "test-key-for-usage-alone"
USER = {"type": "message", "role": "user", "content": "Hi"}


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.02)
    monkeypatch.setattr(background, "FINISH_PAUSES_S", (0.01, 0.01))


async def post(client: Client, path: str, body: Any, key: str = KEY) -> tuple[int, Any]:
    async with client.post(path, body, key) as answer:
        return answer.status, await answer.json()


async def created(client: Client, *items: Any, **fields: Any) -> str:
    status, body = await post(client, ALL, {"items": list(items), **fields})
    assert (status, body["object"]) == (200, "conversation"), body
    return str(body["id"])


async def texts(client: Client, conversation_id: str) -> list[str]:
    status, page = await call(client, "GET", f"{ALL}/{conversation_id}/items?order=asc&limit=100")
    assert status == 200, page
    return [item["content"][0]["text"] for item in page["data"]]


async def test_a_conversation_is_kept(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER, metadata={"a": "b"})
    path = f"{ALL}/{conversation_id}"
    status, body = await call(client, "GET", path)
    assert (status, body["id"], body["metadata"]) == (200, conversation_id, {"a": "b"})
    status, body = await post(client, path, {"metadata": {"c": "d"}})
    assert (status, body["metadata"]) == (200, {"c": "d"})
    more = [{**USER, "content": "b"}, {**USER, "content": "c"}]
    status, added = await post(client, f"{path}/items", {"items": more})
    assert (status, added["object"], len(added["data"])) == (200, "list", 2)
    assert await texts(client, conversation_id) == ["Hi", "b", "c"]
    item = added["data"][0]
    assert await call(client, "GET", f"{path}/items/{item['id']}") == (200, item)
    status, body = await call(client, "DELETE", f"{path}/items/{item['id']}")
    assert (status, body["id"]) == (200, conversation_id)
    assert await texts(client, conversation_id) == ["Hi", "c"]
    assert (await call(client, "GET", f"{path}/items/{item['id']}"))[0] == 404
    status, body = await call(client, "DELETE", path)
    assert body == {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    assert (await call(client, "GET", path))[0] == 404


async def test_responses_read_and_extend_it(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER)
    kit.dispatcher.script = kit.speak("one")
    status, first = await ask(client, conversation=conversation_id, input="b")
    assert (status, first["conversation"]) == (200, {"id": conversation_id})
    assert prompt_of(kit) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    kit.dispatcher.script = kit.speak("two")
    events = await stream_of(client, conversation={"id": conversation_id}, input="c")
    assert events[-1]["response"]["store"] is True
    assert "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nc<|im_end|>" in prompt_of(kit)
    assert await texts(client, conversation_id) == ["Hi", "b", "one", "c", "two"]
    assert rows(kit) == 3
    status, body = await ask(client, previous_response_id=first["id"])
    assert (status, body["error"]["code"]) == (404, "previous_response_not_found")
    assert conversation_id in body["error"]["message"]


async def test_a_background_response_extends_it(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER)
    kit.dispatcher.script = silent
    _, told = await ask(client, conversation=conversation_id, input="b", background=True)
    running = await kit.begun()
    assert await texts(client, conversation_id) == ["Hi"]
    kit.speak("one")(running)
    await ended(client, told["id"], "completed")
    assert await texts(client, conversation_id) == ["Hi", "b", "one"]


async def test_what_fails_adds_nothing(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    conversation_id = await created(client, USER)
    kit.dispatcher.script = script
    assert (await ask(client, conversation=conversation_id))[0] == 503
    await stream_of(client, conversation=conversation_id)
    assert await texts(client, conversation_id) == ["Hi"]


@pytest.mark.parametrize("is_background", [False, True])
async def test_one_that_is_deleted_meanwhile_takes_no_answer(
    kit: Kit, client: Client, is_background: bool
) -> None:
    conversation_id = await created(client, USER)
    kit.dispatcher.script = silent
    fields = {"conversation": conversation_id, "background": is_background}
    asking = asyncio.create_task(ask(client, **fields))
    running = await kit.begun()
    await call(client, "DELETE", f"{ALL}/{conversation_id}")
    kit.speak("one")(running)
    status, body = await asking
    assert status == 200
    if is_background:
        body = await ended(client, body["id"], "failed")
        assert "its conversation" in body["error"]["message"]
    else:
        assert body["store"] is False, "the answer is not lost"


async def test_one_that_is_damaged_meanwhile_takes_no_answer(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER)
    kit.dispatcher.script = silent
    asking = asyncio.create_task(ask(client, conversation=conversation_id))
    running = await kit.begun()
    settings = kit.edge.services.settings
    root = settings.objects_path(settings.data_path)
    [path] = [p for p in root.glob("*/*/*/*") if p.is_file()]
    path.write_bytes(b"[]")
    kit.speak("one")(running)
    status, body = await asking
    assert (status, body["store"]) == (200, False), "the answer is not lost"


async def test_answers_at_a_time_all_come_in(kit: Kit, client: Client) -> None:
    conversation_id = await created(client)
    kit.dispatcher.script = kit.speak("one")
    answers = await asyncio.gather(
        *(ask(client, conversation=conversation_id, input=f"q{n}") for n in range(5))
    )
    assert {body["store"] for _, body in answers} == {True}
    found = await texts(client, conversation_id)
    assert sorted(found) == sorted([*(f"q{n}" for n in range(5)), *["one"] * 5])
    for number in range(5):
        assert found[found.index(f"q{number}") + 1] == "one", "a turn stays together"


async def test_another_tenants_is_a_missing_one(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER)
    kit.use_keys(key_record(), key_record(OTHER_KEY, "key_2", tenant_id="ten_2"))
    told = set()
    for key, name in ((OTHER_KEY, conversation_id), (KEY, "conv_" + "0" * 32)):
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/items"),
            ("GET", "/items/x"),
            ("DELETE", "/items/x"),
        ):
            status, body = await call(client, method, f"{ALL}/{name}{path}", key)
            told.add((status, body["error"]["code"], body["error"]["message"]))
        for path, sent in (("", {"metadata": {}}), ("/items", {"items": [USER]})):
            status, body = await post(client, f"{ALL}/{name}{path}", sent, key)
            told.add((status, body["error"]["code"], body["error"]["message"]))
        status, body = await post(client, URL, {**ASK, "conversation": name}, key)
        assert (status, body["error"]["param"]) == (404, "conversation")
    assert len(told) == 1
    assert {status for status, *_ in told} == {404}
    assert await texts(client, conversation_id) == ["Hi"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"type": "message", "role": "user"}]}, "items[0].content"),
        ("", {"items": [{"type": "image_call"}]}, "items[0].type"),
        ("", {"items": [USER] * 21}, "items"),
        ("", {"odd": 1}, "odd"),
        ("", {"metadata": {"a": 1}}, "metadata[...]"),
        ("", {"metadata": {"a": "b" * 513}}, "metadata.a"),
        ("/ID", {"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ("", {"items": [USER, {**USER, "id": "a/../b"}]}, "items[1].id"),
        ("/ID/items", {"items": [{**USER, "id": "a" * 129}]}, "items[0].id"),
        ("/ID", {}, "metadata"),
        ("/ID/items", {"items": []}, "items"),
        ("/ID/items", {}, "items"),
    ],
)
async def test_what_is_wrong_names_the_field(
    kit: Kit, client: Client, path: str, body: Any, param: str
) -> None:
    conversation_id = await created(client)
    status, told = await post(client, ALL + path.replace("ID", conversation_id), body)
    assert (status, told["error"]["param"]) == (400, param)


async def test_items_with_odd_ids_are_found(kit: Kit, client: Client) -> None:
    odd = ["a/b", "/", "a b?c=d#e%2F", "日本", "msg_1/"]
    conversation_id = await created(client, *({**USER, "id": item_id} for item_id in odd))
    for item_id in odd:
        path = f"{ALL}/{conversation_id}/items/{quote(item_id, safe='')}"
        status, item = await call(client, "GET", path)
        assert (status, item.get("id")) == (200, item_id)
        assert (await call(client, "DELETE", path))[0] == 200
    kit.dispatcher.script = kit.speak("one")
    asked = [{**USER, "id": item_id} for item_id in ("..", "x" * 500, "kept")]
    await ask(client, conversation=conversation_id, input=asked)
    _, page = await call(client, "GET", f"{ALL}/{conversation_id}/items?order=asc")
    ids = [item["id"] for item in page["data"]]
    assert [item_id[:4] for item_id in ids] == ["msg_", "msg_", "kept", "msg_"]
    for item_id in ids:
        path = f"{ALL}/{conversation_id}/items/{quote(item_id, safe='')}"
        assert (await call(client, "GET", path))[1]["id"] == item_id


async def test_a_key_for_stored_state_asks_no_models(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("one")
    _, told = await ask(client)
    stored = replace(key_record(OTHER_KEY, "key_2"), scopes=frozenset({"responses"}))
    other = replace(key_record(THIRD_KEY, "key_3"), scopes=frozenset({"usage"}))
    kit.use_keys(key_record(), stored, other)
    status, made = await post(client, ALL, {"items": [USER]}, OTHER_KEY)
    assert status == 200
    paths = [f"{URL}/{told['id']}", f"{URL}/{told['id']}/input_items", f"{ALL}/{made['id']}/items"]
    for path in paths:
        assert (await call(client, "GET", path, OTHER_KEY))[0] == 200
        status, body = await call(client, "GET", path, THIRD_KEY)
        assert (status, body["error"]["code"]) == (403, "permission_denied")
    status, body = await post(client, URL, {**ASK, "previous_response_id": told["id"]}, OTHER_KEY)
    assert (status, body["error"]["code"]) == (403, "permission_denied")
    assert (await call(client, "GET", "/v1/models", OTHER_KEY))[0] == 403
    assert (await call(client, "DELETE", paths[0], OTHER_KEY))[0] == 200
    assert len(kit.dispatcher.requests) == 1


async def test_sealed_reasoning_without_its_text_is_refused(kit: Kit, client: Client) -> None:
    """A conversation is of any model, and a seal of one: it would be kept empty."""
    conversation_id = await created(client, USER)
    path = f"{ALL}/{conversation_id}/items"
    sealed = {"type": "reasoning", "encrypted_content": seal_of(kit).seal("hm", "tiny")}
    for at, body in ((path, {"items": [USER, sealed]}), (ALL, {"items": [USER, sealed]})):
        status, told = await post(client, at, body)
        assert (status, told["error"]["param"]) == (400, "items[1].encrypted_content")
    with_text = {**sealed, "content": [{"type": "reasoning_text", "text": "hm"}]}
    status, told = await post(client, path, {"items": [with_text]})
    assert (status, told["data"][0]["content"][0]["text"]) == (200, "hm")


async def test_each_route_counts_as_a_request(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER)
    kit.dispatcher.script = kit.speak("one")
    _, told = await ask(client)
    path = f"{ALL}/{conversation_id}"
    asked: list[tuple[str, str, Any]] = [
        ("POST", ALL, {}),
        ("GET", path, None),
        ("POST", path, {"metadata": {}}),
        ("GET", f"{path}/items", None),
        ("POST", f"{path}/items", {"items": [USER]}),
        ("GET", f"{path}/items/x", None),
        ("DELETE", f"{path}/items/x", None),
        ("DELETE", path, None),
        ("GET", f"{URL}/{told['id']}/input_items", None),
        ("GET", f"{URL}/{told['id']}?stream=true", None),
    ]
    headers = {"authorization": f"Bearer {KEY}"}
    for number, (method, at, body) in enumerate(asked):
        limits = Limits(requests_per_minute=1, tokens_per_minute=1)
        kit.use_keys(key_record(key_id=f"key_{number}", limits=limits))
        for is_over in (False, True):
            about = method, client.base + at
            async with client.session.request(*about, json=body, headers=headers) as answer:
                assert (answer.status == 429) == is_over, (method, at)
                assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    for _ in range(3):
        assert (await call(client, "GET", f"{URL}/{told['id']}"))[0] == 200, "who polls may"
    assert not kit.edge.store.num_open


async def test_without_retention_there_are_none(kit: Kit, client: Client) -> None:
    conversation_id = await created(client, USER)
    days(kit, 0)
    status, body = await post(client, ALL, {})
    assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
    assert (await call(client, "GET", f"{ALL}/{conversation_id}"))[0] == 404
    status, body = await ask(client, conversation=conversation_id)
    assert (status, body["error"]["param"]) == (400, "conversation")


async def test_openais_own_client(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("Yes.")
    async with openai.AsyncOpenAI(
        api_key=KEY, base_url=f"{client.base}/v1", max_retries=0, _strict_response_validation=True
    ) as sdk:
        made = await sdk.conversations.create(metadata={"a": "b"})
        assert (await sdk.conversations.retrieve(made.id)).metadata == {"a": "b"}
        told = await sdk.responses.create(model="tiny", input="Hi", conversation=made.id)
        assert told.conversation is not None
        assert told.conversation.id == made.id
        added = await sdk.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "And?"}]
        )
        pages = sdk.conversations.items.list(made.id, order="asc", limit=2)
        kinds = [item.type async for item in pages]
        assert kinds == ["message"] * 3
        item_id = str(added.data[0].id)
        await sdk.conversations.items.retrieve(item_id, conversation_id=made.id)
        await sdk.conversations.items.delete(item_id, conversation_id=made.id)
        await sdk.conversations.update(made.id, metadata={"c": "d"})
        assert (await sdk.conversations.delete(made.id)).deleted
