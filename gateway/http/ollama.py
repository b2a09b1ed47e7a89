"""Ollama's routes, where the setting `ollama_key_id` names a key: editors and chat windows made for
a server on one's own machine send none.

/api/chat, /api/generate, /api/embed,    the pipeline, in Ollama's dialect
/api/embeddings
/api/tags, /api/ps, /api/show            the models that the caller may use, those that are on a
                                         device, and one of them
/api/version                             Polyhost's own
/                                        the text by which clients know that a server is there

Whoever shows a key is served in its name; whoever shows none, in the name of the setting's key.
Web pages of others show none and are refused: a browser on this machine would spend the key for
them, and asks nobody before a request of plain text.
Models are not pulled, made or deleted here: that is the operator's to do.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.auth.auth import authenticate_or_use, find_model, has_key, visible_models
from gateway.dialects import ollama_wire
from gateway.dialects.by_route import OLLAMA_CHAT, OLLAMA_EMBEDDINGS, OLLAMA_GENERATE
from gateway.errors import FORBIDDEN, ApiError
from gateway.http import gets
from gateway.http.own_hosts import LOCALHOST, is_loopback
from gateway.http.post import Post, body_within, client_of
from gateway.pipeline.edge import Edge
from gateway.types import Answer, Call, HostedModel, Principal

_FAR_AT = "9999-12-31T23:59:59Z"


class OllamaRoutes:
    """One object per application."""

    def __init__(self, edge: Edge, key_id: str) -> None:
        self._edge = edge
        self._key_id = key_id

    def routes(self) -> list[Route]:
        """All of them."""
        edge = self._edge
        embed = Post(edge, "embedding", OLLAMA_CHAT, self._handle)
        return [
            Route("/api/chat", Post(edge, "chat", OLLAMA_CHAT, self._handle), methods=["POST"]),
            Route(
                "/api/generate",
                Post(edge, "chat", OLLAMA_GENERATE, self._handle),
                methods=["POST"],
            ),
            Route("/api/embed", embed, methods=["POST"]),
            Route(
                "/api/embeddings",
                Post(edge, "embedding", OLLAMA_EMBEDDINGS, self._handle),
                methods=["POST"],
            ),
            Route("/api/tags", self._tags, methods=["GET"]),
            Route("/api/ps", self._loaded, methods=["GET"]),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/version", gets.version, methods=["GET"]),
            Route("/", _root, methods=["GET"]),
        ]

    async def _handle(self, call: Call) -> Answer:
        now_at = self._edge.clocks.now_at()
        directory = self._edge.services.directory
        self._refuse_pages(call.headers)
        call.principal = authenticate_or_use(
            call.headers, directory, now_at, call.client, self._key_id
        )
        return await self._edge.pipeline.handle(call)

    def _caller(self, request: Request) -> Principal:
        now_at, client = self._edge.clocks.now_at(), client_of(request.scope)
        directory = self._edge.services.directory
        self._refuse_pages(request.headers)
        return authenticate_or_use(request.headers, directory, now_at, client, self._key_id)

    def _refuse_pages(self, headers: Mapping[str, str]) -> None:
        """Raises FORBIDDEN for a web page of others that shows no key."""
        origin = headers.get("origin", "")
        if origin and not has_key(headers) and self._is_foreign(origin):
            text = f"a web page of {origin} needs an API key here, or its place in cors_origins"
            raise ApiError(FORBIDDEN, text)

    def _is_foreign(self, origin: str) -> bool:
        allowed = {name.strip() for name in self._edge.services.settings.cors_origins.split(",")}
        if "*" in allowed or origin in allowed:
            return False
        try:
            parts = urlsplit(origin)
        except ValueError:
            return True
        if parts.scheme not in ("http", "https"):
            return origin == "null"  # editors have schemes of their own; any page can be null
        name = parts.hostname or ""
        return not (name == LOCALHOST or name.endswith(f".{LOCALHOST}") or is_loopback(name))

    async def _tags(self, request: Request) -> Response:
        models = visible_models(self._caller(request), self._edge.services.directory)
        return _json({"models": [_entry(model) for model in models]})

    async def _loaded(self, request: Request) -> Response:
        models = visible_models(self._caller(request), self._edge.services.directory)
        outlook = self._edge.services.dispatcher.model_outlook
        loaded = [model for model in models if outlook(model.name).residency == "resident"]
        entries = [
            {**_entry(model), "expires_at": _FAR_AT, "size_vram": model.weight_bytes}
            for model in loaded
        ]
        return _json({"models": entries})

    async def _show(self, request: Request) -> Response:
        principal = self._caller(request)
        settings = self._edge.services.settings
        body = await body_within(request.receive, settings.receive_timeout_s)
        name, told = ollama_wire.decode_show(body, settings.unknown_fields == "tell")
        model = find_model(principal, self._edge.services.directory, name)
        capabilities = ["embedding"] if model.task == "embed" else []
        if model.task == "generate":
            formats = (await self._edge.codecs.text(model)).formats
            capabilities = ["completion"]
            capabilities += ["tools"] if formats.tools is not None else []
            capabilities += ["thinking"] if formats.reasoning is not None else []
        entry = _entry(model)
        return _json(
            {
                "modified_at": entry["modified_at"],
                "details": entry["details"],
                "model_info": {
                    "general.architecture": "polyhost",
                    "polyhost.context_length": model.max_context,
                    "polyhost.embedding_length": model.dim,
                },
                "capabilities": capabilities,
            },
            told,
        )


async def _root(request: Request) -> Response:
    del request
    return PlainTextResponse("Ollama is running")


def _entry(model: HostedModel) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created_at, UTC)
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "size": model.weight_bytes,
        "digest": model.revision,
        "details": {
            "format": "safetensors",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _json(body: object, told: Sequence[str] = ()) -> Response:
    headers = {"x-polyhost-ignored": ", ".join(told)} if told else None
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
