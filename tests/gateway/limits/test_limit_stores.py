"""Which store a process has, and that a server's surroundings of a shared one start and end."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from admin.context.operator_context import OperatorContext
from admin.operations.keys import create_key, revoke_key
from admin.operations.tenants import create_tenant
from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.limits.limit_stores import open_store, sharing
from gateway.limits.policy.rate_limit import Draw
from gateway.limits.shared_store import SharedStore
from gateway.limits.store import MemoryStore
from gateway.redis.registry_pubsub import RegistryPubsub
from gateway.settings.settings import Settings
from registry.session import make_engine
from tests.migrated import migrated
from tests.redis_kit import RedisServer

PLACES = Draw("places", "concurrency", 0, 10, 1)


async def test_without_redis_counts_are_here(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    store = open_store(settings, "gateway-0")
    assert isinstance(store, MemoryStore)
    async with sharing(store, settings, lambda: None):
        assert not store.is_degraded


async def test_gateways_of_two_folders_share_what_one_redis_counts(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    rung = asyncio.Event()
    settings = [
        Settings(data_dir=str(tmp_path / name), redis_url=redis_server.url, redis_timeout_s=5.0)
        for name in ("a", "b")
    ]
    first, second = (open_store(each, "gateway-0") for each in settings)
    assert isinstance(first, SharedStore)
    async with sharing(first, settings[0], rung.set), sharing(second, settings[1], lambda: None):
        for number in range(10):
            decision = await first.reserve(f"r{number}", [PLACES], 0.0)
            assert decision.reservation is not None
        refused = await second.reserve("more", [PLACES], 0.0)
        assert refused.refusal is not None
        async with asyncio.timeout(20):
            await rung.wait()  # at its start
            rung.clear()
            await asyncio.to_thread(RegistryPubsub(redis_server.url, "polyhost").publish)
            await rung.wait()
    # The next life of the first: its places are free.
    again = open_store(settings[0], "gateway-0")
    async with sharing(again, settings[0], lambda: None):
        decision = await again.reserve("again", [PLACES], 0.0)
        assert decision.reservation is not None
        assert decision.figures[0].remaining == 9


async def test_a_server_starts_without_its_redis(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), redis_url=f"unix://{tmp_path}/nobody")
    store = open_store(settings, "gateway-0")
    async with sharing(store, settings, lambda: None):
        assert store.is_degraded
        decision = await store.reserve("r", [PLACES], 0.0)
        assert decision.reservation is not None


async def test_a_change_is_felt_by_four_gateways_by_its_news_alone(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    settings = Settings(data_dir=str(tmp_path), redis_url=redis_server.url, key_cache_poll_s=3600.0)
    migrated(settings.registry_url)
    engine = make_engine(settings.registry_url)
    context = OperatorContext(engine, tmp_path, "test", settings=settings)
    tenant = create_tenant(context, "acme")
    key, _ = create_key(context, tenant.name, "k")
    directories = [Directory() for _ in range(4)]
    async with AsyncExitStack() as stack:
        for number, directory in enumerate(directories):
            store = open_store(settings, f"gateway-{number}")
            poll = RegistryPoll(
                engine,
                tmp_path,
                directory,
                settings.key_cache_poll_s,
                lambda models, weights: None,
                lambda wish: None,
                store,
            )
            await stack.enter_async_context(sharing(store, settings, poll.poke))
            await poll.load()
            polling = asyncio.create_task(poll.run())
            stack.callback(polling.cancel)
        assert all(directory.find_key(key.public_id) for directory in directories)
        await asyncio.sleep(0.2)  # all have begun to listen, and have looked once for that
        await asyncio.to_thread(revoke_key, context, key.id)
        async with asyncio.timeout(20):
            while any(d.find_key(key.public_id) for d in directories):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    engine.dispose()
