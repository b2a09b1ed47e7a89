"""Requests that a page sends itself, for its user, as a key: the way of any other from there on.

Called in a page's thread; the pipeline works on the event loop.
"""

import asyncio
import os

from gateway.auth import principal_of_key
from gateway.call import Call, EventAnswer
from gateway.edge import Edge
from gateway.errors import INVALID_API_KEY, ApiError
from gateway.types import RequestKind

TIMEOUT_S = 60.0


def request_as(
    edge: Edge, loop: asyncio.AbstractEventLoop, kind: RequestKind, body: bytes, key_id: str
) -> bytes:
    """The whole answer. Raises ApiError as a caller would get it, TimeoutError, ClientGone.

    Who may ask as this key is the caller's to have asked (gateway/service/prompting.py).
    """
    future = asyncio.run_coroutine_threadsafe(_request(edge, kind, body, key_id), loop)
    try:
        return future.result(TIMEOUT_S)
    except TimeoutError:
        future.cancel()
        raise


async def _request(edge: Edge, kind: RequestKind, body: bytes, key_id: str) -> bytes:
    now_at = edge.clocks.now_at()
    principal = principal_of_key(edge.services.directory, key_id, now_at)
    if principal is None:
        raise ApiError(INVALID_API_KEY, "the key is not let in: revoked, expired, or disabled")

    async def whole_body() -> bytes:
        return body

    call = Call(
        kind=kind,
        headers={},
        client="",
        receive_body=whole_body,
        http_id=os.urandom(16).hex(),
        arrived_s=edge.clocks.now_s(),
        when_gone=lambda leave: None,
        principal=principal,
    )
    answer = await edge.pipeline.handle(call)
    try:
        if isinstance(answer, EventAnswer):
            raise TypeError("a page asks for whole answers")
        return b"".join(answer.parts)
    finally:
        answer.close()
