"""All that is asked by POST: from HTTP to a `Call`, and the pipeline's answer to a client that may
go away. The sending half of stage 9.

Who pays for an answer is active_request.py's; what a connection is, and how long one may not read,
is http_protocol.py's.

Events are written straight to the connection, by plain calls: no task and no message an event.
Where the client does not read, `is_full` says so, and whoever writes stops until `when_drained`
calls; what it writes all the same is kept. In a stream that says nothing for `heartbeat_s` comments
go out (lines with a colon, which clients of server-sent events pass over), so that nobody on the
way takes it for dead: while a request waits in the queue, a model loads, or a long prompt is read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from starlette.types import Receive, Scope, Send

from gateway.dialects.dialect import CHAT, Dialect
from gateway.errors import REQUEST_TIMEOUT, UNSUPPORTED_MEDIA, ApiError, ClientGone
from gateway.pipeline.edge import Edge
from gateway.types import Answer, Call, EventAnswer, RequestKind, Sink

_SLICE_BYTES = 262_144
Handle: TypeAlias = Callable[[Call], Awaitable[Answer]]


class Post:
    """An endpoint: the pipeline for one request, stopped where the client goes away."""

    def __init__(
        self, edge: Edge, kind: RequestKind, dialect: Dialect = CHAT, handle: Handle | None = None
    ) -> None:
        """`dialect`: of texts, if it is not the one of its kind. `handle`: in place of the
        pipeline's."""
        self._edge = edge
        self._kind = kind
        self._dialect = dialect
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ApiError while nothing has been sent, and ClientGone."""
        settings, state = self._edge.services.settings, scope["state"]
        headers = RequestHeaders(scope["headers"])
        if not self._dialect.takes_any_media:
            check_media(headers)
        watch = ClientWatch(state["connection"])

        async def receive_body() -> bytes:
            if watch.connection.has_body:
                return await _body(receive)
            return await body_within(receive, settings.receive_timeout_s)

        call = Call(
            kind=self._kind,
            headers=headers,
            client=client_of(scope),
            receive_body=receive_body,
            http_id=state["http_id"],
            arrived_s=state["arrived_s"],
            when_gone=watch.when_gone,
            answer_headers=state["answer_headers"],
            note=state["note"],
            dialect="" if self._dialect is CHAT else self._dialect.name,
        )
        try:
            answer = await (self._handle or self._edge.pipeline.handle)(call)
            try:
                if isinstance(answer, EventAnswer):
                    about = settings.stream_heartbeat_s, self._dialect
                    await EventStream(answer.run, watch, *about).send(send)
                else:
                    watch.stop()
                    await WholeAnswer(answer.parts).send(send)
            finally:
                answer.close()
        except ApiError as error:
            raise self._dialect.renamed(error) from error
        finally:
            watch.stop()


class RequestHeaders(Mapping[str, str]):
    """By their names in lower case, the first of several. Few of them are ever asked for, so each
    is decoded when it is."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Sequence[tuple[bytes, bytes]]) -> None:
        self._raw = dict(reversed(raw))

    def __getitem__(self, name: str) -> str:
        """Raises KeyError."""
        return self._raw[name.encode()].decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def client_of(scope: Scope) -> str:
    """The caller's address: the connection's, or what a trusted proxy says it is."""
    client = scope.get("client")
    return str(client[0]) if client else ""


async def body_within(receive: Receive, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError where it takes longer, and ClientGone."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _body(receive)
    except TimeoutError as error:
        message = f"the request body did not arrive within {timeout_s:g} s: retry the request"
        raise ApiError(REQUEST_TIMEOUT, message) from error


async def _body(receive: Receive) -> bytes:
    """Raises ClientGone."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            return b"".join([*parts, body]) if parts else body
        parts.append(body)


def check_media(headers: Mapping[str, str]) -> None:
    """A form or a compressed body is refused by name instead of as malformed JSON. Raises
    ApiError."""
    media = headers.get("content-type", "application/json")
    if media != "application/json" and (
        media.partition(";")[0].strip().lower() != "application/json"
    ):
        raise ApiError(
            UNSUPPORTED_MEDIA, "unsupported Content-Type: send the body as application/json"
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            UNSUPPORTED_MEDIA, "unsupported Content-Encoding: send the body uncompressed"
        )


class ClientConnection(Protocol):
    """What a request may know of the connection it came by (`http_protocol.BoundedHttp`)."""

    @property
    def is_full(self) -> bool:
        """The client does not read."""

    @property
    def is_gone(self) -> bool:
        """There is nobody to write to."""

    @property
    def has_body(self) -> bool:
        """The body of the request that is being served is all there."""

    def write_chunk(self, data: bytes) -> None:
        """A part of a streamed answer whose head has been sent."""

    def watch(self, watch: "ClientWatch") -> None:
        """Tell it what becomes of the client."""

    def unwatch(self, watch: "ClientWatch") -> None:
        """No longer."""


class ClientWatch:
    """Hears on behalf of one request what becomes of its client."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.gone = connection.is_gone
        self._callbacks: list[Callable[[], None]] = []
        self._on_drained: Callable[[], None] | None = None
        connection.watch(self)

    def stop(self) -> None:
        """The answer is complete; who goes away now breaks nothing off."""
        self.connection.unwatch(self)
        self._callbacks.clear()
        self._on_drained = None

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the client goes away, at once if it has."""
        if self.gone:
            callback()
        else:
            self._callbacks.append(callback)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the client reads again, or is gone."""
        self._on_drained = callback

    def on_gone(self) -> None:
        """The connection's word, once."""
        self.gone = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self.on_drained()

    def on_drained(self) -> None:
        """The connection's word."""
        if self._on_drained is not None:
            self._on_drained()


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A JSON answer, a slice at a time: one of megabytes does not lie in buffers for a client that
    does not read it. A part that is too large is cut; parts that are small are sent as they are.
    """

    parts: Sequence[bytes]

    async def send(self, send: Send) -> None:
        """All of it; returns early, without a sound, where the client goes away."""
        length = str(sum(map(len, self.parts))).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", length),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(self.parts, 1):
            for at in range(0, len(part), _SLICE_BYTES):
                body = part if len(part) <= _SLICE_BYTES else part[at : at + _SLICE_BYTES]
                more = number < len(self.parts) or at + _SLICE_BYTES < len(part)
                await send({"type": "http.response.body", "body": body, "more_body": more})


class EventStream:
    """A streamed answer. Implements types.Sink for whoever makes its events."""

    def __init__(
        self,
        run: Callable[[Sink], Awaitable[None]],
        watch: ClientWatch,
        heartbeat_s: float,
        dialect: Dialect = CHAT,
    ) -> None:
        """`heartbeat_s` 0: none."""
        self._dialect = dialect
        self._run = run
        self._watch = watch
        self._connection = watch.connection
        self._write_chunk = watch.connection.write_chunk
        self._heartbeat_s = heartbeat_s if dialect.heartbeat else 0.0
        self._is_silent = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """See Sink."""
        return self._connection.is_full

    def write(self, event: bytes) -> None:
        """See Sink."""
        self._is_silent = False
        self._write_chunk(event)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """See Sink."""
        self._watch.when_drained(callback)

    async def drained(self) -> None:
        """See Sink."""
        if self.is_full:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def tell() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self.when_drained(tell)
            await waiter

    async def send(self, send: Send, is_head: bool = False) -> None:
        """Head, events, end. `is_head`: the head alone, as HEAD asks for."""
        headers = [
            (b"content-type", self._dialect.media_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy in front must not hold events back
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not is_head:
            await self._send_events()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self) -> None:
        if self._heartbeat_s:
            self._beat_later()
        try:
            await self._run(self)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _beat_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    def _beat(self) -> None:
        if self._is_silent and not self.is_full:
            self._connection.write_chunk(self._dialect.heartbeat)
        self._is_silent = True
        self._beat_later()
