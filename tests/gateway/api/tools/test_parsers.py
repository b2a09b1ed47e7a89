"""All parsers of tool calls are held to the rules of output_parser.py, on good text and bad."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.tools.cursor import MAX_HELD_CHARS
from gateway.api.tools.output_parser import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Padding,
    ToolCallEnd,
    ToolCallStart,
    joined,
    raw_text,
)
from tests.gateway.api.tools import kit
from tests.gateway.api.tools.kit import (
    CUTS,
    FORMAT,
    MADE,
    NOISE,
    PARSERS,
    SAID,
    WRITERS,
    are_whole,
    argument_texts,
    calls,
    check_order,
    content,
    cut,
    new_parser,
    parse,
    run,
)


@given(fmt=FORMAT, said=SAID, made=MADE, cuts=CUTS)
def test_content_and_calls_come_out_as_they_were_written(
    fmt: str, said: str, made: list[kit.Call], cuts: list[int]
) -> None:
    text = WRITERS[fmt](said, made)
    events = run(new_parser(fmt), cut(text, cuts))
    assert content(events) == said
    assert calls(events) == made
    assert all(are_whole(events))
    assert raw_text(events) == text
    check_order(events)


@given(fmt=FORMAT, text=NOISE, cuts=CUTS)
@example(fmt="hermes", text='<tool_call>{"name": "f", "arguments": {"a": "\x01"}}', cuts=[])
@example(fmt="mistral", text='[TOOL_CALLS][{"name": "f"}, {', cuts=[])
def test_noise_gives_the_same_events_however_it_is_cut(
    fmt: str, text: str, cuts: list[int]
) -> None:
    _check_cutting(fmt, text, cuts)


@given(case=kit.spoiled(), cuts=CUTS)
def test_spoiled_calls_give_the_same_events_however_they_are_cut(
    case: tuple[str, str], cuts: list[int]
) -> None:
    _check_cutting(*case, cuts)


def _check_cutting(fmt: str, text: str, cuts: list[int]) -> None:
    whole = parse(fmt, text)
    assert raw_text(whole) == text
    check_order(whole)
    assert run(new_parser(fmt), list(text)) == whole
    assert run(new_parser(fmt), cut(text, cuts)) == whole
    for is_whole, arguments in zip(are_whole(whole), argument_texts(whole), strict=True):
        if is_whole:
            assert isinstance(json.loads(arguments), dict)
    if not whole or all(isinstance(event, ContentDelta) for event in whole):
        assert content(whole) == text


@given(fmt=FORMAT, said=SAID, made=MADE, most=st.integers(0, 2))
def test_no_more_calls_than_allowed(fmt: str, said: str, made: list[kit.Call], most: int) -> None:
    text = WRITERS[fmt](said, made)
    parser = new_parser(fmt, max_calls=most)
    events = run(parser, [text])
    assert calls(events) == made[:most]
    assert raw_text(events) == text
    assert parser.num_calls == min(most, len(made))


@pytest.mark.parametrize("fmt", PARSERS)
def test_nothing_gives_nothing(fmt: str) -> None:
    parser = new_parser(fmt)
    assert parser.feed("") == []
    assert parser.flush() == []
    assert parser.flush() == []


@pytest.mark.parametrize("fmt", PARSERS)
def test_arguments_stream_before_the_call_is_complete(fmt: str) -> None:
    text = WRITERS[fmt]("", [("f", {"a": "x" * 50, "b": "y" * 50})])
    parser = new_parser(fmt)
    events = [event for char in text[: len(text) * 2 // 3] for event in parser.feed(char)]
    assert any(isinstance(event, ToolCallStart) for event in events)
    said = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert said.startswith('{"a": "xxxx')
    assert not any(isinstance(event, ToolCallEnd) for event in events)


@pytest.mark.parametrize("fmt", PARSERS)
def test_a_function_not_on_offer_is_content(fmt: str) -> None:
    text = WRITERS[fmt]("", [("rm", {"a": 1})])
    assert parse(fmt, text) == [ContentDelta(text, text)]


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "hal'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "hal'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "hal'),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": "hal'),
    ],
)
def test_a_call_cut_off_by_the_budget_is_told_as_far_as_it_goes(fmt: str, text: str) -> None:
    events = parse(fmt, text)
    assert argument_texts(events) == ['{"a": "hal']
    assert are_whole(events) == [False]


def test_a_pythonic_call_cut_off_keeps_its_whole_arguments() -> None:
    events = parse("pythonic", "[f(a=1, b='hal")
    assert argument_texts(events) == ['{"a": 1, b=\'hal']
    assert are_whole(events) == [False]


def test_hermes_with_words_around() -> None:
    text = 'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n\nThere.'
    assert parse("hermes", text) == [
        ContentDelta("Let me see.", "Let me see."),
        ToolCallStart(0, "id0", "f", '\n<tool_call>{"name":"f","arguments":'),
        ArgumentsDelta(0, "{}", "{}"),
        ToolCallEnd(0, True, "}</tool_call>"),
        Padding("\n\n"),
        ContentDelta("There.", "There."),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        '<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}, "type": "x"}</tool_call>',
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>{"name": "\\u0066", "arguments": {"a": 1}} </tool_call>',
    ],
)
def test_objects_that_name_a_call(text: str) -> None:
    events = parse("hermes", text)
    assert calls(events) == [("f", {"a": 1})]
    assert are_whole(events) == [True]
    assert content(events) == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{}</tool_call>",
        "if x < tool_call >",
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    assert parse("hermes", text) == [ContentDelta(text, text)]


def test_control_characters_in_arguments_are_escaped() -> None:
    events = parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>')
    assert calls(events) == [("f", {"a": "x\n\ty"})]


def test_broken_arguments_keep_every_character() -> None:
    events = parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": \'x\'}}</tool_call>ok')
    assert argument_texts(events) == ["{\"a\": 'x'}}"]
    assert are_whole(events) == [False]
    assert content(events) == "ok"


def test_llama_calls_only_at_the_start_or_behind_the_mark() -> None:
    call = '{"name": "f", "parameters": {}}'
    assert calls(parse("llama3_json", f"\n {call}")) == [("f", {})]
    assert calls(parse("llama3_json", f"Well. <|python_tag|>{call}")) == [("f", {})]
    text = f"For example: {call}"
    assert parse("llama3_json", text) == [ContentDelta(text, text)]


def test_mistral_passes_over_ids_of_the_models_own() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}'
    assert calls(parse("mistral_args", text)) == [("f", {"a": 1})]
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcDEF123"}]'
    assert calls(parse("mistral", text)) == [("f", {"a": 1})]


def test_pythonic_values() -> None:
    text = "[f(a='it\\'s', b=[1, (2,)], c={'k': None, \"t\": true}, d=-1.5e3, e='''q'q''')]"
    assert calls(parse("pythonic", text)) == [
        ("f", {"a": "it's", "b": [1, [2]], "c": {"k": None, "t": True}, "d": -1500.0, "e": "q'q"})
    ]


@pytest.mark.parametrize(
    "text", ["[f(1)]", "[f(a=g())]", "[f(a=1 + 1)]", "[1, 2]", "[f]", "f(a=1)"]
)
def test_what_is_no_list_of_calls_is_content(text: str) -> None:
    assert parse("pythonic", text) == [ContentDelta(text, text)]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "x": "' + "a" * (MAX_HELD_CHARS + 10),
        "<tool_call>" + " " * (MAX_HELD_CHARS + 10) + "{",
        "<tool_call>" + '{"a":' * 300,
    ],
    ids=["string", "spaces", "depth"],
)
def test_what_is_held_is_bounded(text: str) -> None:
    whole = parse("hermes", text)
    assert raw_text(whole) == content(whole) == text
    size = 1 << 12
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert run(new_parser("hermes"), pieces) == whole


def test_a_delta_for_each_token_is_joined_once() -> None:
    call = ToolCallStart(0, "c", "f", "s"), ArgumentsDelta(0, "{", "{"), ArgumentsDelta(0, "}", "}")
    end = ToolCallEnd(0, True, "e")
    begun = time.process_time()
    made = joined([*[ContentDelta("abcd", "abcd ")] * 200_000, Padding(" "), *call, end, end])
    assert time.process_time() - begun < 1.0  # each joined to those before: above 4 s
    assert made == [
        ContentDelta("abcd" * 200_000, "abcd " * 200_000),
        Padding(" "),
        call[0],
        ArgumentsDelta(0, "{}", "{}"),
        end,
        end,
    ]


def test_long_arguments_stream_without_being_held() -> None:
    head = '<tool_call>{"name": "f", "arguments": {"a": "'
    parser = new_parser("hermes")
    events: list[Event] = list(parser.feed(head))
    for _ in range(100):
        new = parser.feed("x" * 2000)
        assert [event.raw for event in new] == ["x" * 2000]
        events += new
    events += [*parser.feed('"}}</tool_call>'), *parser.flush()]
    assert calls(events) == [("f", {"a": "x" * 200_000})]
