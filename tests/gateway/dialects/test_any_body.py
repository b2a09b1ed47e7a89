"""Whatever a body holds, it is decoded or refused by an ApiError: nothing else comes out."""

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import token_wire, wire
from gateway.dialects import messages_wire, ollama_wire, responses_wire
from gateway.errors import ApiError
from tests.gateway.sealing_kit import SEAL

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
BODIES: dict[str, tuple[Callable[[bytes], object], Any]] = {
    "chat": (
        lambda raw: wire.decode("chat", raw, True),
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}], "extra": 1},
                {"role": "assistant", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]},
            ],
            "reasoning_effort": "low",
            "chat_template_kwargs": {"a": 1},
            "structured_outputs": {"choice": ["a"]},
        },
    ),
    "completion": (
        lambda raw: wire.decode("completion", raw, True),
        {"model": "m", "prompt": ["a", "b"], "stop_token_ids": [1], "prompt_logprobs": 1},
    ),
    "messages": (
        lambda raw: messages_wire.decode(raw, True, SEAL),
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                    {"type": "thinking", "thinking": "t", "signature": "s"}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ),
    "responses": (
        lambda raw: responses_wire.decode(raw, True, SEAL),
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    "ollama": (
        lambda raw: ollama_wire.decode_chat(raw, True, SEAL),
        {
            "model": "m",
            "messages": [{"role": "tool", "content": "a", "tool_call_id": "c"}],
            "options": {"temperature": 0.5, "stop": ["x"]},
            "format": SCHEMA,
            "think": "low",
        },
    ),
    "tokenize": (token_wire.decode_tokenize, {"model": "m", "prompt": "a"}),
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where anything stands in a body."""
    found = [path] if path else []
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@pytest.mark.parametrize("name", BODIES)
def test_the_bodies_are_right(name: str) -> None:
    decode, body = BODIES[name]
    decode(json.dumps(body).encode())


@given(name=st.sampled_from(sorted(BODIES)), data=st.data())
def test_nothing_but_an_api_error_comes_of_a_changed_body(name: str, data: st.DataObject) -> None:
    decode, body = BODIES[name]
    changed = copy.deepcopy(body)
    path = data.draw(st.sampled_from(places(body)))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    what = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "replace":
        inner[path[-1]] = data.draw(VALUES)
    elif what == "remove":
        del inner[path[-1]]
    elif isinstance(inner, dict):
        inner[data.draw(st.text(max_size=5))] = data.draw(VALUES)
    with contextlib.suppress(ApiError):
        decode(json.dumps(changed).encode())
