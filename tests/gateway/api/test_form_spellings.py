"""The form of an answer by vLLM's names comes to the same as by response_format."""

import json
import re
from typing import Any

import pytest

from gateway.api.form_spellings import MAX_ALTERNATIVES
from gateway.api.tool_types import GrammarFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat
from gateway.api.wire import WireRequest, decode
from gateway.errors import ApiError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> WireRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return decode("chat", json.dumps(body).encode())


def completion(**fields: Any) -> WireRequest:
    return decode("completion", json.dumps({"model": "m", "prompt": "a", **fields}).encode())


@pytest.mark.parametrize("ask", [asked, completion])
@pytest.mark.parametrize(
    "spell",
    [
        lambda name, value: {"structured_outputs": {name: value}},
        lambda name, value: {f"guided_{name}": value},
    ],
)
def test_every_spelling(ask: Any, spell: Any) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        form = ask(**spell("json", schema)).response_format
        assert isinstance(form, JsonSchemaFormat)
        assert form.json_schema.schema == SCHEMA
    assert ask(**spell("regex", "a+")).response_format == RegexFormat(pattern="a+")
    grammar = 'start: "a"'
    assert ask(**spell("grammar", grammar)).response_format == GrammarFormat(grammar=grammar)


def test_any_json_object() -> None:
    form = asked(structured_outputs={"json_object": True}).response_format
    assert form == JsonObjectFormat()
    assert asked(structured_outputs={}).response_format == asked().response_format


@pytest.mark.parametrize("texts", [["yes", "no"], ["a.b", "(c)", "d|e", "$5^2", "x y", "é-/#"]])
def test_a_choice_allows_these_texts_and_no_others(texts: list[str]) -> None:
    form = asked(guided_choice=texts).response_format
    assert isinstance(form, RegexFormat)
    for text in texts:
        assert re.fullmatch(form.pattern, text)
    for text in ("axb", "c", "d", "maybe", ""):
        assert not re.fullmatch(form.pattern, text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"json": "{"}}, None),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * (MAX_ALTERNATIVES + 1)}, "guided_choice"),
        ({"guided_choice": ["ab" * 1000] * 3}, "guided_choice"),
        ({"guided_choice": ["a"], "min_tokens": 1}, "min_tokens"),
        ({"guided_choice": ["a"], "stop_token_ids": [5]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.kind.status == 400
    assert caught.value.param == param


def test_defaults_that_are_spelled_out_pass_and_the_rest_is_told() -> None:
    fields = {"skip_special_tokens": True, "include_stop_str_in_output": False}
    assert asked(**fields).ignored == ()
    told = asked(
        spaces_between_special_tokens=False,
        structured_outputs={"regex": "a", "disable_any_whitespace": True},
    )
    assert told.ignored == (
        "spaces_between_special_tokens",
        "structured_outputs.disable_any_whitespace",
    )
