"""The HTTP application: routes, and what every request passes, in one place and in this order:

    a request id, the clock, and the headers every answer carries
    whatever was raised becomes OpenAI's error object; nothing else catches all
    no body larger than the setting, whatever its headers claim

Plain ASGI. The POST routes, by which nearly all requests come, are found by their path; the others
go through Starlette's router. Starlette's own middlewares are left out: each would wrap every
message of every answer once more. Nothing here knows what the routes do.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from admin.app import AdminApp
from admin.ask import PREFIX as ADMIN
from gateway.edge import Edge, build_edge
from gateway.errors import (
    INVALID_REQUEST,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    SERVER_ERROR,
    TOO_LARGE,
    ApiError,
    ClientGone,
)
from gateway.random_ids import RandomBytes
from gateway.routes import health, models, organization, post
from gateway.server.connections import connections_of
from gateway.services import Services
from gateway.types import RequestKind
from gateway.usage_reports import UsageReports

log = logging.getLogger(__name__)

POST_KINDS: dict[str, RequestKind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/classify": "classify",
    "/v1/rerank": "rerank",
}
# A client that is still sending its body would lose our answer with the connection, so a body that
# is too large is read and thrown away for a while first.
DISCARD_FACTOR = 8
DISCARD_TIMEOUT_S = 5.0


class Application(Starlette):
    """What the supervisor hands to uvicorn. `connections` counts those of `http_config`."""

    def __init__(self, services: Services, edge: Edge) -> None:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with edge.running():
                yield
            await edge.close(services.settings.shutdown_timeout_s)
            await asyncio.to_thread(self.admin.close)
            await asyncio.to_thread(self.state.usage_reports.close)

        super().__init__(
            routes=[
                *(Route(path, _post(kind), methods=["POST"]) for path, kind in POST_KINDS.items()),
                Route("/v1/models", models.list_models, methods=["GET"]),
                Route("/v1/models/{name:path}", models.show_model, methods=["GET"]),
                Route(
                    "/v1/organization/usage/completions", organization.completions, methods=["GET"]
                ),
                Route("/v1/organization/costs", organization.costs, methods=["GET"]),
                Route("/health/live", health.live, methods=["GET"]),
                Route("/health/ready", health.ready, methods=["GET"]),
                Route("/metrics", health.metrics, methods=["GET"]),
            ],
            lifespan=lifespan,
        )
        self.router.redirect_slashes = False
        self.state.edge = edge
        self.state.usage_reports = UsageReports(services.settings, edge.clocks.now_at)
        self.connections = connections_of(services.settings)
        edge.metrics.watch_connections(self.connections)
        self._edge = edge
        self._random = RandomBytes()
        self.admin = AdminApp(edge)
        self._max_body_bytes = services.settings.max_body_bytes
        self._entry: ASGIApp = self._serve
        origins = [o.strip() for o in services.settings.cors_origins.split(",") if o.strip()]
        if origins:
            self._entry = CORSMiddleware(
                self._serve,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["*"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self._entry(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. The named boundary of the gateway: nothing raised gets further."""
        context = _Context(self._edge, self._random, scope, send)
        try:
            receive = self._bounded(scope, receive, await self._check_length(scope, receive))
            kind = POST_KINDS.get(scope["path"]) if scope["method"] == "POST" else None
            if kind is not None:
                await post.complete(self._edge, kind, scope, receive, context.send)
            elif scope["path"] == ADMIN or scope["path"].startswith(ADMIN + "/"):
                await self.admin(scope, receive, context.send)
            else:
                await self.router(scope, receive, context.send)
        except ClientGone:
            log.info("request %s: client gone", context.http_id)
        except ApiError as error:
            _let_go(error)
            await context.refuse(error)
        except HTTPException as error:
            await context.refuse(_from_router(scope, error), error.headers)
        except Exception:
            log.exception("request %s %s failed", context.http_id, scope["path"])
            message = f"internal error; name request {context.http_id}"
            await context.refuse(ApiError(SERVER_ERROR, message))

    async def _check_length(self, scope: Scope, receive: Receive) -> int | None:
        """413 by Content-Length at once. Returns what it says, None where it is missing."""
        claimed = None
        for name, value in scope["headers"]:
            if name == b"content-length":
                claimed = value
        if claimed is None:
            return None
        if not (claimed.isdigit() and len(claimed) < 20):
            raise ApiError(INVALID_REQUEST, "the Content-Length header is not a length")
        if int(claimed) > self._max_body_bytes:
            if all(name != b"expect" for name, _ in scope["headers"]):
                await self._discard(receive)
            raise self._too_large()
        return int(claimed)

    def _bounded(self, scope: Scope, receive: Receive, length: int | None) -> Receive:
        """413 by what really comes; a body whose length is told cannot be longer, by HTTP."""
        if length is not None:
            return receive
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                if message.get("more_body"):
                    await self._discard(receive)
                raise self._too_large()
            return message

        return receive_bounded

    async def _discard(self, receive: Receive) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                while num_bytes < DISCARD_FACTOR * self._max_body_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            return

    def _too_large(self) -> ApiError:
        return ApiError(
            TOO_LARGE, f"the request body is larger than {self._max_body_bytes} bytes: send less"
        )


def _let_go(error: BaseException | None) -> None:
    """Of the frames it came through: they have the request, which has the error, and a circle waits
    for the collector with all that was asked (server/interpreter.py)."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Context:
    """One request's id, clock and headers. Puts `http_id`, `arrived_s` and `answer_headers` into
    the request's state."""

    def __init__(self, edge: Edge, random: RandomBytes, scope: Scope, send: Send) -> None:
        self._edge = edge
        self._send = send
        self._arrived_s = edge.clocks.now_s()
        self._started = False
        self._answer_headers: dict[str, str] = {}
        # Never the client's own id: this one is the ledger's key.
        self.http_id = random.take(16).hex()
        state = scope.setdefault("state", {})
        state["http_id"] = self.http_id
        state["arrived_s"] = self._arrived_s
        state["answer_headers"] = self._answer_headers

    async def send(self, message: Message) -> None:
        """ASGI's, with the headers that every answer carries."""
        if message["type"] == "http.response.start":
            self._started = True
            elapsed_s = self._edge.clocks.now_s() - self._arrived_s
            headers = message.setdefault("headers", [])
            headers.append((b"x-request-id", self.http_id.encode()))
            headers.append((b"openai-processing-ms", b"%d" % round(elapsed_s * 1000)))
            headers.extend((k.encode(), v.encode()) for k, v in self._answer_headers.items())
        await self._send(message)

    async def refuse(self, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
        """OpenAI's error object with the headers that its SDKs obey."""
        if self._started:
            # Too late for a status: the connection ends short, which the client can tell.
            log.error("request %s failed after it began: %s", self.http_id, error)
            return
        self._edge.metrics.request_errors.labels(error.kind.code).inc()
        body = msgspec.json.encode(error.body())
        told = error.headers()
        if b"x-should-retry" in dict(told):
            self._answer_headers.pop("x-should-retry", None)
        told += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *((name.lower().encode(), value.encode()) for name, value in (headers or {}).items()),
        ]
        start = {"type": "http.response.start", "status": error.kind.status, "headers": told}
        await self.send(start)
        await self._send({"type": "http.response.body", "body": body})


def create_app(services: Services, edge: Edge | None = None) -> Application:
    """The application that the supervisor hands to uvicorn. `edge` is given by tests."""
    return Application(services, edge or build_edge(services))


def _post(kind: RequestKind) -> Callable[[Request], Awaitable[Response]]:
    """Stands in the router's table for what `Application` serves itself."""

    async def endpoint(request: Request) -> Response:
        raise ApiError(NOT_FOUND, f"{request.url.path} ({kind}) is not served here")

    return endpoint


def _from_router(scope: Scope, error: HTTPException) -> ApiError:
    """What Starlette's router raises itself: no such path, or another method."""
    where = f"{scope['method']} {scope['path']}"
    if error.status_code == 405:
        return ApiError(METHOD_NOT_ALLOWED, f"{where} is not served: try another method")
    if error.status_code == 404:
        return ApiError(NOT_FOUND, f"{where} is not served")
    raise error
