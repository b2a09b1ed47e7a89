"""Which store of limits a process has, and what runs beside one that several gateways share: the
gateway's signs of life, and the news of the registry. What stores do is store.py's and
shared_store.py's.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from gateway.limits.redis_store import RedisLimits
from gateway.limits.shared_store import SharedStore
from gateway.limits.store import LimitStore, MemoryStore
from gateway.redis.registry_pubsub import RegistryPubsub
from gateway.settings.settings import Settings

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.1
RESTART_S = 1.0


def open_store(settings: Settings, gateway_id: str) -> MemoryStore | SharedStore:
    """The store of a process that serves requests. `gateway_id` is its own in this data folder, and
    the same over its restarts."""
    if not settings.redis_url:
        return MemoryStore()
    # Gateways meet in Redis from several machines, and several data folders of one.
    name = f"{socket.gethostname()}:{settings.data_path}:{gateway_id}"
    redis = RedisLimits(
        settings.redis_url, name, settings.redis_timeout_s, prefix=settings.redis_prefix
    )
    return SharedStore(
        redis, time.monotonic, settings.budgets_fail_open, settings.limit_fallback_gateways
    )


@asynccontextmanager
async def sharing(
    store: LimitStore, settings: Settings, on_change: Callable[[], None]
) -> AsyncIterator[None]:
    """What a shared store needs while it is used; `on_change` is called when another process says
    that the registry has changed."""
    if not isinstance(store, SharedStore):
        yield
        return
    await store.start()
    pubsub = RegistryPubsub(settings.redis_url, settings.redis_prefix)
    tasks = [
        asyncio.create_task(_kept("limits-shared", store.run)),
        asyncio.create_task(_kept("registry-pubsub", lambda: pubsub.listen(on_change))),
    ]
    try:
        yield
    finally:
        # More than once: redis-py may take a cancellation for an end of its own waiting.
        while left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        await store.close()


async def _kept(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """For ever, whatever ends it: without it this gateway would be dead to the others, and nobody
    would know."""
    while True:
        try:
            await run()
        except Exception:
            logger.exception("%s failed, restarting it", name)
        await asyncio.sleep(RESTART_S)
