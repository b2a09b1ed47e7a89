"""A Redis that is late, not dead: what is granted without it is counted in it, and no limit gives
more than it has."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.limits.policy.rate_limit import Draw, Reservation, UsedAmounts
from gateway.limits.redis_store import Answer, RedisLimits
from gateway.limits.shared_store import Backoff, SharedStore
from gateway.limits.store import Past
from gateway.redis.redis_script import Unreachable
from tests.redis_kit import RedisServer, SlowProxy

PACE = Backoff(beat_s=0.05, lease_s=5.0, grace_s=0.0, reconcile_s=0.2)
TIMEOUT_S, DELAY_S = 0.05, 0.08
LIMIT = 5
MINUTE = Draw("m", "requests", 60, LIMIT, 1)
PLACES = Draw("places", "concurrency", 0, LIMIT, 1)
BUDGET = Draw("cost", "cost", 0, 10**9, 10, 5, 99.0)
USED = UsedAmounts(1, 1, 10, day=5, month=5)
EVERY_FIFTH = (lambda number: number % 5 == 0, TIMEOUT_S, DELAY_S)
RUNS = (lambda number: number % 40 >= 30, TIMEOUT_S, 5 * DELAY_S)
"""Late again and again: asking once more does not help."""


@asynccontextmanager
async def gateway(
    url: str, timeout_s: float = TIMEOUT_S, name: str = "g"
) -> AsyncIterator[SharedStore]:
    store = SharedStore(RedisLimits(url, name, timeout_s), time.monotonic, pace=PACE)
    await store.start()
    async with asyncio.timeout(20.0):
        while store.is_degraded:
            await store.beat()
            loss = await store.loss()
            if loss is not None:
                await store.restore_loss(loss, (), 0.0)
    running = asyncio.create_task(store.run())
    try:
        yield store
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def ask(store: SharedStore, name: str, draws: Sequence[Draw]) -> Reservation | None:
    decision = await store.reserve(name, draws, time.monotonic())
    return decision.reservation


@pytest.mark.parametrize("late", [EVERY_FIFTH, RUNS], ids=["every fifth reply", "runs of replies"])
async def test_a_minute_gives_no_more_than_it_has(
    redis_server: RedisServer, late: tuple[Callable[[int], bool], float, float]
) -> None:
    is_late, timeout_s, delay_s = late
    async with (
        SlowProxy(redis_server, is_late, delay_s) as proxy,
        gateway(proxy.url, timeout_s) as store,
    ):
        for round_ in range(3):
            minute = replace(MINUTE, name=f"m{round_}")
            granted = refused = number = 0
            while refused < 10 and number < 100:
                number += 1
                held = await ask(store, f"r{round_}-{number}", [minute])
                if held is not None:
                    granted += 1
                    await store.settle(held, replace(USED, posted_at=time.time()))
                elif granted == LIMIT:  # or one of them is counted twice for a moment
                    refused += 1
                await asyncio.sleep(0.005)
            assert granted == LIMIT


async def test_places_are_never_more_than_there_are(redis_server: RedisServer) -> None:
    is_late, timeout_s, delay_s = RUNS
    async with (
        SlowProxy(redis_server, is_late, delay_s) as proxy,
        gateway(proxy.url, timeout_s) as store,
    ):
        open_, most = 0, 0

        async def client(number: int) -> None:
            nonlocal open_, most
            for turn in range(6):
                held = await ask(store, f"r{number}-{turn}", [PLACES])
                if held is None:
                    await asyncio.sleep(0.02)
                    continue
                open_ += 1
                most = max(most, open_)
                await asyncio.sleep(0.01)
                open_ -= 1
                await store.release(held)

        await asyncio.gather(*(client(number) for number in range(12)))
        assert most == LIMIT
        async with asyncio.timeout(20.0):  # all of them are given back
            while (await store.figures([PLACES], 0.0))[0].remaining < LIMIT:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_budget_outlives_one_late_answer(redis_server: RedisServer) -> None:
    async with (
        SlowProxy(redis_server, EVERY_FIFTH[0], 0.4) as proxy,
        gateway(proxy.url, timeout_s=0.3) as store,
    ):
        for number in range(12):
            assert await ask(store, f"r{number}", [replace(BUDGET, limit=120)]) is not None
        assert await ask(store, "more", [replace(BUDGET, limit=120)]) is None
        assert proxy.num_replies > 10


async def test_what_redis_granted_counts_while_it_is_away(redis_server: RedisServer) -> None:
    async with gateway(redis_server.url, timeout_s=1.0) as store:
        for number in range(3):
            held = await ask(store, f"before {number}", [MINUTE])
            assert held is not None
            await store.settle(held, replace(USED, posted_at=time.time()))
        redis_server.stop()
        away = [await ask(store, f"away {number}", [MINUTE]) for number in range(6)]
        assert sum(held is not None for held in away) == LIMIT - 3
        for held in away:
            if held is not None:
                await store.settle(held, replace(USED, posted_at=time.time()))
        redis_server.start()  # with nothing in it
        async with asyncio.timeout(20.0):
            while store.is_out_of_reach:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await ask(store, "after", [MINUTE]) is None


async def test_a_past_that_redis_has_not_heard_of_is_told_before_anybody_draws(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = RedisLimits.maintain, ["restore"]

    async def losing(self: RedisLimits, name: str, epoch: str, **args: Any) -> Answer:
        if name in lost:
            lost.remove(name)
            raise Unreachable("it was lost on its way", is_late=True)
        return await real(self, name, epoch, **args)

    monkeypatch.setattr(RedisLimits, "maintain", losing)
    async with gateway(redis_server.url, 1.0) as store:
        await store.restore([Past("cost", 0, period=5, spent=95)], 0.0)
        assert not lost
        assert await ask(store, "r", [replace(BUDGET, limit=100)]) is None


async def test_counts_that_are_lost_while_redis_is_told_hold_nobody_up(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintain, call = RedisLimits.maintain, RedisLimits.call

    async def unheard(self: RedisLimits, name: str, epoch: str, *args: Any, **more: Any) -> Answer:
        answer = await call(self, name, epoch, *args, **more)
        if more.get("id") == "late":
            raise Unreachable("it came too late", is_late=True)
        return answer

    async def emptied(self: RedisLimits, name: str, epoch: str, **args: Any) -> Answer:
        answer = await maintain(self, name, epoch, **args)
        if name == "add":
            monkeypatch.setattr(RedisLimits, "maintain", maintain)
            with redis_server.client() as client:
                client.flushall()
        return answer

    monkeypatch.setattr(RedisLimits, "call", unheard)
    store = SharedStore(RedisLimits(redis_server.url, "g", 1.0), time.monotonic, pace=PACE)
    await store.start()
    held = await ask(store, "late", [MINUTE])
    assert held is not None
    await store.settle(held, replace(USED, posted_at=time.time()))
    monkeypatch.setattr(RedisLimits, "maintain", emptied)
    async with asyncio.timeout(20.0):
        granted = [await ask(store, f"r{number}", [MINUTE]) for number in range(LIMIT)]
        await store.beat()
    assert sum(one is not None for one in granted) == LIMIT - 1
    await store.close()


async def test_what_others_have_used_counts_while_redis_is_away(redis_server: RedisServer) -> None:
    minute = replace(MINUTE, limit=2 * LIMIT)
    async with (
        gateway(redis_server.url, 1.0, "a") as first,
        gateway(redis_server.url, 1.0, "b") as second,
        asyncio.timeout(20.0),
    ):
        while min(first.num_gateways, second.num_gateways) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for number in range(LIMIT + 3):
            assert await ask(first, f"a{number}", [minute]) is not None
        for number in range(LIMIT - 3):
            assert await ask(second, f"b{number}", [minute]) is not None
        redis_server.stop()
        for number in range(LIMIT):  # its share would be three more
            away = await second.reserve(f"away {number}", [minute], time.monotonic())
            assert away.refusal is not None
            assert away.refusal.wait_s is not None, "it is not refused for ever"
