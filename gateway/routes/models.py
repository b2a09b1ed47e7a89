"""GET /v1/models and /v1/models/{id}: the models the caller's key may use.

Beside OpenAI's fields, which clients check, ours say what the model does and how soon it could
answer: clients that know several models can ask the one that is there.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import authenticate, find_model, visible_models
from gateway.edge import Edge
from gateway.routes.post import client_of
from gateway.types import HostedModel, Principal

OWNER = "polyhost"


async def list_models(request: Request) -> Response:
    """All of them, in the order of the catalog."""
    edge: Edge = request.app.state.edge
    models = visible_models(_caller(request, edge), edge.services.directory)
    return _json({"object": "list", "data": [_model(edge, model) for model in models]})


async def show_model(request: Request) -> Response:
    """One of them."""
    edge: Edge = request.app.state.edge
    name = request.path_params["name"]
    return _json(_model(edge, find_model(_caller(request, edge), edge.services.directory, name)))


def _caller(request: Request, edge: Edge) -> Principal:
    now_at = edge.clocks.now_at()
    return authenticate(request.headers, edge.services.directory, now_at, client_of(request.scope))


def _model(edge: Edge, model: HostedModel) -> dict[str, Any]:
    outlook = edge.services.dispatcher.model_outlook(model.name)
    eta_s = outlook.load_eta_s
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": OWNER,
        "task": model.task,
        "residency": outlook.residency,
        "load_eta_s": None if eta_s is None else round(eta_s, 3),
    }


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
