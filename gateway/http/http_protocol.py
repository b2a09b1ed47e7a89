"""One HTTP/1.1 connection: uvicorn's, with the bounds that it leaves to a proxy in front.

Uvicorn keeps whatever comes before a request's body, however long it is and however long it takes,
and does so before anybody has shown a key. Here

    a head (or a trailer) of more than `max_head_bytes`           gets 431
    one that is not complete within `receive_timeout_s`           ends its connection
    nothing for `keep_alive_timeout_s` between two requests       ends it
    an answer that is not read for `stream_write_timeout_s`       ends it
    what is no HTTP at all                                        gets OpenAI's error object too
    a head that a proxy could read differently (`head_fault`)     gets 400 and ends the connection
    an answer without a length to a client of HTTP/1.0            ends with the connection, in no
                                                                  chunks

Bodies are bounded in layers.py, connections by acceptor.py before there is one of these. A request
finds its connection in its ASGI state as `connection`: who wants to hear that the client went away,
or writes a stream, goes by `post.ClientConnection`, which costs neither a task nor a message.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.errors import HEADERS_TOO_LARGE, INVALID_REQUEST, ApiError
from gateway.http.acceptor import Connections, ConnectionSlot, connections_of
from gateway.http.post import ClientWatch
from gateway.http.tls import tls_options
from gateway.settings.http_settings import HttpSettings

logger = logging.getLogger(__name__)

OLD = "1.0"
LINGER_S = 5.0
"""How long a connection that this side has closed may take to read what is still to be sent."""


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Of one connection."""

    max_head_bytes: int
    head_timeout_s: float
    write_timeout_s: float


class BoundedHttp(HttpToolsProtocol):
    """Implements post.ClientConnection and acceptor.Guest. Made for every connection that is
    served; `bounded_http` says with which bounds and in which count."""

    bounds: HttpBounds
    all_of_them: Connections
    place: ConnectionSlot
    _is_old = False
    _is_head = False
    _num_bytes = 0
    _moved_on = False
    _in_head = False
    _served: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _watches: tuple[ClientWatch, ...] = ()

    # What a request sees of it.

    @property
    def is_full(self) -> bool:
        """The client does not read what it has been sent: write no more for now."""
        return self.flow.write_paused and not self.transport.is_closing()

    @property
    def is_gone(self) -> bool:
        """There is nobody to write to."""
        return self.transport.is_closing()

    @property
    def has_body(self) -> bool:
        """The body of the request that is being served is all there."""
        return not self.cycle.more_body

    def write_chunk(self, data: bytes) -> None:
        """A part of a streamed answer whose head has been sent; an empty one would be its end. An
        answer to HEAD has no parts: what is written here would be read as the next answer."""
        if data and not self._is_head and not self.transport.is_closing():
            self.transport.write(data if self._is_old else b"%x\r\n%b\r\n" % (len(data), data))

    def watch(self, watch: ClientWatch) -> None:
        """Tell it what becomes of the client."""
        self._watches = (*self._watches, watch)

    def unwatch(self, watch: ClientWatch) -> None:
        """No longer."""
        self._watches = tuple(other for other in self._watches if other is not watch)

    # What the transport and the parser say.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects is to send something."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_timer()
        self._stop_stall_timer()
        self.place.leave()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._client_left()
        if self.cycle is not None and self.cycle.response_complete:
            # Request and connection name each other: or some thirty objects a connection would
            # wait to be found as garbage.
            self.cycle = self._served = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Count what comes between two of the steps below: it is being kept by the parser."""
        self._moved_on = False
        # Only a request ends the wait for one: not empty lines, and not what still comes of a body
        # that was refused, which may come for ever.
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if idle is not None:
            # A head may have begun while the answer before was still being written.
            if self._in_head or not self.cycle.response_complete:
                idle.cancel()
            else:
                self.timeout_keep_alive_task = idle
        if self._in_head:
            if self._timer is None:
                self._await_head()
        elif self._timer is not None and self._moved_on:
            self._stop_timer()
        self._num_bytes = 0 if self._moved_on else self._num_bytes + len(data)
        if self._num_bytes > self.bounds.max_head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._moved_on = self._in_head = True
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        """The head's end."""
        self._moved_on, self._in_head = True, False
        size_bytes = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size_bytes > self.bounds.max_head_bytes:  # It came in one piece, or nearly so.
            self._refuse_head()
            raise ValueError("a large head")  # ends the parser
        fault = head_fault(self.parser.get_http_version(), self.headers)
        if fault:
            self.all_of_them.ended["no HTTP"] += 1
            self._refuse(ApiError(INVALID_REQUEST, fault))
            raise ValueError(fault)
        super().on_headers_complete()
        # What comes of headers after the body (trailers) is no part of the head: it would be
        # believed as much as what a proxy in front has said there.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._moved_on = True
        super().on_body(body)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.bounds.write_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if not self.transport.is_closing():  # else it is to read the rest in time, too
            self._stop_stall_timer()
        for watch in self._watches:
            watch.on_drained()

    def on_response_complete(self) -> None:
        """All of an answer is written; where it was the last, the rest is to be read in time."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._bound_rest()
            if self._stall_timer is None:
                self._linger()

    def eof_received(self) -> None:
        """The client has closed its half: the transport closes as soon as all is read."""
        self._client_left()
        self._bound_rest()

    def shutdown(self) -> None:
        """The server stops: at once where no answer is being written."""
        super().shutdown()
        if self.transport.is_closing():
            self._linger()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after an answer."""
        self._close("idle")

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed."""
        if self.transport.is_closing():  # refused already, by its own name
            return
        self.all_of_them.ended["no HTTP"] += 1
        self._refuse(ApiError(INVALID_REQUEST, msg))

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.bounds.head_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of a next request, sent ahead: it is not read on until this one is answered.
            self._await_head()
        else:
            self._close("slow head")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        self._is_old = cycle.scope["http_version"] == OLD
        self._is_head = cycle.scope["method"] == "HEAD"
        super()._start_asgi_task(cycle, _until_the_end(app, cycle) if self._is_old else app)

    def _client_left(self) -> None:
        """Nothing more is written, for the transport may be closed before it says so: neither by
        the last request (`cycle`) nor by the one before it that is being served."""
        for cycle in (self._served, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        watches, self._watches = self._watches, ()
        for watch in watches:
            watch.on_gone()

    def _bound_rest(self) -> None:
        """Below the mark nobody says that the client does not read."""
        if self._stall_timer is None and self.transport.get_write_buffer_size():
            self._stall_timer = self.loop.call_later(self.bounds.write_timeout_s, self._stalled)

    def _stalled(self) -> None:
        logger.info(
            "disconnected a client that does not read address=%s", (self.client or ("",))[0]
        )
        self.all_of_them.ended["stalled"] += 1
        self.transport.abort()

    def _close(self, reason: str) -> None:
        if not self.transport.is_closing():
            self.all_of_them.ended[reason] += 1
            self._leave()

    def _leave(self) -> None:
        """Close; what is still to be sent gets a while."""
        self.transport.close()
        self._client_left()
        self._linger()

    def _linger(self) -> None:
        """A client of TLS may never answer that the connection ends, and one without never read."""
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _refuse_head(self) -> None:
        self.all_of_them.ended["large head"] += 1
        message = (
            f"the request line and headers are larger than {self.bounds.max_head_bytes} bytes: "
            "send less"
        )
        self._refuse(ApiError(HEADERS_TOO_LARGE, message))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless another answer is being written, and end the connection."""
        served = self._served
        is_answering = (
            served is not None
            and not served.response_complete
            and (served.response_started or served is not self.cycle)
        )
        if not is_answering and not self.transport.is_closing():
            self.transport.write(refusal(error))
        self._leave()


def head_fault(http_version: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What this head must not have, or "": two servers one behind the other could take it for
    different requests (RFC 9112, 3.2 and 6.1). Names are in small letters."""
    num_hosts, coding = 0, b""
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
        elif name == b"transfer-encoding":
            coding += value.strip().lower() + b";"
    if num_hosts > 1 or (num_hosts == 0 and http_version != OLD):
        return "the request needs exactly one Host header"
    if coding and (coding != b"chunked;" or http_version == OLD):
        return "Transfer-Encoding must be chunked, once, and only in HTTP/1.1"
    return ""


def _until_the_end(app: Any, cycle: RequestResponseCycle) -> Any:
    """The application for a client of HTTP/1.0, which knows no chunks: an answer without a length
    is written as it is, and ends with the connection."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        is_plain = False

        async def send_plain(message: Any) -> None:
            nonlocal is_plain
            if message["type"] == "http.response.start" and scope["method"] != "HEAD":
                given = list(message.get("headers", ()))
                is_plain = all(name.lower() != b"content-length" for name, _ in given)
                if is_plain:
                    cycle.response_started = True
                    await _write_plain(cycle, _plain_head(message["status"], given))
                    return
            if not is_plain:
                await send(message)
                return
            await _write_plain(cycle, message.get("body", b""))
            if not message.get("more_body", False) and not cycle.disconnected:
                cycle.response_complete = True
                cycle.message_event.set()
                cycle.transport.close()
                cycle.on_response()

        await app(scope, receive, send_plain)

    return run


def _plain_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] != b"connection")
    return STATUS_LINE[status] + lines + b"connection: close\r\n\r\n"


async def _write_plain(cycle: RequestResponseCycle, data: bytes) -> None:
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if data and not cycle.disconnected:
        cycle.transport.write(data)


def refusal(error: ApiError) -> bytes:
    """An answer with which the connection ends. Its id is in no log: no request was read."""
    body = msgspec.json.encode(error.body())
    headers = b"".join(b"%b: %b\r\n" % header for header in error.headers())
    return (
        STATUS_LINE[error.kind.status]
        + b"content-type: application/json\r\nconnection: close\r\n"
        + b"x-request-id: %b\r\n" % secrets.token_hex(16).encode()
        + headers
        + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


def bounded_http(bounds: HttpBounds, connections: Connections) -> type[BoundedHttp]:
    """What uvicorn's `http` option takes."""
    return type("BoundedHttp", (BoundedHttp,), {"bounds": bounds, "all_of_them": connections})


def http_config(
    app: Any, settings: HttpSettings, grace_s: float, connections: Connections | None = None
) -> uvicorn.Config:
    """How the server listens, and whom it believes. `grace_s`: for what runs at its end.
    `connections`: where they are counted; the application's own, where it has one.

    Behind `trusted_proxies` a client is the last address of X-Forwarded-For that is none of them;
    from anybody else that header means nothing.
    """
    bounds = HttpBounds(
        settings.max_head_bytes, settings.receive_timeout_s, settings.stream_write_timeout_s
    )
    counted = connections or getattr(app, "connections", None) or connections_of(settings)
    return uvicorn.Config(
        app,
        http=bounded_http(bounds, counted),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=max(1, round(grace_s)),
        **tls_options(settings),
    )
