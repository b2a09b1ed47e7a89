"""Answers of Ollama's /api/chat and /api/generate, and its errors. Part of stage 9.

Comes in: pieces of the one choice, and how it ended. Goes out: a JSON object, or one a line where
the answer is streamed; the last says `done` and what was used, with durations in nanoseconds. A
call is told when it is complete, its arguments as an object.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.answer.choice import Piece
from gateway.answer.encoder import ChoiceEnd, UsageFigures, UsageNow
from gateway.api.tools.output_parser import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
    joined,
)
from gateway.errors import ApiError
from gateway.prepare.prepare import Prepared

LINES = b"application/x-ndjson"
_NS = 1_000_000_000
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class OllamaFormat:
    """See encoder.AnswerFormat. `is_chat`: an answer has a message, else a text."""

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat

    def stream(self, prepared: Prepared, usage_now: UsageNow) -> "OllamaAnswer":
        """See AnswerFormat."""
        del usage_now
        return OllamaAnswer(prepared, self._is_chat)

    def whole(self, prepared: Prepared) -> "OllamaAnswer":
        """See AnswerFormat."""
        return OllamaAnswer(prepared, self._is_chat)


class OllamaAnswer:
    """See encoder.StreamEncoder and encoder.WholeEncoder."""

    def __init__(self, prepared: Prepared, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._is_load = prepared.request.only_prompt
        created = datetime.fromtimestamp(prepared.request.created_at, UTC)
        self._head = {
            "model": prepared.request.model.name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self._events: list[Event] = []
        self._name = ""
        self._arguments: list[str] = []

    def piece(self, piece: Piece) -> bytes:
        """See StreamEncoder."""
        lines = []
        for event in joined(piece.events):
            said = self._said(event)
            if said is not None:
                lines.append(_encode({**self._head, **self._body(said), "done": False}) + b"\n")
        return b"".join(lines)

    def end(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See StreamEncoder."""
        return self._last({}, ends[0], usage) + b"\n"

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder."""
        return ollama_error(error, "")[1] + b"\n"

    def add(self, piece: Piece) -> None:
        """See WholeEncoder."""
        self._events.extend(piece.events)

    def whole(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See WholeEncoder."""
        message: dict[str, Any] = {}
        for event in joined(self._events):
            for name, value in (self._said(event) or {}).items():
                message[name] = message[name] + value if name in message else value
        return self._last(message, ends[0], usage)

    def _said(self, event: Event) -> dict[str, Any] | None:
        """What a message says more; None: nothing yet."""
        match event:
            case ContentDelta():
                return {"content": event.text}
            case ReasoningDelta():
                return {"thinking": event.text}
            case ToolCallStart():
                self._name = event.name
                self._arguments.clear()
            case ArgumentsDelta():
                self._arguments.append(event.text)
            case ToolCallEnd():
                function = {"name": self._name, "arguments": _object("".join(self._arguments))}
                return {"tool_calls": [{"function": function}]}
        return None

    def _body(self, said: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {"message": {"role": "assistant", "content": "", **said}}
        return {"response": said.pop("content", ""), **said}

    def _last(self, said: dict[str, Any], end: ChoiceEnd, usage: UsageFigures) -> bytes:
        if self._is_load:
            return _encode({**self._head, **self._body({}), "done": True, "done_reason": "load"})
        elapsed, first = round(usage.elapsed_s * _NS), round(usage.first_token_s * _NS)
        return _encode(
            {
                **self._head,
                **self._body(said),
                "done": True,
                "done_reason": "length" if end.finish_reason == "length" else "stop",
                "total_duration": elapsed,
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": first,
                "eval_count": usage.completion_tokens,
                "eval_duration": max(0, elapsed - first),
            }
        )


def ollama_error(error: ApiError, http_id: str) -> tuple[int, bytes]:
    """Ollama's errors are a text."""
    del http_id
    return error.kind.status, _encode({"error": error.message})


def _object(text: str) -> dict[str, Any]:
    """A call's arguments. Those that broke off, or are none, are there as text."""
    try:
        value = _decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": text}
