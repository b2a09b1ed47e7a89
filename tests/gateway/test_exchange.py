"""Who owes for a request that failed while its client was leaving."""

import asyncio

import pytest

from gateway.errors import UNAVAILABLE, ApiError, WorkerLost
from tests.gateway.edge_kit import Client, Kit
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
