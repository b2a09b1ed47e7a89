"""Requests that a page sends itself, for its user, as a key: the way of any other from there on.

Called in a page's thread; the pipeline works on the event loop.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from admin.pipe import Pipe
from gateway.answer.answer import error_event
from gateway.auth import principal_of_key
from gateway.call import Call, EventAnswer
from gateway.edge import Edge
from gateway.errors import INVALID_API_KEY, ApiError, ClientGone
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


async def events_as(
    edge: Edge,
    streaming: set[asyncio.Task[None]],
    kind: RequestKind,
    body: bytes,
    key_id: str,
) -> AsyncIterator[bytes]:
    """The events of a streamed answer, as a caller would get them; an error is the last event.

    Whoever stops reading is a client that went away: what came until then is billed. `streaming`
    holds the request as long as it runs.
    """
    pipe = Pipe()
    task = asyncio.create_task(_stream(edge, kind, body, key_id, pipe))
    streaming.add(task)
    task.add_done_callback(streaming.discard)
    task.add_done_callback(lambda _: pipe.end())
    try:
        async for part in pipe:
            yield part
        await task
    finally:
        pipe.leave()


async def _stream(edge: Edge, kind: RequestKind, body: bytes, key_id: str, pipe: Pipe) -> None:
    try:
        call = _call(edge, kind, body, key_id, pipe.when_gone)
        answer = await edge.pipeline.handle(call)
        try:
            if isinstance(answer, EventAnswer):
                await answer.run(pipe)
            else:
                raise TypeError("a page asked for a stream")
        finally:
            answer.close()
    except ApiError as error:
        pipe.write(error_event(error))
    except ClientGone:
        pass  # what came until then is billed


async def _request(edge: Edge, kind: RequestKind, body: bytes, key_id: str) -> bytes:
    call = _call(edge, kind, body, key_id, lambda leave: None)
    answer = await edge.pipeline.handle(call)
    try:
        if isinstance(answer, EventAnswer):
            raise TypeError("a page asks for whole answers")
        return b"".join(answer.parts)
    finally:
        answer.close()


def _call(
    edge: Edge,
    kind: RequestKind,
    body: bytes,
    key_id: str,
    when_gone: Callable[[Callable[[], None]], None],
) -> Call:
    """Raises ApiError where the key is not let in."""
    principal = principal_of_key(edge.services.directory, key_id, edge.clocks.now_at())
    if principal is None:
        raise ApiError(INVALID_API_KEY, "the key is not let in: revoked, expired, or disabled")

    async def whole_body() -> bytes:
        return body

    return Call(
        kind=kind,
        headers={},
        client="",
        receive_body=whole_body,
        http_id=os.urandom(16).hex(),
        arrived_s=edge.clocks.now_s(),
        when_gone=when_gone,
        principal=principal,
    )
