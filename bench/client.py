"""One streaming chat completion against any OpenAI-like server, timed.

Lives here: the HTTP request, reading server-sent events, and what one request yields
(`RequestResult`). Does not: when requests are sent (`load.py`), what they add up to (`report.py`).

Tokens are counted by the stream's `usage`, since a chunk is not a token. Servers that send no usage
are counted by reading their text back with the model's tokenizer; each result says which it was.
A request without a final `finish_reason` is an error, however much text it brought.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

TokenSource = Literal["usage", "retokenized", "none"]


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. `count_tokens` reads its text back: to check usage, or to stand in."""

    name: str
    base_url: str
    model: str
    api_key: str = ""
    count_tokens: Callable[[str], int] | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is sent: one user message; greedy unless a temperature is given."""

    index: int
    content: str
    max_tokens: int
    temperature: float = 0.0


@dataclass(slots=True)
class RequestResult:
    """Times are seconds of one monotonic clock; `due_s` is when the request should have been sent.

    Latencies count from `due_s`, so a client or server that falls behind is seen to.
    """

    index: int
    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    done_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_source: TokenSource = "none"
    reread_tokens: int = 0
    finish_reason: str = ""
    echoed_prompt: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From due to the first text; None without text."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens after the first; None below two tokens."""
        if self.first_s is None or self.last_s is None or self.completion_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)


class _BadStream(Exception):
    """The server's answer is no usable completion; the message is the error's kind."""


async def chat(
    session: aiohttp.ClientSession, target: Target, request: ChatRequest, due_s: float
) -> RequestResult:
    """Send one request and read its stream to the end. Failures are recorded, never raised."""
    result = RequestResult(request.index, due_s, sent_s=time.perf_counter())
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": request.content}],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(
            f"{target.base_url}/v1/chat/completions",
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        ) as response:
            if response.status != 200:
                raise _BadStream(_status_error(response.status, await response.text()))
            await _read_stream(response, request, result)
        _settle_tokens(target, result)
    except _BadStream as error:
        result.error = str(error)
    except (TimeoutError, asyncio.IncompleteReadError):
        result.error = "timeout"
    except (aiohttp.ClientError, OSError) as error:
        result.error = f"connection: {type(error).__name__}"
    result.done_s = time.perf_counter()
    return result


def new_session() -> aiohttp.ClientSession:
    """A session without a connection limit: the load decides how many are open."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def _read_stream(
    response: aiohttp.ClientResponse, request: ChatRequest, result: RequestResult
) -> None:
    pending = b""
    parts: list[str] = []
    async for data in response.content.iter_any():
        now_s = time.perf_counter()
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            text = _read_event(event, result)
            if text and result.first_s is None and request.content in text:
                # Some servers send the prompt back before the first token; that is no token.
                result.echoed_prompt = True
            elif text:
                parts.append(text)
                _stamp(result, now_s)
    result.text = "".join(parts)
    if not result.finish_reason:
        raise _BadStream("stream ended without finish_reason")


def _read_event(event: bytes, result: RequestResult) -> str:
    """The event's text, its finish reason and usage noted. Raises _BadStream on an error event."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if not data or data == b"[DONE]":
        return ""
    try:
        chunk: Any = json.loads(data)
    except ValueError as error:
        raise _BadStream("event is no JSON") from error
    if "error" in chunk:
        raise _BadStream(f"error event: {_error_code(chunk['error'])}")
    usage = chunk.get("usage")
    if usage:
        result.prompt_tokens = usage["prompt_tokens"]
        result.completion_tokens = usage["completion_tokens"]
        result.token_source = "usage"
    for choice in chunk.get("choices", ()):
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        return choice.get("delta", {}).get("content") or ""
    return ""


def _stamp(result: RequestResult, now_s: float) -> None:
    if result.last_s is None:
        result.first_s = now_s
    elif now_s > result.last_s:
        # Events of one read have one time: a gap is between reads.
        result.gaps_s.append(now_s - result.last_s)
    result.last_s = now_s


def _settle_tokens(target: Target, result: RequestResult) -> None:
    if target.count_tokens is not None:
        result.reread_tokens = target.count_tokens(result.text)
        if result.token_source == "none":
            result.completion_tokens = result.reread_tokens
            result.token_source = "retokenized"
    if result.token_source == "none":
        raise _BadStream("no usage in the stream and no tokenizer to count with")
    if result.completion_tokens and result.first_s is None:
        raise _BadStream("tokens in usage but no text in the stream")


def _status_error(status: int, body: str) -> str:
    try:
        return f"http {status}: {_error_code(json.loads(body)['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"http {status}"


def _error_code(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "unnamed")
    return "unnamed"
