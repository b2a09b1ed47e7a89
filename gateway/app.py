"""The HTTP application: routes, and the three middlewares every request passes, outermost first.

    RequestContext   a request id, the clock, and the headers every answer carries
    ErrorBoundary    whatever was raised becomes OpenAI's error object; nothing else catches all
    BodyLimit        no body larger than the setting, whatever its headers claim

They are plain ASGI: Starlette's BaseHTTPMiddleware costs a task and a queue per request. Nothing
here knows what the routes do.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge import Edge, build_edge
from gateway.errors import (
    INVALID_REQUEST,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    REQUEST_TIMEOUT,
    SERVER_ERROR,
    TOO_LARGE,
    ApiError,
    ClientGone,
)
from gateway.metrics import Metrics
from gateway.routes import chat, classify, completions, embeddings, health, models, rerank
from gateway.services import Services
from gateway.stream import ClientStalled

log = logging.getLogger(__name__)

# A client that is still sending its body would lose our answer with the connection, so a body that
# is too large is read and thrown away for a while first.
DISCARD_FACTOR = 8
DISCARD_TIMEOUT_S = 5.0


def create_app(services: Services, edge: Edge | None = None) -> Starlette:
    """The application that the supervisor hands to uvicorn. `edge` is given by tests."""
    built = edge or build_edge(services)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await built.close(services.settings.shutdown_timeout_s)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat.create, methods=["POST"]),
            Route("/v1/completions", completions.create, methods=["POST"]),
            Route("/v1/embeddings", embeddings.create, methods=["POST"]),
            Route("/v1/classify", classify.create, methods=["POST"]),
            Route("/v1/rerank", rerank.create, methods=["POST"]),
            Route("/v1/models", models.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", models.show_model, methods=["GET"]),
            Route("/health/live", health.live, methods=["GET"]),
            Route("/health/ready", health.ready, methods=["GET"]),
            Route("/metrics", health.metrics, methods=["GET"]),
        ],
        middleware=[
            Middleware(RequestContext, edge=built),
            Middleware(ErrorBoundary, metrics=built.metrics),
            Middleware(BodyLimit, max_bytes=services.settings.max_body_bytes),
        ],
        exception_handlers={HTTPException: _from_router},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.edge = built
    return app


class RequestContext:
    """Puts `http_id`, `arrived_s` and `answer_headers` into the request's state."""

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app = app
        self._now_s = edge.clocks.now_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Never the client's own id: this one is the ledger's key.
        http_id, arrived_s = os.urandom(16).hex(), self._now_s()
        answer_headers: dict[str, str] = {}
        state = scope.setdefault("state", {})
        state.update(http_id=http_id, arrived_s=arrived_s, answer_headers=answer_headers)
        state["started"] = False

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["started"] = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = http_id
                elapsed_s = self._now_s() - arrived_s
                headers["openai-processing-ms"] = str(round(elapsed_s * 1000))
                headers.update(answer_headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class ErrorBoundary:
    """The named boundary of the gateway: nothing raised by a request gets further."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        try:
            await self._app(scope, receive, send)
        except (ClientGone, ClientDisconnect, ClientStalled) as error:
            log.info("request %s: client gone (%s)", state["http_id"], type(error).__name__)
        except ApiError as error:
            await self._answer(error, scope, receive, send)
        except Exception:
            log.exception("request %s %s failed", state["http_id"], scope["path"])
            await self._answer(
                ApiError(SERVER_ERROR, f"internal error; name request {state['http_id']}"),
                scope,
                receive,
                send,
            )

    async def _answer(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["state"]["started"]:
            # Too late for a status: the connection ends short, which the client can tell.
            log.error("request %s failed after it began: %s", scope["state"]["http_id"], error)
            return
        self._metrics.request_errors.labels(error.kind.code).inc()
        await error_response(error)(scope, receive, send)


class BodyLimit:
    """413 by Content-Length at once, and by what really comes where that is missing or a lie."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ApiError for the boundary around it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        claimed = headers.get("content-length", "0")
        if not (claimed.isascii() and claimed.isdigit() and len(claimed) < 20):
            raise ApiError(INVALID_REQUEST, "the Content-Length header is not a length")
        if int(claimed) > self._max_bytes:
            if "expect" not in headers:
                await self._discard(receive)
            raise self._too_large()
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body"):
                    await self._discard(receive)
                raise self._too_large()
            return message

        await self._app(scope, receive_bounded, send)

    async def _discard(self, receive: Receive) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                while num_bytes < DISCARD_FACTOR * self._max_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            return

    def _too_large(self) -> ApiError:
        return ApiError(
            TOO_LARGE, f"the request body is larger than {self._max_bytes} bytes: send less"
        )


def error_response(error: ApiError) -> Response:
    """OpenAI's error object with the headers that its SDKs obey."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.kind is REQUEST_TIMEOUT:
        headers["connection"] = "close"  # What may yet come of the body is nothing to read.
    if error.kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error.body()), error.kind.status, headers, "application/json"
    )


async def _from_router(request: Request, error: Exception) -> Response:
    """What Starlette's router raises itself: no such path, or another method."""
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        answer = ApiError(METHOD_NOT_ALLOWED, f"{where} is not served: try another method")
    elif error.status_code == 404:
        answer = ApiError(NOT_FOUND, f"{where} is not served")
    else:
        raise error
    edge: Edge = request.app.state.edge
    edge.metrics.request_errors.labels(answer.kind.code).inc()
    response = error_response(answer)
    response.headers.update(error.headers or {})
    return response
