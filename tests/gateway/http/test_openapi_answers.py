"""Real answers and errors are what the OpenAPI document says, and hold nothing that it does not."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError
from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, make_kit
from tests.gateway.encoder_kit import make_encoder_kit

USER = {"role": "user", "content": "Hello"}
SAID = f"<think>\nhm\n</think>\n\nSo:\n{CALL}"
PARAMETERS = {"type": "object", "properties": {}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [USER],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
    "service_tier": "auto",
}
SCORED = {"logprobs": True, "top_logprobs": 2}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": ["The game", "a"], "logprobs": 2, "echo": True}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": "Hello",
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 80,
    "messages": [USER],
    "tools": [{"name": "f", "input_schema": PARAMETERS}],
}
COUNT = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
ANSWERS = [
    ("/v1/chat/completions", {**CHAT, **SCORED, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"model": "tiny", "messages": [USER], "n": 2}),
    ("/v1/completions", {**TEXT, "prompt_logprobs": 1}),
    ("/v1/completions", {"model": "tiny", "prompt": "a"}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, "max_output_tokens": 2, "instructions": "x", "user": "u"}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages/count_tokens", COUNT),
    ("/tokenize", {"model": "tiny", "prompt": "The game", "return_token_strs": True}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
]
USAGE = {"include_usage": True, "include_obfuscation": True}
STREAMS = [
    ("/v1/chat/completions", {**CHAT, **SCORED, "stream_options": USAGE}),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"continuous_usage_stats": True}}),
    ("/v1/completions", {**TEXT, "stream_options": USAGE}),
]
ENCODED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": "embed", "input": ["the cat", "a dog"]}),
    ("/v1/embeddings", {"model": "embed", "input": "the cat", "encoding_format": "base64"}),
    ("/v1/classify", {"model": "classes", "input": "the cat"}),
    ("/v2/rerank", {"model": "cross", "query": "the", "documents": ["a", "cat"]}),
    (
        "/v1/rerank",
        {"model": "cross", "query": "the", "documents": ["a"], "return_documents": False},
    ),
    ("/score", {"model": "cross", "text_1": "the", "text_2": ["a", "cat"]}),
]
WRONG: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"model": "none", "messages": [USER]}, 404),
    ("/v1/responses", {"model": "tiny"}, 400),
    ("/v1/messages", {"model": "tiny"}, 400),
    ("/v1/messages", {**MESSAGE, "thread": {"type": "create"}}, 400),
    ("/v1/messages", {**MESSAGE, "model": "none"}, 404),
    ("/tokenize", {"model": "tiny", "prompt": 5}, 400),
]


async def document(client: Client) -> dict[str, Any]:
    """With every object closed: what is not told is an error."""
    async with client.session.get(client.base + "/openapi.json") as answer:
        found: dict[str, Any] = await answer.json()
    for schema in found["components"]["schemas"].values():
        schema["additionalProperties"] = False
    return found


def check(found: dict[str, Any], path: str, status: int, body: Any, way: str = "post") -> None:
    """Raises ValidationError."""
    content = found["paths"][path][way]["responses"][str(status)]["content"]
    _check(found, content["application/json"]["schema"], body)


def _check(found: dict[str, Any], schema: dict[str, Any], body: Any) -> None:
    whole = {**schema, "components": found["components"]}
    jsonschema.Draft202012Validator(whole).validate(body)


async def asked(client: Client, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(path, body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(("path", "body"), ANSWERS)
async def test_answers(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(SAID)
    async with client_of(kit) as client:
        status, answer = await asked(client, path, body)
        assert status == 200, answer
        check(await document(client), path, status, answer)


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_events(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak(SAID)
    async with client_of(kit) as client:
        found = await document(client)
        async with client.post(path, {**body, "stream": True}) as answer:
            lines = (await answer.text()).split("\n\n")
    content = found["paths"][path]["post"]["responses"]["200"]["content"]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    assert len(events) > 3
    for event in events:
        _check(found, content["text/event-stream"]["schema"], json.loads(event))


@pytest.mark.parametrize(("path", "body"), ENCODED)
async def test_encoders_answers(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with client_of(make_encoder_kit(tmp_path)) as client:
        status, answer = await asked(client, path, body)
        assert status == 200, answer
        check(await document(client), path, status, answer)


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_models(kit: Kit, client: Client, headers: dict[str, str]) -> None:
    found = await document(client)
    for path, url in (("/v1/models", "/v1/models"), ("/v1/models/{name}", "/v1/models/tiny")):
        key = {"authorization": f"Bearer {KEY}", **headers}
        async with client.session.get(client.base + url, headers=key) as answer:
            check(found, path, answer.status, await answer.json(), "get")


@pytest.mark.parametrize(("path", "body", "status"), WRONG)
async def test_errors(
    kit: Kit, client: Client, path: str, body: dict[str, Any], status: int
) -> None:
    found = await document(client)
    given, answer = await asked(client, path, body)
    assert given == status
    check(found, path, status, answer)


@pytest.mark.parametrize("kind", [QUEUE_FULL, UNAVAILABLE])
@pytest.mark.parametrize(("path", "body"), [("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)])
async def test_errors_of_the_queue(
    kind: Any, path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.refusal = ApiError(kind, "wait", retry_after_s=1.0)
    async with client_of(kit) as client:
        status, answer = await asked(client, path, body)
        assert status in (429, 503, 529)
        check(await document(client), path, status, answer)


async def test_the_check_finds_what_is_missing_and_what_is_too_much(
    kit: Kit, client: Client
) -> None:
    found = await document(client)
    path, body = ANSWERS[7]
    _, answer = await asked(client, path, {**body, "tools": []})
    check(found, path, 200, answer)
    for wrong in ({}, {**answer, "more": 1}, {"input_tokens": "5"}):
        with pytest.raises(jsonschema.ValidationError):
            check(found, path, 200, wrong)
