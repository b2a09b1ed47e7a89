"""POST /v1/completions: a prompt as text or token ids, continued."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.chat import complete


async def create(request: Request) -> Response:
    """Continue a prompt."""
    return await complete(request, "completion")
