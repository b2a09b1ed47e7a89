"""The registry's view in the gateway: reloaded when the version moved, kept when it cannot be."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.limits import limit_restore
from gateway.limits.limits import period_of
from gateway.limits.policy.rate_limit import Draw, Meter, UsedAmounts
from gateway.limits.store import MemoryStore
from gateway.pricing.policy.pricing import WHOLE, Prices, Rates
from gateway.types import HostedModel
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.api_keys import KeyRecord
from registry.errors import InvalidValue
from registry.models import catalog, residency_requests
from registry.models.catalog import PackFacts
from registry.money import ledger, plans, prices, rollups
from registry.money.ledger import Posting
from registry.money.plans import PlanDiscount, TenantTerms
from registry.money.prices import PriceRecord
from registry.session import make_engine, writing
from tests.migrated import migrated

FACTS = PackFacts("r1", "r1", "llama", "float32", 1234, 512, 100)


class Watch:
    """A poll and what it told."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.now_at = 1000.0
        self.engine = engine
        self.directory = Directory()
        self.catalogs: list[list[str]] = []
        self.weights: dict[str, int] = {}
        self.requests: list[str] = []
        self.store = MemoryStore()
        self.folder = folder
        self.poll = self.new_poll(self.directory, self.store)

    def new_poll(self, directory: Directory, store: MemoryStore) -> RegistryPoll:
        return RegistryPoll(
            self.engine,
            self.folder,
            directory,
            0.5,
            self._on_models,
            lambda request: self.requests.append(f"{request.action} {request.model}"),
            store,
            wall_clock=lambda: self.now_at,
            clock=lambda: self.now_at - 1000.0,
            gateway_id="g",
        )

    def add_model(self, name: str) -> None:
        with writing(self.engine, "test") as session:
            record = catalog.add_model(session, name, "/source", now_at=self.now_at)
            catalog.finish(session, record.registration, FACTS, now_at=self.now_at)

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self.catalogs.append([model.name for model in models])
        self.weights = weights


@pytest.fixture(params=["sqlite", "postgresql"])
def watch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watch]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    migrated(url)
    engine = make_engine(url)
    yield Watch(engine, tmp_path)
    engine.dispose()


async def test_keys_and_models_appear_and_go(watch: Watch) -> None:
    await watch.poll.load()
    assert watch.catalogs == [[]]
    with writing(watch.engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        key, _ = api_keys.create_key(session, tenant.id, "first", now_at=watch.now_at)
    watch.add_model("m")
    await watch.poll.poll()
    assert watch.directory.find_key(key.public_id) == key
    model = watch.directory.find_model("m")
    assert model is not None
    assert model.pack_dir.endswith("/packs/r1")
    assert watch.directory.models() == [model]
    assert watch.weights == {"m": 1234}
    with writing(watch.engine, "test") as session:
        api_keys.revoke(session, key.id, now_at=watch.now_at)
        catalog.remove(session, "m", now_at=watch.now_at)
    await watch.poll.poll()
    assert watch.directory.find_key(key.public_id) is None
    assert watch.directory.find_model("m") is None
    assert watch.catalogs == [[], ["m"], []]


async def test_nothing_is_read_while_the_version_stands(watch: Watch) -> None:
    watch.add_model("m")
    await watch.poll.load()
    model = watch.directory.find_model("m")
    await watch.poll.poll()
    assert watch.directory.find_model("m") is model
    assert watch.catalogs == [["m"]]


async def test_prices_to_come_are_known_before_they_begin(watch: Watch) -> None:
    watch.add_model("m")
    begins_at = watch.now_at + 5
    with writing(watch.engine, "test") as session:
        price = PriceRecord("m", begins_at, prompt_nanos=7)
        prices.set_price(session, price, now_at=watch.now_at)
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        plans.create_plan(session, PlanDiscount("half", begins_at, 5000), now_at=watch.now_at)
        terms = TenantTerms(tenant.id, begins_at + 1, "half", 0)
        plans.set_terms(session, terms, now_at=watch.now_at)
    await watch.poll.load()
    rates = partial(watch.directory.rates, tenant.id, "m")
    assert rates(begins_at - 0.001) == Rates(begins_at - 0.001)
    assert (rates(begins_at).listed, rates(begins_at).share) == (Prices(7), WHOLE)
    assert (rates(begins_at + 1).agreed, rates(begins_at + 1).share) == (Prices(7), WHOLE // 2)


async def test_a_clock_behind_the_registry_is_said(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.add_model("m")
    watch.now_at -= 59.0
    await watch.poll.load()
    assert not caplog.records
    watch.now_at += 2 * 86_400
    watch.add_model("n")
    watch.now_at -= 2 * 86_400
    await watch.poll.poll()
    (told,) = caplog.records
    assert "clock is 172800 s behind the registry's last change" in told.getMessage()


async def test_wishes_are_taken_once(watch: Watch) -> None:
    watch.add_model("m")
    await watch.poll.load()
    with writing(watch.engine, "test") as session:
        residency_requests.ask(session, "m", "load", now_at=watch.now_at)
    with writing(watch.engine, "test") as session:
        residency_requests.ask(session, "m", "unload", now_at=watch.now_at)
    await watch.poll.poll()
    await watch.poll.poll()
    assert watch.requests == ["load m", "unload m"]


async def test_a_database_that_is_gone_leaves_the_view(watch: Watch, tmp_path: Path) -> None:
    watch.add_model("m")
    await watch.poll.load()
    if watch.engine.dialect.name == "postgresql":
        with writing(watch.engine, "test") as session:
            session.execute(text("ALTER TABLE registry_version RENAME TO elsewhere"))
    else:
        watch.engine.dispose()
        (tmp_path / "polyhost.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(SQLAlchemyError):
        await watch.poll.poll()
    assert watch.directory.find_model("m") is not None


def posting(number: int, posted_at: float, key_id: str, outcome: str = "finished") -> Posting:
    who = ("ten_1", key_id, "m", "r", "chat", outcome)
    return Posting(f"id-{number}", *who, 10, 0, 5, 0, 0.0, 0.0, 0.0, 0.0, posted_at)


async def test_counts_by_the_day_outlive_a_restart(watch: Watch) -> None:
    day_s = 86_400.0
    watch.now_at = 2 * day_s
    with writing(watch.engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        key, _ = api_keys.create_key(session, tenant.id, "first", now_at=watch.now_at)
        changes = {"requests_per_day": 5, "tokens_per_day": 100, "tokens_per_minute": 50}
        quotas.set_limits(session, "key", key.id, changes, now_at=watch.now_at)
        ledger.post_many(
            session,
            [
                posting(1, watch.now_at - 1.1 * day_s, key.id),  # has left the window
                posting(2, watch.now_at - 0.9 * day_s, key.id),
                posting(3, watch.now_at - 0.9 * day_s, key.id, "failed"),
                posting(4, watch.now_at - 3600, key.id, "cache_hit"),
                posting(5, watch.now_at - 3600, "another"),
            ],
        )
    await watch.poll.load()

    def draw(meter: Meter) -> Draw:
        return Draw(f"key {key.id} {meter} 86400", meter, 86_400, 100, 1)

    async def used(*draws: Draw) -> list[int]:
        figures = await watch.store.figures(draws, watch.now_at - 1000.0)
        return [100 - one.remaining for one in figures]

    assert await used(draw("requests"), draw("tokens")) == [2, 15]
    assert not watch.store.knows(f"key {key.id} tokens 60")
    # A limit that is new begins with what was used; one that was there is not counted twice.
    with writing(watch.engine, "test") as session:
        quotas.set_limits(session, "gateway", "", {"input_tokens_per_day": 9}, now_at=watch.now_at)
        ledger.post_many(session, [posting(6, watch.now_at, key.id)])
    await watch.poll.poll()
    await watch.poll.settled()
    everybody = Draw("gateway  input_tokens 86400", "input_tokens", 86_400, 100, 1)
    assert await used(draw("requests"), everybody) == [2, 30]
    assert watch.directory.limits.input_tokens_per_day == 9
    # What was restored leaves the window when a day has passed.
    watch.now_at += 0.12 * day_s
    await watch.store.reserve("again", [draw("requests")], watch.now_at - 1000.0)
    assert await used(draw("requests")) == [2]


async def test_budgets_outlive_a_restart(watch: Watch) -> None:
    watch.now_at = 1_772_000_000.0  # 25 February 2026
    with writing(watch.engine, "test") as session:
        quotas.set_limits(
            session,
            "gateway",
            "",
            {"month_budget_nanos": 100, "day_budget_nanos": 50},
            now_at=watch.now_at,
        )
        spent = [(1, 40 * 86_400, 7), (2, 10 * 86_400, 20), (3, 60, 11)]
        ledger.post_many(
            session,
            [
                replace(posting(n, watch.now_at - age_s, "k"), cost_nanos=nanos)
                for n, age_s, nanos in spent
            ],
        )
    await watch.poll.load()
    month, day = period_of("month", watch.now_at), period_of("day", watch.now_at)
    draws = [
        Draw("gateway  cost month", "cost", 0, 100, 1, month.number),
        Draw("gateway  cost day", "cost", 0, 50, 1, day.number),
    ]
    assert [f.remaining for f in await watch.store.figures(draws, 0.0)] == [69, 39]
    with writing(watch.engine, "test") as session:
        ledger.post_many(session, [replace(posting(4, watch.now_at, "k"), cost_nanos=5)])
        quotas.set_limits(session, "gateway", "", {"day_budget_nanos": 60}, now_at=watch.now_at)
    await watch.poll.poll()  # what this process has counted itself is not read again
    assert [f.remaining for f in await watch.store.figures(draws, 0.0)] == [69, 39]


async def test_what_an_earlier_server_left_open_counts_when_it_is_posted(watch: Watch) -> None:
    watch.now_at = 1_772_000_000.0
    with writing(watch.engine, "test") as session:
        changes = {"requests_per_day": 5, "tokens_per_day": 100, "tokens_per_minute": 50}
        quotas.set_limits(session, "gateway", "", changes, now_at=watch.now_at)
        changes = {"month_budget_nanos": 100, "day_budget_nanos": 50}
        quotas.set_limits(session, "gateway", "", changes, now_at=watch.now_at)
    await watch.poll.load()
    left = replace(posting(1, watch.now_at, "k", "disconnected"), cost_nanos=30)
    watch.poll.count_posting(left)
    watch.poll.count_posting(replace(left, outcome="failed", cost_nanos=0))
    await asyncio.sleep(0)
    month, day = period_of("month", watch.now_at), period_of("day", watch.now_at)
    draws = [
        Draw("gateway  cost month", "cost", 0, 100, 1, month.number),
        Draw("gateway  cost day", "cost", 0, 50, 1, day.number),
        Draw("gateway  requests 86400", "requests", 86_400, 5, 1),
        Draw("gateway  tokens 86400", "tokens", 86_400, 100, 1),
    ]
    assert [f.remaining for f in await watch.store.figures(draws, 0.0)] == [70, 20, 4, 85]
    assert watch.store.num_counts == len(draws)  # nobody limits keys, tenants and models
    watch.store.check_integrity()


async def test_a_tenant_that_was_locked_out_owes_what_still_runs(watch: Watch) -> None:
    watch.now_at = 1_772_000_000.0
    with writing(watch.engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        api_keys.create_key(session, tenant.id, "first", now_at=watch.now_at)
        changes = {"day_budget_nanos": 50}
        quotas.set_limits(session, "tenant", tenant.id, changes, now_at=watch.now_at)
    await watch.poll.load()
    day = period_of("day", watch.now_at)
    draw = Draw(f"tenant {tenant.id} cost day", "cost", 0, 50, 40, day.number)
    held = (await watch.store.reserve("r", [draw], 0.0)).reservation
    assert held is not None
    for disabled in (True, False):
        with writing(watch.engine, "test") as session:
            tenants.update_tenant(session, tenant.id, disabled=disabled, now_at=watch.now_at)
        await watch.poll.poll()
    await watch.poll.settled()
    assert [f.remaining for f in await watch.store.figures([draw], 0.0)] == [10]
    await watch.store.settle(held, UsedAmounts(0, 0, 35))
    assert [f.remaining for f in await watch.store.figures([draw], 0.0)] == [15]
    watch.store.check_integrity()


def by_id(directory: Directory) -> dict[str, KeyRecord]:
    return {key.id: key for key in list(directory.keys())}


class Changer:
    """An operator who does anything, anytime."""

    def __init__(self, watch: Watch, dice: random.Random) -> None:
        self.watch = watch
        self.dice = dice
        self.tenants: list[str] = []
        self.keys: list[str] = []
        self.models: list[str] = []

    def change(self) -> None:
        kinds = (self._tenant, self._key, self._model, self._limits, self._key_state, self._lock)
        weights = (1, 4, 1, 6, 4, 2)
        self.dice.choices(kinds, weights)[0]()
        self.watch.now_at += 1.0

    def _tenant(self) -> None:
        with writing(self.watch.engine, "test") as session:
            name = f"t{len(self.tenants)}"
            made = tenants.create_tenant(session, name, now_at=self.watch.now_at)
            self.tenants.append(made.id)

    def _key(self) -> None:
        if not self.tenants:
            return
        with writing(self.watch.engine, "test") as session:
            key, _ = api_keys.create_key(
                session,
                self.dice.choice(self.tenants),
                f"k{len(self.keys)}",
                limits=self._some_limits() if self.dice.random() < 0.5 else None,
                now_at=self.watch.now_at,
            )
            self.keys.append(key.id)

    def _model(self) -> None:
        # A name like an id is a name all the same.
        name = self.dice.choice(self.keys) if self.keys else "m"
        if name not in self.models:
            self.watch.add_model(name)
            self.models.append(name)

    def _limits(self) -> None:
        owners: dict[quotas.LimitScope, list[str]]
        owners = {"key": self.keys, "tenant": self.tenants, "model": self.models, "gateway": [""]}
        scope = self.dice.choice([scope for scope in owners if owners[scope]])
        with writing(self.watch.engine, "test") as session:
            changes = asdict(self._some_limits())
            owner = self.dice.choice(owners[scope])
            quotas.set_limits(session, scope, owner, changes, now_at=self.watch.now_at)

    def _key_state(self) -> None:
        if not self.keys:
            return
        key, now_at = self.dice.choice(self.keys), self.watch.now_at
        with writing(self.watch.engine, "test") as session, suppress(InvalidValue):
            if self.dice.random() < 0.4:
                api_keys.revoke(session, key, now_at=now_at)
            elif self.dice.random() < 0.5:
                api_keys.rotate(session, key, 5.0, now_at=now_at)
            else:
                found = api_keys.KeyChanges(allowed_models=["m"], allowed_cidrs=["10.0.0.0/8"])
                api_keys.change(session, key, found, now_at=now_at)

    def _lock(self) -> None:
        if self.tenants:
            with writing(self.watch.engine, "test") as session:
                locked = self.dice.random() < 0.5
                tenant = self.dice.choice(self.tenants)
                tenants.update_tenant(session, tenant, disabled=locked, now_at=self.watch.now_at)

    def _some_limits(self) -> quotas.Limits:
        pick = self.dice.choice
        return quotas.Limits(
            requests_per_minute=pick((0, 5)),
            tokens_per_day=pick((0, 100)),
            day_budget_nanos=pick((0, 50)),
            month_budget_nanos=pick((0, 90)),
        )


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_read_of_changes_is_what_is_there(watch: Watch, seed: int) -> None:
    changer = Changer(watch, random.Random(seed))
    await watch.poll.load()
    for _ in range(40):
        for _ in range(changer.dice.randint(1, 4)):
            changer.change()
        await watch.poll.poll()
        await watch.poll.settled()
        fresh = Directory()
        await watch.new_poll(fresh, MemoryStore()).load()
        assert by_id(watch.directory) == by_id(fresh)
        assert watch.directory.models() == fresh.models()
        assert (watch.directory.limits, watch.directory.version) == (fresh.limits, fresh.version)


async def test_a_change_of_one_key_reads_one_key(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(watch.engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        made = [
            api_keys.create_key(session, tenant.id, f"k{n}", now_at=watch.now_at)[0]
            for n in range(20)
        ]
    await watch.poll.load()
    before = by_id(watch.directory)
    monkeypatch.delattr(api_keys, "active_keys")  # nothing reads all of them again
    with writing(watch.engine, "test") as session:
        changes = {"requests_per_minute": 3}
        quotas.set_limits(session, "key", made[3].id, changes, now_at=watch.now_at)
        api_keys.revoke(session, made[4].id, now_at=watch.now_at)
    await watch.poll.poll()
    after = by_id(watch.directory)
    assert after[made[3].id].limits.requests_per_minute == 3
    assert set(before) - set(after) == {made[4].id}
    assert sum(before[key_id] is not key for key_id, key in after.items()) == 1


async def test_a_new_budget_is_unread_until_its_past_is_known(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(watch.engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        key, _ = api_keys.create_key(session, tenant.id, "k", now_at=watch.now_at)
    await watch.poll.load()
    reads = list[int]()
    real = rollups.spend_since

    def slow(*args: Any) -> list[ledger.SpendRow]:
        reads.append(1)
        if len(reads) == 1:
            raise OperationalError("the ledger", {}, Exception("is away"))
        return real(*args)

    monkeypatch.setattr(rollups, "spend_since", slow)
    monkeypatch.setattr(limit_restore, "RETRY_S", 0.01)
    with writing(watch.engine, "test") as session:
        changes = {"month_budget_nanos": 9, "requests_per_minute": 3}
        quotas.set_limits(session, "key", key.id, changes, now_at=watch.now_at)
    await watch.poll.poll()
    found = watch.directory.find_key(key.public_id)
    assert found is not None
    assert (found.limits.month_budget_nanos, found.limits.requests_per_minute) == (9, 3)
    assert watch.directory.unread.names == {f"key {key.id} cost month"}
    await watch.poll.settled()
    assert not watch.directory.unread.names
    assert len(reads) == 2


async def test_what_was_left_open_counts_at_its_most_until_it_is_posted(watch: Watch) -> None:
    watch.now_at = 1_772_000_000.0
    with writing(watch.engine, "test") as session:
        changes = {"month_budget_nanos": 100, "tokens_per_day": 100}
        quotas.set_limits(session, "gateway", "", changes, now_at=watch.now_at)
        who = ("ten_1", "key_1", "m", "r", 10, watch.now_at)
        ledger.open_many(
            session,
            [
                ledger.OpenRecord("a", *who, gateway_id="g", reserved_nanos=40),
                ledger.OpenRecord("b", *who, gateway_id="g", reserved_nanos=20),
                ledger.OpenRecord("c", *who, gateway_id="another", reserved_nanos=80),
            ],
        )
    await watch.poll.load()
    month = period_of("month", watch.now_at).number
    draws = [
        Draw("gateway  cost month", "cost", 0, 100, 1, month, kind="month"),
        Draw("gateway  tokens 86400", "tokens", 86_400, 100, 1),
    ]

    async def left() -> list[int]:
        await asyncio.sleep(0)
        return [figures.remaining for figures in await watch.store.figures(draws, 0.0)]

    assert await left() == [40, 100]
    opened = [(by, one.id, one.taken[0].cost) for by, one in await watch.poll.read_open()]
    assert opened == [("g", "a", 40), ("g", "b", 20), ("another", "c", 80)]
    assert await left() == [40, 100]
    ended = replace(posting(1, watch.now_at, "key_1"), request_id="a", cost_nanos=25)
    watch.poll.count_posting(ended)
    assert await left() == [55, 85]
    watch.poll.count_posting(replace(ended, request_id="b", outcome="failed", cost_nanos=0))
    assert await left() == [75, 85]
    assert watch.store.num_open == 0
    watch.store.check_integrity()
