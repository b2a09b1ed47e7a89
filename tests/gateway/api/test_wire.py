"""Request bodies: what is served gets through, all else is refused with the field's name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from gateway.api.tool_types import CalledFunction, ToolCall
from gateway.api.wire import Kind, decode
from gateway.errors import ApiError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
URL = {"url": "data:image/png;base64,iVBORw0KGgo="}


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
    assert (request.max_tokens, request.sampling) == (7, SamplingParams(temperature=0, top_p=0.5))
    assert (request.seed, request.stop) == (-3, ("x", "y"))
    assert request.stream
    assert request.include_usage


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "default", "priority": 3}, 3),
        ({"service_tier": "priority"}, -1),
        ({"service_tier": "flex"}, 0),
        ({"service_tier": "flex", "priority": 1}, 1),
        ({"priority": -1000}, -1000),
    ],
)
def test_priorities_among_a_tenant_s_own(fields: dict[str, Any], priority: int) -> None:
    assert decode("chat", json.dumps(chat(**fields)).encode()).priority == priority


@pytest.mark.parametrize(
    "fields",
    [{"priority": 1001}, {"priority": 0.5}, {"priority": 1, "service_tier": "priority"}],
)
def test_priorities_that_cannot_be(fields: dict[str, Any]) -> None:
    error = refused("chat", chat(**fields))
    assert (error.kind.code, error.param) == ("invalid_request", "priority")


def test_defaults() -> None:
    request = decode("chat", json.dumps(chat()).encode())
    assert (request.sampling, request.seed) == (SamplingParams(), None)
    assert (request.max_tokens, request.stop, request.stream) == (None, (), False)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False},
        {"continue_final_message": False, "add_generation_prompt": True},
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
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"best_of": 2}, "best_of"),
        ({"guided_jsn": {}}, "guided_jsn"),
        ({"echo": True}, "echo"),
        ({"stream": True, "stream_options": {"include_everything": True}},
         "stream_options.include_everything"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]},
         "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "content": "x", "images": [URL]}]},
         "messages[0].images"),
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
         "messages[1].tool_call_id"),
        ({"messages": [{"role": "function", "content": "b"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "b", "tool_call_id": "c"}]},
         "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "b", "reasoning_content": "c"}]},
         "messages[0].reasoning_content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
         "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
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
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e6}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)  # fmt: skip
def test_wrong_types_and_ranges_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused("chat", chat(**fields))
    assert (error.kind.code, error.param) == ("invalid_request", param)


SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": URL}, "type"),
        ({"image_url": URL, "type": "image_url"}, "type"),
        ({"type": "image_url"}, "type"),
        ({"type": "image", "source": SOURCE}, "type"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "type"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "type"),
        ({"type": "text", "text": "hi", "image_url": URL}, "image_url"),
    ],
)
def test_images_and_other_content_are_refused_by_name(part: dict[str, Any], param: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    error = refused("chat", chat(messages=[{"role": "user", "content": content}]))
    assert error.kind.status == 400
    assert (error.kind.code, error.param) == (
        "unsupported_parameter",
        f"messages[0].content[1].{param}",
    )
    if param == "type":
        assert f"content of type {part['type']!r} is not supported, models read text only" in str(
            error
        )


ASSISTANT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"messages": ASSISTANT, "continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [*ASSISTANT, {"role": "assistant", "content": ""}],
          "continue_final_message": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_contradictions_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused("chat", chat(**fields))
    assert (error.kind.code, error.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_contradictions_in_completions(fields: dict[str, Any], param: str) -> None:
    error = refused("completion", {**COMPLETION, **fields})
    assert (error.kind.code, error.param) == ("invalid_request", param)


def test_all_ways_of_sampling() -> None:
    body = chat(
        top_k=40, min_p=0.1, frequency_penalty=-2, presence_penalty=2, repetition_penalty=1.2,
        logit_bias={"5": -100, "7": 0.5}, min_tokens=3, max_tokens=9, ignore_eos=True, n=4,
        logprobs=True, top_logprobs=20,
    )  # fmt: skip
    request = decode("chat", json.dumps(body).encode())
    assert request.sampling == SamplingParams(
        top_k=40, min_p=0.1, repetition_penalty=1.2, frequency_penalty=-2.0, presence_penalty=2.0,
        logit_bias={5: -100.0, 7: 0.5}, min_tokens=3,
    )  # fmt: skip
    assert (request.ignore_eos, request.n) == (True, 4)
    assert request.logprobs == 20
    assert decode("chat", json.dumps(chat(logprobs=True)).encode()).logprobs == 0
    assert decode("chat", json.dumps(chat(top_k=-1)).encode()).sampling.top_k == 0


def test_an_echo_and_its_scores() -> None:
    body = {**COMPLETION, "echo": True, "logprobs": 5, "max_tokens": 0}
    request = decode("completion", json.dumps(body).encode())
    assert (request.echo, request.logprobs, request.max_tokens) == (True, 5, 0)
    assert decode("completion", json.dumps(COMPLETION).encode()).logprobs == -1


def test_a_last_message_to_continue() -> None:
    body = chat(messages=ASSISTANT, continue_final_message=True)
    request = decode("chat", json.dumps(body).encode())
    assert request.continue_final_message
    assert not request.add_generation_prompt
    request = decode("chat", json.dumps(chat(add_generation_prompt=False)).encode())
    assert (request.add_generation_prompt, request.continue_final_message) == (False, False)


def test_messages_with_calls_reasoning_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    request = decode("chat", json.dumps(chat(messages=messages)).encode())
    read = ToolCall(id="c1", function=CalledFunction(name="f", arguments='{"a": 1}'))
    assert request.messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [read], "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    )


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
    ("prompt", "read"),
    [
        (["a", "b", ""], ("a", "b", "")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["\\", '"', "x"], ("\\", '"', "x")),
        (["a"] * 2048, ("a",) * 2048),
    ],
)
def test_several_prompts(prompt: Any, read: Any) -> None:
    request = decode("completion", json.dumps({"model": "m", "prompt": prompt}).encode())
    assert (request.prompt, *request.more_prompts) == read


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([1, "a"], "invalid_request"),
        ([["a"]], "invalid_request"),
        ([[1], []], "invalid_request"),
        (["a"] * 2049, "invalid_request"),
        ([[1]] * 2049, "invalid_request"),
        (["\\"] * 2049, "invalid_request"),
        ([], "invalid_request"),
        ([[]], "invalid_request"),
        ([1.5], "invalid_request"),
        (None, "invalid_request"),
        ({}, "invalid_request"),
    ],
)
def test_prompts_that_cannot_be(prompt: Any, code: str) -> None:
    error = refused("completion", {"model": "m", "prompt": prompt})
    assert error.kind.code == code
    assert error.param is not None
    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"tools": []}, "tools"),
        ({"continue_final_message": True}, "continue_final_message"),
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
