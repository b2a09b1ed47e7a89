"""From postings to messages: each threshold once a period, over restarts and deaf receivers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine

from admin.alerts.alerts import AlertWatch
from admin.alerts.webhook import NotDelivered
from gateway.limits.limits import period_of
from registry.accounts import quotas, tenants
from registry.accounts.quotas import LimitScope
from registry.money import alerts, ledger, rollups
from registry.money.alerts import AlertKind
from registry.money.ledger import Posting
from registry.session import appending, make_engine, reading, writing
from tests.migrated import migrated

NOON = 1_772_020_800.0  # 25 February 2026
URL = "https://example.com/hook"


class World:
    """A ledger, a clock and a receiver."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now_at = NOON
        self.told: list[dict[str, Any]] = []
        self.is_deaf = False
        self._num = 0
        self.watch = self.restarted()
        with writing(engine, "test") as session:
            self.tenant = tenants.create_tenant(session, "acme", now_at=NOON).id

    def restarted(self) -> AlertWatch:
        return AlertWatch(
            self.engine, 0.01, CollectorRegistry(), self._deliver, lambda: self.now_at
        )

    async def _deliver(self, url: str, alert_id: str, secret: str, body: bytes, at: float) -> None:
        assert (url, at, secret[:6]) == (URL, self.now_at, "whsec_")
        if self.is_deaf:
            raise NotDelivered("deaf")
        told = json.loads(body)
        assert told["id"] == alert_id
        self.told.append(told)

    def rule(
        self,
        scope: LimitScope,
        owner: str,
        kind: AlertKind = "month",
        budget: int = 100,
        percents: tuple[int, ...] = (50, 100),
    ) -> str:
        with writing(self.engine, "test") as session:
            made, _ = alerts.add_rule(
                session, scope, owner, kind, budget, percents, URL, now_at=self.now_at
            )
            return made.id

    def spend(self, nanos: int, key: str = "k", model: str = "m") -> None:
        self._num += 1
        who = (self.tenant, key, model, "r", "chat", "finished")
        posting = Posting(f"id-{self._num}", *who, 10, 0, 5, nanos, 0.0, 0.0, 0.0, 0.0, self.now_at)
        with appending(self.engine, "test") as session:
            ledger.post_many(session, [posting])

    def roll(self) -> None:
        with writing(self.engine, "test") as session:
            rollups.roll(session, rollups.newest_seq(session))

    def percents(self) -> list[int]:
        return [told["percent"] for told in self.told]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    yield World(engine)
    engine.dispose()


async def test_each_threshold_once_a_period(world: World) -> None:
    world.rule("tenant", world.tenant)
    world.spend(49)
    await world.watch.look()
    assert world.told == []
    world.spend(1)
    assert (await world.watch.look()).raised == 1
    world.roll()
    world.spend(60)
    for _ in range(3):
        await world.watch.look()
    assert world.percents() == [50, 100]
    told = world.told[1]
    assert (told["type"], told["scope"], told["name"]) == ("budget.threshold", "tenant", "acme")
    assert (told["spent_nanos"], told["budget_nanos"], told["is_hard"]) == (110, 100, False)
    month = period_of("month", NOON)
    assert (told["period_began_at"], told["period_ends_at"]) == (month.began_at, month.ends_at)
    world.now_at = month.ends_at + 2 * 86_400
    await world.watch.look()
    world.spend(50)
    await world.watch.look()
    assert world.percents() == [50, 100, 50]


async def test_whose_spending_counts(world: World) -> None:
    rules = {
        world.rule("key", "k1"): "k1",
        world.rule("model", "m1"): "m1",
        world.rule("gateway", ""): "",
        world.rule("tenant", "another"): "another",
    }
    world.spend(50, "k1", "m2")
    world.spend(40, "k2", "m1")
    await world.watch.look()
    assert sorted(rules[told["rule"]] for told in world.told) == ["", "k1"]


async def test_without_a_sum_it_is_the_hard_budget_in_force(world: World) -> None:
    world.rule("gateway", "", "day", budget=0, percents=(80,))
    world.spend(90)
    await world.watch.look()
    assert world.told == []  # none is set
    with writing(world.engine, "test") as session:
        quotas.set_limits(session, "gateway", "", {"day_budget_nanos": 100}, now_at=NOON)
    await world.watch.look()
    assert [(told["budget_nanos"], told["is_hard"]) for told in world.told] == [(100, True)]


async def test_what_is_not_taken_is_told_again_after_a_restart_too(world: World) -> None:
    world.rule("gateway", "")
    world.is_deaf = True
    world.spend(50)
    await world.watch.look()
    await world.restarted().look()
    assert world.told == []
    with reading(world.engine) as session:
        (alert,) = alerts.list_alerts(session, 10)
    assert (alert.num_tries, alert.last_error) == (1, "deaf")
    world.is_deaf = False
    watch = world.restarted()
    await watch.look()
    assert world.told == []  # not yet
    world.now_at += 11.0
    await watch.look()
    await watch.look()
    assert world.percents() == [50]
    with reading(world.engine) as session:
        (alert,) = alerts.list_alerts(session, 10)
    assert (alert.delivered_at, alert.next_try_at, alert.num_tries) == (world.now_at, None, 2)


async def test_who_is_deaf_for_days_is_given_up(world: World) -> None:
    world.rule("gateway", "")
    world.is_deaf = True
    world.spend(50)
    num_looks = 0
    while (await world.watch.look()).waiting:
        world.now_at += 3600.0
        num_looks += 1
        assert num_looks < 200
    with reading(world.engine) as session:
        (alert,) = alerts.list_alerts(session, 10)
    assert (alert.next_try_at, alert.delivered_at) == (None, None)
    assert num_looks > 60


async def test_several_watches_tell_once(world: World) -> None:
    world.rule("gateway", "")
    world.spend(100)
    await asyncio.gather(*(world.restarted().look() for _ in range(4)))
    assert sorted(world.percents()) == [50, 100]


async def test_the_end_of_a_period_is_looked_at_after_it(world: World) -> None:
    world.rule("gateway", "", "day")
    day = period_of("day", NOON)
    world.now_at = day.ends_at - 1
    world.spend(50)
    world.now_at = day.ends_at + 60
    world.spend(1000)  # of the new day
    await world.watch.look()
    told = {(told["period_ends_at"], told["percent"], told["spent_nanos"]) for told in world.told}
    tomorrow = day.ends_at + 86_400
    assert told == {(day.ends_at, 50, 50), (tomorrow, 50, 1000), (tomorrow, 100, 1000)}
