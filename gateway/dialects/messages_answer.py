"""Answers of /v1/messages, Anthropic's API: whole ones, the events of streamed ones, and errors.

Part of stage 9. Comes in: pieces of the one choice, and how it ended. Goes out: bytes. An answer is
a list of blocks (thinking, text, tool_use), told one after the other:

    message_start                       the empty message, with the prompt's usage
    content_block_start, _delta ...,    a block; a thinking block's last delta is its signature
    content_block_stop
    message_delta                       why it stopped, and the whole usage
    message_stop

Usage is counted as Anthropic does: `input_tokens` are those that were not cached.
"""

import re
from collections.abc import Mapping, Sequence
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
    ToolCallStart,
    joined,
)
from gateway.dialects.messages_wire import THREAD
from gateway.errors import (
    CONTEXT_LENGTH,
    INSUFFICIENT_QUOTA,
    QUEUE_FULL,
    TOO_LARGE,
    UNAVAILABLE,
    UNSUPPORTED_PARAMETER,
    ApiError,
)
from gateway.prepare.prepare import Prepared

HEARTBEAT = b'event: ping\ndata: {"type":"ping"}\n\n'
_OVERLOADED = 529
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class MessagesFormat:
    """See encoder.AnswerFormat."""

    def stream(self, prepared: Prepared, usage_now: UsageNow) -> "MessagesStream":
        """See AnswerFormat."""
        return MessagesStream(prepared, usage_now)

    def whole(self, prepared: Prepared) -> "WholeMessage":
        """See AnswerFormat."""
        return WholeMessage(prepared)


class MessagesStream:
    """See encoder.StreamEncoder."""

    def __init__(self, prepared: Prepared, usage_now: UsageNow) -> None:
        self._prepared = prepared
        self._usage_now = usage_now
        self._has_begun = False
        self._index = -1
        self._open = ""
        self._thinking: list[str] = []
        self._has_input = False

    def piece(self, piece: Piece) -> bytes:
        """See StreamEncoder."""
        out = [] if self._has_begun else [self._begin()]
        for event in joined(piece.events):
            self._event(event, out)
        return b"".join(out)

    def end(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See StreamEncoder."""
        out = [] if self._has_begun else [self._begin()]
        self._stop(out)
        delta = _stop_of(self._prepared, ends[0])
        out.append(_event("message_delta", {"delta": delta, "usage": usage_body(usage)}))
        out.append(_event("message_stop", {}))
        return b"".join(out)

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder."""
        http_id = self._prepared.request.request_id.rpartition("_")[2]
        return b"event: error\ndata: " + messages_error(error, http_id)[1] + b"\n\n"

    def _begin(self) -> bytes:
        self._has_begun = True
        message = _message(self._prepared, [], self._usage_now())
        return _event("message_start", {"message": message})

    def _event(self, event: Event, out: list[bytes]) -> None:
        match event:
            case ContentDelta():
                if self._open != "text":
                    self._start("text", {"type": "text", "text": ""}, out)
                self._delta({"type": "text_delta", "text": event.text}, out)
            case ReasoningDelta():
                if self._open != "thinking":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    self._start("thinking", block, out)
                self._thinking.append(event.text)
                self._delta({"type": "thinking_delta", "thinking": event.text}, out)
            case ToolCallStart():
                call = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
                self._start("tool_use", call, out)
                self._delta({"type": "input_json_delta", "partial_json": ""}, out)
            case ArgumentsDelta():
                self._delta({"type": "input_json_delta", "partial_json": event.text}, out)

    def _start(self, kind: str, block: dict[str, Any], out: list[bytes]) -> None:
        self._stop(out)
        self._index += 1
        self._open = kind
        body = {"index": self._index, "content_block": block}
        out.append(_event("content_block_start", body))

    def _delta(self, delta: dict[str, Any], out: list[bytes]) -> None:
        out.append(_event("content_block_delta", {"index": self._index, "delta": delta}))

    def _stop(self, out: list[bytes]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            text = "".join(self._thinking)
            self._thinking.clear()
            signature = _signature(self._prepared, text)
            self._delta({"type": "signature_delta", "signature": signature}, out)
        out.append(_event("content_block_stop", {"index": self._index}))
        self._open = ""


class WholeMessage:
    """See encoder.WholeEncoder."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._events: list[Event] = []

    def add(self, piece: Piece) -> None:
        """See WholeEncoder."""
        self._events.extend(piece.events)

    def whole(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See WholeEncoder."""
        blocks: list[dict[str, Any]] = []
        for event in joined(self._events):
            match event:
                case ContentDelta():
                    blocks.append({"type": "text", "text": event.text})
                case ReasoningDelta():
                    signature = _signature(self._prepared, event.text)
                    block = {"type": "thinking", "thinking": event.text, "signature": signature}
                    blocks.append(block)
                case ToolCallStart():
                    call = {"type": "tool_use", "id": event.call_id, "name": event.name}
                    blocks.append({**call, "input": {}})
                case ArgumentsDelta():
                    blocks[-1]["input"] = _input(event.text)
        message = _message(self._prepared, blocks, usage)
        return _encode({**message, **_stop_of(self._prepared, ends[0])})


def usage_body(usage: UsageFigures) -> dict[str, Any]:
    """Anthropic's usage object."""
    body: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def messages_error(error: ApiError, http_id: str) -> tuple[int, bytes]:
    """Anthropic's error object, and the status that its SDKs act on."""
    kind, message = error.kind, error.message
    status = kind.status
    if kind in (QUEUE_FULL, UNAVAILABLE):
        status = _OVERLOADED
    elif kind == INSUFFICIENT_QUOTA:
        status = 402
    if kind == CONTEXT_LENGTH:  # By these words clients know that they have to shorten a chat.
        message = f"prompt is too long: {message}"
    name = "request_too_large" if kind == TOO_LARGE else _ERROR_TYPES.get(status)
    body: dict[str, Any] = {"type": name or "invalid_request_error", "message": message}
    if kind == UNSUPPORTED_PARAMETER and error.param == THREAD:
        # The SDK's tool runner asks for a thread, and goes on without one where it is told this.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
    return status, _encode({"type": "error", "error": body, "request_id": http_id})


_GO_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")


def messages_headers(headers: Mapping[str, str], http_id: str, now_at: float) -> dict[str, str]:
    """Rate limits and the request's id by Anthropic's names."""
    out = {"request-id": http_id}
    for name, value in headers.items():
        if not name.startswith("x-ratelimit-"):
            out[name] = value
            continue
        figure, _, meter = name.removeprefix("x-ratelimit-").partition("-")
        if figure == "reset":
            at = datetime.fromtimestamp(now_at + _seconds(value), UTC)
            value = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        out[f"anthropic-ratelimit-{meter}-{figure}"] = value
    return out


def _seconds(duration: str) -> float:
    """Of what limits.go_duration wrote."""
    found = _GO_DURATION.fullmatch(duration)
    assert found is not None
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def _signature(prepared: Prepared, thinking: str) -> str:
    assert prepared.asked is not None
    assert prepared.asked.seal is not None
    return prepared.asked.seal.sign(thinking, prepared.asked.model)


def _message(
    prepared: Prepared, content: Sequence[dict[str, Any]], usage: UsageFigures
) -> dict[str, Any]:
    return {
        "id": prepared.request.request_id,
        "type": "message",
        "role": "assistant",
        "model": prepared.request.model.name,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def _stop_of(prepared: Prepared, end: ChoiceEnd) -> dict[str, str | None]:
    reason = {"tool_calls": "tool_use", "stop": "end_turn"}.get(end.finish_reason, "max_tokens")
    if end.finish_reason == "length":
        asked = prepared.asked.max_tokens if prepared.asked is not None else None
        if asked is not None and asked > prepared.request.max_tokens:
            reason = "model_context_window_exceeded"
    elif end.stop_string and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": end.stop_string or None}


def _input(text: str) -> dict[str, Any]:
    """A call's arguments as an object. Those that broke off, or are none, are there as text."""
    try:
        value = _decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": text}


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **body}))
