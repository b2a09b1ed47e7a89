"""The routes of batches; what they do is gateway/batches/'s.

    POST, GET   /v1/batches                a new one, a page of them
    GET         /v1/batches/{id}           it, with the state that it has now
    POST        /v1/batches/{id}/cancel    nothing more of it is begun

They need a key with the scope `inference`, in whose name the requests are made.
"""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.batches.batches_service import BatchesService
from gateway.http.gets import caller, json_text, params_of
from gateway.http.post import RequestHeaders, body_within, check_media
from gateway.pipeline.edge import Edge

_ALL = "/v1/batches"
_ONE = f"{_ALL}/{{batch_id}}"


def batch_routes() -> Iterator[Route]:
    """All of them."""
    yield Route(_ALL, _create, methods=["POST"])
    yield Route(_ALL, _listed, methods=["GET"])
    yield Route(_ONE, _retrieve, methods=["GET"])
    yield Route(f"{_ONE}/cancel", _cancel, methods=["POST"])


async def _create(request: Request) -> Response:
    principal = caller(request)
    edge: Edge = request.app.state.edge
    check_media(RequestHeaders(request.scope["headers"]))
    body = await body_within(request.receive, edge.services.settings.receive_timeout_s)
    return json_text(await _service(request).create(principal, body))


async def _listed(request: Request) -> Response:
    principal, params = caller(request), params_of(request)
    return json_text(await _service(request).listed(principal, params))


async def _retrieve(request: Request) -> Response:
    return json_text(await _service(request).retrieve(caller(request), _id(request)))


async def _cancel(request: Request) -> Response:
    return json_text(await _service(request).cancel(caller(request), _id(request)))


def _service(request: Request) -> BatchesService:
    edge: Edge = request.app.state.edge
    return edge.batches


def _id(request: Request) -> str:
    batch_id: str = request.path_params["batch_id"]
    return batch_id
