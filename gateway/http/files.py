"""The routes of files and uploads; what they do is gateway/files/'s.

    POST, GET          /v1/files                    a new file, a page of them
    GET, DELETE        /v1/files/{id}               it, gone
    GET                /v1/files/{id}/content       its bytes
    POST               /v1/uploads                  a file that comes in parts
    POST               /v1/uploads/{id}/parts       a part
    POST               /v1/uploads/{id}/complete    the parts become a file
    POST               /v1/uploads/{id}/cancel      they do not

They need a key with the scope `files`, and take nothing of any limit. Two of them (`takes_file`)
take bodies that are larger than `max_body_bytes`, and bound these themselves.
"""

import asyncio
import re
from collections.abc import Iterator
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.dialects.messages_models import VERSION_HEADER
from gateway.errors import (
    INVALID_REQUEST,
    NOT_FOUND,
    REQUEST_TIMEOUT,
    UNSUPPORTED_MEDIA,
    ApiError,
    ClientGone,
)
from gateway.files.file_body import FileBody
from gateway.files.files_service import FileContent, FilesService
from gateway.http.gets import caller, json_text, params_of
from gateway.http.post import ClientWatch, RequestHeaders, body_within, check_media
from gateway.pipeline.edge import Edge
from gateway.types import Principal
from registry.accounts.key_terms import FILES

_ALL = "/v1/files"
_ONE = f"{_ALL}/{{file_id}}"
_UPLOADS = "/v1/uploads"
_UPLOAD = f"{_UPLOADS}/{{upload_id}}"
_PARTS = re.compile(rf"{_UPLOADS}/[^/]+/parts")


def file_routes() -> Iterator[Route]:
    """All of them."""
    yield Route(_ALL, _create, methods=["POST"])
    yield Route(_ALL, _listed, methods=["GET"])
    yield Route(_ONE, _retrieve, methods=["GET"])
    yield Route(_ONE, _remove, methods=["DELETE"])
    yield Route(f"{_ONE}/content", _Content(), methods=["GET"])
    yield Route(_UPLOADS, _create_upload, methods=["POST"])
    yield Route(f"{_UPLOAD}/parts", _add_part, methods=["POST"])
    yield Route(f"{_UPLOAD}/complete", _complete, methods=["POST"])
    yield Route(f"{_UPLOAD}/cancel", _cancel, methods=["POST"])


def takes_file(scope: Scope) -> bool:
    """Whether the route of this request takes a file, which may be larger than other bodies."""
    path = scope["path"]
    return scope["method"] == "POST" and (path == _ALL or _PARTS.fullmatch(path) is not None)


async def _create(request: Request) -> Response:
    principal = _caller(request)
    return json_text(await _service(request).create(principal, _file_body(request)))


async def _listed(request: Request) -> Response:
    principal, params = _caller(request), params_of(request)
    return json_text(await _service(request).listed(principal, params))


async def _retrieve(request: Request) -> Response:
    return json_text(await _service(request).retrieve(_caller(request), _id(request, "file_id")))


async def _remove(request: Request) -> Response:
    return json_text(await _service(request).remove(_caller(request), _id(request, "file_id")))


async def _create_upload(request: Request) -> Response:
    principal = _caller(request)
    body = await _json_body(request)
    return json_text(await _service(request).uploads.create(principal, body))


async def _add_part(request: Request) -> Response:
    principal, upload_id = _caller(request), _id(request, "upload_id")
    body = _file_body(request)
    return json_text(await _service(request).uploads.add_part(principal, upload_id, body))


async def _complete(request: Request) -> Response:
    principal, upload_id = _caller(request), _id(request, "upload_id")
    body = await _json_body(request)
    return json_text(await _service(request).uploads.complete(principal, upload_id, body))


async def _cancel(request: Request) -> Response:
    principal, upload_id = _caller(request), _id(request, "upload_id")
    return json_text(await _service(request).uploads.cancel(principal, upload_id))


class _Content:
    """An endpoint: the bytes of a file, read as fast as the client takes them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ApiError while nothing has been sent."""
        request = Request(scope, receive)
        service = _service(request)
        content = await service.content(_caller(request), _id(request, "file_id"))
        watch = ClientWatch(scope["state"]["connection"])
        try:
            await self._send(service, content, watch, send, scope["method"] == "HEAD")
        finally:
            watch.stop()
            service.close_content(content)

    async def _send(
        self,
        service: FilesService,
        content: FileContent,
        watch: ClientWatch,
        send: Send,
        is_head: bool,
    ) -> None:
        record = content.record
        # Never as what it says it is: a browser is not to show a tenant's page as one of ours.
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(record.size_bytes).encode()),
            (
                b"content-disposition",
                f"attachment; filename*=UTF-8''{quote(record.filename)}".encode(),
            ),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        has_more = not is_head
        if is_head:
            await send({"type": "http.response.body", "body": b""})
        while has_more and not watch.gone:
            piece = content.piece
            has_more = await service.advance(content)
            await send({"type": "http.response.body", "body": piece, "more_body": has_more})


class _Pieces:
    """A body as it comes, each piece within `idle_s` and all of it within `total_s`."""

    def __init__(self, receive: Receive, idle_s: float, total_s: float) -> None:
        self._receive = receive
        self._idle_s = idle_s
        self._until_s = asyncio.get_running_loop().time() + total_s
        self._has_ended = False

    async def __call__(self) -> bytes:
        """The next piece, nothing at the end. Raises ApiError, ClientGone."""
        while not self._has_ended:
            now_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(min(now_s + self._idle_s, self._until_s)):
                    message = await self._receive()
            except TimeoutError as error:
                message_text = "the file did not arrive in time: send it again"
                raise ApiError(REQUEST_TIMEOUT, message_text) from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._has_ended = not message.get("more_body")
            if message.get("body"):
                body: bytes = message["body"]
                return body
        return b""


def _file_body(request: Request) -> FileBody:
    """Raises ApiError."""
    headers, settings = request.headers, _edge(request).services.settings
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "unsupported Content-Encoding: send the body uncompressed"
        raise ApiError(UNSUPPORTED_MEDIA, message)
    length = headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
        raise ApiError(INVALID_REQUEST, "the Content-Length header is not a number")
    times = settings.receive_timeout_s, settings.file_body_timeout_s
    pieces = _Pieces(request.receive, *times)
    return FileBody(
        headers.get("content-type", ""), None if length is None else int(length), pieces
    )


async def _json_body(request: Request) -> bytes:
    """Raises ApiError, ClientGone."""
    check_media(RequestHeaders(request.scope["headers"]))
    timeout_s = _edge(request).services.settings.receive_timeout_s
    return await body_within(request.receive, timeout_s)


def _caller(request: Request) -> Principal:
    """Nobody without a key makes us read a body. Raises ApiError."""
    if VERSION_HEADER in request.headers:  # Anthropic's clients have other files at this path
        message = f"unknown URL: {request.method} {request.scope['path']} of Anthropic's API"
        raise ApiError(NOT_FOUND, message)
    return caller(request, FILES)


def _edge(request: Request) -> Edge:
    edge: Edge = request.app.state.edge
    return edge


def _service(request: Request) -> FilesService:
    return _edge(request).files


def _id(request: Request, name: str) -> str:
    found: str = request.path_params[name]
    return found
