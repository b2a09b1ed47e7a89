"""The seam between a model's text and the answer: text in, events out. Part of stage 9.

Stands between detokenize.py (text without broken characters, cut at stop strings) and stream.py
(JSON and server-sent events). A parser is a pure state machine of one choice of one request: no
clock, no I/O, no failure. The rules every implementation keeps, and tests hold it to:

    chunking   the events do not depend on how the text was cut into pieces, once deltas of one
               kind that follow each other are joined (`joined`)
    lossless   every event names the text it stands for: the `raw` of all events, joined, is the
               model's text, whatever the model wrote
    order      a call starts, has its arguments, and ends before anything else is said; calls are
               numbered 0, 1, ... ; deltas are never empty
    calm       text that only looks like a call is content, and nothing a model writes raises
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import msgspec


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

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece of text and was not before."""

    def flush(self) -> list[Event]:
        """The text is at its end: what was held back. Nothing is fed afterwards."""


class IdentityParser:
    """For requests without tools and models without reasoning: text is content."""

    num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """The text itself."""
        return [ContentDelta(text, text)] if text else []

    def flush(self) -> list[Event]:
        """Nothing: nothing is ever held back."""
        return []


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with deltas of one kind that follow each other made one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case ContentDelta(), ContentDelta():
                out[-1] = ContentDelta(last.text + event.text, last.raw + event.raw)
            case ReasoningDelta(), ReasoningDelta():
                out[-1] = ReasoningDelta(last.text + event.text, last.raw + event.raw)
            case ArgumentsDelta(), ArgumentsDelta():
                out[-1] = ArgumentsDelta(event.index, last.text + event.text, last.raw + event.raw)
            case Padding(), Padding():
                out[-1] = Padding(last.raw + event.raw)
            case _:
                out.append(event)
    return out


def raw_text(events: Iterable[Event]) -> str:
    """The model's text that these events stand for."""
    return "".join(event.raw for event in events)
