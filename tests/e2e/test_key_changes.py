"""Each of several gateway processes feels a change of a key or a limit within a second. A soak."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from admin.context.operator_context import OperatorContext, open_context
from admin.operations import keys as service_keys
from admin.operations import limits as service_limits
from bench.servers import Server
from gateway.settings.settings import Settings
from registry.accounts.api_keys import KeyChanges
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import child_pids, serving
from tests.e2e.test_failures import CHAT

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

PROCESSES, LANES = 4, 32
FELT_S, WATCH_S, PAUSE_S, LIFE_S = 1.0, 1.6, 0.01, 2.0
ELSEWHERE = KeyChanges(allowed_cidrs=("192.0.2.0/24",))
Change: TypeAlias = Callable[[OperatorContext, str], float]
"""It returns since when it counts."""


def revoke(context: OperatorContext, key: str) -> float:
    began_at = time.time()
    service_keys.revoke_key(context, key)
    return began_at


def expire(context: OperatorContext, key: str) -> float:
    at = time.time() + LIFE_S
    service_keys.change_key(context, key, KeyChanges(expires_at=at))
    return at


def shut_out(context: OperatorContext, key: str) -> float:
    began_at = time.time()
    service_keys.change_key(context, key, ELSEWHERE)
    return began_at


def let_in(context: OperatorContext, key: str) -> float:
    began_at = time.time()
    service_keys.change_key(context, key, KeyChanges(allowed_cidrs=None))
    return began_at


def lower(context: OperatorContext, key: str) -> float:
    began_at = time.time()
    service_limits.set_limits(context, "key", key, {"requests_per_minute": 1})
    return began_at


@pytest.fixture(scope="module")
def several(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("several"))
    arguments = ("--device-budget", DEVICE_BUDGET, "--gateway-processes", str(PROCESSES))
    with serving(data_dir, *arguments) as server:
        yield server


def gateway_sockets(server: Server) -> dict[int, int]:
    """Sockets of each gateway process."""
    found = {}
    for child in child_pids(server, "gateway.server.gateway_process"):
        links = [str(each.readlink()) for each in Path(f"/proc/{child}/fd").iterdir()]
        found[child] = sum(link.startswith("socket:") for link in links)
    return found


async def lane(server: Server, key: str, chats: bool, told: list[tuple[float, int]]) -> None:
    """One connection that asks again and again. `told`: (when it began, status)."""
    headers = {"authorization": f"Bearer {key}"}
    path = "/v1/chat/completions" if chats else "/v1/models"
    body = {**CHAT, "max_tokens": 1} if chats else None
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        while True:
            began_at = time.time()
            method = "POST" if chats else "GET"
            async with session.request(method, server.url + path, json=body) as answer:
                await answer.read()
                told.append((began_at, answer.status))
            await asyncio.sleep(PAUSE_S)


@pytest.mark.parametrize(
    ("change", "until"),
    [(revoke, 200), (expire, 200), (shut_out, 200), (let_in, 401), (lower, 200)],
)
async def test_a_change_is_felt_within_a_second(
    several: Server, change: Change, until: int
) -> None:
    settings = Settings(data_dir=str(several.data_dir))
    with open_context(settings, "tests") as context:
        _, key = service_keys.create_key(context, "acme", change.__name__)
        if change is let_in:
            service_keys.change_key(context, key.split("-")[2], ELSEWHERE)
        await asyncio.sleep(FELT_S)  # every process knows the key
        told: list[tuple[float, int]] = []
        before = gateway_sockets(several)
        chats = change is lower
        num_lanes = LANES // 4 if chats else LANES
        lanes = [asyncio.create_task(lane(several, key, chats, told)) for _ in range(num_lanes)]
        await asyncio.sleep(0.5)
        held = {pid: num - before[pid] for pid, num in gateway_sockets(several).items()}
        changed_at = await asyncio.to_thread(change, context, key.split("-")[2])
        await asyncio.sleep(max(0.0, changed_at - time.time()) + WATCH_S)
    for task in lanes:
        task.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    assert len(held) == PROCESSES
    assert chats or min(held.values()) >= 1
    last_at = max((at for at, status in told if status == until), default=changed_at)
    assert last_at - changed_at < FELT_S
    assert {status for at, status in told if at > changed_at + FELT_S} - {until}
