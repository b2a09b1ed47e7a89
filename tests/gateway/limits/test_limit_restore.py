"""Limits whose past is still being read: nothing passes before it is known what is left."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from engine.protocol import SamplingParams
from gateway.auth.auth import principal_of_key
from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.errors import ApiError
from gateway.limits import limit_restore, limits
from gateway.limits.limits import Limiter, LimitReservation, budget_name
from gateway.limits.store import MemoryStore
from gateway.pricing.policy.pricing import Prices, Rates
from gateway.types import HostedModel, PreparedRequest, Principal
from registry.accounts import api_keys, quotas, tenants
from registry.money import ledger, rollups
from registry.money.ledger import Posting
from registry.session import make_engine, writing
from tests.migrated import migrated

NOW_AT = 1_772_000_000.0
PRICES = Prices(prompt_nanos=10, completion_nanos=10)
RATES = Rates(listed=PRICES, agreed=PRICES)
COST = (3 + 7) * 10
MODEL = HostedModel("m", "r", "p", 100, 100, 0)
PARALLEL = 40


class World:
    """A registry, a gateway's view of it and its limiter."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.now_at = NOW_AT
        self.directory = Directory()
        self.store = MemoryStore()
        self.poll = RegistryPoll(
            engine,
            folder,
            self.directory,
            0.5,
            lambda models, weights: None,
            lambda request: None,
            self.store,
            wall_clock=lambda: self.now_at,
            clock=lambda: self.now_at - NOW_AT,
        )
        self.limiter = self.new_limiter()

    def new_limiter(self, *, fail_open: bool = False) -> Limiter:
        return Limiter(
            self.store,
            lambda: self.now_at - NOW_AT,
            lambda meter: None,
            lambda: self.directory.limits,
            lambda: self.now_at,
            self.directory.unread,
            budgets_fail_open=fail_open,
        )

    def new_tenant(self, **changes: int) -> tuple[str, str]:
        """Ids of a tenant with these limits and of its key."""
        with writing(self.engine, "test") as session:
            tenant = tenants.create_tenant(session, token_hex(4), now_at=NOW_AT)
            quotas.set_limits(session, "tenant", tenant.id, changes, now_at=NOW_AT)
            key, _ = api_keys.create_key(session, tenant.id, "k", now_at=NOW_AT)
        return tenant.id, key.id

    def post(self, tenant_id: str, key_id: str, nanos: int) -> None:
        who = (token_hex(8), tenant_id, key_id, "m", "r", "chat", "finished")
        posting = Posting(*who, 10, 0, 5, nanos, 0.0, 0.0, 0.0, 0.0, self.now_at)
        with writing(self.engine, "test") as session:
            ledger.post_many(session, [posting])

    def enable(self, tenant_id: str, *, enabled: bool) -> None:
        with writing(self.engine, "test") as session:
            tenants.update_tenant(session, tenant_id, disabled=not enabled, now_at=self.now_at)

    def who(self, key_id: str) -> Principal:
        found = principal_of_key(self.directory, key_id, self.now_at)
        assert found is not None
        return found

    async def ask(self, key_id: str) -> LimitReservation:
        params = SamplingParams()
        request = PreparedRequest(token_hex(8), "chat", MODEL, [1] * 3, 7, params, [], rates=RATES)
        return await self.limiter.reserve(self.who(key_id), request, {})

    async def burst(self, key_id: str) -> int:
        """How many of so many at once are served, and billed at their most."""
        answers = await asyncio.gather(
            *(self.ask(key_id) for _ in range(PARALLEL)), return_exceptions=True
        )
        served = [one for one in answers if isinstance(one, LimitReservation)]
        for one in served:
            await one.settle(3, 7, COST, self.now_at)
        return len(served)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    yield World(engine, tmp_path)
    engine.dispose()


@pytest.mark.parametrize("limit", ["month_budget_nanos", "requests_per_day"])
async def test_a_limit_holds_from_the_moment_its_key_is_known(world: World, limit: str) -> None:
    await world.poll.load()
    fits = 9
    unit = 1 if limit == "requests_per_day" else COST
    tenant_id, key_id = world.new_tenant(**{limit: fits * unit + unit - 1})
    await world.poll.poll()
    assert await world.burst(key_id) == fits
    # Used up: neither locking the tenant out nor letting it in again gives it more.
    for _ in range(3):
        world.enable(tenant_id, enabled=False)
        await world.poll.poll()
        world.enable(tenant_id, enabled=True)
        await world.poll.poll()
        assert await world.burst(key_id) == 0
    world.store.check_integrity()


async def test_what_a_tenant_spent_counts_before_its_first_request(world: World) -> None:
    await world.poll.load()
    tenant_id, key_id = world.new_tenant(month_budget_nanos=10 * COST)
    world.post(tenant_id, key_id, 7 * COST)
    await world.poll.poll()
    assert await world.burst(key_id) == 3


async def test_a_new_limit_of_a_busy_tenant_waits_and_no_other_does(world: World) -> None:
    tenant_id, key_id = world.new_tenant()
    _, other_id = world.new_tenant(month_budget_nanos=5 * COST)
    await world.poll.load()
    world.post(tenant_id, key_id, 7 * COST)
    with writing(world.engine, "test") as session:
        changes = {"month_budget_nanos": 9 * COST}
        quotas.set_limits(session, "key", key_id, changes, now_at=NOW_AT)
    await world.poll.poll()
    assert world.directory.unread.names == {budget_name("key", key_id, "month")}
    other = asyncio.ensure_future(world.ask(other_id))
    asked = asyncio.ensure_future(world.ask(key_id))
    for _ in range(3):
        await asyncio.sleep(0)
    assert other.done()
    assert not asked.done()
    await asked
    assert await world.burst(key_id) == 1


async def test_a_ledger_that_cannot_be_read_is_503_and_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.poll.load()
    _, key_id = world.new_tenant(month_budget_nanos=5 * COST)
    real, fails = rollups.spend_since, [OperationalError("", {}, Exception("away")), ValueError()]

    def failing(*args: Any) -> Sequence[ledger.SpendRow]:
        if fails:
            raise fails.pop()
        return real(*args)

    monkeypatch.setattr(rollups, "spend_since", failing)
    monkeypatch.setattr(limit_restore, "RETRY_S", 0.05)
    monkeypatch.setattr(limits, "UNREAD_WAIT_S", 0.01)
    await world.poll.poll()
    with pytest.raises(ApiError, match="cannot be determined at the moment") as caught:
        await world.ask(key_id)
    assert (caught.value.kind.status, caught.value.retry_after_s) == (503, 1.0)
    world.limiter = world.new_limiter(fail_open=True)
    await world.ask(key_id)  # as the operator wants it
    await world.poll.settled()
    assert not fails
    assert await world.burst(key_id) == 4


async def test_a_limit_lifted_while_it_is_read_is_read_again_when_it_is_set(world: World) -> None:
    await world.poll.load()
    tenant_id, key_id = world.new_tenant(month_budget_nanos=5 * COST)
    await world.poll.poll()
    with writing(world.engine, "test") as session:
        quotas.set_limits(session, "tenant", tenant_id, {"month_budget_nanos": 0}, now_at=NOW_AT)
    await world.poll.poll()
    assert not world.directory.unread.names
    await world.poll.settled()
    world.post(tenant_id, key_id, 3 * COST)
    with writing(world.engine, "test") as session:
        changes = {"month_budget_nanos": 5 * COST}
        quotas.set_limits(session, "tenant", tenant_id, changes, now_at=NOW_AT)
    await world.poll.poll()
    assert await world.burst(key_id) == 2


def test_a_new_key_reads_only_its_tenants_part_of_the_ledger(world: World) -> None:
    for name in ("a", "b"):
        world.post(name, f"{name}1", 5)
        with writing(world.engine, "test") as session:
            rollups.roll(session, rollups.newest_seq(session))
        world.post(name, f"{name}1", 6)
    with writing(world.engine, "test") as session:
        month = limits.period_of("month", NOW_AT)
        rows = rollups.spend_since(session, month.began_at, None, ["a"])
        assert [(row.tenant_id, row.cost_nanos) for row in rows] == [("a", 11)]
        (slot,) = ledger.usage_by_slot(session, 0.0, 3600, ["b"])
        assert (slot.tenant_id, slot.num_requests) == ("b", 2)
