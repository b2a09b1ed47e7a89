"""The registry's view in the gateway: reloaded when the version moved, kept when it cannot be."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from gateway.directory import Directory
from gateway.periods import period_of
from gateway.policy.rate_limit import Draw, Meter, Reservation, Used
from gateway.registry_poll import PRICES_S, RegistryPoll
from gateway.store.memory import MemoryStore
from gateway.types import HostedModel
from registry import api_keys, catalog, ledger, prices, quotas, residency_requests, tenants
from registry.api_keys import KeyRecord
from registry.catalog import PackFacts
from registry.ledger import Posting
from registry.prices import PriceRecord
from registry.session import make_engine, upgrade, writing

FACTS = PackFacts("r1", "r1", "llama", "float32", 1234, 512, 100)


class Watch:
    """A poll and what it told."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.now_at = 1000.0
        self.engine = engine
        self.directory = Directory()
        self.catalogs: list[list[str]] = []
        self.weights: dict[str, int] = {}
        self.wishes: list[str] = []
        self.store = MemoryStore()
        self.poll = RegistryPoll(
            engine,
            folder,
            self.directory,
            0.5,
            self._on_models,
            lambda wish: self.wishes.append(f"{wish.action} {wish.model}"),
            self.store,
            wall_clock=lambda: self.now_at,
            clock=lambda: self.now_at - 1000.0,
        )

    def add_model(self, name: str) -> None:
        with writing(self.engine, "test") as session:
            record = catalog.add_model(session, name, "/source", now_at=self.now_at)
            catalog.finish(session, record.registration, FACTS, now_at=self.now_at)

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self.catalogs.append([model.name for model in models])
        self.weights = weights


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    upgrade(url)
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


async def test_prices_change_by_time_alone(watch: Watch) -> None:
    watch.add_model("m")
    with writing(watch.engine, "test") as session:
        price = PriceRecord("m", watch.now_at + 5, prompt_nanos=7)
        prices.set_price(session, price, now_at=watch.now_at)
    await watch.poll.load()
    watch.now_at += PRICES_S
    await watch.poll.poll()
    model = watch.directory.find_model("m")
    assert model is not None
    assert model.price_prompt_nanos == 7


async def test_wishes_are_taken_once(watch: Watch) -> None:
    watch.add_model("m")
    await watch.poll.load()
    with writing(watch.engine, "test") as session:
        residency_requests.ask(session, "m", "load", now_at=watch.now_at)
    with writing(watch.engine, "test") as session:
        residency_requests.ask(session, "m", "unload", now_at=watch.now_at)
    await watch.poll.poll()
    await watch.poll.poll()
    assert watch.wishes == ["load m", "unload m"]


async def test_a_database_that_is_gone_leaves_the_view(watch: Watch, tmp_path: Path) -> None:
    watch.add_model("m")
    await watch.poll.load()
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
    everybody = Draw("gateway  input_tokens 86400", "input_tokens", 86_400, 100, 1)
    assert await used(draw("requests"), everybody) == [2, 30]
    assert watch.directory.limits.input_tokens_per_day == 9
    # What was restored leaves the window when a day has passed.
    watch.now_at += 0.12 * day_s
    await watch.store.reserve([draw("requests")], watch.now_at - 1000.0)
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
    held = await watch.store.reserve([draw], 0.0)
    assert isinstance(held, Reservation)
    for disabled in (True, False):
        with writing(watch.engine, "test") as session:
            tenants.update_tenant(session, tenant.id, disabled=disabled, now_at=watch.now_at)
        await watch.poll.poll()
    assert [f.remaining for f in await watch.store.figures([draw], 0.0)] == [10]
    await watch.store.settle(held, Used(0, 0, 35))
    assert [f.remaining for f in await watch.store.figures([draw], 0.0)] == [15]
    watch.store.check_integrity()


async def test_keys_are_not_read_again_for_prices(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(watch.engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=watch.now_at)
        key, _ = api_keys.create_key(session, tenant.id, "first", now_at=watch.now_at)
        quotas.set_limits(session, "gateway", "", {"requests_per_day": 9}, now_at=watch.now_at)
    await watch.poll.load()
    num_reads = 0
    read = api_keys.active_keys

    def counted(session: Session) -> list[KeyRecord]:
        nonlocal num_reads
        num_reads += 1
        return read(session)

    monkeypatch.setattr(api_keys, "active_keys", counted)
    draw = Draw("gateway  requests 86400", "requests", 86_400, 9, 1)
    await watch.store.reserve([draw], 0.0)
    watch.now_at += PRICES_S
    await watch.poll.poll()
    assert num_reads == 0
    assert watch.directory.find_key(key.public_id) == key
    assert watch.directory.limits.requests_per_day == 9
    assert (await watch.store.figures([draw], 0.0))[0].remaining == 8
    with writing(watch.engine, "test") as session:
        api_keys.revoke(session, key.id, now_at=watch.now_at)
    await watch.poll.poll()
    assert num_reads == 1
    assert watch.directory.find_key(key.public_id) is None
