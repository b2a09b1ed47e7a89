"""Anthropic's Messages over HTTP: answers, streams, errors, rate limits, counts and models."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError, WorkerLost
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record, make_kit
from tests.gateway.sealing_kit import seal_of

URL = "/v1/messages"
USER = {"role": "user", "content": "Hello"}
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": [USER]}
HERMES = (
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# </think> #}"
)
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x y"}}\n</tool_call>'


async def ask(client: Client, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(URL, {**ASK, **fields}) as answer:
        return answer.status, await answer.json()


async def stream_of(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """The events, each of whose names is that of its data."""
    async with client.post(URL, {**ASK, "stream": True, **fields}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = (await answer.read()).decode()
    events = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's SDKs put together from its events."""
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    texts: list[str] = []
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                texts[-1] += delta["partial_json"]
        elif kind == "content_block_stop":
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(texts[-1] or "{}")
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    assert events[-1]["type"] == "message_stop"
    return message


async def test_a_message(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    async with client.post(URL, {**ASK, "system": "Be brief."}) as answer:
        assert answer.status == 200
        http_id = answer.headers["request-id"]
        assert answer.headers["x-request-id"] == http_id
        body = await answer.json()
    sent = kit.dispatcher.requests[0].request
    assert body == {
        "id": f"msg_{http_id}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "The game"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(sent.prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(kit.ids("The game")) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert kit.ledger.only.request_id == body["id"]
    assert kit.tokenizer.decode(sent.prompt_token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_stream_comes_to_the_same_message(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot!")
    _, whole = await ask(client)
    events = await stream_of(client)
    message = built(events)
    assert message.pop("id") != whole.pop("id")
    assert message == whole
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    start = events[0]["message"]["usage"]
    assert start["input_tokens"] == whole["usage"]["input_tokens"]


async def test_cached_tokens_are_no_input_tokens(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("x"))
        running.end("stop", cached_tokens=4)

    kit.dispatcher.script = script
    _, body = await ask(client)
    posting = kit.ledger.only
    usage = body["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (
        posting.prompt_tokens - 4,
        4,
    )


async def test_why_it_stopped(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot!", one_by_one=False)
    _, body = await ask(client, stop_sequences=["x!", "afoot"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "afoot")
    assert body["content"] == [{"type": "text", "text": "The game is "}]
    message = built(await stream_of(client, stop_sequences=["afoot"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "afoot")

    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.end("length")

    kit.dispatcher.script = script
    _, body = await ask(client, max_tokens=1)
    assert body["stop_reason"] == "max_tokens"
    # More than the context has room for is no error: the answer ends with the context.
    _, body = await ask(client, max_tokens=32_000)
    assert body["stop_reason"] == "model_context_window_exceeded"
    request = kit.dispatcher.requests[-1].request
    assert request.max_tokens == 256 - len(request.prompt_token_ids)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("one_by_one", [True, False])
async def test_thinking_text_and_calls_are_blocks(
    tmp_path: Path, stream: bool, one_by_one: bool
) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\nSo:\n{CALL}", one_by_one)
    async with client_of(kit) as client:
        fields: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "enabled"}}
        if stream:
            body = built(await stream_of(client, **fields))
        else:
            _, body = await ask(client, **fields)
    thinking, text, call = body["content"]
    signature = seal_of(kit).sign("hm", "tiny")
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": signature}
    assert (text["type"], text["text"].strip()) == ("text", "So:")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": "x y"})
    assert body["stop_reason"] == "tool_use"


async def test_a_loop_goes_on_with_its_own_blocks(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\n{CALL}")
    async with client_of(kit) as client:
        _, first = await ask(client, tools=[TOOL])
        call = first["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
        turns = [
            USER,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        kit.dispatcher.script = kit.speak("It is 42.")
        status, body = await ask(client, tools=[TOOL], messages=turns)
    assert status == 200
    assert body["content"] == [{"type": "text", "text": "It is 42."}]
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    prompt = kit.tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tool_call>{"name": "f", "arguments": {"a": "x y"}}</tool_call>' in prompt
    assert "<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in prompt


async def test_a_last_message_of_the_assistant_is_continued(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak(" 42")
    _, body = await ask(client, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert body["content"] == [{"type": "text", "text": " 42"}]
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    assert kit.tokenizer.decode(ids).endswith("assistant\nIt is")


async def test_a_silent_stream_pings(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, stream_heartbeat_s=0.02)
    kit.dispatcher.script = kit.speak_slowly("The game", 0.08)
    async with client_of(kit) as client:
        events = await stream_of(client)
    assert {"type": "ping"} in events
    text = built([event for event in events if event["type"] != "ping"])["content"][0]["text"]
    assert text == "The game"


async def test_a_stream_that_fails_ends_with_an_error_event(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    events = await stream_of(client)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert f"msg_{events[-1]['request_id']}" == events[0]["message"]["id"]


async def test_a_body_that_is_too_large(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, max_body_bytes=1000)
    async with client_of(kit) as client, client.post(URL, b"x" * 1001) as answer:
        assert answer.status == 413
        assert (await answer.json())["error"]["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(QUEUE_FULL, "full", retry_after_s=2.0), 529, "overloaded_error"),
        (ApiError(UNAVAILABLE, "later", retry_after_s=2.0), 529, "overloaded_error"),
    ],
)
async def test_refusals_of_the_queue(
    kit: Kit, client: Client, error: ApiError, status: int, kind: str
) -> None:
    kit.dispatcher.refusal = error
    async with client.post(URL, ASK) as answer:
        assert answer.status == status
        assert answer.headers["retry-after"] == "2"
        body = await answer.json()
        assert body["error"] == {"type": kind, "message": error.message}
        assert body["request_id"] == answer.headers["request-id"]


async def test_a_kept_answer_is_told_in_the_dialect_that_asks(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    mode = {"x_polyhost_cache_mode": "exact"}
    fields = {"temperature": 0, "max_tokens": 40}
    chat = {"model": "tiny", "messages": [USER], **fields}
    async with client.post("/v1/chat/completions", chat, **mode) as answer:
        assert answer.headers["x-polyhost-cache"] == "miss"
    for stream in (False, True):
        body = {**ASK, **fields, "stream": stream}
        async with client.post(URL, body, **mode) as answer:
            assert answer.headers["x-polyhost-cache"] == "hit"
            text = await answer.text()
        assert ("message_stop" in text) == stream
        assert "The" in text
        assert '"stop_reason":"end_turn"' in text
    assert len(kit.dispatcher.requests) == 1


async def test_errors_before_and_after_the_body_is_read(kit: Kit, client: Client) -> None:
    async with client.post(URL, ASK, key="wrong") as answer:
        assert answer.status == 401
        assert (await answer.json())["error"]["type"] == "authentication_error"
    status, body = await ask(client, thread={"type": "create"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (status, body["error"]["details"]) == (400, details)  # the SDK's tool runner reads it
    status, body = await ask(client, model="nobody")
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    async with client.post(URL + "/nothing", ASK) as answer:
        assert answer.status == 404
        assert (await answer.json())["type"] == "error"
    status, body = await ask(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert not kit.dispatcher.requests


async def test_limits_and_budgets_by_anthropics_names(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=1)))
    kit.dispatcher.script = kit.speak("x")
    async with client.post(URL, ASK) as answer:
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
        reset = answer.headers["anthropic-ratelimit-requests-reset"]
        assert reset.endswith("Z")
        assert len(reset) == len("2026-01-01T00:00:00Z")
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    status, body = await ask(client)
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    kit.use_keys(key_record(key_id="key_2", limits=Limits(day_budget_nanos=1)))
    async with client.post(URL, ASK) as answer:
        assert answer.status == 402
        assert answer.headers["x-should-retry"] == "false"
        assert (await answer.json())["error"]["type"] == "billing_error"


async def test_tokens_are_counted_and_cost_nothing(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak("x")
    kit.use_keys(key_record(limits=Limits(requests_per_minute=3, tokens_per_minute=2000)))
    fields = {"system": "s", "tools": [TOOL], "messages": [USER]}
    async with client_of(kit) as client:
        count = {"model": "tiny", **fields}
        async with client.post(URL + "/count_tokens", count) as answer:
            assert answer.status == 200
            counted = await answer.json()
            assert answer.headers["anthropic-ratelimit-tokens-remaining"] == "2000"
        _, body = await ask(client, **fields)
        assert counted == {"input_tokens": body["usage"]["input_tokens"]}
        async with client.post(URL + "/count_tokens", {**count, "model": "nobody"}) as answer:
            assert answer.status == 404
        async with client.post(URL + "/count_tokens", count) as answer:
            assert answer.status == 200
        async with client.post(URL + "/count_tokens", count) as answer:
            assert answer.status == 429
    assert len(kit.ledger.posted) == 1


async def test_models_as_anthropics_clients_check_them(kit: Kit, client: Client) -> None:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}

    async def get(path: str) -> Any:
        async with client.session.get(client.base + path, headers=headers) as answer:
            return await answer.json()

    tiny = {
        "type": "model",
        "id": "tiny",
        "display_name": "tiny",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 256,
        "max_tokens": 256,
    }
    page = {"data": [tiny], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert await get("/v1/models") == page
    assert await get("/v1/models/tiny") == tiny
    assert (await get("/v1/models/none"))["error"]["type"] == "not_found_error"
    for limit in ("0", "1001", "0001" + "9" * 5000, "²"):
        refused = await get(f"/v1/models?limit={limit}")
        assert refused["error"]["type"] == "invalid_request_error"
    empty = {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert await get("/v1/models?after_id=tiny") == empty
