"""POST /v1/embeddings: texts or token ids to vectors."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.chat import complete


async def create(request: Request) -> Response:
    """Embed inputs."""
    return await complete(request, "embedding")
