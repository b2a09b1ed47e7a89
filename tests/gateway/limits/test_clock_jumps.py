"""Clocks that jump ahead and back, days and months: a budget stays what it is in each period."""

from collections.abc import AsyncIterator

import pytest

from gateway.limits.limits import period_of
from gateway.limits.policy.rate_limit import Draw, Refusal, Spend, UsedAmounts, reserve, settle
from gateway.limits.redis_store import RedisLimits
from gateway.limits.shared_store import Backoff, SharedStore
from gateway.limits.store import LimitStore, MemoryStore, Past
from tests.gateway.limits.test_limit_restore import COST, NOW_AT, World, world  # noqa: F401
from tests.redis_kit import RedisServer

DAY_S = 86_400.0


def draw(period: int, cost: int = 10, limit: int = 100) -> Draw:
    return Draw("n", "cost", 0, limit, cost, period, 60.0)


def test_an_earlier_period_keeps_what_was_spent_in_it() -> None:
    spend = Spend(1)
    (taken,) = reserve([spend], [draw(1, 90)], 0.0)  # type: ignore[misc]
    settle(spend, taken, UsedAmounts(0, 0, 80, day=1))
    (ahead,) = reserve([spend], [draw(40, 15)], 0.0)  # type: ignore[misc]
    assert spend.figures(draw(1), 0.0).remaining == 100 - 80 - 15  # what runs may be posted here
    settle(spend, ahead, UsedAmounts(0, 0, 20, day=1))  # the clock is right again
    assert spend.figures(draw(1), 0.0).remaining == 0
    refusal = reserve([spend], [draw(1)], 0.0)
    assert isinstance(refusal, Refusal)
    assert not refusal.is_unknown
    assert spend.figures(draw(40), 0.0).remaining == 100


def test_a_period_that_is_not_counted_any_more_is_unknown_until_it_is_restored() -> None:
    spend = Spend(5)
    refusal = reserve([spend], [draw(1)], 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.is_unknown
    assert refusal.is_past
    spend.restore(1, 95)
    refusal = reserve([spend], [draw(1)], 0.0)
    assert isinstance(refusal, Refusal)
    assert not refusal.is_unknown
    assert isinstance(reserve([spend], [draw(1, 5)], 0.0), tuple)
    assert isinstance(reserve([spend], [draw(5)], 0.0), tuple)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    shared = SharedStore(RedisLimits(server.url, "g", 5.0), lambda: 0.0, pace=Backoff(grace_s=0.0))
    await shared.start()
    loss = await shared.loss()
    assert loss is not None
    await shared.restore_loss(loss, (), 0.0)
    yield shared
    await shared.close()


async def test_one_wrong_clock_of_several_gives_nobody_a_new_budget(store: LimitStore) -> None:
    """Of two gateways at one store, one is forty days ahead, then right, then a day behind."""

    async def ask(name: str, period: int, cost: int) -> str:
        decision = await store.reserve(name, [draw(period, cost)], 0.0)
        if decision.refusal is not None:
            return "unknown" if decision.refusal.is_past else "refused"
        assert decision.reservation is not None
        await store.settle(decision.reservation, UsedAmounts(0, 0, cost, day=period))
        return "granted"

    assert await ask("a", 7, 90) == "granted"
    assert await ask("ahead", 47, 10) == "granted"
    assert await ask("b", 7, 20) == "refused"
    assert await ask("c", 7, 10) == "granted"
    assert await ask("d", 7, 1) == "refused"
    assert await ask("behind", 6, 10) == "unknown"
    await store.restore([Past("n", 0, period=6, spent=80)], 0.0)
    assert await ask("behind", 6, 20) == "granted"
    assert await ask("more", 6, 1) == "refused"
    assert await ask("right", 7, 1) == "unknown"  # two are counted; the ledger has the third
    await store.restore([Past("n", 0, period=7, spent=100)], 0.0)
    assert await ask("right", 7, 1) == "refused"
    assert await ask("ahead", 47, 90) == "granted"


async def test_a_clock_that_comes_back_reads_the_ledger_again(world: World) -> None:  # noqa: F811
    tenant_id, key_id = world.new_tenant(month_budget_nanos=5 * COST)
    world.post(tenant_id, key_id, 3 * COST)
    world.now_at = NOW_AT + 80 * DAY_S
    await world.poll.load()  # a start by a wrong clock
    assert period_of("month", world.now_at).number != period_of("month", NOW_AT).number
    assert await world.burst(key_id) == 5
    world.now_at = NOW_AT
    assert await world.burst(key_id) == 2
    world.store.check_integrity()


async def test_jumps_never_grant_more_than_the_budget_of_a_period(world: World) -> None:  # noqa: F811
    _, key_id = world.new_tenant(month_budget_nanos=5 * COST)
    await world.poll.load()
    assert await world.burst(key_id) == 5
    for jump_s in (40 * DAY_S, 0.0, 0.0):
        world.now_at = NOW_AT + jump_s
        if jump_s:
            await (await world.ask(key_id)).settle(3, 7, COST, world.now_at)
        else:
            assert await world.burst(key_id) == 0
