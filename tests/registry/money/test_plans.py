"""Plans and terms on both databases: dated, traced, never begun in the past."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from gateway.auth.directory import price_book
from gateway.pricing.policy.pricing import WHOLE, Prices
from registry import audit
from registry.accounts import tenants
from registry.errors import AlreadyExists, InvalidValue, NotFound
from registry.money import plans, prices
from registry.money.plans import PlanDiscount, PlanPrice, TenantTerms
from registry.money.prices import MAX_PRICE_NANOS, PriceRecord
from registry.schema import downgrade, upgrade
from registry.session import make_engine, reading, writing

NOW = 1000.0
PLAN = PlanDiscount("partner", NOW, 1500)
OWN = PlanPrice("partner", NOW + 5, "m", PriceRecord("m", NOW + 5, 1, 2, 3, 4, 5, 6))


@pytest.fixture
def tenant_id(engine: Engine) -> str:
    """A tenant, a model's price and a plan."""
    with writing(engine, "test") as session:
        prices.set_price(session, PriceRecord("m", NOW, 9, 8, 7, 6, 5, 4), now_at=NOW)
        plans.create_plan(session, PLAN, now_at=NOW)
        return tenants.create_tenant(session, "acme", now_at=NOW).id


def test_what_is_set_is_what_the_book_says(engine: Engine, tenant_id: str) -> None:
    ended = PlanPrice("partner", NOW + 9, "m", None)
    with writing(engine, "test") as session:
        plans.set_plan_price(session, OWN, now_at=NOW)
        plans.set_plan_price(session, ended, now_at=NOW)
        plans.set_discount(session, PlanDiscount("partner", NOW + 20, 0), now_at=NOW)
        terms = TenantTerms(tenant_id, NOW + 1, "partner", 1000)
        plans.set_terms(session, terms, now_at=NOW)
    with reading(engine) as session:
        assert plans.list_plan_prices(session) == [OWN, ended]
        assert plans.list_terms(session, tenant_id) == [terms]
        assert [one.discount_bp for one in plans.list_discounts(session)] == [1500, 0]
        book = price_book(session)
    listed = Prices(9, 8, 7, 6, 5, 4)
    assert book.rates(tenant_id, "m", NOW).share == WHOLE
    assert book.rates(tenant_id, "m", NOW + 1).share == 8500 * 9000
    own = book.rates(tenant_id, "m", NOW + 5)
    assert (own.listed, own.agreed) == (listed, Prices(1, 2, 3, 4, 5, 6))
    assert book.rates(tenant_id, "m", NOW + 9).agreed == listed
    assert book.rates(tenant_id, "m", NOW + 20).share == 10_000 * 9000


def test_every_change_is_traced_and_reaches_gateways(engine: Engine, tenant_id: str) -> None:
    changes: dict[str, Callable[[Session], object]] = {
        "plan.create": lambda s: plans.create_plan(s, replace(PLAN, plan="new"), now_at=NOW),
        "plan.discount": lambda s: plans.set_discount(s, replace(PLAN, discount_bp=1), now_at=NOW),
        "plan.price": lambda s: plans.set_plan_price(s, OWN, now_at=NOW),
        "tenant.terms": lambda s: plans.set_terms(
            s, TenantTerms(tenant_id, NOW, "", 5), now_at=NOW
        ),
    }
    for action, change in changes.items():
        with reading(engine) as session:
            before = audit.current_version(session)
        with writing(engine, "test") as session:
            change(session)
        with reading(engine) as session:
            assert audit.current_version(session) == before + 1
            entry = audit.latest(session, 1)[0]
        assert (entry.action, entry.actor) == (action, "test")
        assert entry.after is not None


def test_what_makes_no_sense_is_refused(engine: Engine, tenant_id: str) -> None:
    with writing(engine, "test") as session:
        with pytest.raises(AlreadyExists, match="partner"):
            plans.create_plan(session, PLAN, now_at=NOW)
        with pytest.raises(InvalidValue, match="name"):
            plans.create_plan(session, replace(PLAN, plan=" x"), now_at=NOW)
        for discount_bp in (-1, 10_001):
            with pytest.raises(InvalidValue, match="basis points"):
                plans.set_discount(session, replace(PLAN, discount_bp=discount_bp), now_at=NOW)
        with pytest.raises(InvalidValue, match="past"):
            plans.set_discount(session, replace(PLAN, valid_from=NOW - 1), now_at=NOW)
        with pytest.raises(InvalidValue, match="past"):
            plans.set_plan_price(session, replace(OWN, valid_from=NOW - 1), now_at=NOW)
        dear = PriceRecord("m", NOW, load_second_nanos=MAX_PRICE_NANOS + 1)
        with pytest.raises(InvalidValue, match="load_second_nanos"):
            plans.set_plan_price(session, replace(OWN, price=dear), now_at=NOW)
        for unknown in (
            lambda: plans.set_discount(session, replace(PLAN, plan="no"), now_at=NOW),
            lambda: plans.set_plan_price(session, replace(OWN, plan="no"), now_at=NOW),
            lambda: plans.set_terms(session, TenantTerms("t", NOW, "no", 0), now_at=NOW),
        ):
            with pytest.raises(NotFound, match="plans list"):
                unknown()


def test_what_has_not_begun_is_withdrawn_and_traced(engine: Engine, tenant_id: str) -> None:
    terms = [TenantTerms(tenant_id, NOW + at, "partner", 0) for at in (0, 9)]
    with writing(engine, "test") as session:
        plans.set_discount(session, replace(PLAN, valid_from=NOW + 9), now_at=NOW)
        plans.set_plan_price(session, OWN, now_at=NOW)
        for each in terms:
            plans.set_terms(session, each, now_at=NOW)
    withdrawals: list[tuple[str, float, Callable[[Session, float], object]]] = [
        ("plan.withdraw", NOW + 9,
         lambda s, at: plans.withdraw_discount(s, "partner", NOW + 9, now_at=at)),
        ("plan.withdraw", NOW + 5,
         lambda s, at: plans.withdraw_plan_price(s, "partner", "m", NOW + 5, now_at=at)),
        ("tenant.withdraw", NOW + 9,
         lambda s, at: plans.withdraw_terms(s, tenant_id, NOW + 9, now_at=at)),
    ]  # fmt: skip
    for action, begins_at, withdraw in withdrawals:
        with writing(engine, "test") as session, pytest.raises(InvalidValue, match="in effect"):
            withdraw(session, begins_at)
        with writing(engine, "test") as session:
            withdraw(session, NOW)
        with reading(engine) as session:
            entry = audit.latest(session, 1)[0]
        assert (entry.action, (entry.before or {})["valid_from"]) == (action, begins_at)
        with writing(engine, "test") as session, pytest.raises(NotFound, match="plans list"):
            withdraw(session, NOW)
    with writing(engine, "test") as session:
        assert plans.list_discounts(session) == [PLAN]
        assert plans.list_plan_prices(session) == []
        assert plans.list_terms(session) == terms[:1]
        with pytest.raises(InvalidValue, match="only this discount"):
            plans.withdraw_discount(session, "partner", NOW, now_at=NOW - 1)


def test_an_older_releases_prices_are_kept(url: str) -> None:
    """An encoder's tokens cost what a prompt's did, and the way back loses only what is new."""
    upgrade(url, "0008")
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO prices VALUES ('m', 5, 11, 12, 13)"))
    upgrade(url)
    with reading(engine) as session:
        assert prices.list_prices(session) == [PriceRecord("m", 5.0, 11, 12, 13, 11, 0, 0)]
    engine.dispose()
    downgrade(url, "0008")
    with engine.connect() as connection:
        assert tuple(connection.execute(text("SELECT * FROM prices")).one()) == (
            *("m", 5.0),
            *(11, 12, 13),
        )
    engine.dispose()
