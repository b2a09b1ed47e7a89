"""Reasoning is split off wherever the text is cut, and nothing of the text is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.tools.output_parser import (
    ContentDelta,
    Event,
    IdentityParser,
    OutputParser,
    Padding,
    ReasoningDelta,
    ReasoningMarks,
    ReasoningParser,
    ReasoningState,
    ToolCallStart,
    raw_text,
    reasoning_marks,
    state_of,
)
from tests.gateway.api.tools.kit import CUTS, calls, check_order, content, cut, new_parser, run

THINK = ReasoningMarks("<think>", "</think>")
STATES: tuple[ReasoningState, ...] = ("inside", "possible", "done")


def parser(state: ReasoningState, inner: OutputParser | None = None) -> ReasoningParser:
    return ReasoningParser(inner or IdentityParser(), THINK, state)


def reasoning(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


@pytest.mark.parametrize(
    ("state", "text", "thought", "said"),
    [
        ("inside", "\nHm.\nYes.\n</think>\n\nIt is 4.", "Hm.\nYes.", "It is 4."),
        ("inside", "Hm.</think>It is 4.", "Hm.", "It is 4."),
        ("inside", "</think>It is 4.", "", "It is 4."),
        ("inside", "Hm, and then the budget en", "Hm, and then the budget en", ""),
        ("possible", "<think>\nHm.\n</think>\n\n4", "Hm.", "4"),
        ("possible", "\n<think>Hm.</think>4", "Hm.", "4"),
        ("possible", "It is 4.", "", "It is 4."),
        ("possible", "It is <think>4</think>.", "", "It is <think>4</think>."),
        ("possible", "<thi", "", "<thi"),
        ("possible", " \n", "", " \n"),
        ("possible", "<think>Hm.</think>a</think><think>b", "Hm.", "a</think><think>b"),
        ("done", "<think>4</think>", "", "<think>4</think>"),
    ],
)
def test_splits(state: ReasoningState, text: str, thought: str, said: str) -> None:
    for pieces in ([text], list(text)):
        events = run(parser(state), pieces)
        assert (reasoning(events), content(events)) == (thought, said)
        assert raw_text(events) == text


@given(
    state=st.sampled_from(STATES),
    parts=st.lists(
        st.sampled_from(
            [
                *("<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "é", "\n" * 300),
                *("<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"),
            ]
        ),
        max_size=12,
    ),
    cuts=CUTS,
)
def test_the_same_events_however_the_text_is_cut(
    state: ReasoningState, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    whole = run(parser(state, new_parser("hermes")), [text])
    assert raw_text(whole) == text
    check_order([event for event in whole if not isinstance(event, ReasoningDelta)])
    assert run(parser(state, new_parser("hermes")), cut(text, cuts)) == whole
    assert run(parser(state, new_parser("hermes")), list(text)) == whole


def test_calls_follow_reasoning_and_are_not_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    split = parser("inside", new_parser("hermes"))
    events = run(split, [f"I could {call} here.</think>\n{call}"])
    assert reasoning(events) == f"I could {call} here."
    assert calls(events) == [("f", {"a": 1})]
    assert split.num_calls == 1
    assert isinstance(events[1], Padding)
    assert isinstance(events[2], ToolCallStart)


def test_reasoning_streams() -> None:
    split = parser("inside")
    assert split.feed("Let me") == [ReasoningDelta("Let me", "Let me")]
    assert split.feed(" see ") == [ReasoningDelta(" see", " see")]
    assert split.feed("</thi") == []
    assert split.feed("nk>So") == [Padding(" </think>"), ContentDelta("So", "So")]


def test_a_long_run_of_spaces_is_not_held() -> None:
    split = parser("inside")
    events = split.feed("a" + "\n" * 10_000)
    assert len(raw_text(events)) > 9_000


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", "inside"),
        ("<|im_start|>assistant\n", "possible"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "done"),
        ("<think> in a question<|im_end|>\n<|im_start|>assistant\n", "possible"),
    ],
)
def test_how_the_prompt_ends_says_how_the_answer_begins(tail: str, state: str) -> None:
    assert state_of(THINK, tail) == state
    assert state_of(None, tail) == "done"


def test_marks_are_those_of_the_template() -> None:
    assert reasoning_marks("{{ '<think>' + x + '</think>' }}") == THINK
    assert reasoning_marks("{{ '[THINK]' }}{{ '[/THINK]' }}") == ReasoningMarks(
        "[THINK]", "[/THINK]"
    )
    assert reasoning_marks("{{ messages }}") is None
