"""A Redis that several gateways share, as limits and the answer cache ask it: each with one script
(called by its digest), within deadlines, and left alone for a while where it does not answer.

The breaker is
    closed   it is asked; a broken connection, or `max_late` answers in a row that came too late,
             open it
    open     it is not asked, but for one probe at a time: after `first_s`, then twice as long each
             time up to `longest_s`; a probe that succeeds closes
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis import ConnectionPool
from redis.asyncio import ConnectionPool as AsyncConnectionPool
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from registry.errors import InvalidValue

PATCHED: dict[tuple[int, ...], int] = {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}
"""By branch, the first release in which no known script takes over the server."""
STALL_TURNS = 4
"""Turns of the event loop after a deadline, in which an answer that lies here already is taken: the
loop may have been busy, and not Redis late."""
T = TypeVar("T")
_ANSWERS = frozenset({"decode_responses", "encoding", "encoding_errors", "legacy_responses"})
"""Options of redis-py that change what answers look like, which are read as bytes here."""


def check_url(url: str) -> None:
    """Raises InvalidValue where redis-py would not connect by it; nothing is connected to. The URL
    may hold a password: no part of it but an option's name is in the message."""
    forms = "redis://:PASSWORD@HOST:PORT/DB, rediss:// for TLS, or unix://PATH"
    try:
        options = parse_qs(urlsplit(url).query)
        for pool in (ConnectionPool, AsyncConnectionPool):
            pool.from_url(url).make_connection()
    except TypeError as error:
        name = str(error).rpartition(" ")[2]
        raise InvalidValue(f"redis_url has the unknown option {name}: remove it") from error
    except ValueError as error:
        raise InvalidValue(
            f"redis_url is not valid: use {forms}, with special characters of the password "
            "percent-encoded"
        ) from error
    for name in _ANSWERS.intersection(options):
        raise InvalidValue(f"redis_url has the unknown option {name!r}: remove it")


class Unreachable(Exception):
    """No answer in time: what was asked may have been done or not. `is_late`: it may yet come."""

    def __init__(self, reason: str, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class RedisScript:
    """The script at one server, or at one endpoint that fails over by itself."""

    def __init__(self, url: str, source: str, max_connections: int) -> None:
        self._source = source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        # A retry of redis-py's own would outlast the deadlines.
        self.redis = Redis.from_url(
            url, max_connections=max_connections, retry=Retry(NoBackoff(), 0)
        )

    async def run(self, key: str | bytes, *args: bytes | str | int) -> Any:
        """One call. Raises as redis-py does."""
        try:
            answer: Any = await _awaited(self.redis.evalsha(self._sha, 1, key, *args))
        except NoScriptError:  # a Redis that has just started; EVAL keeps it for the next time
            answer = await _awaited(self.redis.eval(self._source, 1, key, *args))
        return answer

    async def fault(self, timeout_s: float) -> str:
        """See `version_fault`; "" also where the server does not say what it is."""
        try:
            found: dict[str, Any] = await within(timeout_s, self.redis.info("server"))
        except Unreachable:
            return ""
        return version_fault(found)

    async def close(self) -> None:
        """Give the connections back."""
        await self.redis.aclose()


def version_fault(info: Mapping[str, Any]) -> str:
    """Why this server (by its INFO) should be replaced, or ""."""
    version = str(info.get("redis_version", ""))
    parts = version.split(".")
    if info.get("server_name", "redis") != "redis" or not all(map(str.isdecimal, parts[:3])):
        return ""  # another server that speaks Redis' protocol has versions of its own
    branch, patch = tuple(map(int, parts[:2])), int("".join(parts[2:3]) or 0)
    if branch > max(PATCHED) or patch >= PATCHED.get(branch, math.inf):
        return ""
    known = ", ".join(f"{a}.{b}.{patch}" for (a, b), patch in PATCHED.items())
    return (
        f"Redis {version} lets whoever may run scripts take over the server (CVE-2024-46981, "
        f"CVE-2025-49844): update it to {known} or newer"
    )


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """What the calls come to. Raises Unreachable, from redis-py's own error where there is one."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.wait([running], timeout=timeout_s)
        for _ in range(STALL_TURNS):
            if not running.done():
                await asyncio.sleep(0)
        if not running.done():
            raise Unreachable("no answer in time", is_late=True)
        return running.result()
    except (RedisError, OSError) as error:
        raise Unreachable(str(error) or type(error).__name__) from error
    finally:
        running.add_done_callback(_forgotten)
        running.cancel()


@dataclass(slots=True)
class Breaker:
    """See above. Pure: the caller says what happened and when, by a clock that never runs
    backwards."""

    max_late: int = 3
    first_s: float = 0.1
    longest_s: float = 1.0
    is_open: bool = False
    num_late: int = 0
    wait_s: float = 0.0
    probe_at_s: float = 0.0

    def succeeded(self) -> None:
        """An answer came in time."""
        self.is_open, self.num_late, self.wait_s = False, 0, 0.0

    def failed(self, now_s: float, is_late: bool) -> bool:
        """No answer: late, or none to come. True where that opens it."""
        if self.is_open:
            return False
        self.num_late += 1
        if is_late and self.num_late < self.max_late:
            return False
        self.is_open, self.wait_s = True, self.first_s
        self.probe_at_s = now_s + self.wait_s
        return True

    def probe_failed(self, now_s: float) -> None:
        """Still none."""
        self.wait_s = min(self.longest_s, self.wait_s * 2)
        self.probe_at_s = now_s + self.wait_s


async def _awaited(evaluated: Awaitable[Any]) -> Any:
    return await evaluated


def _forgotten(ended: asyncio.Future[Any]) -> None:
    """What it still came to is nobody's business any longer."""
    if not ended.cancelled():
        ended.exception()
