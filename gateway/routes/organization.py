"""GET /v1/organization/usage/completions and /v1/organization/costs: a tenant's own, for keys with
the scope `usage`. What is asked and told is usage_reports.py's."""

from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import authenticate
from gateway.edge import Edge
from gateway.errors import INVALID_REQUEST, ApiError
from gateway.routes.post import client_of
from gateway.types import Principal
from gateway.usage_reports import Params, UsageReports
from registry.key_scopes import USAGE

MAX_FIELDS = 500


async def completions(request: Request) -> Response:
    """Tokens and requests by bucket."""
    reports: UsageReports = request.app.state.usage_reports
    return _page(await reports.completions(_caller(request), _params(request)))


async def costs(request: Request) -> Response:
    """Money by day."""
    reports: UsageReports = request.app.state.usage_reports
    return _page(await reports.costs(_caller(request), _params(request)))


def _caller(request: Request) -> Principal:
    edge: Edge = request.app.state.edge
    now_at, client = edge.clocks.now_at(), client_of(request.scope)
    return authenticate(request.headers, edge.services.directory, now_at, client, USAGE)


def _params(request: Request) -> Params:
    try:
        return parse_qs(
            request.scope["query_string"].decode(),  # request.url is made of Host, too
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError as error:
        raise ApiError(INVALID_REQUEST, "the query of the address cannot be read") from error


def _page(body: bytes) -> Response:
    return Response(body, media_type="application/json")
