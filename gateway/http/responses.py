"""The routes of stored responses; what they do is gateway/state/responses_service.py's.

    GET     /v1/responses/{id}                 the response, with the state that it has now
    DELETE  /v1/responses/{id}                 it is gone, also for what would follow it
    GET     /v1/responses/{id}/input_items     a page of the items it was made of
    POST    /v1/responses/{id}/cancel          a background response stops

They need a key with the scope `inference`. `input_items` reads up to a thousand objects and counts
as a request in limits. The others read one or none and take nothing of any limit: who waits for a
background response asks again and again.
"""

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.http.gets import caller, counted_caller, json_text, params_of
from gateway.pipeline.edge import Edge
from gateway.state.responses_service import ResponsesService

KNOWN = {"include", "include[]"}


async def retrieve(request: Request) -> Response:
    """One response."""
    principal = caller(request)
    for name, values in params_of(request).items():
        if name not in KNOWN and values != ["false"]:
            message = f"{name} is not supported: remove it, and ask again until the response ended"
            raise ApiError(UNSUPPORTED_PARAMETER, message, name)
    return json_text(await _service(request).retrieve(principal, _id(request)))


async def remove(request: Request) -> Response:
    """What is left of it is its id."""
    return json_text(await _service(request).remove(caller(request), _id(request)))


async def input_items(request: Request) -> Response:
    """A page."""
    principal, params = await counted_caller(request), params_of(request)
    return json_text(await _service(request).input_items(principal, _id(request), params))


async def cancel(request: Request) -> Response:
    """What it is then."""
    return json_text(await _service(request).cancel(caller(request), _id(request)))


def _service(request: Request) -> ResponsesService:
    edge: Edge = request.app.state.edge
    return edge.responses


def _id(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id
