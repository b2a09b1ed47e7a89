"""Items that a body names by their ids: found, missing, and bounded."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.state import item_references
from gateway.state.item_references import MAX_RESPONSES, resolved
from registry.errors import NotFound
from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.dialects.test_responses import TOOL, URL, ask
from tests.gateway.edge_kit import KEY, Kit, client_of, key_record, make_kit
from tests.gateway.state.test_responses import OTHER_KEY, call, prompt_of
from tests.migrated import migrated

RESPONSE = "resp_" + "0f" * 16
SAID = {"id": "msg_" + "0f" * 16 + "00", "type": "message", "role": "assistant", "content": "Hi"}
HEARD = {"id": "msg_" + "0f" * 16 + "i0", "type": "message", "role": "user", "content": "Hello"}
BIG = 1 << 20


def reference(item_id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": item_id}


def read(response_id: str) -> Iterable[msgspec.Raw]:
    if response_id != RESPONSE:
        raise NotFound(response_id)
    return [msgspec.Raw(json.dumps(item).encode()) for item in (HEARD, SAID)]


def body(*items: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": items, "metadata": {"a": "ä"}}).encode()


def test_references_become_the_items_in_their_places() -> None:
    new = {"role": "user", "content": "Go on"}
    sent = body(reference(HEARD["id"]), reference(SAID["id"]), new)
    found = json.loads(resolved(sent, BIG, read))
    assert found == {"model": "tiny", "input": [HEARD, SAID, new], "metadata": {"a": "ä"}}


def test_stored_reasoning_is_read_by_any_model() -> None:
    """What was sealed of it would open for its own alone."""
    item = {"id": SAID["id"], "type": "reasoning", "content": [], "encrypted_content": "phs1.x"}

    def read_sealed(_: str) -> Iterable[msgspec.Raw]:
        return [msgspec.Raw(json.dumps(item).encode())]

    [found] = json.loads(resolved(body(reference(SAID["id"])), BIG, read_sealed))["input"]
    assert found == {"id": SAID["id"], "type": "reasoning", "content": []}


@pytest.mark.parametrize(
    "item_id", ["", "msg_1", "msg_" + "0e" * 16 + "00", "msg_" + "0f" * 16 + "99", "x" * 10_000]
)
def test_what_is_not_there_is_named(item_id: str) -> None:
    with pytest.raises(ApiError, match="no item has the id") as caught:
        resolved(body({"role": "user", "content": "a"}, reference(item_id)), BIG, read)
    assert (caught.value.kind.status, caught.value.param) == (404, "input[1].id")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"[]",
        b"{",
        b'{"input": "item_reference"}',
        b'{"input": [1]}',
        b'{"input": [{"type": "\xff"}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_left_to_the_decoder(sent: bytes) -> None:
    assert resolved(sent, BIG, read) == sent


def test_a_response_is_read_once_and_not_too_many_are() -> None:
    asked: list[str] = []

    def counted(response_id: str) -> Iterable[msgspec.Raw]:
        asked.append(response_id)
        name = response_id.removeprefix("resp_")
        return [msgspec.Raw(json.dumps({"id": f"msg_{name}00"}).encode())]

    ids = [f"msg_{number:032x}00" for number in range(MAX_RESPONSES)]
    resolved(body(*map(reference, ids), *map(reference, ids)), BIG, counted)
    assert len(asked) == MAX_RESPONSES
    with pytest.raises(ApiError, match="more than 256 responses"):
        resolved(body(*map(reference, [*ids, f"msg_{1 << 64:032x}00"])), BIG, counted)


def test_a_small_body_cannot_become_a_large_one() -> None:
    sent = body(*[reference(SAID["id"])] * 100)
    with pytest.raises(ApiError, match=r"more than 9000 bytes with the items it names"):
        resolved(sent, 9000, read)


async def test_a_loop_of_tools_goes_on_from_ids_alone(tmp_path: Path) -> None:
    """As AI SDK has it by default."""
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
        said = [reference(item["id"]) for item in first["output"]]
        status, _ = await ask(
            client, tools=[TOOL], input=[{"role": "user", "content": "Hello"}, *said, output]
        )
        assert status == 200
    assert '<tool_call>{"name": "f", "arguments": {"a": "x y"}}</tool_call>' in prompt_of(kit)
    assert "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n" in prompt_of(kit)


async def test_another_tenants_item_is_as_one_that_never_was(kit: Kit) -> None:
    kit.use_keys(key_record(), key_record(OTHER_KEY, "key_2", tenant_id="ten_2"))
    async with client_of(kit) as client:
        kit.dispatcher.script = kit.speak("Hi")
        _, mine = await ask(client)
        for number, item_id in enumerate((mine["output"][0]["id"], "msg_" + "0" * 32 + "00")):
            content = {"model": "tiny", "input": [reference(item_id)]}
            headers = {"authorization": f"Bearer {OTHER_KEY}"}
            async with client.session.post(
                client.base + URL, json=content, headers=headers
            ) as answer:
                said = await answer.json()
            assert answer.status == 404, number
            assert said["error"]["message"].replace(item_id, "ID") == (
                "no item has the id 'ID': it may have expired, or it was not stored (store: "
                "false); send the item itself"
            )
        assert (await call(client, "DELETE", f"{URL}/{mine['id']}", KEY))[0] == 200
        status, _ = await ask(client, input=[reference(mine["output"][0]["id"])])
        assert status == 404


def test_the_word_that_is_looked_for_is_in_every_reference() -> None:
    assert item_references.WORD in body(reference("x"))
