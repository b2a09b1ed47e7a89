"""The seam between pieces of choices and bytes of an answer. Part of stage 9.

Each API spells the same answer in its own way: OpenAI's in answer.py, others in
gateway/dialects/. Comes in: pieces in the order they come, and at the end how the choices ended and
what was used. Goes out: bytes. An encoder serves one answer, has no clock and no I/O, and nothing
between stage 2 and here knows which one it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from gateway.answer.choice import Piece
from gateway.answer.text_parts import TextParts
from gateway.errors import ApiError
from gateway.prepare.prepare import Prepared


class UsageFigures(msgspec.Struct, frozen=True):
    """Tokens as the client sees them; the posting says the same."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = 0
    """Of the completion's; None: not known, of a kept answer."""
    elapsed_s: float = 0.0
    """Since the request arrived, and until its first token; at the end of an answer."""
    first_token_s: float = 0.0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body


UsageNow: TypeAlias = Callable[[], UsageFigures]
"""Of the answer so far."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How a choice ended: OpenAI's word for it, and the stop string, if there was one."""

    index: int
    finish_reason: str
    stop_string: str = ""


class StreamEncoder(Protocol):
    """Writes the events of one streamed answer."""

    def piece(self, piece: Piece) -> bytes:
        """What is new of a choice; may be nothing."""

    def end(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """The rest, up to the end of the stream."""

    def error(self, error: ApiError) -> bytes:
        """What a stream ends with that has begun and cannot go on."""


class WholeEncoder(Protocol):
    """Gathers one answer that is not streamed."""

    def add(self, piece: Piece) -> None:
        """What is new of a choice."""

    def whole(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """The answer's body."""


class AnswerFormat(Protocol):
    """How one API spells answers."""

    def stream(self, prepared: Prepared, usage_now: UsageNow) -> StreamEncoder:
        """For an answer that is streamed."""

    def whole(self, prepared: Prepared) -> WholeEncoder:
        """For one that is not."""


def usage_of(parts: TextParts, times_s: tuple[float, float] = (0.0, 0.0)) -> UsageFigures:
    """Of the text so far; all of it once it has ended. `times_s`: `elapsed_s`, `first_token_s`."""
    num_prompt = parts.prepared.request.num_prompt_tokens
    reasoned = parts.num_reasoning_tokens
    return UsageFigures(num_prompt, parts.num_tokens, parts.cached_tokens, reasoned, *times_s)


def ends_of(parts: TextParts) -> list[ChoiceEnd]:
    """Once the text has ended."""
    return [ChoiceEnd(c.index, c.finish_reason, c.stop_string) for c in parts.choices]
