"""Fields without effect: taken, and named; what they stand beside is read as if they were not."""

import json
from typing import Any

import pytest

from gateway.api.told_fields import CHAT, MAX_NAMES, ToldFields, without_told
from gateway.api.wire import WireRequest, decode
from gateway.errors import ApiError

USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(*messages: dict[str, Any], tells: bool = False, **fields: Any) -> WireRequest:
    body = {"model": "m", "messages": messages or [USER], **fields}
    return decode("chat", json.dumps(body).encode(), tells)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"store": True}, "store"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"a": 1}}, "prompt_cache_options"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "scale"}, "service_tier"),
    ],
)
def test_fields_at_the_top_are_told_and_change_nothing(fields: dict[str, Any], name: str) -> None:
    told, plain = chat(**fields), chat()
    assert told.ignored == (name,)
    assert (told.messages, told.sampling, told.priority) == (plain.messages, plain.sampling, 0)


@pytest.mark.parametrize("name", ["store", "prediction", "verbosity", "prompt_cache_retention"])
def test_null_asks_for_nothing(name: str) -> None:
    fields: dict[str, Any] = {name: None}
    assert chat(**fields).ignored == ()


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "assistant", "content": "b", "provider_specific_fields": {"refusal": None}},
         "messages[].provider_specific_fields"),
        ({"role": "assistant", "content": "b", "annotations": [{"type": "x"}]},
         "messages[].annotations"),
        ({"role": "user", "content": "b", "cache_control": {"type": "ephemeral"}},
         "messages[].cache_control"),
        ({"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}]},
         "messages[].content[].cache_control"),
        ({"role": "assistant", "content": "b", "tool_calls": [{**CALL, "extra_content": {}}]},
         "messages[].tool_calls[].extra_content"),
        ({"role": "assistant", "content": "b",
          "tool_calls": [{**CALL, "function": {**CALL["function"], "x": 1}}]},  # type: ignore[dict-item]
         "messages[].tool_calls[].function.x"),
    ],
)  # fmt: skip
def test_what_libraries_add_to_messages_is_told(message: dict[str, Any], name: str) -> None:
    asked = chat(USER, message, USER)
    assert asked.ignored == (name,)
    assert [m["content"] for m in asked.messages] == ["a", "b", "a"]
    assert len(asked.messages[1].get("tool_calls", ())) == ("tool_calls" in message)


def test_the_rest_of_the_body_is_read_as_it_is() -> None:
    message = {"role": "user", "content": 'é "x": \U0001f600', "weight": 1}
    schema = {"type": "object", "properties": {"n": {"const": 12345678901234567890123}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = chat(message, tools=[{**tool, "cache_control": {}}], logit_bias={"5": 1.5}, seed=7)
    assert asked.ignored == ("messages[].weight", "tools[].cache_control")
    assert asked.messages[0]["content"] == message["content"]
    assert asked.tools[0].function.parameters == schema
    assert (asked.sampling.logit_bias, asked.seed) == ({5: 1.5}, 7)


def test_an_unknown_field_that_is_null_is_not_worth_a_word() -> None:
    asked = chat({**USER, "provider_specific_fields": None})
    assert (asked.ignored, len(asked.messages)) == ((), 1)


def test_names_are_bounded_and_plain() -> None:
    odd = chat({**USER, "a\r\nset-cookie: x": 1, "é": 2, "x" * 65: 3})
    assert odd.ignored == ("messages[].*",)
    many = chat({**USER, **{f"f{n}": n for n in range(2 * MAX_NAMES)}})
    assert len(many.ignored) == MAX_NAMES


def test_unknown_fields_at_the_top_are_refused_or_told_by_the_setting() -> None:
    with pytest.raises(ApiError) as caught:
        chat({**USER, "weight": 1}, guided_jsn={})
    assert caught.value.param == "guided_jsn"
    asked = chat({**USER, "weight": 1}, tells=True, guided_jsn={}, best_off=None)
    assert asked.ignored == ("guided_jsn", "messages[].weight")
    completion = json.dumps({"model": "m", "prompt": "x", "messages": [], "weight": 1}).encode()
    assert decode("completion", completion, True).ignored == ("messages", "weight")


def test_what_is_wrong_beside_a_told_field_is_still_refused() -> None:
    with pytest.raises(ApiError) as caught:
        chat({**USER, "weight": 1}, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(ApiError) as caught:
        chat({"role": "user", "weight": 1, "content": [{"type": "image_url", "detail": "low"}]})
    assert caught.value.param == "messages[0].content[0].type"
    with pytest.raises(ApiError) as caught:
        chat({"role": "assistant", "content": "b", "audio": {"id": "x"}})
    assert caught.value.param == "messages[0].audio"


def test_a_body_of_names_alone_is_not_looked_at() -> None:
    told = ToldFields()
    body = b'{"messages":[{' + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}]}"
    assert without_told(body, CHAT, told) is None
    assert without_told(b'{"messages": 5, "model": []}', CHAT, told) is None
    assert without_told(b"[]", CHAT, told) is None


def test_reasoning_is_read_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        asked = chat(USER, {"role": "assistant", "content": "b", name: "hm"}, USER)
        assert asked.messages[1]["reasoning_content"] == "hm"
        with pytest.raises(ApiError) as caught:
            chat({"role": "user", "content": "b", name: "hm"})
        assert caught.value.param == f"messages[0].{name}"


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert decode("chat", b"\xef\xbb\xbf" + body).messages == decode("chat", body).messages
    with pytest.raises(ApiError):
        decode("chat", b"\xef\xbb\xbf" * 100_000 + body)
