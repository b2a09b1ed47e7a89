"""Stage 9, the writing half: text as OpenAI's JSON and server-sent events, sent to the client.

Comes in: pieces of text and how the request ended. Goes out: bytes. What is the same in all chunks
of a request is encoded once, so a piece of text costs one JSON string and two joins. Turning tokens
into text is detokenize.py's; who pays for it is exchange.py's.

A client that goes away shows only as an ASGI message, so one task per request waits for it
(`DisconnectWatch`) while the answer is made, streamed or not.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


class Chunks:
    """Writes the events of one streamed answer."""

    def __init__(self, request: PreparedRequest) -> None:
        self._request = request
        self._is_chat = request.kind == "chat"
        # With include_usage every chunk but the last says "usage": null, as OpenAI's do.
        self._extra = {"usage": None} if request.include_usage else {}
        self._before, self._after = self._around_text()

    def first(self) -> bytes:
        """What comes before any text: the role, in a chat."""
        if not self._is_chat:
            return b""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, text: str) -> bytes:
        """One piece of the answer."""
        return self._before + _encode(text) + self._after

    def last(self, finish_reason: str) -> bytes:
        """The end of the text."""
        return self._chunk({"delta": {}} if self._is_chat else {"text": ""}, finish_reason)

    def usage(self, usage: UsageFigures) -> bytes:
        """The chunk without choices that stream_options.include_usage asks for."""
        if not self._request.include_usage:
            return b""
        return _event({**_head(self._request, True), "choices": [], "usage": usage.body()})

    def _chunk(self, content: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return _event({**_head(self._request, True), "choices": [choice], **self._extra})

    def _around_text(self) -> tuple[bytes, bytes]:
        mark = "\ue000"
        chunk = self._chunk({"delta": {"content": mark}} if self._is_chat else {"text": mark}, None)
        # From the right: a model's name comes before the text and is the operator's to choose.
        before, _, after = chunk.rpartition(_encode(mark))
        return before, after


def error_event(error: ApiError) -> bytes:
    """What a stream ends with that has begun and cannot go on."""
    return _event(error.body())


def json_answer(
    request: PreparedRequest, text: str, finish_reason: str, usage: UsageFigures
) -> bytes:
    """The whole answer of a request that is not streamed."""
    content: dict[str, Any] = {"text": text}
    if request.kind == "chat":
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    return _encode({**_head(request, False), "choices": [choice], "usage": usage.body()})


class DisconnectWatch:
    """Calls back once when the client goes away. Begin after the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    def start(self) -> None:
        """From now on `receive` belongs to the watch."""
        self._task = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """The answer is complete; who goes away now breaks nothing off."""
        if self._task is not None:
            self._task.cancel()

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client goes away, at once if it has."""
        if self.gone:
            callback()
        else:
            self._callbacks.append(callback)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for callback in self._callbacks:
            callback()


class ClientStalled(Exception):
    """The client holds the connection but has not read for too long."""


class EventStream(Response):
    """Sends events as they come. `close` is called when no more are taken, however that comes.

    Raises ClientStalled where one event takes longer than `write_timeout_s` to send.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str],
        write_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._write_timeout_s = write_timeout_s
        # x-accel-buffering: a proxy in front must not hold events back.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this answer."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        now_s = asyncio.get_running_loop().time
        # One timer for the whole stream, armed while something is being sent.
        timer = asyncio.timeout(None)
        try:
            async with timer:
                await send(start)
                async for event in self._events:
                    timer.reschedule(now_s() + self._write_timeout_s)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    timer.reschedule(None)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError as error:
            if timer.expired():
                raise ClientStalled from error
            raise
        finally:
            self._close()
            await self._events.aclose()


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
