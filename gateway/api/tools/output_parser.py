"""The seam between a model's text and the answer: text in, events out. Stages 2 and 9.

Stands between detokenize.py (text without broken characters, cut at stop strings) and answer.py
(JSON). A parser is a pure state machine of one choice of one request: no clock, no I/O, no failure.
The rules every implementation keeps, and tests hold it to:

    chunking   the events do not depend on how the text was cut into pieces, once deltas of one
               kind that follow each other are joined (`joined`)
    lossless   every event names the text it stands for: the `raw` of all events, joined, is the
               model's text, whatever the model wrote
    order      a call starts, has its arguments, and ends before anything else is said; calls are
               numbered 0, 1, ... ; deltas are never empty
    calm       text that only looks like a call is content, and nothing a model writes raises

What a model tells itself before it answers is split off first (`ReasoningParser`): what is between
the marks that its template knows (`<think>`, `</think>`) is `ReasoningDelta`, all that follows goes
to the parser that would have had the whole text. Some templates write the opening mark into the
prompt, or an empty pair where no reasoning is wanted, so how the text begins depends on how the
prompt ends (`state_of`). Only the first thing in a text can be reasoning: an answer that speaks of
the marks later on is an answer. White space around marks is padding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import msgspec

SPACES = " \t\r\n"
MAX_HELD_SPACES = 256
"""White space that is held because a mark may follow. Of a longer run only the end is held."""


class ContentDelta(msgspec.Struct, frozen=True):
    """More of what is said to the user; `raw` differs where a format's padding was dropped."""

    text: str
    raw: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model tells itself before it answers."""

    text: str
    raw: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call of an offered function begins. `raw` is the format's envelope up to the arguments."""

    index: int
    call_id: str
    name: str
    raw: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """More of the call's arguments, as JSON text."""

    index: int
    text: str
    raw: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The call is at its end. `whole`: its arguments are a JSON object and nothing is missing."""

    index: int
    whole: bool
    raw: str


class Padding(msgspec.Struct, frozen=True):
    """Text of the format that says nothing to anyone: marks, line breaks between calls."""

    raw: str


Event: TypeAlias = (
    ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd | Padding
)


class OutputParser(Protocol):
    """One choice of one request."""

    @property
    def num_calls(self) -> int:
        """Calls begun so far. More than 0 at the end: the finish reason `tool_calls`."""

    @property
    def reasoning_state(self) -> "ReasoningState":
        """Whether the text so far ends in reasoning."""

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece of text and was not before."""

    def flush(self) -> list[Event]:
        """The text is at its end: what was held back. Nothing is fed afterwards."""


class IdentityParser:
    """For requests without tools and models without reasoning: text is content."""

    num_calls = 0
    reasoning_state: "ReasoningState" = "done"

    def feed(self, text: str) -> list[Event]:
        """The text itself."""
        return [ContentDelta(text, text)] if text else []

    def flush(self) -> list[Event]:
        """Nothing: nothing is ever held back."""
        return []


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with deltas of one kind that follow each other made one. An answer may have a
    delta for each of its tokens, so a run of them is joined once."""
    out: list[Event] = []
    run: list[Event] = []
    for event in events:
        if run and not (type(event) is type(run[0]) and isinstance(event, _JOINABLE)):
            out.append(_one(run))
            run = []
        run.append(event)
    if run:
        out.append(_one(run))
    return out


_JOINABLE = (ContentDelta, ReasoningDelta, ArgumentsDelta, Padding)


def _one(run: Sequence[Event]) -> Event:
    last = run[-1]
    if len(run) == 1:
        return last
    raw = "".join(event.raw for event in run)
    if isinstance(last, Padding):
        return Padding(raw)
    text = "".join(event.text for event in run)  # type: ignore[union-attr]
    return msgspec.structs.replace(last, text=text, raw=raw)


def raw_text(events: Iterable[Event]) -> str:
    """The model's text that these events stand for."""
    return "".join(event.raw for event in events)


# inside: the prompt opened it; possible: the model may; done: the prompt closed it, or there is
# no such thing.
ReasoningState: TypeAlias = Literal["inside", "possible", "done"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What a model writes around its reasoning."""

    open: str
    close: str


_KNOWN_MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


def reasoning_marks(template: str) -> ReasoningMarks | None:
    """The marks a template knows, None where it knows none."""
    return next((marks for marks in _KNOWN_MARKS if marks.close in template), None)


def state_of(marks: ReasoningMarks | None, prompt_tail: str) -> ReasoningState:
    """How a text begins whose rendered prompt ends like this; a few hundred characters will do."""
    if marks is None:
        return "done"
    tail = prompt_tail.rstrip(SPACES)
    if tail.endswith(marks.open):
        return "inside"
    return "done" if tail.endswith(marks.close) else "possible"


class ReasoningParser:
    """Splits reasoning off for an inner parser. See OutputParser."""

    def __init__(self, inner: OutputParser, marks: ReasoningMarks, state: ReasoningState) -> None:
        self._inner = inner
        self._marks = marks
        self._state = state
        self._held = ""
        # Spaces at the next text's start belong to the mark before it.
        self._is_behind_mark = state == "inside"

    @property
    def num_calls(self) -> int:
        """See OutputParser."""
        return self._inner.num_calls

    @property
    def reasoning_state(self) -> ReasoningState:
        """See OutputParser."""
        return self._state

    def feed(self, text: str) -> list[Event]:
        """See OutputParser."""
        if self._state == "done" and not self._is_behind_mark:
            return self._inner.feed(text)
        if not text:
            return []
        self._held += text
        return self._advance(at_end=False)

    def flush(self) -> list[Event]:
        """See OutputParser."""
        return [*self._advance(at_end=True), *self._inner.flush()]

    def _advance(self, at_end: bool) -> list[Event]:
        events: list[Event] = []
        if self._state == "possible":
            self._look_for_open(events, at_end)
        if self._state == "inside":
            self._reason(events, at_end)
        if self._state == "done" and self._held:
            self._pass_on(events)
        return events

    def _look_for_open(self, events: list[Event], at_end: bool) -> None:
        """The mark, behind nothing but white space; else the text is an answer from the start."""
        body = self._held.lstrip(SPACES)
        start = len(self._held) - len(body)
        if start <= MAX_HELD_SPACES and body.startswith(self._marks.open):
            end = start + len(self._marks.open)
            events.append(Padding(self._held[:end]))
            self._held = self._held[end:]
            self._state, self._is_behind_mark = "inside", True
        elif at_end or start > MAX_HELD_SPACES or not self._marks.open.startswith(body):
            self._state = "done"

    def _reason(self, events: list[Event], at_end: bool) -> None:
        self._drop_spaces(events)
        held = self._held
        close = held.find(self._marks.close)
        if close >= 0:
            end = close
        else:
            end = len(held) - (0 if at_end else overlap(held, (self._marks.close,)))
        # White space before the mark is padding, and so may be what is at the end so far.
        num_told = max(len(held[:end].rstrip(SPACES)), end - MAX_HELD_SPACES)
        if close < 0 and at_end:
            num_told = end
        if num_told > 0:
            events.append(ReasoningDelta(held[:num_told], held[:num_told]))
        if close >= 0:
            end = close + len(self._marks.close)
            events.append(Padding(held[num_told:end]))
            self._held = held[end:]
            self._state, self._is_behind_mark = "done", True
        else:
            self._held = held[num_told:]

    def _pass_on(self, events: list[Event]) -> None:
        self._drop_spaces(events)
        if self._held:
            events.extend(self._inner.feed(self._held))
            self._held = ""

    def _drop_spaces(self, events: list[Event]) -> None:
        if self._is_behind_mark and self._held:
            body = self._held.lstrip(SPACES)
            if len(body) < len(self._held):
                events.append(Padding(self._held[: len(self._held) - len(body)]))
            self._held = body
            self._is_behind_mark = not body


def overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
