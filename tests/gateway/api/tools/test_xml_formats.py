"""Calls whose arguments stand between tags: what a value is goes by the function's schema."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.tools.cursor import Cursor
from gateway.api.tools.output_parser import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ToolCallStart,
    raw_text,
)
from gateway.api.tools.xml_formats import GlmXmlParser, QwenXmlParser
from tests.gateway.api.tools.kit import (
    CUTS,
    JSON,
    SAID,
    are_whole,
    argument_texts,
    calls,
    check_order,
    content,
    cut,
    run,
    xml_text,
)

PARSERS: dict[str, type[Cursor]] = {"qwen_xml": QwenXmlParser, "glm_xml": GlmXmlParser}
FORMAT = st.sampled_from(sorted(PARSERS))
KEYS = {"text": "string", "any": None, "maybe": ["string", "null"], "number": "number"}
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": kind} if kind else {} for key, kind in KEYS.items()},
}
NAMES = ("f", "g.h", "look_up-2")
SCHEMAS = dict.fromkeys(NAMES, SCHEMA)
# A text may hold anything but the end of its own tag.
TEXT = st.text(max_size=30).filter(lambda text: "</" not in text and not text.endswith(("<", "\n")))
VALUES = {
    "text": TEXT,
    "any": JSON.filter(lambda value: not isinstance(value, str)),
    "maybe": st.none() | st.sampled_from(["1", "true", "a b", "{}"]),
    "number": st.integers(-1000, 1000) | st.floats(-100, 100),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
MADE = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3)
Call = tuple[str, dict[str, Any]]


def new_parser(fmt: str, schemas: Any = SCHEMAS) -> Cursor:
    ids = iter(range(10_000))
    return PARSERS[fmt](NAMES, lambda: f"id{next(ids)}", None, schemas)


def check(fmt: str, text: str, cuts: list[int]) -> list[Event]:
    whole = run(new_parser(fmt), [text])
    assert raw_text(whole) == text
    check_order(whole)
    assert run(new_parser(fmt), list(text)) == whole
    assert run(new_parser(fmt), cut(text, cuts)) == whole
    for is_whole, arguments in zip(are_whole(whole), argument_texts(whole), strict=True):
        if is_whole:
            assert isinstance(json.loads(arguments), dict)
    return whole


@given(fmt=FORMAT, said=SAID, made=MADE, cuts=CUTS)
def test_content_and_calls_come_out_as_they_were_xml_text(
    fmt: str, said: str, made: list[Call], cuts: list[int]
) -> None:
    events = check(fmt, xml_text(fmt, said, made), cuts)
    assert content(events) == said
    assert calls(events) == made
    assert all(are_whole(events))


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "f", "\n", " ",
        "<parameter=text>", "<parameter=any>", "</parameter>", "<parameter=", ">", "<", "</",
        "<arg_key>text</arg_key>", "<arg_key>any</arg_key>", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", '{"a": 1}', '"', "\\", "true", "True", "1", "é", "\x01",
    ]
)  # fmt: skip


@given(fmt=FORMAT, text=st.lists(FRAGMENTS, max_size=16).map("".join), cuts=CUTS)
def test_noise_gives_the_same_events_however_it_is_cut(
    fmt: str, text: str, cuts: list[int]
) -> None:
    check(fmt, text, cuts)


@given(fmt=FORMAT, made=MADE, data=st.data(), cuts=CUTS)
def test_spoiled_calls_give_the_same_events_however_they_are_cut(
    fmt: str, made: list[Call], data: st.DataObject, cuts: list[int]
) -> None:
    text = xml_text(fmt, "", made)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 8)))
    check(fmt, text[:start] + data.draw(FRAGMENTS | st.just("")) + text[end:], cuts)


@pytest.mark.parametrize("fmt", PARSERS)
def test_a_text_streams_as_it_comes(fmt: str) -> None:
    text = xml_text(fmt, "", [("f", {"text": 'say "x"\n' * 20_000})])
    parser = new_parser(fmt)
    events = [event for at in range(0, 2000, 7) for event in parser.feed(text[at : at + 7])]
    assert isinstance(events[0], ToolCallStart)
    said = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert said.startswith('{"text": "say \\"x\\"\\nsay')
    assert len(said) > 1000
    # However long it is: nothing of it is held.
    assert calls(run(new_parser(fmt), [text]))[0][1]["text"].count("say") == 20_000


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("string", "42", "42"),
        ("string", "null", "null"),
        ("integer", "42", 42),
        ("boolean", "True", True),
        (["string", "null"], "null", None),
        (["string", "null"], "42", "42"),
        (["string", "integer"], "42", 42),
        (None, "42", 42),
        (None, "forty two", "forty two"),
        (None, '{"a": [1]}', {"a": [1]}),
        ("array", "not json", "not json"),
    ],
)
@pytest.mark.parametrize("fmt", PARSERS)
def test_what_a_value_is(fmt: str, kind: Any, value: str, read: Any) -> None:
    schema = {"properties": {"a": {"type": kind} if kind else {}}}
    text = xml_text(fmt, "", [("f", {"a": value})])
    assert calls(run(new_parser(fmt, {"f": schema}), [text])) == [("f", {"a": read})]


def test_words_of_an_enum_are_texts() -> None:
    schema = {"properties": {"a": {"enum": ["1", "2"]}}}
    text = xml_text("qwen_xml", "", [("f", {"a": "1"})])
    assert calls(run(new_parser("qwen_xml", {"f": schema}), [text])) == [("f", {"a": "1"})]


def test_a_call_without_the_outer_mark() -> None:
    """Qwen3-Coder leaves it out at times."""
    text = "So:\n<function=f>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"
    events = check("qwen_xml", text, [])
    assert content(events) == "So:"
    assert calls(events) == [("f", {"text": "x"})]


@pytest.mark.parametrize("fmt", PARSERS)
def test_a_function_not_on_offer_is_content(fmt: str) -> None:
    text = xml_text(fmt, "", [("rm", {"text": "x"})])
    assert run(new_parser(fmt), [text]) == [ContentDelta(text, text)]


@pytest.mark.parametrize("fmt", PARSERS)
def test_no_more_calls_than_allowed(fmt: str) -> None:
    made: list[Call] = [("f", {"text": "x"}), ("f", {"text": "y"})]
    text = xml_text(fmt, "", made)
    parser = PARSERS[fmt](NAMES, lambda: "id", 1, SCHEMAS)
    assert calls(run(parser, [text])) == made[:1]
