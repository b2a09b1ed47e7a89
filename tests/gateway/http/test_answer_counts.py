"""Each HTTP request is counted once, by route, model, code and fault."""

import asyncio
from pathlib import Path

from gateway.errors import MODEL_FAILED, RATE_LIMITED, ApiError
from gateway.metrics.families import Labels
from tests.gateway.edge_kit import KEY, Kit, client_of, make_kit

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
URL = "/v1/chat/completions"


def answers(kit: Kit) -> dict[tuple[str, str, str, str], float]:
    """(route, model, code, fault) -> how many."""
    registry = kit.edge.services.metrics_registry
    (family,) = [f for f in registry.take()() if f.name == "polyhost_answers"]
    found = {}
    for _, labels, value in family.samples:
        of = dict(labels)
        found[of["route"], of["model_name"], of["code"], of["fault"]] = value
    return found


def errors(kit: Kit) -> list[tuple[str, Labels, float]]:
    registry = kit.edge.services.metrics_registry
    (family,) = [f for f in registry.take()() if f.name == "polyhost_request_errors"]
    return family.samples


async def test_by_route_model_code_and_fault(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny")
    kit.dispatcher.script = kit.speak("The game is afoot!")
    async with client_of(kit) as client:
        await client.chat()
        await client.events(URL, CHAT)
        await client.chat("Hello " * 5000)
        await client.post(URL, {**CHAT, "model": "none-such"})
        await client.post(URL, b"{")
        await client.post(URL, CHAT, key="sk-wrong")
        kit.dispatcher.script = lambda running: running.fail(ApiError(RATE_LIMITED, "slower"))
        await client.chat()
        kit.dispatcher.script = lambda running: running.fail(ApiError(MODEL_FAILED, "broken"))
        await client.chat()
        await client.post("/tokenize", {"model": "tiny", "prompt": "Hello"})
        await client.session.get(client.base + "/v1/models/tiny")
        await client.session.get(client.base + "/v1/whatever/" + "x" * 50)
        await client.session.get(client.base + "/v1/models%0A")
        await client.session.get(client.base + "/admin/static/none-such")
        await client.session.get(client.base + "/administrator")
    assert answers(kit) == {
        (URL, "tiny", "ok", "none"): 2,
        (URL, "tiny", "context_length_exceeded", "client"): 1,
        (URL, "", "model_not_found", "client"): 1,
        (URL, "", "invalid_request", "client"): 1,
        (URL, "", "invalid_api_key", "client"): 1,
        (URL, "tiny", "rate_limit_exceeded", "limit"): 1,
        (URL, "tiny", "model_failed", "server"): 1,
        ("/tokenize", "tiny", "ok", "none"): 1,
        ("/v1/models/{name:path}", "", "invalid_api_key", "client"): 1,
        ("other", "", "not_found", "client"): 3,
        ("/admin", "", "status_404", "client"): 1,
    }


async def test_an_error_in_mid_stream_is_an_error(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", stream_heartbeat_s=0.02)
    kit.dispatcher.script = lambda running: None
    async with client_of(kit) as client, client.post(URL, {**CHAT, "stream": True}) as answer:
        assert answer.status == 200
        await answer.content.readuntil(b"\n\n")
        kit.dispatcher.requests[0].fail(ApiError(MODEL_FAILED, "broken"))
        await answer.content.read()
    assert answers(kit) == {(URL, "tiny", "model_failed", "server"): 1}
    assert errors(kit) == [], "it was answered with 200"


async def test_a_client_that_leaves_is_no_failure(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny")
    kit.dispatcher.script = kit.speak_slowly("The game is afoot!", 0.05)
    async with client_of(kit) as client:
        answer = await client.session.post(
            client.base + URL,
            json={**CHAT, "stream": True},
            headers={"authorization": f"Bearer {KEY}"},
        )
        await kit.begun()
        await answer.content.readuntil(b"\n\n")
        answer.close()
        await kit.settled()
        kit.dispatcher.script = lambda running: None
        waits = asyncio.create_task(client.chat())
        await kit.begun()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await kit.settled(2)
        await asyncio.sleep(0.05)
    assert answers(kit) == {(URL, "tiny", "client_gone", "client"): 2}
    assert errors(kit) == []
