"""The way to a Redis that keeps answers: deadlines, the breaker, the script, vector commands.

Whatever does not come in time, or not at all, is StoreUnavailable: for a request that is a miss. A
Redis that fails is left alone for a moment and tried again by one call at a time; what it refuses
(no memory left, a wrong kind of key) leaves the breaker as it is.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar

from redis.exceptions import ResponseError

from gateway.cache.types import StoreUnavailable
from gateway.redis.redis_script import Breaker, RedisScript, Unreachable, within

MAX_CONNECTIONS = 16
BASE_BYTES = 8
LINKS = 8
"""Of an element of a vector set to its neighbours (its M): Redis's default."""

Reply: TypeAlias = tuple[bytes, list[bytes], Any]
"""The epoch, members to be taken out of vector sets, and what was asked for."""
T = TypeVar("T")


class RedisLink:
    """`prefix` keeps hosts apart that share a Redis."""

    def __init__(self, url: str, prefix: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._base = f"{{{prefix}:cache}}:".encode()
        source = files("gateway.cache").joinpath("answers.lua").read_text()
        self._script = RedisScript(url, source, MAX_CONNECTIONS)
        self._redis = self._script.redis
        self._command: Callable[..., Awaitable[Any]] = self._redis.execute_command
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._breaker = Breaker()
        self._probing = False

    async def within(self, timeout_s: float, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Calls of this object, together within the time. Raises StoreUnavailable."""
        breaker = self._breaker
        is_probe = breaker.is_open
        if is_probe and (self._probing or self._clock() < breaker.probe_at_s):
            raise StoreUnavailable("it was not asked")
        self._probing |= is_probe
        try:
            done = await within(timeout_s, work())
        except Unreachable as error:
            if not isinstance(error.__cause__, ResponseError):
                if is_probe:
                    breaker.probe_failed(self._clock())
                else:
                    breaker.failed(self._clock(), error.is_late)
            raise StoreUnavailable(str(error)) from error
        finally:
            if is_probe:
                self._probing = False
        if is_probe:
            breaker.succeeded()
        else:
            breaker.num_late = 0
        return done

    @property
    def is_out_of_reach(self) -> bool:
        """It failed, and was not found again yet."""
        return self._breaker.is_open

    async def call(
        self,
        name: str,
        tenant: bytes,
        model_name: str,
        *args: bytes | str | int,
        is_plain: bool = False,
    ) -> Reply:
        """One of the script's calls."""
        fresh = secrets.token_hex(BASE_BYTES // 2)
        argv = [name, fresh, int(is_plain), tenant, model_name, *args]
        async with self._places:
            epoch, gone, answer = await self._script.run(self._base + b"state", *argv)
        return epoch, gone, answer

    async def has_vector_sets(self) -> bool:
        """Whether this Redis knows the commands."""
        async with self._places:
            try:
                await self._command("VCARD", self._base + b"none")
            except ResponseError:
                return False
        return True

    async def similar(
        self, key: bytes, vector: bytes, k: int, effort: int
    ) -> list[tuple[bytes, float]]:
        """Members of a vector set and their cosines, the nearest first."""
        async with self._places:
            raw = await self._command(
                "VSIM", key, "FP32", vector, "WITHSCORES", "COUNT", k, "EF", effort
            )
        pairs = raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=True)
        return [(member, 2 * float(score) - 1) for member, score in pairs]

    async def add_member(self, key: bytes, member: bytes, vector: bytes, ttl_ms: int) -> None:
        """Into a vector set, which lives as long as the longest of its members."""
        async with self._places, self._redis.pipeline(transaction=False) as pipe:
            pipe.execute_command("VADD", key, "FP32", vector, member, "CAS", "Q8", "M", LINKS)
            pipe.execute_command("PEXPIRE", key, ttl_ms, "NX")
            pipe.execute_command("PEXPIRE", key, ttl_ms, "GT")
            await pipe.execute()

    async def remove_members(self, members: Sequence[tuple[bytes, bytes]]) -> None:
        """(vector set, member)."""
        async with self._places, self._redis.pipeline(transaction=False) as pipe:
            for key, member in members:
                pipe.execute_command("VREM", key, member)
            await pipe.execute()

    def set_key(self, epoch: bytes, tenant: bytes, set_id: bytes) -> bytes:
        """As answers.lua names it."""
        return self._base + epoch[:BASE_BYTES] + b":" + tenant + b":s:" + set_id

    async def close(self) -> None:
        """Give the connections back."""
        await self._script.close()
