"""Budgets of tenants that become known while a server runs, asked for by forty clients at once."""

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from admin.context.operator_context import OperatorContext, open_context
from admin.operations import keys, limits, prices, tenants
from bench.gateway import MODEL
from bench.servers import Polyhost
from gateway.settings.config import load_settings
from registry.money.prices import PriceRecord
from tests.e2e.reconcile_clients import INSTANT
from tests.e2e.server import usage_rows
from tests.redis_kit import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

PARALLEL = 40
FITS = 9
MAX_TOKENS = 16
BODY = {"model": INSTANT, "prompt": [5] * 4, "max_tokens": MAX_TOKENS, "ignore_eos": True}
COST_NANOS = (4 + MAX_TOKENS) * 1000
GIVE_UP_S = 60.0
ROUNDS = 3


async def burst(url: str, secret: str) -> Counter[int]:
    """Every connection asks as soon as its key is known, and goes on until its budget is refused;
    how often which status came."""
    told = Counter[int]()
    give_up_s = time.monotonic() + GIVE_UP_S
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"authorization": f"Bearer {secret}"}

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < give_up_s:
            async with session.post(f"{url}/v1/completions", json=BODY, headers=headers) as answer:
                await answer.read()
            told[answer.status] += 1
            if answer.status == 429:
                return
            if answer.status != 200:
                await asyncio.sleep(0.02)

    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(PARALLEL)))
    return told


def cycles(context: OperatorContext, data_dir: Path, url: str, name: str) -> None:
    tenant = tenants.create_tenant(context, name)
    budget = FITS * COST_NANOS + COST_NANOS - 1
    limits.set_limits(context, "tenant", tenant.id, {"month_budget_nanos": budget})
    _, secret = keys.create_key(context, name, "key")
    assert asyncio.run(burst(url, secret))[200] == FITS
    for _ in range(ROUNDS):
        for disabled in (True, False):
            tenants.update_tenant(context, name, disabled=disabled)
            time.sleep(1.0 if disabled else 0.0)
        assert asyncio.run(burst(url, secret))[200] == 0
    time.sleep(2.0)
    posted = usage_rows(data_dir, tenant=name)
    assert sum(row["cost_nanos"] for row in posted) == FITS * COST_NANOS


@pytest.mark.parametrize("kind", ["one process", "two processes", "redis"])
def test_a_budget_holds_from_the_moment_its_key_is_known(tmp_path: Path, kind: str) -> None:
    settings: dict[str, object] = {"max_connections_per_address": 0}
    settings["connection_rate_per_address"] = 0
    if kind != "one process":
        settings["gateway_processes"] = 2
    with tempfile.TemporaryDirectory(
        prefix="polyhost-redis-"
    ) as folder:  # a socket's path is short
        redis = RedisServer(Path(folder))
        if kind == "redis":
            redis.start()
            settings |= {"redis_url": redis.url, "redis_timeout_s": 2.0}
        try:
            run(tmp_path / "data", settings)
        finally:
            redis.stop()


def run(data_dir: Path, settings: dict[str, object]) -> None:
    data_dir.mkdir()
    ours = Polyhost(data_dir, settings)
    ours.add_model(INSTANT, MODEL)
    loaded = load_settings(overrides={"data_dir": str(data_dir)}, environ={})
    with open_context(loaded, "budgets") as context:
        prices.set_price(context, PriceRecord(INSTANT, 0.0, 1000, 1000, 1000))
        server = ours.serve("", module=("bench.gateway_server",))
        with server.process:
            for number in range(3):
                cycles(context, data_dir, server.url, f"tenant-{number}")
