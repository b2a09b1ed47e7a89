"""One chat completion against any OpenAI-like server: what a client saw of it, and when.

Lives here: the HTTP request, reading server-sent events, how it ended (`Answer`), and for load what
one request yields (`RequestResult`). Does not: when requests are sent (`load.py`), what they add up
to (`report.py`), what they should have come to (the judges of tests/e2e).

    done      a whole answer; a stream with a finish reason and its last mark
    left      the client had enough, or lost its patience
    refused   a status that names a reason of the client's
    error     500, or an error event in the stream
    broken    anything else: `code` says what

Tokens are counted by the `usage`, since a chunk is not a token. For servers that send none, the
text is read back with the model's tokenizer; each result of load says which it was.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

End = Literal["", "done", "left", "refused", "error", "broken"]
TokenSource = Literal["usage", "retokenized", "none"]
NO_MARK = "stream ended without [DONE]"
UNREACHED = "connection: ClientConnectorError"
"""Nobody listened: nothing was sent."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client saw of one request. Times are seconds of `time.perf_counter`.

    `chunks` are events with text, `tokens` those of which logprobs told.
    """

    end: End = ""
    code: str = ""
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    request_id: str = ""
    text: str = ""
    finish_reason: str = ""
    echoed_prompt: bool = False
    chunks: int = 0
    tokens: int = 0
    has_usage: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    began_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    done_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)

    @property
    def told(self) -> tuple[int, int] | None:
        """Prompt and completion tokens, where the usage came."""
        return (self.prompt_tokens, self.completion_tokens) if self.has_usage else None


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
class RequestResult(Answer):
    """`due_s` is when the request should have been sent.

    Latencies count from `due_s`, so a client or server that falls behind is seen to.
    """

    index: int
    due_s: float
    token_source: TokenSource = "none"
    reread_tokens: int = 0
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


class _Broken(Exception):
    """The server's answer is no usable completion; the message is the code."""


def new_session(*, force_close: bool = False) -> aiohttp.ClientSession:
    """A session without a connection limit: the load decides how many are open."""
    connector = aiohttp.TCPConnector(limit=0, force_close=force_close)
    return aiohttp.ClientSession(connector=connector)


async def ask(
    session: aiohttp.ClientSession,
    base_url: str,
    key: str,
    body: Mapping[str, Any],
    answer: Answer,
    *,
    headers: Mapping[str, str] | None = None,
    echo: str = "",
    leaves_after: int = 0,
    patience_s: float | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Send one chat request and fill `answer` until its end. Failures are recorded, never raised.

    `echo`: text that some servers send back before the first token. `leaves_after`: so many chunks
    or tokens of a stream are enough. `patience_s`: the client gives up then; `timeout_s`: the
    server is broken then.
    """
    own = {"authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=timeout_s)
    patience = asyncio.timeout(patience_s)
    answer.began_s = time.perf_counter()
    try:
        async with (
            patience,
            session.post(
                f"{base_url}/v1/chat/completions",
                json=body,
                headers=own | dict(headers or {}),
                timeout=limit,
            ) as response,
        ):
            answer.status, answer.headers = response.status, response.headers
            if response.status != 200:
                answer.code = _status_code(await response.text())
                answer.end = "error" if response.status == 500 else "refused"
            elif body.get("stream"):
                await _read_stream(response, answer, leaves_after, echo)
            else:
                _read_whole(await response.json(), answer)
    except TimeoutError:
        gave_up = patience.expired()
        answer.end, answer.code = ("left", "gave up") if gave_up else ("broken", "timeout")
    except _Broken as error:
        answer.end, answer.code = "broken", str(error)
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        answer.end, answer.code = "broken", f"connection: {type(error).__name__}"
    except (ValueError, LookupError, TypeError):
        answer.end, answer.code = "broken", "answer is no completion"
    answer.done_s = time.perf_counter()


async def chat(
    session: aiohttp.ClientSession, target: Target, request: ChatRequest, due_s: float
) -> RequestResult:
    """One greedy stream of load to its end. Failures are recorded, never raised.

    A request without a final `finish_reason` is an error, however much text it brought.
    """
    result = RequestResult(request.index, due_s)
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": request.content}],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url, key = target.base_url, target.api_key
    timeout_s, echo = target.timeout_s, request.content
    await ask(session, url, key, body, result, timeout_s=timeout_s, echo=echo)
    if result.end == "done" or result.code == NO_MARK:
        result.error = _settle_tokens(target, result)
    elif result.status not in (0, 200):
        result.error = f"http {result.status}: {result.code}".removesuffix(": ")
    else:
        result.error = f"error event: {result.code}" if result.end == "error" else result.code
    return result


async def _read_stream(
    response: aiohttp.ClientResponse, answer: Answer, leaves_after: int, echo: str
) -> None:
    parts: list[str] = []
    try:
        async for now_s, event in _events(response):
            if event is None:
                if not answer.finish_reason:
                    break
                answer.end = "done"
                return
            if "error" in event:
                answer.end, answer.code = "error", _error_code(event["error"])
                return
            text = _read_event(event, answer)
            if text and echo and answer.first_s is None and echo in text:
                answer.echoed_prompt = True
            elif text:
                parts.append(text)
                _stamp(answer, now_s)
            if 0 < leaves_after <= max(answer.chunks, answer.tokens):
                answer.end = "left"
                return
    finally:
        answer.text = "".join(parts)
    raise _Broken(NO_MARK if answer.finish_reason else "stream ended without finish_reason")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, Any]]:
    """When each was read, and what it says; None is the last mark."""
    pending = b""
    async for data in response.content.iter_any():
        now_s = time.perf_counter()
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if said := b"\n".join(lines):
                yield now_s, None if said == b"[DONE]" else json.loads(said)


def _read_event(event: Mapping[str, Any], answer: Answer) -> str:
    """The event's text; all else is noted."""
    answer.request_id = event.get("id") or answer.request_id
    if event.get("usage"):
        _read_usage(event["usage"], answer)
    text = ""
    for choice in event.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.tokens += len((choice.get("logprobs") or {}).get("content") or ())
        text += choice.get("delta", {}).get("content") or ""
    return text


def _read_whole(whole: Mapping[str, Any], answer: Answer) -> None:
    choice = whole["choices"][0]
    answer.request_id = whole["id"]
    answer.text = choice["message"].get("content") or ""
    answer.finish_reason = choice.get("finish_reason") or ""
    answer.tokens = len((choice.get("logprobs") or {}).get("content") or ())
    answer.chunks = 1
    _read_usage(whole["usage"], answer)
    answer.end = "done"


def _read_usage(usage: Mapping[str, Any], answer: Answer) -> None:
    answer.has_usage = True
    answer.prompt_tokens = usage["prompt_tokens"]
    answer.completion_tokens = usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    answer.cached_tokens = details.get("cached_tokens") or 0


def _stamp(answer: Answer, now_s: float) -> None:
    answer.chunks += 1
    if answer.last_s is None:
        answer.first_s = now_s
    elif now_s > answer.last_s:
        # Events of one read have one time: a gap is between reads.
        answer.gaps_s.append(now_s - answer.last_s)
    answer.last_s = now_s


def _settle_tokens(target: Target, result: RequestResult) -> str:
    """Where its tokens are known from; what is wrong, or ""."""
    result.token_source = "usage" if result.has_usage else "none"
    if target.count_tokens is not None:
        result.reread_tokens = target.count_tokens(result.text)
        if result.token_source == "none":
            result.completion_tokens = result.reread_tokens
            result.token_source = "retokenized"
    if result.token_source == "none":
        return "no usage in the stream and no tokenizer to count with"
    if result.completion_tokens and result.first_s is None:
        return "tokens in usage but no text in the stream"
    return ""


def _status_code(body: str) -> str:
    try:
        return _error_code(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _error_code(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "unnamed")
    return "unnamed"
