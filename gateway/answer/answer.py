"""Answers as OpenAI's JSON: whole ones, and the chunks of streamed ones. Part of stage 9.

Comes in: pieces of choices and how they ended. Goes out: bytes. What is the same in all chunks of a
choice is encoded once, so a piece of plain text costs one JSON string and two joins. Where the
pieces come from is text_parts.py's; sending them is post.py's. Events of a chat are spelled so:

    ContentDelta      {"content": "..."}
    ReasoningDelta    {"reasoning": "...", "reasoning_content": "..."}
    ToolCallStart     {"tool_calls": [{"index": 0, "id": ..., "type": "function",
                                       "function": {"name": ..., "arguments": ""}}]}
    ArgumentsDelta    {"tool_calls": [{"index": 0, "function": {"arguments": "..."}}]}

ToolCallEnd and Padding are nothing to a client. Log-probabilities have two formats, a chat's and a
completion's. A token whose bytes are half a character is spelled as OpenAI spells it in completions
("bytes:\\xe2\\x82"), where tokens are keys; in chats it has its `bytes` beside it. JSON has no
infinity: what the model rules out is reported as LOWEST.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
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
from gateway.errors import ApiError
from gateway.prepare.prepare import Prepared
from gateway.text.detokenize import ScoredToken
from gateway.text.pieces import PieceTable
from gateway.types import PreparedRequest

DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    ("chat", True): "chat.completion.chunk",
    ("chat", False): "chat.completion",
    ("completion", True): "text_completion",
    ("completion", False): "text_completion",
}
_encode = msgspec.json.Encoder().encode
LOWEST = -9999.0
NO_MORE: Mapping[str, Any] = {}
_EVEN_BYTES = 64
"""Padded events are multiples of it."""


class TokenScores:
    """The `logprobs` of a choice in its request's format; None where they were not asked for."""

    def __init__(self, request: PreparedRequest, pieces: PieceTable, index: int = 0) -> None:
        self._wanted = request.logprobs >= 0
        self._num_top = max(0, request.logprobs)
        self._is_chat = request.kind == "chat"
        self._shift = len(request.echo_of(index))
        self._pieces = pieces

    def body(
        self, scored: Sequence[ScoredToken], prompt: Sequence[ScoredToken] = ()
    ) -> dict[str, Any] | None:
        """Of these tokens; `prompt`: those of the echoed prompt, which come first."""
        if not self._wanted:
            return None
        if self._is_chat:
            return self._chat(scored)
        body = self._completion(prompt)
        for name, values in self._completion(scored, self._shift).items():
            body[name] += values
        return body

    def _chat(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = []
        for token in scored:
            if token.scores is None:
                continue
            top = [self._chat_entry(i, value) for i, value in token.scores.top]
            entry = self._chat_entry(token.token_id, token.scores.logprob)
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _completion(self, scored: Sequence[ScoredToken], shift: int = 0) -> dict[str, Any]:
        """`shift`: characters before the tokens' text."""
        tops: list[dict[str, float] | None] = []
        for token in scored:
            if token.scores is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            likeliest = token.scores.top[: self._num_top]
            for token_id, value in (*likeliest, (token.token_id, token.scores.logprob)):
                top.setdefault(self._key(token_id), _finite(value))
            tops.append(top)
        return {
            "tokens": [self._key(token.token_id) for token in scored],
            "token_logprobs": [
                None if token.scores is None else _finite(token.scores.logprob) for token in scored
            ],
            "top_logprobs": tops,
            "text_offset": [shift + token.start for token in scored],
        }

    def of_prompt(
        self, prompt: Sequence[ScoredToken], num_top: int
    ) -> list[dict[str, dict[str, Any]] | None]:
        """As vLLM spells the scores of a prompt: by token id, with ranks where they are known."""
        found: list[dict[str, dict[str, Any]] | None] = []
        for token in prompt:
            if token.scores is None:
                found.append(None)
                continue
            likeliest = token.scores.top[:num_top]
            entries = {
                str(token_id): self._prompt_entry(token_id, value, rank)
                for rank, (token_id, value) in enumerate(likeliest, 1)
            }
            own = self._prompt_entry(token.token_id, token.scores.logprob, None)
            entries.setdefault(str(token.token_id), own)
            found.append(entries)
        return found

    def _prompt_entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._chat_entry(token_id, logprob)["token"]
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._pieces.piece(token_id)
        return {
            "token": piece.decode("utf-8", "replace") if piece else self._name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(piece) if piece else None,
        }

    def _key(self, token_id: int) -> str:
        piece = self._pieces.piece(token_id)
        if not piece:
            return self._name(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _name(self, token_id: int) -> str:
        """Of a control token, which has no text."""
        return self._pieces.name(token_id)


class Chunks:
    """Writes the events of one streamed answer. See encoder.StreamEncoder."""

    def __init__(
        self, request: PreparedRequest, pieces: PieceTable, usage_now: UsageNow | None = None
    ) -> None:
        """`usage_now`: where `continuous_usage` is asked for."""
        self._request = request
        self._usage_now = usage_now if request.continuous_usage else None
        self._is_even = self._usage_now is None and not request.obfuscates
        self._is_chat = request.kind == "chat"
        # With include_usage every chunk but the last says "usage": null, as OpenAI's do.
        self._extra = {"usage": None} if request.include_usage else {}
        self._scores = [TokenScores(request, pieces, n) for n in range(request.num_choices)]
        choices = range(request.num_choices if self._is_even else 0)
        self._around = [self._around_text(index) for index in choices]
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
        scores = self._scores[piece.index].body(piece.scored)
        chunks = [
            self._chunk(piece.index, said, None, None if n else scores)
            for n, said in enumerate(deltas)
        ]
        return first + b"".join(chunks)

    def end(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See StreamEncoder."""
        last = b"".join(self.last(end.index, end.finish_reason) for end in ends)
        return last + self.usage(usage) + DONE

    def error(self, error: ApiError) -> bytes:
        """See StreamEncoder."""
        return error_event(error)

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
        echo = self._request.echo_of(piece.index)
        if not echo and not piece.prompt:
            return b""
        scores = self._scores[piece.index].body((), piece.prompt) if piece.prompt else None
        return self._chunk(piece.index, {"text": echo}, None, scores)

    def _event(self, index: int, event: Event) -> bytes:
        if isinstance(event, ContentDelta) and self._is_even:
            before, after = self._around[index]
            return before + _encode(event.text) + after
        said = self._delta(event)
        return b"" if said is None else self._chunk(index, said, None)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        """What a chunk says of an event; some say nothing to the client."""
        if self._is_chat:
            return delta(event, self._request.reasoning_fields)
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
        body = {**_head(self._request, True), "choices": [choice], **self._extra}
        if self._usage_now is not None:
            body["usage"] = self._usage_now().body()
        if self._request.obfuscates:
            body["obfuscation"] = ""
            body["obfuscation"] = _padding(len(_encode(body)))
        return _event(body)

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
        self._echo = request.echo_of(index)
        self._scores = TokenScores(request, pieces, index)
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
        said = message(self._events, self._request.reasoning_fields)
        is_chat = self._request.kind == "chat"
        content = {"message": said} if is_chat else {"text": self._echo + said["content"]}
        echoed = self._prompt if self._request.echoes else ()
        body = {
            "index": self._index,
            **content,
            "logprobs": self._scores.body(self._scored, echoed),
            "finish_reason": finish_reason,
        }
        if not is_chat and self._request.shown_prompt_logprobs >= 0:
            body["prompt_logprobs"] = self.prompt_logprobs()
        return body

    def prompt_logprobs(self) -> list[dict[str, dict[str, Any]] | None]:
        """Of the prompt's tokens."""
        return self._scores.of_prompt(self._prompt, self._request.shown_prompt_logprobs)


class Choices:
    """Gathers all choices of an answer that is not streamed. See encoder.WholeEncoder."""

    def __init__(self, request: PreparedRequest, pieces: PieceTable) -> None:
        self._request = request
        self._choices = [WholeChoice(request, n, pieces) for n in range(request.num_choices)]

    def add(self, piece: Piece) -> None:
        """See WholeEncoder."""
        self._choices[piece.index].add(piece)

    def whole(self, ends: Sequence[ChoiceEnd], usage: UsageFigures) -> bytes:
        """See WholeEncoder."""
        bodies = [self._choices[end.index].body(end.finish_reason) for end in ends]
        more: dict[str, Any] = {}
        if self._request.kind == "chat" and self._request.shown_prompt_logprobs >= 0:
            more["prompt_logprobs"] = self._choices[0].prompt_logprobs()
        return json_answer(self._request, bodies, usage, more)


class OpenAiFormat:
    """Chat completions and completions. See encoder.AnswerFormat."""

    def stream(self, prepared: Prepared, usage_now: UsageNow) -> Chunks:
        """See AnswerFormat."""
        return Chunks(prepared.request, prepared.codec.pieces, usage_now)

    def whole(self, prepared: Prepared) -> Choices:
        """See AnswerFormat."""
        return Choices(prepared.request, prepared.codec.pieces)


def error_event(error: ApiError) -> bytes:
    """What a stream ends with that has begun and cannot go on."""
    return _event(error.body())


def json_answer(
    request: PreparedRequest,
    choices: Sequence[dict[str, Any]],
    usage: UsageFigures,
    more: Mapping[str, Any] = NO_MORE,
) -> bytes:
    """The whole answer of a request that is not streamed. `more`: further fields."""
    return _encode({**_head(request, False), "choices": choices, "usage": usage.body(), **more})


def _head(request: PreparedRequest, stream: bool) -> dict[str, Any]:
    head = {
        "id": request.request_id,
        "object": _OBJECTS[request.kind, stream],
        "created": request.created_at,
        "model": request.model.name,
        "system_fingerprint": f"fp_{request.model.revision[:12]}",
    }
    if request.service_tier:
        head["service_tier"] = request.service_tier
    return head


def _padding(size_bytes: int) -> str:
    """What makes an event of so many bytes as long as its neighbours."""
    return secrets.token_hex(_EVEN_BYTES)[: _EVEN_BYTES - size_bytes % _EVEN_BYTES]


def _event(body: object) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def delta(event: Event, reasoning_fields: Sequence[str]) -> dict[str, Any] | None:
    """The `delta` of one chunk, None where there is none to send."""
    match event:
        case ContentDelta():
            return {"content": event.text}
        case ReasoningDelta():
            return dict.fromkeys(reasoning_fields, event.text)
        case ToolCallStart():
            function = {"name": event.name, "arguments": ""}
            call = {"id": event.call_id, "type": "function", "function": function}
            return {"tool_calls": [{"index": event.index, **call}]}
        case ArgumentsDelta():
            function = {"arguments": event.text}
            return {"tool_calls": [{"index": event.index, "function": function}]}
    return None


def message(
    events: Iterable[Event], reasoning_fields: Sequence[str] = ("reasoning_content",)
) -> dict[str, Any]:
    """The message of a whole answer. `content` is None where there are only calls."""
    content: list[str] = []
    reasoned: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentDelta():
                content.append(event.text)
            case ReasoningDelta():
                reasoned.append(event.text)
            case ToolCallStart():
                calls.append({"id": event.call_id, "type": "function", "function": event.name})
                arguments.append([])
            case ArgumentsDelta():
                arguments[event.index].append(event.text)
    text = "".join(content)
    out: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoned:
        out |= dict.fromkeys(reasoning_fields, "".join(reasoned))
    if calls:
        out["content"] = text or None
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"] = {"name": call["function"], "arguments": "".join(pieces)}
        out["tool_calls"] = calls
    return out


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
