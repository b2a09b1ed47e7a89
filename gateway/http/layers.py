"""What every request passes on its way to a route: plain ASGI wrappers, each around the next.

app.py has their order. They take the place of Starlette's own error and exception middlewares,
which would wrap every message of every answer twice more. Nothing here knows what routes do.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.dialects.by_route import dialect_of
from gateway.dialects.dialect import CHAT
from gateway.errors import (
    INVALID_REQUEST,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    SERVER_ERROR,
    TOO_LARGE,
    ApiError,
    ClientGone,
)
from gateway.metrics.metrics import Metrics
from gateway.prepare.prepare import RandomBytes
from gateway.types import AnswerNote

log = logging.getLogger(__name__)

# A client that is still sending its body would lose our answer with the connection, so a body that
# is too large is read and thrown away for a while first.
DISCARD_FACTOR = 8
DISCARD_TIMEOUT_S = 5.0


def cors(origins: str) -> list[Middleware]:
    """For pages of these origins (separated by commas); none where there are none."""
    allowed = [origin.strip() for origin in origins.split(",") if origin.strip()]
    if not allowed:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    ]


class RequestHeads:
    """A request's id and clock, and the headers that every answer carries.

    Puts `http_id`, `arrived_s`, `dialect`, `answer_headers` and `note` into the request's state,
    and `has_begun` once its answer has. Each answer is counted once, when all of it was sent or its
    client is gone.
    """

    def __init__(
        self,
        app: ASGIApp,
        now_s: Callable[[], float],
        now_at: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._answers = metrics.answers
        self._now_s = now_s
        self._now_at = now_at
        self._random = RandomBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        arrived_s = self._now_s()
        # Never the client's own id: this one is the ledger's key.
        http_id = self._random.take(16).hex()
        answer_headers: dict[str, str] = {}
        dialect = dialect_of(scope["path"], scope["headers"])
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {
            "http_id": http_id,
            "arrived_s": arrived_s,
            "dialect": dialect,
            "answer_headers": answer_headers,
            "note": (note := AnswerNote()),
            "has_begun": False,
        }

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["has_begun"] = True
                note.has_status(message["status"])
                elapsed_ms = round((self._now_s() - arrived_s) * 1000)
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", http_id.encode()))
                headers.append((b"openai-processing-ms", b"%d" % elapsed_ms))
                given = answer_headers
                if dialect is not CHAT:
                    given = dialect.headers(answer_headers, http_id, self._now_at())
                headers.extend((k.encode(), v.encode()) for k, v in given.items())
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except BaseException:
            note.client_gone()
            raise
        finally:
            self._answers.add(scope["app"].path_of(scope), note)


class ErrorAnswers:
    """Whatever is raised becomes the dialect's error object. The named boundary of the gateway:
    nothing else catches all, and nothing raised gets further."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        http_id = scope["state"]["http_id"]
        try:
            if scope["path"].endswith("\n"):  # Starlette's routes would take it for the path before
                raise HTTPException(404)
            await self._app(scope, receive, send)
        except ClientGone:
            scope["state"]["note"].client_gone()
            log.info("request %s: client gone", http_id)
        except ApiError as error:
            _let_go(error)
            await self._refuse(scope, send, error)
        except HTTPException as error:
            await self._refuse(scope, send, _from_router(scope, error), error.headers)
        except Exception:
            log.exception("request %s %s failed", http_id, scope["path"])
            message = f"internal server error: report it with the request id {http_id}"
            await self._refuse(scope, send, ApiError(SERVER_ERROR, message))

    async def _refuse(
        self, scope: Scope, send: Send, error: ApiError, more: Mapping[str, str] | None = None
    ) -> None:
        """The dialect's error object with the headers that SDKs obey."""
        state = scope["state"]
        state["note"].fail(error.kind)
        if state["has_begun"]:
            # Too late for a status: the connection ends short, which the client can tell.
            log.error("request %s failed after it began: %s", state["http_id"], error)
            return
        status, body = state["dialect"].error(error, state["http_id"])
        headers = error.headers()
        if b"x-should-retry" in dict(headers):
            state["answer_headers"].pop("x-should-retry", None)
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *((name.lower().encode(), value.encode()) for name, value in (more or {}).items()),
        ]
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})


class BodyBound:
    """No body is larger than `max_bytes`, whatever its headers claim. `is_apart`: of a request
    whose route bounds its body itself."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, is_apart: Callable[[Scope], bool] = lambda _: False
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._is_apart = is_apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. A body whose length is given cannot be longer, by HTTP."""
        if self._is_apart(scope):
            await self._app(scope, receive, send)
            return
        if not await self._tells_length(scope, receive):
            receive = self._bounded(receive)
        await self._app(scope, receive, send)

    async def _tells_length(self, scope: Scope, receive: Receive) -> bool:
        """413 by Content-Length at once. False where it is missing."""
        claimed = None
        for name, value in scope["headers"]:
            if name == b"content-length":
                claimed = value
        if claimed is None:
            return False
        if not (claimed.isdigit() and len(claimed) < 20):
            raise ApiError(INVALID_REQUEST, "the Content-Length header is not a number")
        if int(claimed) > self._max_bytes:
            if all(name != b"expect" for name, _ in scope["headers"]):
                await self._discard(receive)
            raise self._too_large()
        return True

    def _bounded(self, receive: Receive) -> Receive:
        """413 by what really comes."""
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

        return receive_bounded

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


def _let_go(error: BaseException | None) -> None:
    """Of the frames it came through: they have the request, which has the error, and a circle waits
    for the collector with all that was asked (gateway/server/process_setup.py)."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _from_router(scope: Scope, error: HTTPException) -> ApiError:
    """What Starlette's router raises itself: no such path, or another method."""
    where = f"{scope['method']} {scope['path']}"
    if error.status_code == 405:
        return ApiError(METHOD_NOT_ALLOWED, f"method not allowed: {where}")
    if error.status_code == 404:
        return ApiError(NOT_FOUND, f"unknown URL: {where}")
    raise error
