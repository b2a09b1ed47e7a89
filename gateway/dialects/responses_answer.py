"""Answers of /v1/responses, OpenAI's Responses: whole ones, and the events of streamed ones.

Part of stage 9. Comes in: pieces of the one choice, and how it ended. Goes out: bytes. A response
is a list of items (reasoning, message, function_call); each is told from its beginning to its end:

    response.created, response.in_progress
    response.output_item.added
      response.content_part.added                reasoning and messages
      response.output_text.delta, .done          or reasoning_text, function_call_arguments
      response.content_part.done
    response.output_item.done
    response.completed, .incomplete (length) or .failed

Every event has a `sequence_number`, without gaps. Clients rebuild the answer from what is added and
done, so nothing is left open. Errors before the stream are OpenAI's error object.

A stored response is told only when it is stored, so a stream's last event is held back
(`last_event`). One that is stored already is told as a stream by `replayed`. A background response
has `response.queued` behind `response.created`, both told before there is anything of it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from gateway.api.wire import WireRequest
from gateway.dialects.responses_scores import MessageScores
from gateway.errors import ApiError
from gateway.prepare.prepare import Prepared

_encode = msgspec.json.Encoder().encode
_ID_PREFIX = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
NUM_BEFORE = 2
"""Events of a background response that are told before anything of it is made."""
REPLAY_BYTES = 65_536
_LAST = re.compile(rb"^event: response\.(completed|incomplete|failed)\ndata: ", re.MULTILINE)


class ResponsesFormat:
    """See encoder.AnswerFormat."""

    def stream(self, prepared: Prepared, usage_now: UsageNow) -> "ResponsesStream":
        """See AnswerFormat."""
        del usage_now
        return ResponsesStream(prepared)

    def whole(self, prepared: Prepared) -> "WholeResponse":
        """See AnswerFormat."""
        return WholeResponse(prepared)


class ResponsesStream:
    """See encoder.StreamEncoder."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.items: list[dict[str, Any]] = []
        """Told so far; the last one may be open."""
        self._text: list[str] = []
        wants_scores = prepared.request.logprobs >= 0
        self._scores = MessageScores(prepared) if wants_scores else None
        self._entries: list[dict[str, Any]] = []
        """Of the open message's tokens."""
        self._is_open = False
        asked = prepared.asked
        is_background = asked is not None and bool(asked.shown.get("background"))
        self._begins = () if is_background else ("response.created",)
        self._number = NUM_BEFORE if is_background else 0
        self._has_begun = False

    def piece(self, piece: Piece) -> bytes:
        """See StreamEncoder."""
        out = self._begin()
        if self._scores is not None:
            self._scores.take(piece.scored)
        for event in joined(piece.events):
            self._event(event, out)
        return b"".join(out)

    def end(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See StreamEncoder."""
        out = self._begin()
        is_cut = ends[0].finish_reason == "length"
        self._close(out, "incomplete" if is_cut else "completed")
        status = "incomplete" if is_cut else "completed"
        out.append(self._response(f"response.{status}", status, usage))
        return b"".join(out)

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder."""
        out = self._begin()
        self._close(out, "incomplete")
        failure = {"code": error.kind.code, "message": error.message}
        out.append(self._response("response.failed", "failed", None, failure))
        return b"".join(out)

    def _begin(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        names = (*self._begins, "response.in_progress")
        return [self._response(name, "in_progress", None) for name in names]

    def _event(self, event: Event, out: list[bytes]) -> None:
        entries = [] if self._scores is None else self._scores.of(event)
        match event:
            case ContentDelta():
                self._open("message", out)
                self._delta("response.output_text.delta", event.text, out, entries)
            case ReasoningDelta():
                self._open("reasoning", out)
                self._delta("response.reasoning_text.delta", event.text, out)
            case ToolCallStart():
                self._close(out, "completed")
                call = {"call_id": event.call_id, "name": event.name, "arguments": ""}
                self._add("function_call", call, out)
            case ArgumentsDelta():
                self._delta("response.function_call_arguments.delta", event.text, out)

    def _open(self, kind: str, out: list[bytes]) -> None:
        """An item of this kind, unless one is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return
        self._close(out, "completed")
        body: dict[str, Any] = {"content": []}
        if kind == "message":
            body["role"] = "assistant"
        else:
            body["summary"] = []
        self._add(kind, body, out)
        self._say("response.content_part.added", {**self._at(), "part": self._part("")}, out)

    def _add(self, kind: str, body: dict[str, Any], out: list[bytes]) -> None:
        name = _ID_PREFIX[kind] + self._prepared.request.request_id.rpartition("_")[2]
        item = {"id": f"{name}{len(self.items):02d}", "type": kind, "status": "in_progress"}
        self.items.append({**item, **body})
        self._is_open = True
        self._text.clear()
        self._entries = []
        place = {"output_index": len(self.items) - 1, "item": self.items[-1]}
        self._say("response.output_item.added", place, out)

    def _delta(
        self,
        name: str,
        text: str,
        out: list[bytes],
        entries: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """`entries`: of a message's text, the log-probabilities of its tokens."""
        self._text.append(text)
        body = {**self._at(), "delta": text}
        if entries is not None:
            self._entries += entries
            body["logprobs"] = entries
        self._say(name, body, out)

    def _close(self, out: list[bytes], status: str) -> None:
        """What ends the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._text)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {**self._at(), "arguments": text, "name": item["name"]}
            self._say("response.function_call_arguments.done", done, out)
        else:
            part = self._part(text)
            body = {**self._at(), "text": text}
            if item["type"] == "message":
                body["logprobs"] = self._entries
            self._say(f"response.{part['type']}.done", body, out)
            self._say("response.content_part.done", {**self._at(), "part": part}, out)
            item["content"] = [part]
            asked = self._prepared.asked
            if item["type"] == "reasoning" and asked is not None and asked.seal is not None:
                item["encrypted_content"] = asked.seal.seal(text, asked.model)
        place = {"output_index": len(self.items) - 1, "item": item}
        self._say("response.output_item.done", place, out)

    def _part(self, text: str) -> dict[str, Any]:
        kind = _PARTS[self.items[-1]["type"]]
        part: dict[str, Any] = {"type": kind, "text": text}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": self._entries}
        return part

    def _at(self) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}

    def _response(
        self,
        name: str,
        status: str,
        usage: UsageFigures | None,
        error: dict[str, Any] | None = None,
    ) -> bytes:
        body = response_body(self._prepared, status, self.items, usage, error)
        out: list[bytes] = []
        self._say(name, {"response": body}, out)
        return out[0]

    def _say(self, name: str, body: dict[str, Any], out: list[bytes]) -> None:
        out.append(_spelled(name, {"sequence_number": self._number, **body}))
        self._number += 1


class WholeResponse:
    """See encoder.WholeEncoder. Its items are those that a stream would have told."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._stream = ResponsesStream(prepared)
        self._events: list[Event] = []

    def add(self, piece: Piece) -> None:
        """See WholeEncoder. Texts are put together once; scores belong to their own piece."""
        if self._prepared.request.logprobs >= 0:
            self._stream.piece(piece)
        else:
            self._events.extend(piece.events)

    def whole(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See WholeEncoder."""
        stream = self._stream
        if self._events:
            stream.piece(Piece(0, joined(self._events)))
        stream.end(ends, usage)
        status = "incomplete" if ends[0].finish_reason == "length" else "completed"
        return _encode(response_body(self._prepared, status, stream.items, usage))


def response_body(
    prepared: Prepared,
    status: str,
    items: Sequence[dict[str, Any]],
    usage: UsageFigures | None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The response object."""
    request = prepared.request
    assert prepared.asked is not None
    about = request.request_id, request.created_at, prepared.asked
    return {
        **empty_response(*about, status),
        "error": error,
        "output": items,
        "usage": None if usage is None else usage_body(usage),
    }


def empty_response(
    request_id: str, created_at: int, asked: WireRequest, status: str
) -> dict[str, Any]:
    """The response object before there is anything of it."""
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": request_id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": cut,
        "model": asked.model,
        "output": [],
        "previous_response_id": None,
        "service_tier": asked.service_tier or "default",
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **asked.shown,
    }


def usage_body(usage: UsageFigures) -> dict[str, Any]:
    """OpenAI's usage object as Responses spell it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class LastEvent:
    """What a stream ends with: all that comes before its last event, and this one's response as
    JSON. `status`: of the response."""

    before: bytes
    status: str
    number: int
    response: bytes

    def told(self, response: bytes) -> bytes:
        """The end of the stream with this response in it."""
        body = {"sequence_number": self.number, "response": msgspec.Raw(response)}
        return self.before + _spelled(f"response.{self.status}", body)


class _Last(msgspec.Struct):
    sequence_number: int
    response: msgspec.Raw


def last_event(data: bytes) -> LastEvent | None:
    """Of what a `ResponsesStream` wrote in one piece; None where the stream goes on. Texts cannot
    look like it: their newlines are escaped."""
    found = _LAST.search(data)
    if found is None:
        return None
    last = msgspec.json.decode(data[found.end() :].strip(), type=_Last)
    status, before = found[1].decode(), data[: found.start()]
    return LastEvent(before, status, last.sequence_number, bytes(last.response))


def queued_events(response: bytes) -> list[bytes]:
    """The first NUM_BEFORE events of a background response."""
    return [_numbered(*event) for event in enumerate(_before(msgspec.json.decode(response)))]


def error_event(number: int, error: ApiError) -> bytes:
    """What a stream ends with whose response cannot be read, whatever becomes of the response."""
    body = {"code": error.kind.code, "message": error.message, "param": None}
    return _numbered(number, ("error", body))


_Told: TypeAlias = tuple[str, dict[str, Any]]
Cut: TypeAlias = int | tuple[int, int]
"""The length of a delta in characters, and with how many log-probabilities it came, if with any."""


def replayed(response: bytes, cuts: Sequence[Sequence[Cut]] = (), at: int = 0) -> Iterator[bytes]:
    """The events of a response that has ended, from number `at` on, in parts of whole events that
    end with the one that makes them REPLAY_BYTES. `cuts`: of each item those of its deltas; without
    them a text is one. Of one that was cancelled, or failed and was not stored so far, there is the
    last event at least. A long one takes long: for threads."""
    body = msgspec.json.decode(response)
    part: list[bytes] = []
    num_bytes, number = 0, -1
    event: _Told = ("", {})
    for number, event in enumerate(_replayed(body, cuts)):
        if number < at:
            continue
        part.append(_numbered(number, event))
        num_bytes += len(part[-1])
        if num_bytes >= REPLAY_BYTES:
            yield b"".join(part)
            part, num_bytes = [], 0
    if number < at and body["status"] not in ("completed", "incomplete"):
        part.append(_numbered(at, event))
    if part:
        yield b"".join(part)


def _numbered(number: int, event: _Told) -> bytes:
    return _spelled(event[0], {"sequence_number": number, **event[1]})


def _begun(body: dict[str, Any], status: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("usage", "error", "incomplete_details"))
    return {"response": {**body, **nothing, "status": status, "output": []}}


def _before(body: dict[str, Any]) -> Iterator[_Told]:
    yield "response.created", _begun(body, "queued")
    yield "response.queued", _begun(body, "queued")


def _replayed(body: dict[str, Any], cuts: Sequence[Sequence[Cut]]) -> Iterator[_Told]:
    begun = _begun(body, "in_progress")
    if body["background"]:
        yield from _before(body)
    else:
        yield "response.created", begun
    yield "response.in_progress", begun
    for index, item in enumerate(body["output"]):
        own = cuts[index] if index < len(cuts) else None
        at = {"item_id": item["id"], "output_index": index}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        added = {**item, **empty, "status": "in_progress"}
        added.pop("encrypted_content", None)
        yield "response.output_item.added", {"output_index": index, "item": added}
        if is_call:
            name, text = "response.function_call_arguments", item["arguments"]
            for piece, _ in _pieces(text, (), own):
                yield f"{name}.delta", {**at, "delta": piece}
            yield f"{name}.done", {**at, "arguments": text, "name": item["name"]}
        for number, part in enumerate(item.get("content", ())):
            place = {**at, "content_index": number}
            kind, text = part["type"], part["text"]
            scores = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            begun = {**part, "text": "", **{key: [] for key in scores}}
            yield "response.content_part.added", {**place, "part": begun}
            for piece, entries in _pieces(text, part.get("logprobs", ()), own):
                told = {"logprobs": entries} if scores else {}
                yield f"response.{kind}.delta", {**place, "delta": piece, **told}
            yield f"response.{kind}.done", {**place, "text": text, **scores}
            yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    status = "failed" if body["status"] == "cancelled" else body["status"]
    yield f"response.{status}", {"response": body}


def _pieces(
    text: str, entries: Sequence[Any], cuts: Sequence[Cut] | None
) -> Iterator[tuple[str, Sequence[Any]]]:
    begin = first = 0
    for cut in [(len(text), len(entries))] if cuts is None else cuts:
        length, num = (cut, 0) if isinstance(cut, int) else cut
        yield text[begin : begin + length], entries[first : first + num]
        begin, first = begin + length, first + num


def _spelled(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **body}))
