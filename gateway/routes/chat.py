"""POST /v1/chat/completions, and what all such routes share: from HTTP to a `Call`."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from gateway.edge import Edge
from gateway.errors import REQUEST_TIMEOUT, UNSUPPORTED_MEDIA, ApiError
from gateway.pipeline import Call, EventAnswer
from gateway.stream import DisconnectWatch, EventStream, WholeAnswer
from gateway.types import RequestKind


async def create(request: Request) -> Response:
    """Answer a chat."""
    return await complete(request, "chat")


async def complete(request: Request, kind: RequestKind) -> Response:
    """Run the pipeline for one request and stop it where the client goes away."""
    edge: Edge = request.app.state.edge
    _check_media(request)
    watch = DisconnectWatch(request.receive)

    async def receive_body() -> bytes:
        body = await _body(request, edge.services.settings.receive_timeout_s)
        watch.start()  # from here on all there is to receive is that the client goes away
        return body

    call = Call(
        kind=kind,
        headers=request.headers,
        client=client_of(request),
        receive_body=receive_body,
        http_id=request.state.http_id,
        arrived_s=request.state.arrived_s,
        when_gone=watch.when_gone,
        answer_headers=request.state.answer_headers,
    )
    try:
        answer = await edge.pipeline.handle(call)
    except BaseException:
        watch.stop()
        raise
    timeout_s = edge.services.settings.stream_write_timeout_s
    if not isinstance(answer, EventAnswer):
        watch.stop()
        return WholeAnswer(answer.parts, timeout_s, answer.close)

    def close() -> None:
        watch.stop()
        answer.close()

    return EventStream(answer.events, close, {}, timeout_s)


def client_of(request: Request) -> str:
    """The caller's address: the connection's, or what a trusted proxy says it is."""
    return request.client.host if request.client else ""


async def _body(request: Request, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await request.body()
    except TimeoutError as error:
        message = f"the request body did not come within {timeout_s:g} s: send it again"
        raise ApiError(REQUEST_TIMEOUT, message) from error


def _check_media(request: Request) -> None:
    """A form or a compressed body is refused by name instead of as malformed JSON."""
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media.lower() != "application/json":
        raise ApiError(UNSUPPORTED_MEDIA, "send the body as Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(UNSUPPORTED_MEDIA, "send the body without Content-Encoding")
