"""Who owes for a request that failed while its client was leaving; what is left of one."""

import asyncio
import gc

import pytest

from gateway.answer.choice import Choice
from gateway.errors import UNAVAILABLE, ApiError, WorkerLost
from gateway.exchange import Exchange
from tests.gateway.edge_kit import Client, Kit, Running
from tests.gateway.test_pipeline import CHAT, begun, client, connection, kit, settled, silent

__all__ = ["client", "kit"]


async def test_a_client_that_leaves_what_has_failed_owes_nothing(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One choice fails; while the other is being stopped, the client goes away."""
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": True, "n": 2}) as reader:
        await begun(kit)
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
    await settled(kit)
    assert (kit.ledger.only.outcome, kit.ledger.only.cost_nanos) == ("failed", 0)


async def test_without_an_open_record_a_client_that_leaves_owes_nothing(
    kit: Kit, client: Client
) -> None:
    """What the worker had made by the abort never left the gateway."""
    kit.ledger.open_error = ApiError(UNAVAILABLE, "behind", retry_after_s=5)
    kit.dispatcher.script = silent
    async with connection(client, {**CHAT, "stream": True}):
        running = await begun(kit)
        running.num_sent += 3
    await settled(kit)
    assert (kit.ledger.posted, kit.ledger.voided) == ([], [running.request.request_id])


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
async def test_an_answered_request_leaves_nothing_for_the_collector(
    kit: Kit, client: Client, more: dict[str, object]
) -> None:
    """It comes seldom (server/interpreter.py), and a prompt may be large."""
    kit.dispatcher.script = kit.speak("The game is afoot!")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            async with client.post("/v1/chat/completions", {**CHAT, **more}) as answer:
                await answer.read()
        await settled(kit)
        await asyncio.sleep(0.05)
        left = [each for each in gc.get_objects() if isinstance(each, Exchange | Choice)]
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
    gc.disable()
    try:
        for _ in range(3):
            async with client.post("/v1/chat/completions", CHAT) as answer:
                assert answer.status == 503
        await settled(kit)
        await asyncio.sleep(0.05)
        left = [each for each in gc.get_objects() if isinstance(each, Exchange | Choice)]
    finally:
        gc.enable()
    assert left == []
