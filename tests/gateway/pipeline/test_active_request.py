"""Nothing is held of a request that is broken off at any moment, and who owes for one."""

import asyncio
import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest

from gateway.answer.choice import Choice
from gateway.errors import UNAVAILABLE, ApiError, WorkerLost
from gateway.pipeline.active_request import ActiveRequest
from tests.gateway.edge_kit import Client, Kit, Running, key_record, silent
from tests.gateway.encoder_kit import answering, make_encoder_kit
from tests.gateway.pipeline.test_pipeline import CHAT, URL, asgi_request, connection
from tests.gateway.prepare_kit import InlinePool


async def test_a_client_that_leaves_what_has_failed_owes_nothing(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One choice fails; while the other is being stopped, the client goes away."""
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": True, "n": 2}) as reader:
        await kit.begun()
        first, second = kit.dispatcher.requests
        end = second.end
        monkeypatch.setattr(second, "end", lambda reason: None)
        first.say(kit.ids("The game"))
        await reader.readuntil(b"content")
        first.fail(WorkerLost("gone"))
        while not second.aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    end("abort")
    await kit.settled()
    assert (kit.ledger.only.outcome, kit.ledger.only.cost_nanos) == ("failed", 0)


async def test_without_an_open_record_a_client_that_leaves_owes_nothing(
    kit: Kit, client: Client
) -> None:
    """What the worker had made by the abort never left the gateway."""
    kit.ledger.open_error = ApiError(UNAVAILABLE, "behind", retry_after_s=5)
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": True}):
        running = await kit.begun()
        running.num_sent += 3
    await kit.settled()
    assert (kit.ledger.posted, kit.ledger.voided) == ([], [running.request.request_id])


def living() -> list[ActiveRequest | Choice]:
    return [each for each in gc.get_objects() if isinstance(each, ActiveRequest | Choice)]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
async def test_an_answered_request_leaves_nothing_for_the_collector(
    kit: Kit, client: Client, more: dict[str, object]
) -> None:
    """It comes seldom (server/interpreter.py), and a prompt may be large."""
    kit.dispatcher.script = kit.speak("The game is afoot!")
    gc.collect()
    before = living()  # held by errors that are parameters of other tests, by their tracebacks
    gc.disable()
    try:
        for _ in range(3):
            async with client.post("/v1/chat/completions", {**CHAT, **more}) as answer:
                await answer.read()
        await kit.settled()
        await asyncio.sleep(0.05)
        left = [each for each in living() if each not in before]
    finally:
        gc.enable()
    assert len(kit.ledger.posted) == 3
    assert left == []


async def test_nor_does_one_that_failed(kit: Kit, client: Client) -> None:
    """Its error came through the frames that have it."""

    def fails(running: Running) -> None:
        running.fail(ApiError(UNAVAILABLE, "nobody in time", retry_after_s=1))

    kit.dispatcher.script = fails
    gc.collect()
    before = living()  # held by errors that are parameters of other tests, by their tracebacks
    gc.disable()
    try:
        for _ in range(3):
            async with client.post("/v1/chat/completions", CHAT) as answer:
                assert answer.status == 503
        await kit.settled()
        await asyncio.sleep(0.05)
        left = [each for each in living() if each not in before]
    finally:
        gc.enable()
    assert left == []


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": (URL, CHAT),
    "stream": (URL, {**CHAT, "stream": True}),
    "choices": (URL, {**CHAT, "n": 2}),
    "choices streamed": (URL, {**CHAT, "n": 2, "stream": True}),
    "kept": (URL, {**CHAT, "seed": 0}),
    "hit": (URL, {**CHAT, "temperature": 0}),
    "pieces": ("/v1/embeddings", {"model": "embed", "input": [[5] * 8, [6] * 8, [7] * 8]}),
}
MANY_TURNS = 60
"""Of the event loop: more than any of these requests takes."""


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_held_of_what_is_broken_off_at_any_moment(
    tmp_path: Path, way: str, leaves: bool
) -> None:
    """In whichever turn of the event loop the client leaves, or the task is cancelled."""
    kit = make_encoder_kit(tmp_path, encode_piece_tokens=8, pool=InlinePool())
    kit.use_keys(key_record(cache_mode="exact" if way in ("kept", "hit") else "off"))
    path, body = WAYS[way]
    speaks = kit.speak("The game is afoot!")

    def script(running: Running) -> None:
        say = answering if running.request.encode is not None else speaks
        asyncio.get_running_loop().call_soon(say, running)

    kit.dispatcher.script = script
    scope, receive, send = asgi_request(body, path)
    await kit.app(scope, receive, send)  # Tokenizers are loaded; now prompts wait for nothing.
    num_whole = 0
    for turns in range(MANY_TURNS):
        scope, receive, send = asgi_request({**body, "seed": turns} if path == URL else body, path)
        task = asyncio.create_task(kit.app(scope, receive, send))
        for _ in range(turns):
            await asyncio.sleep(0)
        num_whole += task.done()
        if leaves:
            scope["state"]["connection"].leave()
        else:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        await kit.edge.pipeline.drain(5)
        kit.check_closed()
        assert not scope["state"]["connection"].watches
        for running in kit.dispatcher.requests:
            assert running.stream._end is not None, "a worker goes on"
        kit.dispatcher.requests.clear()
    assert 0 < num_whole < MANY_TURNS
    await kit.edge.close(1)
