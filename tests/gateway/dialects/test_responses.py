"""OpenAI's Responses over HTTP: answers, streams, loops of tools, refusals."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from gateway.errors import WorkerLost
from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record, make_kit
from tests.gateway.sealing_kit import seal_of

URL = "/v1/responses"
ASK: dict[str, Any] = {"model": "tiny", "input": "Hello"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


async def ask(client: Client, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(URL, {**ASK, **fields}) as answer:
        return answer.status, await answer.json()


async def stream_of(client: Client, **fields: Any) -> list[dict[str, Any]]:
    async with client.post(URL, {**ASK, "stream": True, **fields}) as answer:
        assert answer.status == 200, await answer.text()
        raw = (await answer.read()).decode()
    events = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def check_told_to_the_end(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every item and part that is added is done, and the deltas are its text. Returns the items."""
    open_items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    items: list[dict[str, Any]] = []
    for event in events:
        kind, index = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert not open_items
            open_items[index], texts[index] = event["item"], ""
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            assert event["item_id"] == open_items[index]["id"]
            texts[index] += event["delta"]
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == texts[index]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[index]
        elif kind == "response.output_item.done":
            assert open_items.pop(index)["id"] == event["item"]["id"]
            items.append(event["item"])
    assert not open_items
    return items


async def test_a_response(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "temperature": 0.5}
    status, body = await ask(client, **fields, max_output_tokens=40)
    assert status == 200
    sent = kit.dispatcher.requests[0].request
    assert kit.tokenizer.decode(sent.prompt_token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (sent.max_tokens, sent.sampling.temperature) == (40, 0.5)
    assert body["id"] == kit.ledger.only.request_id
    assert body["id"].startswith("resp_")
    [item] = body["output"]
    part = {"type": "output_text", "text": "The game", "annotations": [], "logprobs": []}
    assert (item["type"], item["status"], item["content"]) == ("message", "completed", [part])
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert (body["instructions"], body["metadata"]) == ("Be brief.", {"a": "b"})
    assert body["usage"] == {
        "input_tokens": len(sent.prompt_token_ids),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(kit.ids("The game")) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(sent.prompt_token_ids) + len(kit.ids("The game")) + 1,
    }


@pytest.mark.parametrize("one_by_one", [True, False])
async def test_a_stream_tells_the_same_response(tmp_path: Path, one_by_one: bool) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\nSo:\n{CALL}", one_by_one)
    async with client_of(kit) as client:
        events = await stream_of(client, tools=[TOOL])
        _, whole = await ask(client, tools=[TOOL])
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    assert events[-1]["type"] == "response.completed"
    told = events[-1]["response"]
    assert check_told_to_the_end(events) == told["output"]

    def without_ids(body: dict[str, Any]) -> Any:
        items = [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in body["output"]]
        return {**body, "id": "", "created_at": 0, "output": items}

    assert without_ids(told) == without_ids(whole)
    reasoning, message, call = told["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"].strip() == "So:"
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": "x y"})
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_loop_goes_on_with_its_own_items(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\n{CALL}")
    async with client_of(kit) as client:
        _, first = await ask(client, tools=[TOOL])
        output = {
            "type": "function_call_output",
            "call_id": first["output"][-1]["call_id"],
            "output": [{"type": "input_text", "text": "42"}],
        }
        turns = [{"role": "user", "content": "Hello"}, *first["output"], output]
        kit.dispatcher.script = kit.speak("It is 42.")
        status, body = await ask(client, tools=[TOOL], input=turns)
    assert status == 200
    assert body["output"][0]["content"][0]["text"] == "It is 42."
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    prompt = kit.tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tool_call>{"name": "f", "arguments": {"a": "x y"}}</tool_call>' in prompt
    assert "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n" in prompt


REASONING = HERMES.replace("+ m['content']", "+ (m.reasoning_content or '') + m['content']")
SEALED = {"include": ["reasoning.encrypted_content"], "store": False}


@pytest.mark.parametrize("stream", [True, False])
async def test_who_keeps_nothing_gets_reasoning_sealed(tmp_path: Path, stream: bool) -> None:
    kit = make_kit(tmp_path, REASONING, max_context=1024)
    kit.dispatcher.script = kit.speak("<think>\nhm\n</think>\n\nYes.")
    async with client_of(kit) as client:
        if stream:
            events = await stream_of(client, **SEALED)
            output = check_told_to_the_end(events)
            added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
            assert "encrypted_content" not in added[0]
        else:
            output = (await ask(client, **SEALED))[1]["output"]
        reasoning = output[0]
        assert seal_of(kit).open(reasoning["encrypted_content"], "tiny") == "hm"
        # Clients of this field send it back without the text.
        kept = {key: reasoning[key] for key in ("type", "id", "summary", "encrypted_content")}
        turns = [{"role": "user", "content": "Hello"}, kept, output[1]]
        status, _ = await ask(client, **SEALED, input=[*turns, {"role": "user", "content": "b"}])
        assert status == 200
        asked = kit.dispatcher.requests[-1].request.prompt_token_ids
        assert "assistant\nhmYes." in kit.tokenizer.decode(asked, skip_special_tokens=False)
        kit.use_keys(key_record(), key_record("another-key", "key_2", tenant_id="ten_2"))
        async with client.post(URL, {**ASK, "input": turns}, key="another-key") as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["param"]) == (400, "input[1].encrypted_content")
        assert "encrypted_content" not in (await ask(client))[1]["output"][0]


async def test_an_answer_that_was_cut_is_incomplete(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.end("length")

    kit.dispatcher.script = script
    _, body = await ask(client, max_output_tokens=1)
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert body["output"][0]["status"] == "incomplete"
    events = await stream_of(client)
    assert events[-1]["type"] == "response.incomplete"
    check_told_to_the_end(events)


async def test_a_stream_that_fails_says_so_in_its_last_event(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    events = await stream_of(client)
    check_told_to_the_end(events)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "service_unavailable"


async def test_errors_are_openais(kit: Kit, client: Client) -> None:
    status, body = await ask(client, model="nobody")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body = await ask(client, prompt={"id": "pmpt_1"})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert not kit.dispatcher.requests


async def test_openais_own_client(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\nYes.\n{CALL}")
    async with (
        client_of(kit) as client,
        openai.AsyncOpenAI(
            api_key=KEY, base_url=f"{client.base}/v1", _strict_response_validation=True
        ) as sdk,
    ):
        tools: Any = [{**TOOL, "strict": False}]
        whole = await sdk.responses.create(model="tiny", input="Hi", tools=tools)
        assert isinstance(whole, Response)
        assert whole.output_text.strip() == "Yes."
        async with sdk.responses.stream(model="tiny", input="Hi", tools=tools) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert "response.reasoning_text.delta" in kinds
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        again: Any = [{"role": "user", "content": "Hi"}, *(i.model_dump() for i in final.output)]
        kit.dispatcher.script = kit.speak("Done.")
        last = await sdk.responses.create(model="tiny", input=again, tools=tools)
        assert last.output_text == "Done."
