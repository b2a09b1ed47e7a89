"""POST /v1/rerank: documents in the order of their relevance to a query."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.chat import complete


async def create(request: Request) -> Response:
    """Rank documents."""
    return await complete(request, "rerank")
