"""The routes of stored responses; what they do is gateway/state/responses_service.py's.

    GET     /v1/responses/{id}                 the response, with the state that it has now; with
                                               `stream=true` the events of a background response
    DELETE  /v1/responses/{id}                 it is gone, also for what would follow it
    GET     /v1/responses/{id}/input_items     a page of the items it was made of
    POST    /v1/responses/{id}/cancel          a background response stops

They need a key with the scope `responses` or `inference`. `input_items` reads up to a thousand
objects, a stream sends megabytes: they count as requests in limits. The others read one object or
none and take nothing of any limit: who waits for a background response asks again and again.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.bodies import invalid
from gateway.dialects.by_route import RESPONSES
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.http.gets import caller, counted_caller, json_text, params_of
from gateway.http.post import ClientWatch, EventStream
from gateway.http.usage_reports import Params
from gateway.pipeline.edge import Edge
from gateway.state.responses_service import ResponsesService
from registry.accounts import key_terms

RESPONSES_SCOPE = key_terms.RESPONSES
KNOWN = {"include", "include[]", "include_obfuscation", "starting_after", "stream"}


class Retrieve:
    """One response: as JSON, or its events. An endpoint of ASGI, as a stream goes straight to its
    connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ApiError."""
        request = Request(scope, receive)
        edge: Edge = request.app.state.edge
        principal, params = caller(request, RESPONSES_SCOPE), params_of(request)
        after = _starting_after(params)
        if after is None:
            answer = json_text(await edge.responses.retrieve(principal, _id(request)))
            await answer(scope, receive, send)
            return
        await counted_caller(request)
        watch = ClientWatch(scope["state"]["connection"])
        try:
            about = principal, _id(request), after, watch.when_gone, scope["state"]["note"]
            events = await edge.responses.follow(*about)
            heartbeat_s = edge.services.settings.stream_heartbeat_s
            stream = EventStream(events.run, watch, heartbeat_s, RESPONSES)
            await stream.send(send, scope["method"] == "HEAD")
        finally:
            watch.stop()


def _starting_after(params: Params) -> int | None:
    """-1: all events. None: no stream is asked for. Raises ApiError."""
    for name in params.keys() - KNOWN:
        raise ApiError(UNSUPPORTED_PARAMETER, f"{name} is not supported: remove it", name)
    streams, after = (params.get(name, [""])[-1] for name in ("stream", "starting_after"))
    if streams.lower() not in ("", "true", "false"):
        raise invalid("stream", "stream must be true or false")
    if streams.lower() != "true":
        if after:
            message = "starting_after is a number of an event: send it with stream=true"
            raise invalid("starting_after", message)
        return None
    if not after:
        return -1
    if not (after.isascii() and after.isdecimal() and len(after) < 10):
        message = "starting_after must be the sequence_number of an event"
        raise invalid("starting_after", message)
    return int(after)


async def remove(request: Request) -> Response:
    """What is left of it is its id."""
    return json_text(await _service(request).remove(caller(request, RESPONSES_SCOPE), _id(request)))


async def input_items(request: Request) -> Response:
    """A page."""
    principal, params = await counted_caller(request), params_of(request)
    return json_text(await _service(request).input_items(principal, _id(request), params))


async def cancel(request: Request) -> Response:
    """What it is then."""
    return json_text(await _service(request).cancel(caller(request, RESPONSES_SCOPE), _id(request)))


def _service(request: Request) -> ResponsesService:
    edge: Edge = request.app.state.edge
    return edge.responses


def _id(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id
