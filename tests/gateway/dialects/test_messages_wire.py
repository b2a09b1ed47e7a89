"""Bodies of /v1/messages: what they come to, and what is refused or told by name."""

import json
import time
from typing import Any

import pytest

from gateway.api.reasoning_types import Reasoning
from gateway.api.tool_types import JsonSchemaFormat, NamedChoice, NamedFunction, ToolCall
from gateway.api.wire import WireRequest
from gateway.dialects.messages_wire import decode
from gateway.errors import ApiError
from gateway.sealing.seals import Seals
from tests.gateway.sealing_kit import MASTER, SEAL

USER = {"role": "user", "content": "a"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "t"}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
CONTROL = {"type": "ephemeral"}


def asked(*messages: dict[str, Any], tells: bool = False, **fields: Any) -> WireRequest:
    body = {"model": "m", "max_tokens": 9, "messages": messages or [USER], **fields}
    return decode(json.dumps(body).encode(), tells, SEAL)


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_everything_at_the_top() -> None:
    request = asked(
        system=[TEXT, {**TEXT, "text": "u"}],
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stream=True,
        metadata={"user_id": "u1"},
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    )
    assert request.messages == ({"role": "system", "content": "t\nu"}, USER)
    assert (request.max_tokens, request.stop, request.stream) == (9, ("x",), True)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert request.user == ("u1", "")
    assert request.tools[0].function.name == "f"
    assert request.tool_choice == NamedChoice(function=NamedFunction(name="f"))
    assert not request.parallel_tool_calls
    assert request.ignored == ()


@pytest.mark.parametrize(
    ("choice", "read"),
    [("auto", "auto"), ("any", "required"), ("none", "none")],
)
def test_choices(choice: str, read: str) -> None:
    request = asked(tools=[TOOL], tool_choice={"type": choice})
    assert (request.tool_choice, request.parallel_tool_calls) == (read, True)
    assert asked(tool_choice={"type": choice}).tool_choice is None


def test_results_come_before_text_and_turns_of_a_user_are_one() -> None:
    request = asked(
        user(TEXT),
        USER,
        assistant(TEXT, USE),
        user(RESULT, {**RESULT, "tool_use_id": "c2", "content": [TEXT, TEXT]}, TEXT),
        USER,
    )
    first, called, *results, last = request.messages
    assert first == {"role": "user", "content": "t\n\na"}
    [call] = called["tool_calls"]
    assert isinstance(call, ToolCall)
    assert (call.id, call.function.arguments) == ("c1", '{"a":1}')
    assert results == [
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "tool", "content": "t\nt", "tool_call_id": "c2"},
    ]
    assert last == {"role": "user", "content": "t\n\na"}
    assert not request.continue_final_message


def test_thousands_of_turns_of_a_user_cost_no_more_than_one() -> None:
    begun = time.process_time()
    [turn] = asked({"role": "user", "content": "b" * 6_000_000}, *[USER] * 4095).messages
    assert turn["content"] == "b" * 6_000_000 + "\n\na" * 4095
    assert time.process_time() - begun < 0.8  # joined one by one: above 2 s


def test_thinking_is_taken_back_with_its_own_signature_only() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": SEAL.sign("hm", "m")}
    request = asked(USER, assistant(thinking, TEXT), USER)
    assert request.messages[1]["reasoning_content"] == "hm"
    foreign = {**thinking, "signature": "EqQBCgIYAhIM"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    request = asked(USER, assistant(foreign, redacted, TEXT), USER)
    assert "reasoning_content" not in request.messages[1]
    assert request.ignored == (
        "messages[].content[].thinking",
        "messages[].content[].redacted_thinking",
    )
    for changed in (
        {**thinking, "thinking": "ha"},
        {**thinking, "signature": "phm1.00"},
        {**thinking, "signature": SEAL.sign("hm", "other")},
        {**thinking, "signature": Seals(lambda: [MASTER]).of("ten_2").sign("hm", "m")},
    ):
        with pytest.raises(ApiError) as caught:
            asked(USER, assistant(changed, TEXT), USER)
        assert caught.value.param == "messages[1].content[0].signature"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    request = asked(USER, {"role": "assistant", "content": "It is"})
    assert request.continue_final_message
    assert not request.add_generation_prompt
    assert asked(USER, assistant(USE)).add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, Reasoning(False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Reasoning(True, "", 1024)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
         Reasoning(True, "low")),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, Reasoning(False)),
    ],
)  # fmt: skip
def test_reasoning(fields: dict[str, Any], reasoning: Reasoning | None) -> None:
    assert asked(**fields).reasoning == reasoning


def test_a_form() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        found = asked(**fields).response_format
        assert isinstance(found, JsonSchemaFormat)
        assert found.json_schema.schema == {"type": "object"}


def test_what_has_no_effect_is_told() -> None:
    request = asked(
        user({**TEXT, "cache_control": CONTROL}),
        assistant(USE),
        user({**RESULT, "is_error": True}),
        system=[{**TEXT, "cache_control": CONTROL}],
        tools=[{**TOOL, "cache_control": CONTROL}],
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 2, "display": "omitted"},
        context_management={"edits": []},
    )
    assert set(request.ignored) == {
        "service_tier",
        "thinking.display",
        "context_management",
        "system[].cache_control",
        "messages[].content[].cache_control",
        "messages[].content[].is_error",
        "tools[].cache_control",
    }


def test_unknown_fields_are_refused_or_told_by_the_setting() -> None:
    with pytest.raises(ApiError) as caught:
        asked(max_token=5)
    assert caught.value.param == "max_token"
    assert asked(tells=True, max_token=5).ignored == ("max_token",)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "tool_result", "tool_use_id": "c",
                             "content": [{"type": "image", "source": {}}]})]},
         "messages[0].content[0].content[0].type"),
        ({"messages": [user(USE)]}, "messages[0].content[0].type"),
        ({"messages": [USER, assistant(RESULT)]}, "messages[1].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [user({"type": "video"})]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(body: dict[str, Any], param: str) -> None:
    whole = {"model": "m", "max_tokens": 9, "messages": [USER], **body}
    with pytest.raises(ApiError) as caught:
        decode(json.dumps(whole).encode(), False, SEAL)
    assert caught.value.kind.status == 400
    assert caught.value.param == param


def test_tokens_can_be_counted_without_a_length() -> None:
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert decode(body, False, SEAL, needs_length=False).max_tokens is None
