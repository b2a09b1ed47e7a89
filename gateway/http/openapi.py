"""The OpenAPI document of the tenants' API, made of the types that bodies are decoded into.

So it cannot say anything of a request that the server does not check. Answers are those of
answer_types.py, errors those of the error table by their status. `Raw` fields, which are read in a
second step, are any value.
"""

import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.api import encode_wire, token_wire, wire_body
from gateway.batches import batches_service
from gateway.dialects import by_route, messages_wire, ollama_wire, responses_wire
from gateway.dialects.dialect import CHAT
from gateway.files import uploads_service
from gateway.files.file_fields import FORM_FIELDS
from gateway.http import answer_types as types
from gateway.http import file_answer_types as file_types
from gateway.state import conversations_service

Body: TypeAlias = type[msgspec.Struct]
ONE_RESPONSE = "/v1/responses/{response_id}"
ONE_CONVERSATION = "/v1/conversations/{conversation_id}"
FILES, UPLOADS, BATCHES = "/v1/files", "/v1/uploads", "/v1/batches"
ONE_BATCH = f"{BATCHES}/{{batch_id}}"
ONE_FILE, ONE_UPLOAD = f"{FILES}/{{file_id}}", f"{UPLOADS}/{{upload_id}}"
POSTS: dict[str, tuple[str, Body, Body | None]] = {
    "/v1/chat/completions": ("A chat completion", wire_body.ChatBody, types.ChatAnswer),
    "/v1/completions": ("A text completion", wire_body.CompletionBody, types.CompletionAnswer),
    "/v1/responses": ("A response", responses_wire.ResponsesBody, types.ResponseAnswer),
    "/v1/conversations": ("A conversation", conversations_service.ConversationBody, None),
    ONE_CONVERSATION: ("Its metadata", conversations_service.MetadataBody, None),
    f"{ONE_CONVERSATION}/items": ("More items", conversations_service.ItemsBody, None),
    "/v1/messages": ("A message (Anthropic)", messages_wire.MessagesBody, types.MessagesAnswer),
    "/v1/messages/count_tokens": (
        "The tokens of a message",
        messages_wire.MessagesBody,
        types.CountAnswer,
    ),
    BATCHES: ("A batch of requests", batches_service.BatchBody, file_types.BatchAnswer),
    UPLOADS: ("A file that comes in parts", uploads_service.UploadBody, file_types.UploadAnswer),
    f"{ONE_UPLOAD}/complete": (
        "Its parts become a file",
        uploads_service.CompleteBody,
        file_types.UploadAnswer,
    ),
    "/v1/embeddings": (
        "A vector for each input",
        encode_wire.EmbeddingBody,
        types.EmbeddingAnswer,
    ),
    "/v1/classify": (
        "Class probabilities for each input",
        encode_wire.ClassifyBody,
        types.ClassifyAnswer,
    ),
    "/v1/rerank": ("Documents by their relevance", encode_wire.RerankBody, types.RerankAnswer),
    "/v2/rerank": ("Documents by their relevance", encode_wire.RerankBody, types.RerankAnswer),
    "/rerank": ("Documents by their relevance", encode_wire.RerankBody, types.RerankAnswer),
    "/v1/score": ("The relevance of pairs of texts", encode_wire.ScoreBody, types.ScoreAnswer),
    "/score": ("The relevance of pairs of texts", encode_wire.ScoreBody, types.ScoreAnswer),
    "/tokenize": ("A prompt in token ids", token_wire.TokenizeBody, types.TokenizeAnswer),
    "/detokenize": ("Token ids as text", token_wire.DetokenizeBody, types.DetokenizeAnswer),
    "/api/chat": ("A chat (Ollama)", ollama_wire.OllamaChatBody, None),
    "/api/generate": ("A text (Ollama)", ollama_wire.OllamaGenerateBody, None),
    "/api/embed": ("Vectors (Ollama)", ollama_wire.OllamaEmbedBody, None),
    "/api/embeddings": ("A vector (Ollama)", ollama_wire.OllamaEmbeddingsBody, None),
    "/api/show": ("A model (Ollama)", ollama_wire.ShowBody, None),
}
"""By path: what it does, its body, and its answer, where that is told."""
BODILESS: dict[tuple[str, str], tuple[str, tuple[Body, ...]]] = {
    (f"{ONE_RESPONSE}/cancel", "post"): ("Stop a background response", (types.ResponseAnswer,)),
    (ONE_RESPONSE, "delete"): ("Delete a response", ()),
    (ONE_CONVERSATION, "delete"): ("Delete a conversation", ()),
    (f"{ONE_CONVERSATION}/items/{{item_id}}", "delete"): ("Delete an item of it", ()),
    (ONE_FILE, "delete"): ("Delete a file", (file_types.FileDeletedAnswer,)),
    (f"{ONE_BATCH}/cancel", "post"): ("Begin nothing more of it", (file_types.BatchAnswer,)),
    (f"{ONE_UPLOAD}/cancel", "post"): ("Delete its parts", (file_types.UploadAnswer,)),
}
"""Other operations without a body."""
FORMS: dict[str, tuple[str, str, tuple[str, ...], Body]] = {
    FILES: ("A file", "file", FORM_FIELDS, file_types.FileAnswer),
    f"{ONE_UPLOAD}/parts": ("A part of a file", "data", (), file_types.UploadPartAnswer),
}
"""By path, what takes a form: what it does, the field with the file, the others, its answer."""
GETS: dict[str, tuple[str, tuple[Body, ...]]] = {
    ONE_RESPONSE: ("A stored response", (types.ResponseAnswer,)),
    f"{ONE_RESPONSE}/input_items": ("A page of what it was made of", ()),
    ONE_CONVERSATION: ("A conversation without its items", ()),
    f"{ONE_CONVERSATION}/items": ("A page of its items", ()),
    f"{ONE_CONVERSATION}/items/{{item_id}}": ("One of them", ()),
    BATCHES: ("The tenant's batches", (file_types.BatchesAnswer,)),
    ONE_BATCH: ("One of them", (file_types.BatchAnswer,)),
    FILES: ("The tenant's files", (file_types.FilesAnswer,)),
    ONE_FILE: ("One of them", (file_types.FileAnswer,)),
    f"{ONE_FILE}/content": ("Its bytes", ()),
    "/v1/models": (
        "The models that this key may use",
        (types.ModelsAnswer, types.MessagesModels),
    ),
    "/v1/models/{name}": ("One of them", (types.ModelAnswer, types.MessagesModel)),
    "/v1/organization/usage/completions": (
        "The tenant's own requests and tokens",
        (types.PageAnswer,),
    ),
    "/v1/organization/costs": ("The tenant's own costs", (types.PageAnswer,)),
    "/health": ("Whether a request could be served", ()),
    "/ping": ("Whether a request could be served", ()),
    "/health/ready": ("Whether a request could be served", ()),
    "/health/live": ("Whether the process is alive", ()),
    "/version": ("The server's version", (types.VersionAnswer,)),
    "/metrics": ("Metrics in Prometheus' text format", ()),
    "/openapi.json": ("This document", ()),
    "/api/tags": ("The models (Ollama)", ()),
    "/api/ps": ("The models that are on a device (Ollama)", ()),
    "/api/version": ("The server's version", (types.VersionAnswer,)),
    "/": ("That there is a server (Ollama)", ()),
}
EVENTS: dict[str, Body | None] = {
    "/v1/chat/completions": types.ChatChunk,
    "/v1/completions": types.CompletionAnswer,
    "/v1/responses": None,
    "/v1/messages": None,
}
"""Routes that stream events, and what each event holds, where that is told."""
BINARY = (f"{ONE_FILE}/content",)
"""Routes that answer with bytes."""
_OPEN = ("/health", "/ping", "/version", "/metrics", "/openapi.json", "/api/version")
"""Beginnings of routes without an API key."""
_KEYS: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_SECURITY: list[dict[str, list[str]]] = [{name: []} for name in _KEYS]
_IN_PATH = re.compile(r"\{(\w+)\}")
_ALTERNATIVES = {"/tokenize": token_wire.TokenizeChatBody}
_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, errors.ErrorKind)]


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
    for path, (summary, body, answer) in POSTS.items():
        if path in names:
            schema = schemas.reference(body)
            if path in _ALTERNATIVES:
                schema = {"anyOf": [schema, schemas.reference(_ALTERNATIVES[path])]}
            operation = _operation(schemas, path, summary, (answer,) if answer else ())
            operation["requestBody"] = {"required": True, "content": _json(schema)}
            paths[path] = {"post": _with_parameters(operation, path)}
    for path, (summary, file, others, answer) in FORMS.items():
        if path in names:
            operation = _operation(schemas, path, summary, (answer,))
            operation["requestBody"] = {"required": True, "content": _form(file, others)}
            paths[path] = {"post": _with_parameters(operation, path)}
    gets = {(path, "get"): about for path, about in GETS.items()}
    for (path, method), (summary, answers) in (gets | BODILESS).items():
        if path in names:
            operation = _operation(schemas, path, summary, answers)
            paths.setdefault(path, {})[method] = _with_parameters(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polyhost", "version": metadata.version("polyhost")},
        "security": _SECURITY,
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": _KEYS,
        },
    }


def _with_parameters(operation: dict[str, Any], path: str) -> dict[str, Any]:
    """Those of the path."""
    place = {"in": "path", "required": True, "schema": {"type": "string"}}
    parameters = [{"name": name, **place} for name in _IN_PATH.findall(path)]
    return {**operation, "parameters": parameters} if parameters else operation


def _operation(
    schemas: "_Schemas", path: str, summary: str, answers: Sequence[Body]
) -> dict[str, Any]:
    told = [schemas.reference(answer) for answer in answers]
    right: dict[str, Any] = {"description": "As docs/api.md says"}
    if path in BINARY:
        right["content"] = {"application/octet-stream": {"schema": {"format": "binary"}}}
    if told:
        right["content"] = _json(told[0] if len(told) == 1 else {"anyOf": told})
    if path in EVENTS:
        event = EVENTS[path]
        schema = {"type": "string"} if event is None else schemas.reference(event)
        right.setdefault("content", {})["text/event-stream"] = {"schema": schema}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": right, **_errors(schemas, path)},
    }
    if path == "/" or path.startswith(_OPEN):
        operation["security"] = []
    elif path.startswith("/api/"):  # without a key in the name of the setting's
        operation["security"] = [{}, *_SECURITY]
    return operation


def _errors(schemas: "_Schemas", path: str) -> dict[str, Any]:
    """By status, in the form of the route's API. A few may come on every route, so all are told."""
    answer: Body = types.ErrorAnswer
    write = CHAT.error
    if path.startswith("/api/"):
        answer, write = types.OllamaErrorAnswer, by_route.OLLAMA_CHAT.error
    elif path.startswith("/v1/messages"):
        answer, write = types.MessagesErrorAnswer, by_route.MESSAGES.error
    content = _json(schemas.reference(answer))
    codes: dict[int, list[str]] = {}
    for kind in _KINDS:
        status, _ = write(errors.ApiError(kind, ""), "")
        codes.setdefault(status, []).append(kind.code)
    return {
        str(status): {"description": ", ".join(codes[status]), "content": content}
        for status in sorted(codes)
    }


def _form(file: str, others: Sequence[str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            file: {"type": "string", "format": "binary"},
            **{name: {"type": "string"} for name in others},
        },
        "required": [file, *others[:1]],
        "additionalProperties": False,
    }
    return {"multipart/form-data": {"schema": schema}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


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
