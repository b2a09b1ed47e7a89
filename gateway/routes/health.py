"""GET /health/live, /health/ready and /metrics. No key needed: they tell nothing of any tenant."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge import Edge


async def live(request: Request) -> Response:
    """The process answers: 200 as long as it can say so."""
    del request
    return _json({"status": "live"}, 200)


async def ready(request: Request) -> Response:
    """200 once a request could be served; otherwise 503 with what is missing."""
    edge: Edge = request.app.state.edge
    missing = _missing(edge)
    if missing:
        return _json({"status": "not_ready", "reasons": missing}, 503)
    num_models = len(edge.services.directory.models())
    return _json({"status": "ready", "num_models": num_models}, 200)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    edge: Edge = request.app.state.edge
    services = edge.services
    if services.scrape is None:
        body = generate_latest(services.metrics_registry)
    else:
        body = await services.scrape()
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


def _missing(edge: Edge) -> list[str]:
    services = edge.services
    missing = []
    if services.directory.version < 0:
        missing.append("the registry has not been read yet")
    if not services.dispatcher.ready:
        missing.append("no worker is ready, or the server is stopping")
    if services.ledger.snapshot().refuses:
        missing.append("the usage ledger takes nothing new")
    return missing


def _json(body: object, status: int) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
