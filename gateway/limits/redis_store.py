"""Counts of limits in Redis: one script, one call, atomic over all draws. Nothing else knows Redis.

    reserve, close, figures, carry, restore, add     on counts
    beat, start, own, claim, restore_loss            what becomes of gateways and of lost counts

What a call means is said in limits.lua; what happens where Redis does not answer, and what is tried
again, is shared_store.py's. Every failure to get an answer in time is `Unreachable`, counts that
are gone are `Lost`.

One Redis server, or one endpoint that fails over by itself. All keys have one hash tag and lie in
one slot, so that a cluster's node that owns it serves as well; a cluster's redirects are not
followed.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, TypeAlias

import msgspec

from gateway.limits.policy.rate_limit import LimitFigures, Taken
from gateway.redis.redis_script import RedisScript, Unreachable, within

logger = logging.getLogger(__name__)

REDIS_CLOCK = """
local function now_s()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end
"""
MAX_CONNECTIONS = 8
MAX_MAINTENANCE = 4
"""Of these for calls that no request waits for: of more at once, one would find none."""
MAX_CALLS = 64
"""In one go: Redis serves nobody else meanwhile."""
PATIENCE = 20.0
"""Times the deadline for calls that no request waits for."""
JOIN_PATIENCE = 4.0


class Lost(Exception):
    """Redis does not know the epoch that was asked about: its counts are not those."""


class Answer(msgspec.Struct, frozen=True):
    """What the script says; each call fills in what it has."""

    at_s: float = 0.0
    epoch: str = ""
    lost: bool = False
    taken: tuple[Taken, ...] | None = None
    figures: tuple[LimitFigures, ...] = ()
    refused: int | None = None
    unknown: int | None = None
    is_past: bool = False
    used: int = 0
    wait_s: float | None = None
    num_gateways: int = 0
    ready: bool = False
    ids: tuple[str, ...] = ()
    began_at: float | None = None


_Waiting: TypeAlias = tuple[dict[str, Any], asyncio.Future[Answer], float]


class RedisLimits:
    """The script at one server. `prefix` keeps hosts apart that share a Redis; `clock_lua` defines
    the script's `now_s()`.

    Requests that come while a call is under way share the next one, so a burst costs Redis and this
    process little more than one request.
    """

    def __init__(
        self,
        url: str,
        gateway_id: str,
        timeout_s: float,
        prefix: str = "polyhost",
        clock_lua: str = REDIS_CLOCK,
    ) -> None:
        self._gateway_id = gateway_id
        self._timeout_s = timeout_s
        self._state_key = f"{{{prefix}}}:state"
        source = files("gateway.limits").joinpath("limits.lua").read_text()
        self._script = RedisScript(url, f"{clock_lua}\n{source}", MAX_CONNECTIONS)
        self._decoder = msgspec.msgpack.Decoder(list[Answer])
        self._waiting: list[_Waiting] = []
        self._sender: asyncio.Task[None] | None = None
        self._is_checked = False
        self._maintaining = asyncio.Semaphore(MAX_MAINTENANCE)

    async def call(self, name: str, epoch: str, patience: float = 1.0, **args: Any) -> Answer:
        """One of the script's calls in the epoch, for a request that waits; `patience`: times the
        deadline. Raises Unreachable or Lost."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(({"call": name, "epoch": epoch, **args}, future, patience))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all(), name="limits-redis")
        return await future

    async def maintain(self, name: str, epoch: str, **args: Any) -> Answer:
        """A call that no request waits for: by itself, and with more time. Raises as `call`."""
        call = {"call": name, "epoch": epoch, **args}
        async with self._maintaining:
            return _checked((await self._run([call], self._timeout_s * PATIENCE))[0])

    async def join(self, **args: Any) -> Answer:
        """`beat` in whichever epoch there is, begun here if there is none. Raises Unreachable."""
        call = {"call": "beat", "epoch": "", **args}
        fresh = secrets.token_hex(8)
        answers = await self._run([call], self._timeout_s * JOIN_PATIENCE, fresh)
        if not self._is_checked:
            self._is_checked = True
            fault = await self._script.fault(self._timeout_s * JOIN_PATIENCE)
            if fault:
                logger.warning(fault)
        return _checked(answers[0])

    async def close(self) -> None:
        """Give the connections back."""
        if self._sender is not None:
            await asyncio.wait([self._sender])
        await self._script.close()

    async def _send_all(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting[:MAX_CALLS], self._waiting[MAX_CALLS:]
            patience = max(patience for _, _, patience in sent)
            try:
                answers = await self._run([call for call, _, _ in sent], self._timeout_s * patience)
            except Unreachable as error:  # who waits behind has waited long enough as well
                sent, self._waiting = sent + self._waiting, []
                _fail(sent, error)
                continue
            except (ArithmeticError, TypeError, ValueError, msgspec.MsgspecError) as error:
                # Not to be packed or read: raised where they wait, who would wait for ever.
                _fail(sent, error)
                continue
            for (_, future, _), answer in zip(sent, answers, strict=True):
                if future.done():
                    continue
                if answer.lost:
                    future.set_exception(Lost())
                else:
                    future.set_result(answer)

    async def _run(
        self, calls: list[dict[str, Any]], timeout_s: float, fresh: str | None = None
    ) -> list[Answer]:
        args = {"gateway": self._gateway_id, "calls": calls}
        payload = msgspec.msgpack.encode(args if fresh is None else {**args, "fresh": fresh})
        answers = await within(timeout_s, self._script.run(self._state_key, payload))
        return self._decoder.decode(answers)


def _fail(asked: Sequence[_Waiting], error: Exception) -> None:
    for _, future, _ in asked:
        if not future.done():
            future.set_exception(error)


def _checked(answer: Answer) -> Answer:
    if answer.lost:
        raise Lost
    return answer
