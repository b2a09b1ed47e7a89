"""Answers as OpenAI's JSON: whole ones, and the chunks of streamed ones. Part of stage 9.

Comes in: pieces of choices and how they ended. Goes out: bytes. What is the same in all chunks of a
choice is encoded once, so a piece of plain text costs one JSON string and two joins. Where the
pieces come from is choice.py's; sending them is stream.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.answer.choice import Piece
from gateway.answer.detokenize import PieceTable, ScoredToken
from gateway.answer.output_parser import ContentDelta, Event, joined
from gateway.answer.scores import ScoreWriter
from gateway.answer.tool_deltas import delta, message
from gateway.errors import ApiError
from gateway.types import PreparedRequest

DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    ("chat", True): "chat.completion.chunk",
    ("chat", False): "chat.completion",
    ("completion", True): "text_completion",
    ("completion", False): "text_completion",
}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UsageFigures:
    """Tokens as the client is told them; the posting says the same."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Scores:
    """The `logprobs` of a choice in its request's format; None where they were not asked for."""

    def __init__(self, request: PreparedRequest, pieces: PieceTable) -> None:
        self._wanted = request.logprobs >= 0
        self._is_chat = request.kind == "chat"
        self._shift = len(request.echo)
        self._writer = ScoreWriter(pieces)

    def body(
        self, scored: Sequence[ScoredToken], prompt: Sequence[ScoredToken] = ()
    ) -> dict[str, Any] | None:
        """Of these tokens; `prompt`: those of the echoed prompt, which come first."""
        if not self._wanted:
            return None
        if self._is_chat:
            return self._writer.chat(scored)
        body = self._writer.completion(prompt)
        for name, values in self._writer.completion(scored, self._shift).items():
            body[name] += values
        return body


class Chunks:
    """Writes the events of one streamed answer."""

    def __init__(self, request: PreparedRequest, pieces: PieceTable) -> None:
        self._request = request
        self._is_chat = request.kind == "chat"
        # With include_usage every chunk but the last says "usage": null, as OpenAI's do.
        self._extra = {"usage": None} if request.include_usage else {}
        self._scores = _Scores(request, pieces)
        self._around = [self._around_text(index) for index in range(request.num_choices)]
        self._begun: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        """What is new of a choice; its first chunk says the role, or repeats the prompt."""
        first = b"" if piece.index in self._begun else self._first(piece)
        events = piece.events if len(piece.events) < 2 else joined(piece.events)
        if not first and len(events) == 1 and not piece.scored:
            return self._event(piece.index, events[0])
        if not piece.scored:
            return first + b"".join(self._event(piece.index, event) for event in events)
        # All scores go with the piece's first chunk: accumulators only append them.
        deltas = [said for event in events if (said := self._delta(event)) is not None]
        deltas = deltas or [{"content": ""} if self._is_chat else {"text": ""}]
        scores = self._scores.body(piece.scored)
        chunks = [
            self._chunk(piece.index, said, None, None if n else scores)
            for n, said in enumerate(deltas)
        ]
        return first + b"".join(chunks)

    def last(self, index: int, finish_reason: str) -> bytes:
        """The end of a choice."""
        return self._first(Piece(index)) + self._chunk(
            index, {} if self._is_chat else {"text": ""}, finish_reason
        )

    def usage(self, usage: UsageFigures) -> bytes:
        """The chunk without choices that stream_options.include_usage asks for."""
        if not self._request.include_usage:
            return b""
        return _event({**_head(self._request, True), "choices": [], "usage": usage.body()})

    def _first(self, piece: Piece) -> bytes:
        if piece.index in self._begun:
            return b""
        self._begun.add(piece.index)
        if self._is_chat:
            return self._chunk(piece.index, {"role": "assistant", "content": ""}, None)
        echo = self._request.echo
        if not echo and not piece.prompt:
            return b""
        scores = self._scores.body((), piece.prompt) if piece.prompt else None
        return self._chunk(piece.index, {"text": echo}, None, scores)

    def _event(self, index: int, event: Event) -> bytes:
        if isinstance(event, ContentDelta):
            before, after = self._around[index]
            return before + _encode(event.text) + after
        said = self._delta(event)
        return b"" if said is None else self._chunk(index, said, None)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        """What a chunk says of an event; some say nothing to the client."""
        if self._is_chat:
            return delta(event)
        return {"text": event.text} if isinstance(event, ContentDelta) else None

    def _chunk(
        self,
        index: int,
        said: dict[str, Any],
        finish_reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        content = {"delta": said} if self._is_chat else said
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**_head(self._request, True), "choices": [choice], **self._extra})

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        mark = "\ue000"
        chunk = self._chunk(index, {"content": mark} if self._is_chat else {"text": mark}, None)
        # From the right: a model's name comes before the text and is the operator's to choose.
        before, _, after = chunk.rpartition(_encode(mark))
        return before, after


class WholeChoice:
    """Gathers one choice of an answer that is not streamed."""

    def __init__(self, request: PreparedRequest, index: int, pieces: PieceTable) -> None:
        self._request = request
        self._index = index
        self._scores = _Scores(request, pieces)
        self._events: list[Event] = []
        self._scored: list[ScoredToken] = []
        self._prompt: Sequence[ScoredToken] = ()

    def add(self, piece: Piece) -> None:
        """What is new."""
        self._events.extend(piece.events)
        self._scored.extend(piece.scored)
        self._prompt = piece.prompt or self._prompt

    def body(self, finish_reason: str) -> dict[str, Any]:
        """An item of `choices`."""
        said = message(self._events)
        is_chat = self._request.kind == "chat"
        content = {"message": said} if is_chat else {"text": self._request.echo + said["content"]}
        return {
            "index": self._index,
            **content,
            "logprobs": self._scores.body(self._scored, self._prompt),
            "finish_reason": finish_reason,
        }


def error_event(error: ApiError) -> bytes:
    """What a stream ends with that has begun and cannot go on."""
    return _event(error.body())


def json_answer(
    request: PreparedRequest, choices: Sequence[dict[str, Any]], usage: UsageFigures
) -> bytes:
    """The whole answer of a request that is not streamed."""
    return _encode({**_head(request, False), "choices": choices, "usage": usage.body()})


def _head(request: PreparedRequest, stream: bool) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "object": _OBJECTS[request.kind, stream],
        "created": request.created_at,
        "model": request.model.name,
        "system_fingerprint": f"fp_{request.model.revision[:12]}",
    }


def _event(body: object) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
