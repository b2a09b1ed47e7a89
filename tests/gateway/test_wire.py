"""Request bodies: what is served gets through, all else is refused with the field's name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.wire import Kind, decode

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refused(kind: Kind, body: Any) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        decode(kind, raw)
    assert caught.value.kind.status == 400
    return caught.value


def chat(**fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields}


def test_a_chat_with_everything_that_is_served() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "audio": None},
            {"role": "user", "content": "d", "name": "ann"},
        ],
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": -3,
        "stop": ["x", "y"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = decode("chat", json.dumps(body).encode())
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "ann"},
    )
    assert (request.max_tokens, request.temperature, request.top_p) == (7, 0.0, 0.5)
    assert (request.seed, request.stop) == (-3, ("x", "y"))
    assert request.stream
    assert request.include_usage


def test_defaults() -> None:
    request = decode("chat", json.dumps(chat()).encode())
    assert (request.temperature, request.top_p, request.seed) == (1.0, 1.0, None)
    assert (request.max_tokens, request.stop, request.stream) == (None, (), False)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0, "store": False, "service_tier": "auto"},
        {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"tools": None, "logit_bias": None, "stop": None, "stream_options": None, "n": None},
        {"modalities": ["text"], "parallel_tool_calls": True, "reasoning_effort": None},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ],
)
def test_neutral_and_ignored_fields_pass(fields: dict[str, Any]) -> None:
    decode("chat", json.dumps(chat(**fields)).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_k": 5}, "top_k"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    ],
)  # fmt: skip
def test_unserved_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused("chat", chat(**fields))
    assert (error.kind.code, error.param) == ("unsupported_parameter", param)
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
         "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"seed": 1.5}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
    ],
)  # fmt: skip
def test_wrong_types_and_ranges_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused("chat", chat(**fields))
    assert (error.kind.code, error.param) == ("invalid_request", param)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_fields_are_named(missing: str) -> None:
    body = {name: value for name, value in CHAT.items() if name != missing}
    error = refused("chat", body)
    assert error.param == missing
    assert error.message == f"{missing} is required"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800", "messages": []}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]} {}',
        b'{"model": "m", "tools": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model": "m", "logit_bias": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
)
def test_what_is_no_request_at_all(raw: bytes) -> None:
    assert refused("chat", raw).kind.code == "invalid_request"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        ("", ""),
        ([1, 2, 3], (1, 2, 3)),
        (["text"], "text"),
        ([[4, 5]], (4, 5)),
        ([7], (7,)),
    ],
)
def test_prompts(prompt: Any, read: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert decode("completion", body).prompt == read


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (["a", "b"], "unsupported_parameter"),
        ([[1], [2]], "unsupported_parameter"),
        ([1, "a"], "unsupported_parameter"),
        ([], "invalid_request"),
        ([[]], "invalid_request"),
        ([1.5], "invalid_request"),
        (None, "invalid_request"),
        ({}, "invalid_request"),
    ],
)
def test_prompts_that_are_not_served(prompt: Any, code: str) -> None:
    error = refused("completion", {"model": "m", "prompt": prompt})
    assert error.kind.code == code
    assert error.param is not None
    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused("completion", {**COMPLETION, **fields})
    assert (error.kind.code, error.param) == ("unsupported_parameter", param)


def survives(kind: Kind, raw: bytes) -> None:
    """Decodes, or is refused: nothing else comes out."""
    with contextlib.suppress(ApiError):
        decode(kind, raw)


@given(st.binary(max_size=200), st.sampled_from(["chat", "completion"]))
def test_no_bytes_break_the_decoder(raw: bytes, kind: Kind) -> None:
    survives(kind, raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*CHAT, "stop", "n", "tools", "seed", "stream"]), JSON))
def test_no_json_breaks_the_decoder(fields: dict[str, Any]) -> None:
    survives("chat", json.dumps({**CHAT, **fields}).encode())
