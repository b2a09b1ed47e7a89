"""The routes that are asked by GET.

/health/live, /health/ready, /health     no key needed: they tell nothing of any tenant. /health
                                         and /ping are /health/ready by the names that vLLM and
                                         SageMaker have for it
/version                                 no key needed either: clients of vLLM ask for it
/metrics                                 for who has the server's `metrics_token`: it tells of all
                                         tenants
/v1/models, /v1/models/{id}              the models the caller's key may use. Beside OpenAI's
                                         fields, which clients check, ours say what the model
                                         does and how soon it could answer: clients that know
                                         several models can ask the one that is there
/v1/organization/usage/completions       a tenant's own, for keys with the scope `usage`; what
/v1/organization/costs                   is asked and told is usage_reports.py's
"""

import asyncio
from importlib import metadata
from typing import Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.auth.auth import authenticate, check_metrics_token, find_model, visible_models
from gateway.dialects.by_route import MESSAGES
from gateway.dialects.messages_models import model_body, model_list
from gateway.errors import INVALID_REQUEST, ApiError
from gateway.http.post import client_of
from gateway.http.usage_reports import Params, UsageReports
from gateway.pipeline.edge import Edge
from gateway.types import HostedModel, Principal
from registry.accounts.key_terms import INFERENCE, RESPONSES, USAGE

OWNER = "polyhost"
_VERSION = metadata.version("polyhost")
MAX_FIELDS = 500


async def live(request: Request) -> Response:
    """The process answers: 200 as long as it can say so."""
    del request
    return _json({"status": "live"})


async def ready(request: Request) -> Response:
    """200 once a request could be served; otherwise 503 with what is missing."""
    edge: Edge = request.app.state.edge
    missing = _missing(edge)
    if missing:
        return _json({"status": "not_ready", "reasons": missing}, 503)
    return _json({"status": "ready"})


async def version(request: Request) -> Response:
    """Polyhost's own."""
    del request
    return _json({"version": _VERSION})


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    edge: Edge = request.app.state.edge
    services = edge.services
    check_metrics_token(request.headers, services.settings.metrics_token)
    if services.scrape is None:
        build, now_s = services.metrics_registry.take(), edge.clocks.now_s()
        body = await asyncio.to_thread(lambda: edge.metrics_text.text(build(), now_s))
    else:
        body = await services.scrape()
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


def _missing(edge: Edge) -> list[str]:
    services = edge.services
    missing = []
    if services.directory.version < 0:
        missing.append("the registry has not been read yet")
    if not services.dispatcher.ready:
        missing.append("no worker is ready, or the server is shutting down")
    if services.ledger.snapshot().refuses:
        missing.append("the usage ledger does not accept new requests")
    return missing


async def list_models(request: Request) -> Response:
    """All of them, in the order of the catalog."""
    edge: Edge = request.app.state.edge
    models = visible_models(caller(request), edge.services.directory)
    if request.state.dialect is MESSAGES:
        query = {name: values[-1] for name, values in params_of(request).items()}
        return _json(model_list(models, query))
    return _json({"object": "list", "data": [_model(edge, model) for model in models]})


async def show_model(request: Request) -> Response:
    """One of them."""
    edge: Edge = request.app.state.edge
    name = request.path_params["name"]
    model = find_model(caller(request), edge.services.directory, name)
    if request.state.dialect is MESSAGES:
        return _json(model_body(model))
    return _json(_model(edge, model))


def _model(edge: Edge, model: HostedModel) -> dict[str, Any]:
    outlook = edge.services.dispatcher.model_outlook(model.name)
    eta_s = outlook.load_eta_s
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": OWNER,
        "task": model.task,
        "max_model_len": model.max_context,
        "residency": outlook.residency,
        "load_eta_s": None if eta_s is None else round(eta_s, 3),
    }


async def usage(request: Request) -> Response:
    """Tokens and requests by bucket."""
    reports: UsageReports = request.app.state.usage_reports
    return json_text(await reports.completions(caller(request, USAGE), params_of(request)))


async def costs(request: Request) -> Response:
    """Money by day."""
    reports: UsageReports = request.app.state.usage_reports
    return json_text(await reports.costs(caller(request, USAGE), params_of(request)))


def params_of(request: Request) -> Params:
    """The query of a URL. Raises ApiError."""
    try:
        return parse_qs(
            request.scope["query_string"].decode(),  # request.url is made of Host, too
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError as error:
        raise ApiError(INVALID_REQUEST, "the query string of the URL is malformed") from error


def caller(request: Request, scope: str = INFERENCE) -> Principal:
    """Whose key a request has. Raises ApiError."""
    edge: Edge = request.app.state.edge
    now_at, client = edge.clocks.now_at(), client_of(request.scope)
    return authenticate(request.headers, edge.services.directory, now_at, client, scope)


async def counted_caller(request: Request) -> Principal:
    """The same, of a request for stored state that counts in limits though no model computes it.
    Raises ApiError."""
    edge: Edge = request.app.state.edge
    principal, state = caller(request, RESPONSES), request.state
    await edge.limiter.count(principal, f"state-{state.http_id}", state.answer_headers)
    return principal


def _json(body: object, status: int = 200) -> Response:
    return json_text(msgspec.json.encode(body), status)


def json_text(body: bytes, status: int = 200) -> Response:
    """An answer that is JSON already."""
    return Response(body, status, media_type="application/json")
