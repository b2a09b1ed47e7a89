"""A scope holds all that an answer depends on but the question; an exact key, that too."""

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import SamplingParams
from gateway.cache.scope import Place, Turn, place_of, question_of, turn_of
from gateway.prepare.wire import decode
from gateway.types import HostedModel, PreparedRequest

MODEL = HostedModel("m", "rev", "p", 100, 100, 0)
REQUEST = PreparedRequest("id", "chat", MODEL, [1, 2], 7, SamplingParams(0.5, 1.0, 3), [9], ("x",))
TURN = Turn("hello", b"around")
USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def place(tenant: str = "t", turn: Turn = TURN, embedder: str = "e", **change: Any) -> Place:
    return place_of(tenant, replace(REQUEST, **change), turn, False, embedder)


def turn(kind: Any = "chat", dated: bool = False, longest: int = 32, **body: Any) -> Turn:
    given = {"model": "m", **({"messages": [USER]} if kind == "chat" else {}), **body}
    return turn_of(decode(kind, json.dumps(given).encode()), longest, dated)


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "u"},
        {"turn": Turn("hello", b"other")},
        {"embedder": "f"},
        {"model": replace(MODEL, revision="other")},
        {"model": replace(MODEL, name="other")},
        {"kind": "completion"},
        {"sampling": SamplingParams(0.5, 1.0, 4)},
        {"sampling": SamplingParams(0.5, 0.9, 3)},
        {"sampling": SamplingParams(0.0, 1.0, 3)},
        {"stop_strings": ("x", "y")},
        {"stop_strings": ()},
        {"stop_token_ids": [8]},
        {"shown_token_ids": frozenset({4})},
    ],
    ids=str,
)
def test_a_scope_differs_by_all_that_is_around_the_question(change: dict[str, Any]) -> None:
    assert place(**change).scope != place().scope
    assert place(**change).exact_key != place().exact_key


@pytest.mark.parametrize("change", [{"prompt_token_ids": [1, 3]}, {"max_tokens": 8}], ids=str)
def test_an_exact_key_differs_by_the_prompt(change: dict[str, Any]) -> None:
    assert place(**change).scope == place().scope
    assert place(**change).exact_key != place().exact_key


def test_what_the_text_does_not_depend_on_is_not_there() -> None:
    same = place(request_id="b", stream=True, sampling=SamplingParams(0.0, 1.0, 2), priority=3)
    assert same == place(sampling=SamplingParams(0.0, 0.5, 1))
    drawn = replace(REQUEST, sampling=SamplingParams(0.5, 1.0, 4))
    assert place_of("t", drawn, TURN, True, "e") == place_of("t", REQUEST, TURN, True, "e")
    assert place_of("t", drawn, TURN, True, "e").scope != place().scope


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [SYSTEM, USER]},
        {"messages": [{"role": "system", "content": "Be long."}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "hi"}, USER]},
        {"messages": [{**USER, "name": "ann"}]},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"max_tokens": 5},
        {"max_tokens": 32},
        {"longest": 16},
        {"dated": True},
    ],
    ids=str,
)
def test_turns_differ_by_what_stands_around_them(body: dict[str, Any]) -> None:
    assert turn(**body).around != turn().around
    assert turn(**body).question == "hello"


def test_the_question_itself_is_not_around_it() -> None:
    other = turn(messages=[{"role": "user", "content": "bye"}])
    assert other.question == "bye"
    assert other.around == turn().around
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert turn(messages=[{"role": "user", "content": parts}]).question == "hel\nlo"


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": "hi"}],
        [USER, {"role": "assistant", "content": "hi"}, {**SYSTEM}],
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ],
    ],
    ids=["assistant", "system", "tool"],
)
def test_other_last_messages_are_no_question(messages: list[Any]) -> None:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert question_of(decode("chat", body)) == ""
    changed = [*messages[:-1], {**messages[-1], "content": "else"}]
    assert turn(messages=changed).around != turn(messages=messages).around


def test_a_completion_is_its_whole_prompt() -> None:
    assert turn("completion", prompt="Once upon").question == "Once upon"
    assert turn("completion", prompt="a").around == turn("completion", prompt="b").around
    assert turn("completion", prompt=[1, 2]).question == ""


def test_whether_the_length_is_the_callers_is_known() -> None:
    assert turn(max_tokens=5).names_length
    assert not turn().names_length
