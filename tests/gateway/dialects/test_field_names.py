"""Errors name the fields that the caller sent, in each dialect."""

from pathlib import Path
from typing import Any

import pytest

from gateway.dialects import field_names
from gateway.dialects.field_names import Names, renamed
from gateway.errors import INVALID_REQUEST, ApiError
from tests.gateway.dialects.test_messages import HERMES
from tests.gateway.edge_kit import client_of, make_kit

TOOL = {"type": "object", "properties": {"a": "no schema"}}
LONG = "word " * 2000
USER = {"role": "user", "content": "Hello"}
RESPONSES: dict[str, Any] = {"model": "m", "input": "Hello"}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}


@pytest.mark.parametrize(
    ("names", "chat", "own"),
    [
        (field_names.RESPONSES_NAMES, "messages[3].content", "input"),
        (field_names.RESPONSES_NAMES, "messages", "input"),
        (field_names.RESPONSES_NAMES, "tools[2].function.parameters", "tools[2].parameters"),
        (field_names.RESPONSES_NAMES, "tools[2].function.name", "tools[2].name"),
        (field_names.RESPONSES_NAMES, "tool_choice.allowed_tools.tools", "tool_choice.tools"),
        (field_names.RESPONSES_NAMES, "response_format.json_schema.schema", "text.format.schema"),
        (field_names.RESPONSES_NAMES, "max_tokens", "max_output_tokens"),
        (field_names.MESSAGES_NAMES, "tools[0].function.parameters", "tools[0].input_schema"),
        (field_names.MESSAGES_NAMES, "tool_choice.function.name", "tool_choice.name"),
        (field_names.MESSAGES_NAMES, "stop[1]", "stop_sequences[1]"),
        (field_names.MESSAGES_NAMES, "stop_sequences", "stop_sequences"),
        (field_names.MESSAGES_NAMES, "messages", "messages"),
        (field_names.OLLAMA_CHAT_NAMES, "max_tokens", "options.num_predict"),
        (field_names.OLLAMA_GENERATE_NAMES, "messages", "prompt"),
    ],
)
def test_a_field_has_its_own_name(names: Names, chat: str, own: str) -> None:
    error = renamed(ApiError(INVALID_REQUEST, f"{chat} is wrong", chat, 2.0), names)
    assert (error.param, error.message) == (own, f"{own} is wrong")
    assert error.retry_after_s == 2.0


def test_another_fields_message_is_left_alone() -> None:
    error = ApiError(INVALID_REQUEST, "the model 'messages' is away", "model")
    assert renamed(error, field_names.RESPONSES_NAMES) is error


@pytest.mark.parametrize(
    ("url", "body", "param", "absent"),
    [
        ("/v1/responses", {**RESPONSES, "input": LONG}, "input", "messages"),
        (
            "/v1/responses",
            {**RESPONSES, "tools": [{"type": "function", "name": "f", "parameters": TOOL}]},
            "tools[0].parameters",
            "function",
        ),
        ("/v1/messages", {**MESSAGES, "tools": [{"name": "f", "input_schema": TOOL}]}, "", "param"),
    ],
)
async def test_a_request_is_answered_in_its_own_words(
    tmp_path: Path, url: str, body: dict[str, Any], param: str, absent: str
) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=512)
    async with client_of(kit) as client, client.post(url, {**body, "model": "tiny"}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error.get("param", "") == param
    assert absent not in error["message"]
