"""Reasoning and template values, as callers spell them."""

import json
from typing import Any

import pytest

from gateway.api.reasoning_types import Reasoning
from gateway.api.wire import WireRequest, decode
from gateway.errors import ApiError


def chat(**fields: Any) -> WireRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return decode("chat", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, None),
        ({"reasoning_effort": None, "thinking": None}, None),
        ({"reasoning_effort": "none"}, Reasoning(False)),
        ({"reasoning_effort": "high"}, Reasoning(True, "high")),
        ({"thinking": {"type": "disabled"}}, Reasoning(False)),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, Reasoning(False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Reasoning(True, "", 9)),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, Reasoning(True, "low")),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, Reasoning(False)),
    ],
)
def test_what_is_said_of_reasoning(fields: dict[str, Any], read: Reasoning | None) -> None:
    assert chat(**fields).reasoning == read


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 70_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{n}": n for n in range(33)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}},
         "chat_template_kwargs.add_generation_prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_said(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.kind.code, caught.value.param) == ("invalid_request", param)


def test_values_for_the_template_are_read_as_they_are() -> None:
    values = {"enable_thinking": False, "documents": [{"a": 1}]}
    assert chat(chat_template_kwargs=values).template_values == values
    assert chat(chat_template_kwargs=None).template_values == {}
