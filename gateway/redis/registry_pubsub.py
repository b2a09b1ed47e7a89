"""News of the registry over Redis: who has changed it says so, and gateways look at once.

Nothing depends on it. What is lost is made up for by the next look a moment later, so a Redis that
is away is tried again quietly.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
PUBLISH_TIMEOUT_S = 0.5
QUIET_S = 30.0
"""Without a word for so long it is asked whether there is anybody at the other end."""


def channel_of(prefix: str) -> str:
    """Where it is published."""
    return f"{{{prefix}}}:changed"


class RegistryPubsub:
    """One listener, or many publishers."""

    def __init__(self, url: str, prefix: str) -> None:
        self._url = url
        self._channel = channel_of(prefix)

    async def listen(self, on_change: Callable[[], None]) -> None:
        """For ever."""
        while True:
            try:
                async with AsyncRedis.from_url(self._url) as redis, redis.pubsub() as heard:
                    await heard.subscribe(self._channel)
                    on_change()  # What was published before nobody has heard.
                    while True:
                        message = await heard.get_message(timeout=QUIET_S)
                        if message is None:
                            await heard.ping()
                        elif message["type"] == "message":
                            on_change()
            except (RedisError, OSError) as error:
                logger.debug("no news of the registry: %s", error)
            await asyncio.sleep(RETRY_S)

    def publish(self) -> None:
        """Once, from a process that need not run an event loop."""
        try:
            with self._redis() as redis:
                redis.publish(self._channel, "")
        except (RedisError, OSError) as error:
            logger.debug("a change of the registry was not published: %s", error)

    def answer_s(self) -> float | None:
        """How long a ping takes on an open connection; None where there is no answer."""
        try:
            with self._redis() as redis:
                redis.ping()  # connects
                began_s = time.monotonic()
                redis.ping()
                return time.monotonic() - began_s
        except (RedisError, OSError):
            return None

    def _redis(self) -> Redis:
        timeout_s = PUBLISH_TIMEOUT_S
        return Redis.from_url(self._url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
