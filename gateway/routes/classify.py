"""POST /v1/classify: texts or token ids to probabilities of classes."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.chat import complete


async def create(request: Request) -> Response:
    """Classify inputs."""
    return await complete(request, "classify")
