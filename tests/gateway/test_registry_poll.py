"""The registry's view in the gateway: reloaded when the version moved, kept when it cannot be."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.directory import Directory
from gateway.registry_poll import PRICES_S, RegistryPoll
from gateway.types import HostedModel
from registry import api_keys, catalog, prices, residency_requests, tenants
from registry.catalog import PackFacts
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
        self.poll = RegistryPoll(
            engine,
            folder,
            self.directory,
            0.5,
            self._on_models,
            lambda wish: self.wishes.append(f"{wish.action} {wish.model}"),
            wall_clock=lambda: self.now_at,
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
