"""A real server whose Redis dies three times under load. A soak."""

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import aiohttp
import pytest

from bench.servers import Server
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import polyhost, serving
from tests.e2e.test_failures import CHAT
from tests.redis_kit import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

PROCESSES, LANES = 4, 4
BEFORE_S, DOWN_S, FELT_S = 5.0, 4.0, 30.0
SERVED_S = 2.0
"""A tenant is served again when it has been for so long."""
RPM = 40
LINES_A_DEATH = 6
"""Of each process: an outage is told when it begins and when it ends."""
LIMITS = ("--rpm", "1000000", "--tpm", "1000000000", "--concurrency", "1000")


class Tenant:
    """Asks with one key. `told`: (when a request began, its status; 0 where none came)."""

    def __init__(self, server: Server, key: str) -> None:
        self._url = f"{server.url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self.told: list[tuple[float, int]] = []

    def statuses_since(self, began_s: float) -> set[int]:
        """All that came of requests from then on."""
        return {status for at, status in self.told if at >= began_s}

    async def ask(self, session: aiohttp.ClientSession) -> int:
        """One short chat."""
        began_s, status = time.monotonic(), 0
        with contextlib.suppress(aiohttp.ClientError):
            asked = session.post(self._url, json={**CHAT, "max_tokens": 2}, headers=self._headers)
            async with asked as answer:
                await answer.read()
                status = answer.status
        self.told.append((began_s, status))
        return status

    async def ask_until(self, stop: asyncio.Event) -> None:
        """One after the other, with a short pause after a refusal."""
        async with aiohttp.ClientSession() as session:
            while not stop.is_set():
                if await self.ask(session) != 200:
                    await asyncio.sleep(0.1)


def is_degraded(server: Server) -> bool:
    """What /metrics says of limits, over all processes."""
    return server.metrics()['degraded{part="limits"}'] == 1


async def until_degraded(server: Server, wanted: bool) -> None:
    """Fails where it does not say so in time."""
    await asyncio.to_thread(server.wait_until, lambda: is_degraded(server) == wanted, FELT_S)


async def die(server: Server, redis: RedisServer, number: int, small: Tenant) -> None:
    """Redis comes back with a snapshot, the third time empty; then `small` asks meanwhile."""
    await asyncio.sleep(BEFORE_S)
    await asyncio.to_thread(redis.stop, number < 2)
    killed_s = time.monotonic()
    await until_degraded(server, True)
    if number == 2:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(small.ask(session) for _ in range(3 * RPM)))
    await asyncio.sleep(max(0.0, DOWN_S - (time.monotonic() - killed_s)))
    await asyncio.to_thread(redis.start)
    await until_degraded(server, False)


async def test_only_budgets_wait_for_a_redis_that_dies(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    for tenant, limits in {
        "acme": LIMITS,
        "crowd": (*LIMITS, "--budget-month", "1000"),
        "gone": ("--rpm", str(RPM)),
    }.items():
        assert polyhost(data_dir, "limits", "set", "--tenant", tenant, *limits).returncode == 0
    arguments = ("--device-budget", DEVICE_BUDGET, "--gateway-processes", str(PROCESSES))
    with tempfile.TemporaryDirectory(prefix="polyhost-redis-") as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            with serving(data_dir, *arguments, POLYHOST_REDIS_URL=redis.url) as server:
                await until_degraded(server, False)
                rates, budget, small = (
                    Tenant(server, prepared.keys[name]) for name in ("acme", "crowd", "gone")
                )
                num_lines = len(server.process.read_log().splitlines())
                stop = asyncio.Event()
                tenants = (rates, budget) * LANES
                loops = [asyncio.create_task(tenant.ask_until(stop)) for tenant in tenants]
                for number in range(3):
                    await die(server, redis, number, small)
                # On a busy machine Redis may answer late once more.
                async with asyncio.timeout(FELT_S):
                    while budget.statuses_since(time.monotonic() - SERVED_S) != {200}:  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                stop.set()
                await asyncio.gather(*loops)
                num_lines = len(server.process.read_log().splitlines()) - num_lines
        finally:
            redis.stop()
    assert rates.statuses_since(0.0) == {200}
    assert budget.statuses_since(0.0) == {200, 503}
    assert 0 < sum(status == 200 for _, status in small.told) <= RPM
    assert num_lines <= 3 * LINES_A_DEATH * (PROCESSES + 2)
