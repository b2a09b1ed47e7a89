"""Redis and this process count alike: the same calls, the same answers."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from redis import Redis

from gateway.limits.policy.rate_limit import DAY_S, Draw, Reservation, UsedAmounts
from gateway.limits.redis_store import RedisLimits
from gateway.limits.shared_store import PACE, SharedStore
from gateway.limits.store import MemoryStore, Past
from tests.redis_kit import CLOCK_KEY, TEST_CLOCK, RedisServer

BEGAN_S = 1_795_000_000.0
SEQUENCES = 200
CALLS = 30
OWNERS = ("key a", "key b", "tenant t", "gateway ")


class Pair:
    """Both stores, asked the same under one clock."""

    def __init__(self, server: RedisServer) -> None:
        self._client: Redis = server.client()
        self.prefix = 0
        self._server = server
        self.now_s = BEGAN_S

    async def begin(self) -> None:
        """Both empty."""
        self.prefix += 1
        self.now_s = BEGAN_S
        self.tick(0.0)
        redis = RedisLimits(
            self._server.url, "g", 5.0, prefix=f"p{self.prefix}", clock_lua=TEST_CLOCK
        )
        self.shared = SharedStore(redis, lambda: self.now_s)
        self.memory = MemoryStore()
        await self.shared.start()
        self.tick(PACE.grace_s)
        loss = await self.shared.loss()
        assert loss is not None
        await self.shared.restore_loss(loss, (), self.now_s)
        assert not self.shared.is_degraded

    async def end(self) -> None:
        await self.shared.close()

    def close(self) -> None:
        self._client.close()

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self._client.set(CLOCK_KEY, repr(self.now_s))

    async def reserve(self, reservation_id: str, draws: Sequence[Draw]) -> Reservation | None:
        here = await self.memory.reserve(reservation_id, draws, self.now_s)
        there = await self.shared.reserve(reservation_id, draws, self.now_s)
        assert there == here
        return here.reservation


@pytest.fixture
async def pair(redis_server: RedisServer) -> AsyncIterator[Pair]:
    both = Pair(redis_server)
    yield both
    both.close()


def some_draws(dice: random.Random, period: int, scale: int) -> list[Draw]:
    """What a request of somebody takes, of limits of all kinds."""
    draws = []
    for owner in dice.sample(OWNERS, dice.randint(1, 3)):
        tokens = dice.choice((0, 1, 3, 7, 20))
        every = (
            Draw(f"{owner} requests 60", "requests", 60, 6 * scale, 1),
            Draw(f"{owner} tokens 60", "tokens", 60, 60 * scale, tokens),
            Draw(f"{owner} input_tokens 1", "input_tokens", 1, 30, tokens // 2),
            Draw(f"{owner} tokens {DAY_S}", "output_tokens", DAY_S, 200 * scale, tokens),
            Draw(f"{owner} concurrency 0", "concurrency", 0, 4, 1),
            Draw(f"{owner} cost day", "cost", 0, 10**15 * scale, tokens * 10**13, period, 50.5),
            Draw(f"{owner} cost month", "cost", 0, 900, tokens, period // 3, 99.0, "month"),
        )
        draws += [draw for draw in every if dice.random() < 0.6]
    return draws


async def one_sequence(pair: Pair, dice: random.Random) -> int:
    """Random calls on both. How many requests were refused."""
    opened: list[Reservation] = []
    period, num_refused = 7, 0
    scale = dice.choice((1, 3))
    for number in range(CALLS):
        pair.tick(dice.choice((0.0, 0.001, 0.3, 0.5, 4.0, 31.0, 61.0, 700.0, 50_000.0)))
        period += dice.random() < 0.1
        if dice.random() < 0.05:  # a clock jumps
            period = max(3, period + dice.choice((-40, -3, -1, 40)))
        draws = some_draws(dice, period, scale)
        kind = dice.random()
        if kind < 0.5 or (kind < 0.85 and not opened):
            reservation = await pair.reserve(f"r{number}", draws)
            if reservation is None:
                num_refused += 1
            else:
                opened.append(reservation)
        elif kind < 0.75:
            ended = opened.pop(dice.randrange(len(opened)))
            money = max((t.cost for t in ended.taken if t.meter == "cost"), default=0)
            used = UsedAmounts(dice.randint(0, 9), dice.randint(0, 9), money // dice.randint(1, 5))
            used = replace(used, day=period, month=period // 3, posted_at=pair.now_s)
            for store in (pair.memory, pair.shared):
                await store.settle(ended, used)
        elif kind < 0.85:
            ended = opened.pop(dice.randrange(len(opened)))
            for store in (pair.memory, pair.shared):
                await store.release(ended)
        else:
            pasts = some_pasts(dice, draws)
            name = dice.choice(("restore", "add"))
            for store in (pair.memory, pair.shared):
                await getattr(store, name)(pasts, pair.now_s)
        told = await pair.memory.figures(draws, pair.now_s)
        assert await pair.shared.figures(draws, pair.now_s) == told
        pair.memory.check_integrity()
    return num_refused


def some_pasts(dice: random.Random, draws: Sequence[Draw]) -> list[Past]:
    """Of one of the counts."""
    draw = dice.choice([d for d in draws if d.meter != "concurrency"] or [None])
    if draw is None:
        return []
    if draw.meter == "cost":
        return [Past(draw.name, 0, period=draw.period, spent=dice.randint(0, 400))]
    ages = sorted((dice.uniform(0, 1.2 * draw.window_s) for _ in range(4)), reverse=True)
    return [Past(draw.name, draw.window_s, tuple((age, dice.randint(0, 9)) for age in ages))]


async def test_random_sequences_end_alike_in_both(pair: Pair) -> None:
    num_refused = 0
    for seed in range(SEQUENCES):
        await pair.begin()
        try:
            num_refused += await one_sequence(pair, random.Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        await pair.end()
    assert num_refused > SEQUENCES
