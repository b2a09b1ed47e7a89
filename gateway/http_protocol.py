"""One HTTP/1.1 connection: uvicorn's, with the bounds that it leaves to a proxy in front.

Uvicorn keeps whatever comes before a request's body, however long it is and however long it takes,
and does so before anybody has shown a key. Here a head (or a trailer) of more than `max_head_bytes`
gets 431, one that is not complete within `head_timeout_s` ends its connection, and what is no HTTP
at all gets OpenAI's error object too. Bodies are bounded in app.py and routes/chat.py.
"""

import asyncio
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import HEADERS_TOO_LARGE, INVALID_REQUEST, ApiError
from gateway.settings import Settings


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn makes one for every connection; `bounded_http` sets the bounds."""

    max_head_bytes: int
    head_timeout_s: float
    _num_bytes = 0
    _moved_on = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects is to send something."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what comes between two of the steps below: it is being kept by the parser."""
        self._moved_on = False
        super().data_received(data)
        self._num_bytes = 0 if self._moved_on else self._num_bytes + len(data)
        if self._num_bytes > self.max_head_bytes:
            message = f"the request's headers are larger than {self.max_head_bytes} bytes"
            self._refuse(ApiError(HEADERS_TOO_LARGE, message))

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._moved_on = True
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head's end."""
        self._moved_on = True
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._moved_on = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed."""
        self._refuse(ApiError(INVALID_REQUEST, msg))

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of a next request, sent ahead: it is not read on until this one is answered.
            self._await_head()
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless another answer is being written, and end the connection."""
        cycle = self.cycle
        is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if not is_answering and not self.transport.is_closing():
            body = msgspec.json.encode(error.body())
            self.transport.write(
                STATUS_LINE[error.kind.status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()


def bounded_http(max_head_bytes: int, head_timeout_s: float) -> type[BoundedHttp]:
    """What uvicorn's `http` option takes."""
    bounds = {"max_head_bytes": max_head_bytes, "head_timeout_s": head_timeout_s}
    return type("BoundedHttp", (BoundedHttp,), bounds)


def http_config(app: Any, settings: Settings, grace_s: float) -> uvicorn.Config:
    """How the server listens, and whom it believes. `grace_s`: for what runs at its end.

    Behind `trusted_proxies` a client is the last address of X-Forwarded-For that is none of them;
    from anybody else that header means nothing.
    """
    return uvicorn.Config(
        app,
        http=bounded_http(settings.max_head_bytes, settings.receive_timeout_s),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
