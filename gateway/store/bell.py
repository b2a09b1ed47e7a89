"""A bell over Redis: who has changed the registry rings, gateways look at once.

Nothing depends on it. A ring that is lost is made up for by the next look a moment later, so a
Redis that is away is tried again quietly.
"""

import asyncio
import logging
from collections.abc import Callable

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
RING_TIMEOUT_S = 0.5
QUIET_S = 30.0
"""Without a word for so long it is asked whether there is anybody at the other end."""


def channel_of(prefix: str) -> str:
    """Where it is heard."""
    return f"{{{prefix}}}:changed"


class Bell:
    """One listener, or many rings."""

    def __init__(self, url: str, prefix: str) -> None:
        self._url = url
        self._channel = channel_of(prefix)

    async def listen(self, on_ring: Callable[[], None]) -> None:
        """For ever."""
        while True:
            try:
                async with AsyncRedis.from_url(self._url) as redis, redis.pubsub() as heard:
                    await heard.subscribe(self._channel)
                    on_ring()  # What was rung before nobody has heard.
                    while True:
                        message = await heard.get_message(timeout=QUIET_S)
                        if message is None:
                            await heard.ping()
                        elif message["type"] == "message":
                            on_ring()
            except (RedisError, OSError) as error:
                logger.debug("the bell is silent: %s", error)
            await asyncio.sleep(RETRY_S)

    def ring(self) -> None:
        """Once, from a process that need not run an event loop."""
        try:
            with Redis.from_url(
                self._url,
                socket_timeout=RING_TIMEOUT_S,
                socket_connect_timeout=RING_TIMEOUT_S,
            ) as redis:
                redis.publish(self._channel, "")
        except (RedisError, OSError) as error:
            logger.debug("the bell was not rung: %s", error)
