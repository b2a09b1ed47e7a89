"""The OpenAPI document of the tenants' API, made of the types that bodies are decoded into.

So it cannot say anything of a request that the server does not check. What answers hold is in
docs/api.md: here they are JSON, or events where `stream` is true. `Raw` fields, which are read in a
second step, are any value.
"""

import re
from functools import cache
from importlib import metadata
from typing import Any

import msgspec
from msgspec import inspect
from starlette.requests import Request
from starlette.responses import Response

from gateway.api import encode_wire, token_wire, wire_body
from gateway.dialects import messages_wire, ollama_wire, responses_wire
from gateway.state import conversations_service

POSTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("A chat completion", wire_body.ChatBody),
    "/v1/completions": ("A text completion", wire_body.CompletionBody),
    "/v1/responses": ("A response", responses_wire.ResponsesBody),
    "/v1/conversations": ("A conversation", conversations_service.ConversationBody),
    "/v1/conversations/{conversation_id}": ("Its metadata", conversations_service.MetadataBody),
    "/v1/conversations/{conversation_id}/items": ("More items", conversations_service.ItemsBody),
    "/v1/messages": ("A message (Anthropic)", messages_wire.MessagesBody),
    "/v1/messages/count_tokens": ("The tokens of a message", messages_wire.MessagesBody),
    "/v1/embeddings": ("A vector for each input", encode_wire.EmbeddingBody),
    "/v1/classify": ("Class probabilities for each input", encode_wire.ClassifyBody),
    "/v1/rerank": ("Documents by their relevance", encode_wire.RerankBody),
    "/v2/rerank": ("Documents by their relevance", encode_wire.RerankBody),
    "/rerank": ("Documents by their relevance", encode_wire.RerankBody),
    "/v1/score": ("The relevance of pairs of texts", encode_wire.ScoreBody),
    "/score": ("The relevance of pairs of texts", encode_wire.ScoreBody),
    "/tokenize": ("A prompt in token ids", token_wire.TokenizeBody),
    "/detokenize": ("Token ids as text", token_wire.DetokenizeBody),
    "/api/chat": ("A chat (Ollama)", ollama_wire.OllamaChatBody),
    "/api/generate": ("A text (Ollama)", ollama_wire.OllamaGenerateBody),
    "/api/embed": ("Vectors (Ollama)", ollama_wire.OllamaEmbedBody),
    "/api/show": ("A model (Ollama)", ollama_wire.ShowBody),
}
ONE_RESPONSE = "/v1/responses/{response_id}"
ONE_CONVERSATION = "/v1/conversations/{conversation_id}"
BODILESS = {
    (f"{ONE_RESPONSE}/cancel", "post"): "Stop a background response",
    (ONE_RESPONSE, "delete"): "Delete a response",
    (ONE_CONVERSATION, "delete"): "Delete a conversation",
    (f"{ONE_CONVERSATION}/items/{{item_id}}", "delete"): "Delete an item of it",
}
"""Other operations without a body."""
GETS = {
    ONE_RESPONSE: "A stored response",
    f"{ONE_RESPONSE}/input_items": "A page of what it was made of",
    ONE_CONVERSATION: "A conversation without its items",
    f"{ONE_CONVERSATION}/items": "A page of its items",
    f"{ONE_CONVERSATION}/items/{{item_id}}": "One of them",
    "/v1/models": "The models that this key may use",
    "/v1/models/{name}": "One of them",
    "/v1/organization/usage/completions": "The tenant's own requests and tokens",
    "/v1/organization/costs": "The tenant's own costs",
    "/health": "Whether a request could be served",
    "/ping": "Whether a request could be served",
    "/health/ready": "Whether a request could be served",
    "/health/live": "Whether the process is alive",
    "/version": "The server's version",
    "/metrics": "Metrics in Prometheus' text format",
    "/openapi.json": "This document",
    "/api/tags": "The models (Ollama)",
    "/api/ps": "The models that are on a device (Ollama)",
    "/api/version": "The server's version",
}
_IN_PATH = re.compile(r"\{(\w+)\}")
_ALTERNATIVES = {"/tokenize": token_wire.TokenizeChatBody}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    """The same for every caller. Of the routes that this server has."""
    paths = frozenset(getattr(route, "path", "") for route in request.app.routes)
    return Response(_encoded(paths), media_type="application/json")


@cache
def _encoded(routes: frozenset[str]) -> bytes:
    return msgspec.json.encode(document(routes))


def document(routes: frozenset[str]) -> dict[str, Any]:
    """`routes`: the paths that there are, as the application names them."""
    schemas = _Schemas()
    names = {route.replace(":path}", "}") for route in routes}
    paths: dict[str, Any] = {}
    for path, (summary, body) in POSTS.items():
        if path in names:
            schema = schemas.reference(body)
            if path in _ALTERNATIVES:
                schema = {"anyOf": [schema, schemas.reference(_ALTERNATIVES[path])]}
            content = {"application/json": {"schema": schema}}
            operation = _operation(path, summary)
            operation["requestBody"] = {"required": True, "content": content}
            paths[path] = {"post": _with_parameters(operation, path)}
    gets = {(path, "get"): summary for path, summary in GETS.items()}
    for (path, method), summary in (gets | BODILESS).items():
        if path in names:
            operation = _operation(path, summary)
            paths.setdefault(path, {})[method] = _with_parameters(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polyhost", "version": metadata.version("polyhost")},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas.components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _with_parameters(operation: dict[str, Any], path: str) -> dict[str, Any]:
    """Those of the path."""
    place = {"in": "path", "required": True, "schema": {"type": "string"}}
    parameters = [{"name": name, **place} for name in _IN_PATH.findall(path)]
    return {**operation, "parameters": parameters} if parameters else operation


def _operation(path: str, summary: str) -> dict[str, Any]:
    """Errors of other APIs have forms of their own."""
    is_openais = not path.startswith(("/api/", "/v1/messages"))
    schema = {"$ref": "#/components/schemas/Error"} if is_openais else {}
    error = {"application/json": {"schema": schema}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "As docs/api.md says"},
            "default": {"description": "An error in the form of this API", "content": error},
        },
    }


class _Schemas:
    """JSON Schemas of structs, each once, by the name of its class."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def reference(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """Where the struct's schema is; made if it is not there yet."""
        name = f"{struct.__module__.rpartition('.')[2]}.{struct.__name__.lstrip('_')}"
        if name not in self.components:
            self.components[name] = {}  # it may refer to itself
            self.components[name] = self._struct(inspect.type_info(struct))
        return {"$ref": f"#/components/schemas/{name}"}

    def _struct(self, info: inspect.Type) -> dict[str, Any]:
        assert isinstance(info, inspect.StructType)
        properties = {field.encode_name: self._of(field.type) for field in info.fields}
        required = [field.encode_name for field in info.fields if field.required]
        if info.tag is not None and info.tag_field is not None:
            properties[info.tag_field] = {"const": info.tag}
            required.append(info.tag_field)
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            schema["required"] = required
        if info.forbid_unknown_fields:
            schema["additionalProperties"] = False
        return schema

    def _of(self, info: inspect.Type) -> dict[str, Any]:
        match info:
            case inspect.StructType():
                return self.reference(info.cls)
            case inspect.UnionType():
                return {"anyOf": [self._of(inner) for inner in info.types]}
            case inspect.LiteralType():
                return {"enum": list(info.values)}
            case inspect.ListType():
                bounds = {"minItems": info.min_length, "maxItems": info.max_length}
                return _bounded({"type": "array", "items": self._of(info.item_type)}, bounds)
            case inspect.DictType():
                return {"type": "object", "additionalProperties": self._of(info.value_type)}
            case inspect.StrType():
                pattern = info.pattern
                if pattern is not None:
                    pattern = pattern.replace(r"\A", "^").replace(r"\Z", "$")
                bounds = {"minLength": info.min_length, "maxLength": info.max_length}
                return _bounded({"type": "string"}, {**bounds, "pattern": pattern})
            case inspect.IntType() | inspect.FloatType():
                kind = "integer" if isinstance(info, inspect.IntType) else "number"
                return _bounded({"type": kind}, {"minimum": info.ge, "maximum": info.le})
            case inspect.BoolType():
                return {"type": "boolean"}
            case inspect.NoneType():
                return {"type": "null"}
        return {}


def _bounded(schema: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
    return {**schema, **{name: value for name, value in bounds.items() if value is not None}}
