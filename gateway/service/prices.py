"""The verbs on prices, plans and tenants' terms, for the CLI and, later, the admin API and pages
(see service/control.py); and the price book that the request path and exports go by.

What is set begins at the earliest when every gateway has read it (`notice_s`): a request's price is
that of its arrival, and no gateway may learn of a price after it began.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from sqlalchemy.orm import Session

from gateway.policy.price_book import Plan, PriceBook, Terms
from gateway.policy.pricing import Prices
from gateway.service.control import Control, find_tenant, require, visible
from gateway.service.meanwhile import check_unchanged, mark_of
from registry import catalog, plans, prices, tenants
from registry.base import LATEST_AT
from registry.errors import InvalidValue
from registry.plans import PlanDiscount, PlanPrice, TenantTerms
from registry.prices import PRICE_NAMES, PriceRecord

NOTICE_POLLS = 4
"""How many times a gateway looks before a price begins."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan as its operator sees it: all its discounts and prices, and how many tenants have it
    now."""

    name: str
    discounts: list[PlanDiscount]
    prices: list[PlanPrice]
    num_tenants: int


def set_price(
    control: Control, price: PriceRecord, valid_from: float | None = None, seen: str = ""
) -> PriceRecord:
    """A list price from `valid_from` (as soon as may be where None) on. The model must be in the
    catalog. `seen`: the mark of its dated prices that were looked at. Raises ChangedMeanwhile where
    they are others by now."""
    require(control, "prices.write")
    with control.writing() as session:
        now_at = control.clock()
        start = _start(control, valid_from, now_at)
        name = catalog.get_model(session, price.model).name
        if seen:
            now = prices_mark(prices.list_prices(session, name))
            check_unchanged("the model's prices were", now, seen)
        dated = replace(price, model=name, valid_from=start)
        return prices.set_price(session, dated, now_at=now_at)


def list_prices(control: Control, model: str | None = None) -> list[PriceRecord]:
    """All dated list prices, those of removed models too."""
    visible(control, "prices.read")
    with control.reading() as session:
        return prices.list_prices(session, model)


def prices_mark(dated: Iterable[PriceRecord]) -> str:
    """Of one model's dated prices, in any order."""
    return mark_of(sorted(astuple(price) for price in dated))


def create_plan(control: Control, name: str, discount_bp: int = 0) -> PlanDiscount:
    """A new plan, whose discount holds as soon as may be."""
    require(control, "prices.write")
    with control.writing() as session:
        now_at = control.clock()
        plan = PlanDiscount(name, _start(control, None, now_at), discount_bp)
        return plans.create_plan(session, plan, now_at=now_at)


def set_plan_discount(
    control: Control, name: str, discount_bp: int, valid_from: float | None = None
) -> PlanDiscount:
    """Another discount from its date on."""
    require(control, "prices.write")
    with control.writing() as session:
        now_at = control.clock()
        plan = PlanDiscount(name, _start(control, valid_from, now_at), discount_bp)
        return plans.set_discount(session, plan, now_at=now_at)


def set_plan_price(
    control: Control,
    plan: str,
    model: str,
    price: PriceRecord | None,
    valid_from: float | None = None,
) -> PlanPrice:
    """The plan's own price of a model in the catalog; None ends it."""
    require(control, "prices.write")
    with control.writing() as session:
        now_at = control.clock()
        start = _start(control, valid_from, now_at)
        name = catalog.get_model(session, model).name
        dated = None if price is None else replace(price, model=name, valid_from=start)
        return plans.set_plan_price(session, PlanPrice(plan, start, name, dated), now_at=now_at)


def set_terms(
    control: Control,
    tenant: str,
    plan: str,
    discount_bp: int = 0,
    valid_from: float | None = None,
) -> TenantTerms:
    """A tenant's plan ("" for none) and its own discount."""
    require(control, "prices.write")
    with control.writing() as session:
        now_at = control.clock()
        start = _start(control, valid_from, now_at)
        found = tenants.get_tenant(session, tenant)
        terms = TenantTerms(found.id, start, plan, discount_bp)
        return plans.set_terms(session, terms, now_at=now_at)


def list_terms(control: Control, tenant: str | None = None) -> list[tuple[str, TenantTerms]]:
    """(tenant's name, its terms), by tenant and date."""
    seen = visible(control, "prices.read")
    with control.reading() as session:
        names = {one.id: one.name for one in tenants.list_tenants(session)}
        only = None
        if tenant is not None:
            only = find_tenant(control, session, tenant, "prices.read").id
        return [
            (names.get(one.tenant_id, ""), one)
            for one in plans.list_terms(session, only)
            if seen is None or one.tenant_id in seen
        ]


def list_plans(control: Control) -> list[PlanView]:
    """All plans by name."""
    require(control, "prices.read")
    now_at = control.clock()
    with control.reading() as session:
        discounts, own = plans.list_discounts(session), plans.list_plan_prices(session)
        book = price_book(session)
    has = [book.terms_of(tenant_id, now_at).plan for tenant_id in book.terms]
    return [
        PlanView(
            name,
            [one for one in discounts if one.plan == name],
            [one for one in own if one.plan == name],
            has.count(name),
        )
        for name in sorted(book.plans)
    ]


def price_book(session: Session) -> PriceBook:
    """Everything dated about prices, as of the session's snapshot."""
    listed: dict[str, list[tuple[float, Prices]]] = {}
    for price in prices.list_prices(session):
        listed.setdefault(price.model, []).append((price.valid_from, _prices(price)))
    discounts: dict[str, list[tuple[float, int]]] = {}
    for one in plans.list_discounts(session):
        discounts.setdefault(one.plan, []).append((one.valid_from, one.discount_bp))
    own: dict[str, dict[str, list[tuple[float, Prices | None]]]] = {}
    for priced in plans.list_plan_prices(session):
        of_plan = own.setdefault(priced.plan, {}).setdefault(priced.model, [])
        of_plan.append((priced.valid_from, None if priced.price is None else _prices(priced.price)))
    terms: dict[str, list[tuple[float, Terms]]] = {}
    for held in plans.list_terms(session):
        dated = terms.setdefault(held.tenant_id, [])
        dated.append((held.valid_from, Terms(held.plan, held.discount_bp)))
    made = {name: Plan(dated, own.get(name, {})) for name, dated in discounts.items()}
    return PriceBook(listed, made, terms)


def _prices(price: PriceRecord) -> Prices:
    return Prices(*(getattr(price, name) for name in PRICE_NAMES))


def _start(control: Control, valid_from: float | None, now_at: float) -> float:
    """When it begins. Raises InvalidValue where some gateway might learn of it too late.

    To be asked for inside the writing session, which may have waited for others for seconds.
    """
    notice_s = NOTICE_POLLS * control.settings.key_cache_poll_s
    earliest_at = float(math.ceil(now_at + notice_s))
    if valid_from is None:
        return earliest_at
    if not valid_from <= LATEST_AT:
        raise InvalidValue("it must begin before the year 10000")
    if valid_from < now_at + notice_s:
        raise InvalidValue(
            f"it must begin {notice_s:g} s from now at the earliest, or be given without a date: "
            "every gateway has to know of it before"
        )
    return valid_from
