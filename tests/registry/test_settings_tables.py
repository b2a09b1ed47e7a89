"""Tenants, limits, prices, residency requests: values, traces and the version."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from registry import audit
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.quotas import Limits
from registry.audit import current_version
from registry.errors import AlreadyExists, InvalidValue, NotFound
from registry.models import catalog, residency_requests
from registry.models.catalog import PackFacts
from registry.money import prices
from registry.money.prices import PriceRecord
from registry.session import reading, writing

NOW = 1000.0
FACTS = PackFacts("rev1", "rev1", "llama", "float32", 4096, 512, 1000)


@pytest.fixture
def key_id(engine: Engine) -> str:
    """A tenant `acme` with a key, and a ready model `tiny`."""
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=NOW)
        key, _ = api_keys.create_key(session, tenant.id, "ci", now_at=NOW)
        model = catalog.add_model(session, "tiny", "/m", now_at=NOW)
        catalog.finish(session, model.registration, FACTS, now_at=NOW)
    return key.id


CHANGES: dict[str, Callable[[Session, str], object]] = {
    "tenant.create": lambda s, k: tenants.create_tenant(s, "other", now_at=NOW),
    "tenant.update": lambda s, k: tenants.update_tenant(s, "acme", weight=3.0, now_at=NOW),
    "key.create": lambda s, k: api_keys.create_key(
        s, tenants.get_tenant(s, "acme").id, "second", now_at=NOW
    ),
    "key.revoke": lambda s, k: api_keys.revoke(s, k, now_at=NOW),
    "key.change": lambda s, k: api_keys.change(
        s, k, api_keys.KeyChanges(allowed_cidrs=["10.0.0.0/8"]), now_at=NOW
    ),
    "key.rotate": lambda s, k: api_keys.rotate(s, k, now_at=NOW),
    "limits.set": lambda s, k: quotas.set_limits(s, "key", k, {"max_concurrency": 2}, now_at=NOW),
    "price.set": lambda s, k: prices.set_price(s, PriceRecord("tiny", NOW, 1, 1, 1), now_at=NOW),
    "model.add": lambda s, k: catalog.add_model(s, "new", "/m", now_at=NOW),
    "model.pin": lambda s, k: catalog.set_pinned(s, "tiny", True, now_at=NOW),
    "model.remove": lambda s, k: catalog.remove(s, "tiny", now_at=NOW),
    "model.load": lambda s, k: residency_requests.ask(s, "tiny", "load", now_at=NOW),
}


@pytest.mark.parametrize("action", CHANGES)
def test_every_change_leaves_a_trace_and_a_new_version(
    engine: Engine, key_id: str, action: str
) -> None:
    with reading(engine) as session:
        before = current_version(session)
    with writing(engine, "cli:eve") as session:
        CHANGES[action](session, key_id)
    with reading(engine) as session:
        assert current_version(session) == before + 1
        newest = audit.latest(session, 1)[0]
    assert (newest.action, newest.actor, newest.at) == (action, "cli:eve", NOW)


@pytest.mark.parametrize("action", CHANGES)
def test_what_is_rolled_back_leaves_none(engine: Engine, key_id: str, action: str) -> None:
    class Stop(Exception):
        pass

    def change_and_stop() -> None:
        with writing(engine, "test") as session:
            CHANGES[action](session, key_id)
            raise Stop

    with reading(engine) as session:
        before = (current_version(session), len(audit.latest(session)))
    with pytest.raises(Stop):
        change_and_stop()
    with reading(engine) as session:
        assert (current_version(session), len(audit.latest(session))) == before


def test_tenants(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        tenants.create_tenant(session, "zeta", 2.5, now_at=NOW)
        assert [tenant.name for tenant in tenants.list_tenants(session)] == ["acme", "zeta"]
        by_name = tenants.get_tenant(session, "zeta")
        assert tenants.get_tenant(session, by_name.id) == by_name
        with pytest.raises(AlreadyExists):
            tenants.create_tenant(session, "zeta", now_at=NOW)
        with pytest.raises(NotFound):
            tenants.update_tenant(session, "none", weight=1.0, now_at=NOW)
        for weight in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidValue):
                tenants.update_tenant(session, "zeta", weight=weight, now_at=NOW)


def test_limits(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        assert quotas.get_limits(session, "key", key_id) == Limits()
        for changes in ({"requests_per_minute": 60}, {"tokens_per_minute": 1000}):
            quotas.set_limits(session, "key", key_id, changes, now_at=NOW)
        assert quotas.get_limits(session, "key", key_id) == Limits(60, 1000, 0)
        for wrong in ({"max_concurrency": -1}, {"tokens_per_minute": 2**60}, {"no_such": 1}):
            with pytest.raises(InvalidValue):
                quotas.set_limits(session, "key", key_id, wrong, now_at=NOW)
        assert quotas.get_limits(session, "key", key_id) == Limits(60, 1000, 0)
        tenant_id = api_keys.get_key(session, key_id).tenant_id
        quotas.set_limits(session, "tenant", tenant_id, {"tokens_per_day": 7}, now_at=NOW)
        quotas.set_limits(session, "gateway", "", {"max_prompt_tokens": 8}, now_at=NOW)
    with reading(engine) as session:
        key = api_keys.get_key(session, key_id)
        assert key.limits == Limits(60, 1000, 0)
        assert key.tenant_limits == Limits(tokens_per_day=7)
        assert quotas.get_limits(session, "gateway") == Limits(max_prompt_tokens=8)
        assert quotas.all_limits(session, "tenant") == {tenant_id: Limits(tokens_per_day=7)}


def test_limits_that_stay_as_they_are_are_no_change(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        quotas.set_limits(session, "key", key_id, {"tokens_per_minute": 5}, now_at=NOW)
        before = audit.current_version(session)
        quotas.set_limits(session, "key", key_id, {"tokens_per_minute": 5}, now_at=NOW)
        assert audit.current_version(session) == before


def test_prices_are_dated(engine: Engine, key_id: str) -> None:
    first = PriceRecord("tiny", NOW, 100, 50, 200)
    later = PriceRecord("tiny", NOW + 100, 10, 5, 20)
    other = PriceRecord("other", NOW, 1, 1, 1)
    with writing(engine, "test") as session:
        assert prices.price_at(session, "tiny", NOW) == PriceRecord("tiny", 0.0)
        for price in (first, later, other):
            prices.set_price(session, price, now_at=NOW)
    with reading(engine) as session:
        assert prices.price_at(session, "tiny", NOW - 0.1).prompt_nanos == 0
        assert prices.price_at(session, "tiny", NOW + 99.9) == first
        assert prices.price_at(session, "tiny", NOW + 100) == later
        assert prices.prices_at(session, NOW + 200) == {"tiny": later, "other": other}
        assert prices.list_prices(session, "tiny") == [first, later]


def test_prices_that_cannot_be(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        for price in (
            PriceRecord("tiny", NOW, -1, 0, 0),
            PriceRecord("tiny", NOW, 0, 0, 2**41),
            PriceRecord("tiny", NOW - 1, 0, 0, 0),
        ):
            with pytest.raises(InvalidValue):
                prices.set_price(session, price, now_at=NOW)


def test_a_price_may_be_corrected_before_it_begins(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        prices.set_price(session, PriceRecord("tiny", NOW + 9, 1, 1, 1), now_at=NOW)
        prices.set_price(session, PriceRecord("tiny", NOW + 9, 2, 2, 2), now_at=NOW)
        assert prices.list_prices(session) == [PriceRecord("tiny", NOW + 9, 2, 2, 2)]


def test_residency_requests_are_taken_once_and_grow_stale(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        residency_requests.ask(session, "tiny", "load", now_at=NOW)
        residency_requests.ask(session, "tiny", "unload", now_at=NOW + 30)
    with writing(engine, "test") as session:
        taken = residency_requests.take(session, now_at=NOW + 61)
        assert [(request.model, request.action) for request in taken] == [("tiny", "unload")]
        assert residency_requests.take(session, now_at=NOW + 61) == []


def test_only_ready_models_can_be_loaded(engine: Engine, key_id: str) -> None:
    with writing(engine, "test") as session:
        catalog.add_model(session, "new", "/m", now_at=NOW)
        with pytest.raises(InvalidValue, match="registering"):
            residency_requests.ask(session, "new", "load", now_at=NOW)
        with pytest.raises(NotFound):
            residency_requests.ask(session, "none", "load", now_at=NOW)
