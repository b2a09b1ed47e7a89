"""What a model tells itself before it answers, split off its text. Stages 2 and 9.

Comes in: a chat template's source; then a model's text in pieces. Goes out: the marks the template
knows (`<think>`, `</think>`), and events: what is between the marks is `ReasoningDelta`, all that
follows goes to the parser that would have had the whole text.

Some templates write the opening mark into the prompt, or an empty pair where no reasoning is
wanted, so how the text begins depends on how the prompt ends (`state_of`). Only the first thing in
a text can be reasoning: an answer that speaks of the marks later on is an answer. White space
around marks is padding.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.answer.output_parser import (
    Event,
    OutputParser,
    Padding,
    ReasoningDelta,
)
from gateway.answer.tools.cursor import MAX_HELD_SPACES, SPACES, overlap

# inside: the prompt opened it; possible: the model may; done: the prompt closed it, or there is
# no such thing.
ReasoningState: TypeAlias = Literal["inside", "possible", "done"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What a model writes around its reasoning."""

    open: str
    close: str


_KNOWN = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


def detect(template: str) -> ReasoningMarks | None:
    """The marks a template knows, None where it knows none."""
    return next((marks for marks in _KNOWN if marks.close in template), None)


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
