"""What headers say of the cache, and where in it a request belongs: a scope holds all that an
answer depends on but the question; an exact key, that too."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.protocol import SamplingParams
from gateway.api.wire import decode
from gateway.cache.cache_request import (
    NO_CACHE_HEADERS,
    CachePlace,
    Turn,
    place_of,
    question_of,
    read_cache_headers,
    turn_of,
)
from gateway.cache.policy.cache_rule import CacheHeaders
from gateway.errors import ApiError
from gateway.types import HostedModel, PreparedRequest


def headers_of(has_embedder: bool = True, **headers: str) -> CacheHeaders:
    return read_cache_headers({k.replace("_", "-"): v for k, v in headers.items()}, has_embedder)


def test_nothing_said_is_no_wish() -> None:
    assert headers_of() is NO_CACHE_HEADERS


@pytest.mark.parametrize("mode", ["off", "exact", "semantic", "shadow"])
def test_modes(mode: str) -> None:
    assert headers_of(x_polyhost_cache_mode=mode).mode == mode


@pytest.mark.parametrize("mode", ["", "Exact", "on", "exact,semantic"])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(ApiError, match="must be one of off, exact, semantic, shadow"):
        headers_of(x_polyhost_cache_mode=mode)


def test_without_an_embedder_meanings_are_refused_with_how_to_set_one_up() -> None:
    for mode in ("semantic", "shadow"):
        with pytest.raises(ApiError, match="polyhost models add NAME") as refused:
            headers_of(has_embedder=False, x_polyhost_cache_mode=mode)
        assert refused.value.kind.status == 400
    assert headers_of(has_embedder=False, x_polyhost_cache_mode="exact").mode == "exact"


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ("max-age=60", CacheHeaders(max_age_s=60.0)),
        ('Max-Age="60", public', CacheHeaders(max_age_s=60.0)),
        ("max-age=0", CacheHeaders(max_age_s=0.0)),
        ("no-cache", CacheHeaders(reads=False)),
        ("no-store", CacheHeaders(reads=False, keeps=False)),
        ("no-cache, max-age=9", CacheHeaders(max_age_s=9.0, reads=False)),
        ("private, stale-if-error=5", CacheHeaders()),
        ("no-store," * 100, CacheHeaders()),
        ("", CacheHeaders()),
    ],
)
def test_cache_control(control: str, expected: CacheHeaders) -> None:
    assert headers_of(cache_control=control) == expected


@pytest.mark.parametrize("age", ["", "-1", "1.5", "x", "1" * 13, "٣"])
def test_ages_that_are_none_are_refused(age: str) -> None:
    with pytest.raises(ApiError, match="max-age must be a whole number of seconds"):
        headers_of(cache_control=f"max-age={age}")


def test_sampled() -> None:
    assert headers_of(x_polyhost_cache_sampled="true").sampled is True
    assert headers_of(x_polyhost_cache_sampled="false").sampled is False
    with pytest.raises(ApiError, match="must be true or false"):
        headers_of(x_polyhost_cache_sampled="yes")


MODEL = HostedModel("m", "rev", "p", 100, 100, 0)
REQUEST = PreparedRequest("id", "chat", MODEL, [1, 2], 7, SamplingParams(0.5, 1.0, 3), [9], ("x",))
TURN = Turn("hello", b"around")
USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def place(tenant: str = "t", turn: Turn = TURN, embedder: str = "e", **change: Any) -> CachePlace:
    return place_of(tenant, msgspec.structs.replace(REQUEST, **change), turn, False, embedder)


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
    drawn = msgspec.structs.replace(REQUEST, sampling=SamplingParams(0.5, 1.0, 4))
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
        {"user": "alice"},
        {"safety_identifier": "alice"},
        {"chat_template_kwargs": {"a": 1}},
        {"chat_template_kwargs": {"a": 10**30}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 10**30}}}]},
    ],
    ids=str,
)
def test_turns_differ_by_what_stands_around_them(body: dict[str, Any]) -> None:
    assert turn(**body).around != turn().around
    assert turn(**body).question == "hello"


def test_each_user_of_the_callers_has_a_place_and_the_two_fields_are_not_mixed_up() -> None:
    turns = [
        turn(),
        turn(user="alice"),
        turn(user="bob"),
        turn(safety_identifier="alice"),
        turn(user="alice", safety_identifier="bob"),
        turn(user="bob", safety_identifier="alice"),
        turn(user="a", safety_identifier="lice"),
    ]
    assert len({one.around for one in turns}) == len(turns)
    assert turn(user="", safety_identifier=None) == turn()
    assert turn("completion", prompt="?", user="alice") != turn("completion", prompt="?")


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
