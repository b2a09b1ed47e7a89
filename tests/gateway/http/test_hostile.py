"""Clients that mean no good, against the HTTP edge in this process.

tests/e2e has the real server.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.settings.settings import Settings
from tests import hostile
from tests.gateway.edge_kit import KEY, Client, Kit, make_kit, serving

PATIENCE_S = 10.0
ENDED = {"closed", "400", "408", "413", "429", "431"}
SETTINGS: dict[str, Any] = {
    "receive_timeout_s": 0.4,
    "keep_alive_timeout_s": 0.4,
    "stream_write_timeout_s": 0.4,
}


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_kit(tmp_path / "tiny", max_connections_per_address=40, **SETTINGS)
    kit.dispatcher.script = kit.speak_slowly("Elementary, my dear Watson.", 0.005)
    return kit


@pytest.fixture
async def client(kit: Kit) -> AsyncIterator[Client]:
    settings = Settings(**SETTINGS, max_connections_per_address=40)
    async with (
        serving(kit.app, settings, kit.app.connections) as base,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, base)
    kit.check_closed()
    assert kit.app.connections.num_open == 0


def site_of(client: Client) -> hostile.Site:
    port = int(client.base.rpartition(":")[2])
    return hostile.Site(port, KEY, "tiny", patience_s=PATIENCE_S)


async def is_served(client: Client, until: "asyncio.Future[hostile.Outcomes]") -> int:
    """An honest client asks for as long as the other is at it; how often."""
    count = 0
    while not until.done():
        assert (await client.chat())[0] == 200
        count += 1
    return count


@pytest.mark.parametrize("name", hostile.ATTACKS)
async def test_nothing_but_a_refusal_or_an_end(kit: Kit, client: Client, name: str) -> None:
    attack = asyncio.ensure_future(hostile.ATTACKS[name](site_of(client)))
    assert await is_served(client, attack)
    outcomes = set(await attack)
    # A whole request whose client then closes its sending half may have been answered already.
    assert outcomes <= ENDED | ({"200"} if name == "half-closed" else set()), outcomes
    if name.startswith("slow"):
        assert outcomes <= {"closed", "408"}
    async with asyncio.timeout(5):
        while kit.edge.store.num_open or kit.app.connections.num_open > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_crowd_of_one_address_is_let_in_up_to_the_bound(kit: Kit, client: Client) -> None:
    crowd = asyncio.ensure_future(hostile.crowd(site_of(client), 200, 0.2))
    assert await is_served(client, crowd)
    outcomes = await crowd
    assert 0 < outcomes["200"] <= 40
    assert set(outcomes) <= {"200", "429", "closed"}
