"""What the pipeline is handed and what it hands back: one request and its answer, without HTTP.

Made and used by routes/post.py; the way between is pipeline.py's. No behaviour.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.types import Principal, RequestKind, Sink


@dataclass(slots=True)
class Call:
    """One HTTP request. `answer_headers` is filled in on the way, for errors too.

    `receive_body` is called once, after auth: nobody without a key makes us hold a body.
    `client` is the caller's address, "" where there is none. `when_gone` takes what is to be called
    when the client goes away. `principal`: whose request it is, where an operator asks for a tenant
    and has shown the right to; then no key is looked for.
    """

    kind: RequestKind
    headers: Mapping[str, str]
    client: str
    receive_body: Callable[[], Awaitable[bytes]]
    http_id: str
    arrived_s: float
    when_gone: Callable[[Callable[[], None]], None]
    answer_headers: dict[str, str] = field(default_factory=dict)
    principal: Principal | None = None


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A whole answer, in parts. Whoever sends it calls `close` at the end, however it ends."""

    parts: Sequence[bytes]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """A streamed answer. Whoever calls `run` calls `close` at the end, however it ends."""

    run: Callable[[Sink], Awaitable[None]]
    close: Callable[[], None] = lambda: None


Answer: TypeAlias = JsonAnswer | EventAnswer
