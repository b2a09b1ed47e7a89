"""All that is asked by POST: from HTTP to a `Call` and from the pipeline's answer to HTTP."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from starlette.types import Receive, Scope, Send

from gateway.call import Call, EventAnswer
from gateway.edge import Edge
from gateway.errors import REQUEST_TIMEOUT, UNSUPPORTED_MEDIA, ApiError, ClientGone
from gateway.stream import ClientWatch, EventStream, WholeAnswer
from gateway.types import RequestKind


async def complete(
    edge: Edge, kind: RequestKind, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the pipeline for one request and stop it where the client goes away. Raises ApiError
    while nothing has been sent, and ClientGone."""
    settings, state = edge.services.settings, scope["state"]
    headers = RequestHeaders(scope["headers"])
    _check_media(headers)
    watch = ClientWatch(state["connection"])

    async def receive_body() -> bytes:
        if watch.connection.has_body:
            return await _body(receive)
        try:
            async with asyncio.timeout(settings.receive_timeout_s):
                return await _body(receive)
        except TimeoutError as error:
            within = f"{settings.receive_timeout_s:g} s"
            message = f"the request body did not come within {within}: send it again"
            raise ApiError(REQUEST_TIMEOUT, message) from error

    call = Call(
        kind=kind,
        headers=headers,
        client=client_of(scope),
        receive_body=receive_body,
        http_id=state["http_id"],
        arrived_s=state["arrived_s"],
        when_gone=watch.when_gone,
        answer_headers=state["answer_headers"],
    )
    try:
        answer = await edge.pipeline.handle(call)
        try:
            if isinstance(answer, EventAnswer):
                stream = EventStream(answer.run, watch, settings.stream_heartbeat_s)
                await stream.send([], send)
            else:
                watch.stop()
                await WholeAnswer(answer.parts).send([], send)
        finally:
            answer.close()
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


def _check_media(headers: Mapping[str, str]) -> None:
    """A form or a compressed body is refused by name instead of as malformed JSON."""
    media = headers.get("content-type", "application/json")
    if media != "application/json" and (
        media.partition(";")[0].strip().lower() != "application/json"
    ):
        raise ApiError(UNSUPPORTED_MEDIA, "send the body as Content-Type: application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(UNSUPPORTED_MEDIA, "send the body without Content-Encoding")
