"""The routes of conversations; what they do is gateway/state/conversations_service.py's.

    POST    /v1/conversations                             a new one
    GET, POST, DELETE  /v1/conversations/{id}             it, with other metadata, gone
    GET, POST          /v1/conversations/{id}/items       a page of its items, more of them
    GET, DELETE        /v1/conversations/{id}/items/{id}  one of them

They need a key with the scope `responses` or `inference`. Each counts as a request in the limits of
the key, its tenant and the server: whatever it is about, the whole list is read, and written by a
change.
"""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api.told_fields import ToldFields
from gateway.http.gets import counted_caller, json_text, params_of
from gateway.http.post import RequestHeaders, body_within, check_media
from gateway.pipeline.edge import Edge
from gateway.state.conversations_service import ConversationsService

_ALL = "/v1/conversations"
_ONE = f"{_ALL}/{{conversation_id}}"
_ITEM = f"{_ONE}/items/{{item_id:path}}"
"""Ids that callers give may have slashes, which arrive as such whether quoted or not."""


def conversation_routes() -> Iterator[Route]:
    """All of them."""
    yield Route(_ALL, _create, methods=["POST"])
    yield Route(_ONE, _retrieve, methods=["GET"])
    yield Route(_ONE, _update, methods=["POST"])
    yield Route(_ONE, _remove, methods=["DELETE"])
    yield Route(f"{_ONE}/items", _items, methods=["GET"])
    yield Route(f"{_ONE}/items", _add_items, methods=["POST"])
    yield Route(_ITEM, _item, methods=["GET"])
    yield Route(_ITEM, _remove_item, methods=["DELETE"])


async def _create(request: Request) -> Response:
    principal, told = await counted_caller(request), ToldFields()
    answer = await _service(request).create(principal, await _body(request), told)
    return _telling(request, told, answer)


async def _retrieve(request: Request) -> Response:
    principal = await counted_caller(request)
    return json_text(await _service(request).retrieve(principal, _id(request)))


async def _update(request: Request) -> Response:
    principal = await counted_caller(request)
    body = await _body(request)
    return json_text(await _service(request).update(principal, _id(request), body))


async def _remove(request: Request) -> Response:
    principal = await counted_caller(request)
    return json_text(await _service(request).remove(principal, _id(request)))


async def _items(request: Request) -> Response:
    principal, params = await counted_caller(request), params_of(request)
    return json_text(await _service(request).items(principal, _id(request), params))


async def _add_items(request: Request) -> Response:
    principal, told = await counted_caller(request), ToldFields()
    body = await _body(request)
    answer = await _service(request).add_items(principal, _id(request), body, told)
    return _telling(request, told, answer)


async def _item(request: Request) -> Response:
    principal, about = await counted_caller(request), (_id(request), _id(request, "item_id"))
    return json_text(await _service(request).item(principal, *about))


async def _remove_item(request: Request) -> Response:
    principal, about = await counted_caller(request), (_id(request), _id(request, "item_id"))
    return json_text(await _service(request).remove_item(principal, *about))


def _telling(request: Request, told: ToldFields, answer: bytes) -> Response:
    if told.names:
        request.state.answer_headers["x-polyhost-ignored"] = ", ".join(told.names)
    return json_text(answer)


async def _body(request: Request) -> bytes:
    """Nobody without a key makes us read one. Raises ApiError, ClientGone."""
    edge: Edge = request.app.state.edge
    check_media(RequestHeaders(request.scope["headers"]))
    return await body_within(request.receive, edge.services.settings.receive_timeout_s)


def _service(request: Request) -> ConversationsService:
    edge: Edge = request.app.state.edge
    return edge.responses.conversations


def _id(request: Request, name: str = "conversation_id") -> str:
    found: str = request.path_params[name]
    return found
