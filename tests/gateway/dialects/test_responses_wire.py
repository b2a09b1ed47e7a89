"""Bodies of /v1/responses: what they come to, and what is refused or told by name."""

import json
import time
from typing import Any

import pytest

from gateway.api.reasoning_types import Reasoning
from gateway.api.tool_types import (
    AllowedChoice,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedChoice,
    TextFormat,
)
from gateway.api.wire import WireRequest
from gateway.dialects.responses_wire import decode
from gateway.errors import ApiError
from gateway.sealing.seals import Seals
from tests.gateway.sealing_kit import MASTER, SEAL

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
}


def asked(items: Any = "a", tells: bool = False, **fields: Any) -> WireRequest:
    return decode(json.dumps({"model": "m", "input": items, **fields}).encode(), tells, SEAL)


def test_items_of_one_turn_are_one_message() -> None:
    request = asked(
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            REASONING,
            SAID,
            CALL,
            {**CALL, "call_id": "c2"},
            OUTPUT,
            {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "s"}]},
            {"role": "assistant", "content": "e"},
            {"role": "user", "content": "f"},
        ],
        instructions="i",
    )
    first, second, third, turn, *rest = request.messages
    assert [first, second, third] == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a"},
    ]
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "b", "hm")
    assert [call.id for call in turn["tool_calls"]] == ["c1", "c2"]
    assert rest == [
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "tool", "content": "s", "tool_call_id": "c2"},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    assert request.ignored == ()


def test_texts_of_one_turn_are_lines_and_thousands_cost_no_more_than_one() -> None:
    said = {"role": "assistant", "content": "a" * 2_000_000}
    begun = time.process_time()
    [turn] = asked([{**said, "content": ""}, said, *[{**said, "content": "b"}] * 8000]).messages
    assert turn["content"] == "a" * 2_000_000 + "\nb" * 8000
    assert time.process_time() - begun < 1.0  # joined one by one: above 2 s


def test_fields_at_the_top() -> None:
    request = asked(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "high"},
        service_tier="flex",
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        metadata={"a": "b"},
        store=False,
        truncation="disabled",
        background=False,
        top_logprobs=0,
    )
    assert (request.max_tokens, request.sampling.temperature) == (7, 0.5)
    assert isinstance(request.tool_choice, NamedChoice)
    assert not request.parallel_tool_calls
    assert request.reasoning == Reasoning(True, "high")
    assert (request.priority, request.service_tier, request.user) == (0, "flex", ("u", "s"))
    assert request.ignored == ()
    choice = asked(
        tools=[TOOL],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}],
        },
    ).tool_choice
    assert isinstance(choice, AllowedChoice)
    assert choice.allowed_tools.mode == "required"


def test_forms() -> None:
    assert asked().response_format == TextFormat()
    assert asked(text={"format": {"type": "text"}}).response_format == TextFormat()
    form = asked(text={"format": {"type": "json_object"}}).response_format
    assert form == JsonObjectFormat()
    schema = {"type": "object", "properties": {}}
    found = asked(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert isinstance(found.response_format, JsonSchemaFormat)
    assert found.response_format.json_schema.schema == schema
    assert found.shown["text"]["format"]["schema"] == schema


def test_what_has_no_effect_is_told() -> None:
    request = asked(
        [{**REASONING, "encrypted_content": "x"}, {**SAID, "odd": 1}],
        store=True,
        truncation="auto",
        include=["file_search_call.results"],
        text={"verbosity": "low"},
        reasoning={"summary": "auto"},
        stream_options={"include_obfuscation": True},
        prompt_cache_retention="24h",
        service_tier="scale",
        stream=True,
    )
    assert set(request.ignored) == {
        "truncation",
        "include",
        "text.verbosity",
        "reasoning.summary",
        "stream_options.include_obfuscation",
        "prompt_cache_retention",
        "service_tier",
        "input[].encrypted_content",
        "input[].odd",
    }


def test_what_clients_leave_in_parts_is_told() -> None:
    part = {"type": "output_text", "text": "b", "annotations": [], "parsed": {"a": 1}}
    request = asked([{"role": "user", "content": "a"}, {**SAID, "content": [part]}])
    assert request.ignored == ("input[].content[].parsed",)
    assert request.messages[1]["content"] == "b"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "r" * 65}, "previous_response_id"),
        ({"conversation": {"name": "conv_1"}}, "conversation.name"),
        ({"conversation": "conv_1", "store": False}, "store"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "store"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"messages": []}, "messages"),
        ({"metadata": {"a": "b" * 70_000}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"ok": "", "a": "b" * 513}}, "metadata.a"),
        ({"user": "u" * 5000}, "user"),
        ({"safety_identifier": "u" * 5000}, "safety_identifier"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "f", "more": "x" * 70_000}]}},
         "tool_choice.tools[0].more"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**{"items": fields.pop("input", "a"), **fields})
    assert caught.value.kind.status == 400
    assert caught.value.param == param


def reasoning(sealed: str | None, **fields: Any) -> list[Any]:
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed, **fields}
    return [{"role": "user", "content": "a"}, item, {"role": "assistant", "content": "b"}]


def test_sealed_reasoning_is_opened() -> None:
    sealed = SEAL.seal("hm", "m")
    text = {"type": "reasoning_text", "text": "forged"}
    for content in (None, [], [text]):
        request = asked(reasoning(sealed, content=content))
        assert request.messages[1]["reasoning_content"] == "hm"
        assert not request.ignored
    plain = asked(reasoning(None, content=[text]))
    assert plain.messages[1]["reasoning_content"] == "forged"
    foreign = asked(reasoning("gAAAAABo"))
    assert "reasoning_content" not in foreign.messages[1]
    assert foreign.ignored == ("input[].encrypted_content",)


@pytest.mark.parametrize(
    "sealed",
    [
        SEAL.seal("hm", "other"),
        Seals(lambda: [MASTER]).of("ten_2").seal("hm", "m"),
        SEAL.seal("hm", "m")[:-8] + "AAAAAAA=",
        "phs1.",
        7,
    ],
    ids=["other model", "other tenant", "changed", "cut", "no text"],  # sealed with a random nonce
)
def test_what_does_not_open_names_the_field(sealed: Any) -> None:
    with pytest.raises(ApiError) as caught:
        asked(reasoning(sealed))
    assert (caught.value.kind.status, caught.value.param) == (400, "input[1].encrypted_content")


def test_only_reasoning_is_opened() -> None:
    """Or its own content would be lost, and sealed text become a user's or the system's."""
    sealed = SEAL.seal("hm", "m")
    request = asked([{"role": "system", "content": "a", "encrypted_content": sealed}])
    assert request.messages == ({"role": "system", "content": "a"},)
    assert request.ignored == ("input[].encrypted_content",)


def test_what_is_no_text_names_the_field() -> None:
    body = json.dumps({"model": "m", "input": reasoning("here")}).encode()
    with pytest.raises(ApiError) as caught:
        decode(body.replace(b"here", b"\xff\xfe"), False, SEAL)
    assert (caught.value.kind.status, caught.value.param) == (400, "input[1].encrypted_content")


def test_what_is_included_is_sealed_and_the_rest_is_told() -> None:
    assert asked().seal is None
    request = asked(include=["reasoning.encrypted_content"])
    assert (request.seal, request.ignored) == (SEAL, ())
    request = asked(include=["reasoning.encrypted_content", "file_search_call.results"])
    assert (request.seal, request.ignored) == (SEAL, ("include",))


def test_metadata_has_openais_bounds() -> None:
    most = {f"{n:064}": "ä" * 512 for n in range(16)}
    assert asked(metadata=most).shown["metadata"] == most


def test_unknown_fields_are_told_by_the_setting() -> None:
    assert asked(tells=True, messages=[]).ignored == ("messages",)
