"""The HTTP application: its routes, and the layers that every request passes on its way to them.

Both are lists, read from top to bottom. What the layers do is layers.py's, what the routes do
post.py's and gets.py's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.dialects.by_route import MESSAGES, RESPONSES
from gateway.dialects.dialect import CHAT
from gateway.http import gets, responses
from gateway.http.acceptor import connections_of
from gateway.http.batches import batch_routes
from gateway.http.conversations import conversation_routes
from gateway.http.files import file_routes, takes_file
from gateway.http.layers import BodyBound, ErrorAnswers, RequestHeads, cors
from gateway.http.ollama import OllamaRoutes
from gateway.http.openapi import openapi
from gateway.http.own_hosts import OwnHosts
from gateway.http.post import Post
from gateway.http.usage_reports import UsageReports
from gateway.pipeline.edge import Edge, build_edge
from gateway.pipeline.pipeline import Services


class MountedApp(Protocol):
    """An application that serves all paths below a prefix, such as the operator's pages."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

    def close(self) -> None:
        """When no more requests come. May block."""


RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE = ("/v1/score", "/score")
"""The same by the names that clients of Cohere, Jina and vLLM use."""

Mounts: TypeAlias = Mapping[str, Callable[[Edge], MountedApp]]
"""Path prefix -> what makes the application that is mounted there."""


class Application(Starlette):
    """What the supervisor hands to uvicorn. `connections` counts those of `http_config`."""

    def __init__(self, services: Services, edge: Edge, mounts: Mounts) -> None:
        settings, organization = services.settings, "/v1/organization"
        mounted = {prefix: make(edge) for prefix, make in mounts.items()}

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with edge.running():
                yield
            await edge.close(settings.shutdown_timeout_s)
            for app in mounted.values():
                await asyncio.to_thread(app.close)
            await asyncio.to_thread(self.state.usage_reports.close)

        super().__init__(
            middleware=[
                *cors(settings.cors_origins),
                Middleware(
                    RequestHeads,
                    now_s=edge.clocks.now_s,
                    now_at=edge.clocks.now_at,
                    metrics=edge.metrics,
                ),
                Middleware(ErrorAnswers),
                Middleware(BodyBound, max_bytes=settings.max_body_bytes, is_apart=takes_file),
            ],
            routes=[
                Route("/v1/chat/completions", Post(edge, "chat"), methods=["POST"]),
                Route("/v1/completions", Post(edge, "completion"), methods=["POST"]),
                Route("/v1/messages", Post(edge, "chat", MESSAGES), methods=["POST"]),
                *_response_routes(edge),
                *_token_routes(edge),
                *file_routes(),
                *batch_routes(),
                Route("/v1/embeddings", Post(edge, "embedding"), methods=["POST"]),
                Route("/v1/classify", Post(edge, "classify"), methods=["POST"]),
                *(Route(path, Post(edge, "rerank"), methods=["POST"]) for path in RERANK),
                *(Route(path, Post(edge, "score"), methods=["POST"]) for path in SCORE),
                *_ollama_routes(edge),
                Route("/v1/models", gets.list_models, methods=["GET"]),
                Route("/v1/models/{name:path}", gets.show_model, methods=["GET"]),
                Route(f"{organization}/usage/completions", gets.usage, methods=["GET"]),
                Route(f"{organization}/costs", gets.costs, methods=["GET"]),
                Route("/health/live", gets.live, methods=["GET"]),
                Route("/health/ready", gets.ready, methods=["GET"]),
                Route("/health", gets.ready, methods=["GET"]),
                Route("/ping", gets.ready, methods=["GET"]),
                Route("/version", gets.version, methods=["GET"]),
                Route("/openapi.json", openapi, methods=["GET"]),
                Route("/metrics", gets.metrics, methods=["GET"]),
                *(_Below(path, OwnHosts(app, settings)) for path, app in mounted.items()),
            ],
            lifespan=lifespan,
        )
        self.router.redirect_slashes = False
        routes = [route for route in self.routes if isinstance(route, Route)]
        self._paths = {route.endpoint: route.path for route in reversed(routes)}
        self._prefixes = tuple(mounted)
        self.state.edge = edge
        self.state.usage_reports = UsageReports(settings, edge.clocks.now_at)
        self.connections = connections_of(settings)
        edge.metrics.watch_connections(self.connections)

    def path_of(self, scope: Scope) -> str:
        """For metrics: the path of the route that took a request, with its parameters' names. The
        first of several that one function serves; `other` where no route did."""
        endpoint = scope.get("endpoint")
        path = None if endpoint is None else self._paths.get(endpoint)
        if path is None:  # a client may ask for any path: none becomes a label
            asked: str = scope["path"]
            below = (p for p in self._prefixes if asked == p or asked.startswith(f"{p}/"))
            return next(below, "other")
        return path

    def build_middleware_stack(self) -> ASGIApp:
        """The layers alone, the first of the list outermost."""
        app: ASGIApp = self.router.app
        for layer in reversed(self.user_middleware):
            app = layer.cls(app, *layer.args, **layer.kwargs)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Layers see requests alone. Starlette's own would be one more frame to resume at
        each `await` of a request."""
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        app = self.middleware_stack if scope["type"] == "http" else self.router
        await app(scope, receive, send)


def _token_routes(edge: Edge) -> Iterator[Route]:
    """Requests that end with stage 2."""
    requests = edge.token_requests
    for path, handle, dialect in (
        ("/tokenize", requests.tokenize, CHAT),
        ("/detokenize", requests.detokenize, CHAT),
        ("/v1/messages/count_tokens", requests.count_tokens, MESSAGES),
    ):
        yield Route(path, Post(edge, "chat", dialect, handle), methods=["POST"])


def _ollama_routes(edge: Edge) -> list[Route]:
    """None where the setting names no key."""
    key_id = edge.services.settings.ollama_key_id
    return OllamaRoutes(edge, key_id).routes() if key_id else []


def _response_routes(edge: Edge) -> Iterator[Route]:
    create = Post(edge, "chat", RESPONSES, edge.responses.create)
    one = "/v1/responses/{response_id}"
    yield Route("/v1/responses", create, methods=["POST"])
    yield Route(one, responses.Retrieve(), methods=["GET"])
    yield Route(one, responses.remove, methods=["DELETE"])
    yield Route(f"{one}/input_items", responses.input_items, methods=["GET"])
    yield Route(f"{one}/cancel", responses.cancel, methods=["POST"])
    yield from conversation_routes()


class _Below(BaseRoute):
    """All paths below a prefix, for an application that reads them as they are."""

    def __init__(self, prefix: str, app: ASGIApp) -> None:
        self._prefix = prefix
        self._app = app

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See BaseRoute."""
        path: str = scope["path"]
        is_below = path == self._prefix or path.startswith(self._prefix + "/")
        return (Match.FULL if is_below else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See BaseRoute."""
        await self._app(scope, receive, send)


def create_app(services: Services, mounts: Mounts, edge: Edge | None = None) -> Application:
    """The application that the supervisor hands to uvicorn. `edge` is given by tests."""
    return Application(services, edge or build_edge(services), mounts)
