"""The OpenAPI document: every route is in it, and its schemas say what the decoders do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from gateway.api import wire
from gateway.dialects import messages_wire, ollama_wire, responses_wire
from gateway.errors import ApiError
from gateway.http.openapi import document
from tests.gateway.edge_kit import Client, Kit, client_of, make_kit
from tests.gateway.sealing_kit import SEAL

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def served(client: Client) -> dict[str, Any]:
    async with client.session.get(client.base + "/openapi.json") as answer:
        assert answer.status == 200
        body: dict[str, Any] = await answer.json()
        return body


async def test_every_route_is_in_it_and_nothing_else(tmp_path: Path) -> None:
    for key_id in ("", "key_1"):
        kit = make_kit(tmp_path, ollama_key_id=key_id)
        routes = {
            (route.path.replace(":path}", "}"), method.lower())
            for route in kit.app.routes
            if isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}
        }
        async with client_of(kit) as client:
            found = await served(client)
            await client.chat()
        operations = {(path, way) for path, ways in found["paths"].items() for way in ways}
        assert operations == routes
        assert ("/api/chat" in found["paths"]) == bool(key_id)


async def test_it_says_which_routes_need_a_key(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, ollama_key_id="key_1")
    async with client_of(kit) as client:
        found = await served(client)
        for path, ways in found["paths"].items():
            if "get" not in ways or path.startswith(("/api/", "/metrics")):
                continue
            url = client.base + path.replace("{name}", "tiny")
            async with client.session.get(url) as answer:
                security = ways["get"].get("security", found["security"])
                assert (answer.status == 401) == bool(security), path
    assert {} in found["paths"]["/api/tags"]["get"]["security"]


async def test_all_references_lead_somewhere(kit: Kit, client: Client) -> None:
    await client.chat()
    found = await served(client)
    schemas = found["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(found)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas


def accepts(path: str, body: Any) -> bool:
    found = document(frozenset({path}))
    schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": found["components"]}
    return jsonschema.Draft202012Validator(whole).is_valid(body)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": lambda raw: wire.decode("chat", raw),
    "/v1/completions": lambda raw: wire.decode("completion", raw),
    "/v1/messages": lambda raw: messages_wire.decode(raw, False, SEAL),
    "/v1/responses": lambda raw: responses_wire.decode(raw, False, SEAL),
    "/api/chat": lambda raw: ollama_wire.decode_chat(raw, False, SEAL),
}


@pytest.mark.parametrize(
    ("path", "body", "is_right"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [USER]}, True),
        ("/v1/chat/completions", {"model": "m", "messages": [
            {"role": "assistant", "content": None, "tool_calls": [CALL]}], "seed": 3}, True),
        ("/v1/chat/completions", {"model": "m", "messages": []}, False),
        ("/v1/chat/completions", {"model": "m", "messages": [USER], "top_p": 2}, False),
        ("/v1/chat/completions", {"model": "m", "messages": [USER], "best_off": 2}, False),
        ("/v1/chat/completions", {"model": "", "messages": [USER]}, False),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}, True),
        ("/v1/completions", {"model": "m"}, False),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [
            {"role": "user", "content": [{"type": "video"}]}]}, False),
        ("/v1/responses", {"model": "m", "input": "a", "text": {"format": {"type": "text"}}}, True),
        ("/v1/responses", {"model": "m", "input": 5}, False),
        ("/api/chat", {"model": "m", "messages": [USER], "think": "low"}, True),
        ("/api/chat", {"model": "m", "messages": [USER], "think": "huge"}, False),
    ],
)  # fmt: skip
def test_it_says_what_the_decoders_do(path: str, body: Any, is_right: bool) -> None:
    assert accepts(path, body) == is_right
    raw = json.dumps(body).encode()
    if is_right:
        DECODERS[path](raw)
    else:
        with pytest.raises(ApiError):
            DECODERS[path](raw)
