"""Operations on prices, plans and tenants' terms.

What is set begins at the earliest when every gateway has read it (`notice_s`): a request's price is
that of its arrival, and no gateway may learn of a price after it began.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_tenant, visible
from admin.context.optimistic_lock import check_unchanged, version_of
from gateway.auth.directory import price_book
from gateway.limits.limits import Period, period_of
from registry.accounts import tenants
from registry.base import LATEST_AT
from registry.errors import InvalidValue, NotFound
from registry.models import catalog
from registry.models.catalog import Model
from registry.money import plans, prices
from registry.money.plans import PlanDiscount, PlanPrice, TenantTerms
from registry.money.prices import Consumed, PriceRecord
from registry.paging import Cut, Listed, listed_rows

NOTICE_POLLS = 4
"""How many times a gateway looks before a price begins."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan as its operator sees it: all its discounts and prices, its discount now and how many
    tenants have it now."""

    name: str
    discounts: list[PlanDiscount]
    prices: list[PlanPrice]
    discount_bp: int
    num_tenants: int


@operation("prices.write", audit=("price.set",))
def set_price(
    context: OperatorContext, price: PriceRecord, valid_from: float | None = None, seen: str = ""
) -> PriceRecord:
    """A list price from `valid_from` (as soon as may be where None) on. The model must be in the
    catalog. `seen`: the mark of its dated prices that were looked at. Raises ChangedMeanwhile where
    they are others by now."""
    with context.writing() as session:
        now_at = context.clock()
        start = _start(context, valid_from, now_at)
        name = catalog.get_model(session, price.model).name
        if seen:
            now = prices_mark(prices.list_prices(session, name))
            check_unchanged("the model's prices", now, seen)
        dated = replace(price, model=name, valid_from=start)
        return prices.set_price(session, dated, now_at=now_at)


@operation("prices.write", audit=("price.withdraw",))
def withdraw_price(
    context: OperatorContext, model: str, valid_from: float, seen: str = ""
) -> PriceRecord:
    """Take back a scheduled price before it begins; `seen` as in `set_price`. Raises NotFound,
    InvalidValue where a gateway might go by it already, ChangedMeanwhile."""
    with context.writing() as session:
        now_at = context.clock()
        now = prices_mark(prices.list_prices(session, model))
        check_unchanged("the model's prices", now, seen)
        found = prices.withdraw_price(session, model, valid_from, now_at=now_at)
        _check_far(context, valid_from, now_at)
        return found


@operation("prices.read", on="tenant")
def list_prices(context: OperatorContext, model: str | None = None) -> list[PriceRecord]:
    """All dated list prices, those of removed models too."""
    with context.reading() as session:
        return prices.list_prices(session, model)


def prices_mark(dated: Iterable[PriceRecord]) -> str:
    """Of one model's dated prices, in any order."""
    return version_of(sorted(astuple(price) for price in dated))


def dated_mark(dated: Iterable[PlanDiscount | PlanPrice | TenantTerms]) -> str:
    """Of dated entries, in any order."""
    return version_of(sorted(repr(each) for each in dated))


def _check_plan(session: Session, plan: str, seen: str) -> None:
    """Raises ChangedMeanwhile; an empty `seen` is not compared."""
    if seen:
        entries = plans.list_discounts(session, plan), plans.list_plan_prices(session, plan)
        check_unchanged("the plan", dated_mark([*entries[0], *entries[1]]), seen)


@operation("prices.write", audit=("plan.create",))
def create_plan(context: OperatorContext, name: str, discount_bp: int = 0) -> PlanDiscount:
    """A new plan, whose discount holds as soon as may be."""
    with context.writing() as session:
        now_at = context.clock()
        plan = PlanDiscount(name, _start(context, None, now_at), discount_bp)
        return plans.create_plan(session, plan, now_at=now_at)


@operation("prices.write", audit=("plan.discount",))
def set_plan_discount(
    context: OperatorContext,
    name: str,
    discount_bp: int,
    valid_from: float | None = None,
    seen: str = "",
) -> PlanDiscount:
    """Another discount from its date on. `seen`: the mark of the plan's entries that were looked
    at. Raises ChangedMeanwhile where they are others by now."""
    with context.writing() as session:
        _check_plan(session, name, seen)
        now_at = context.clock()
        plan = PlanDiscount(name, _start(context, valid_from, now_at), discount_bp)
        return plans.set_discount(session, plan, now_at=now_at)


@operation("prices.write", audit=("plan.price",))
def set_plan_price(
    context: OperatorContext,
    plan: str,
    model: str,
    price: PriceRecord | None,
    valid_from: float | None = None,
    seen: str = "",
) -> PlanPrice:
    """The plan's own price of a model in the catalog; None ends it. `seen` as in
    `set_plan_discount`."""
    with context.writing() as session:
        _check_plan(session, plan, seen)
        now_at = context.clock()
        start = _start(context, valid_from, now_at)
        name = catalog.get_model(session, model).name
        dated = None if price is None else replace(price, model=name, valid_from=start)
        return plans.set_plan_price(session, PlanPrice(plan, start, name, dated), now_at=now_at)


@operation("prices.write", audit=("tenant.terms",))
def set_terms(
    context: OperatorContext,
    tenant: str,
    plan: str,
    discount_bp: int = 0,
    valid_from: float | None = None,
    seen: str = "",
) -> TenantTerms:
    """A tenant's plan ("" for none) and its own discount. `seen`: `dated_mark` of its terms."""
    with context.writing() as session:
        now_at = context.clock()
        start = _start(context, valid_from, now_at)
        found = tenants.get_tenant(session, tenant)
        if seen:
            now = dated_mark(plans.list_terms(session, found.id))
            check_unchanged("the tenant's terms", now, seen)
        terms = TenantTerms(found.id, start, plan, discount_bp)
        return plans.set_terms(session, terms, now_at=now_at)


@operation("prices.write", audit=("plan.withdraw",))
def withdraw_plan_entry(
    context: OperatorContext, plan: str, model: str, valid_from: float, seen: str = ""
) -> None:
    """Take back a plan's scheduled price of a model, or where `model` is "" its scheduled discount,
    before it begins; `seen` as in `set_plan_discount`. Raises NotFound, InvalidValue where a
    gateway might go by it already, ChangedMeanwhile."""
    with context.writing() as session:
        now_at = context.clock()
        _check_plan(session, plan, seen)
        if model:
            plans.withdraw_plan_price(session, plan, model, valid_from, now_at=now_at)
        else:
            plans.withdraw_discount(session, plan, valid_from, now_at=now_at)
        _check_far(context, valid_from, now_at)


@operation("prices.write", audit=("tenant.withdraw",))
def withdraw_terms(
    context: OperatorContext, tenant: str, valid_from: float, seen: str = ""
) -> None:
    """Take back a tenant's scheduled plan before it begins; `seen` as in `set_terms`."""
    with context.writing() as session:
        now_at = context.clock()
        found = tenants.get_tenant(session, tenant)
        if seen:
            now = dated_mark(plans.list_terms(session, found.id))
            check_unchanged("the tenant's terms", now, seen)
        plans.withdraw_terms(session, found.id, valid_from, now_at=now_at)
        _check_far(context, valid_from, now_at)


@operation("prices.read", on="tenant")
def list_terms(
    context: OperatorContext, tenant: str | None = None
) -> list[tuple[str, TenantTerms]]:
    """(tenant's name, its terms), by tenant and date."""
    seen = visible(context, "prices.read")
    with context.reading() as session:
        names = {one.id: one.name for one in tenants.list_tenants(session)}
        only = None
        if tenant is not None:
            only = find_tenant(context, session, tenant, "prices.read").id
        return [
            (names.get(one.tenant_id, ""), one)
            for one in plans.list_terms(session, only)
            if seen is None or one.tenant_id in seen
        ]


@operation("prices.read")
def plan_view(context: OperatorContext, name: str) -> PlanView:
    """One plan. Raises NotFound."""
    found = next((plan for plan in list_plans(context) if plan.name == name), None)
    if found is None:
        raise NotFound(f"unknown plan {name!r}: see `polyhost plans list`")
    return found


@operation("prices.read")
def list_plans(context: OperatorContext) -> list[PlanView]:
    """All plans by name."""
    now_at = context.clock()
    with context.reading() as session:
        discounts, own = plans.list_discounts(session), plans.list_plan_prices(session)
        book = price_book(session)
    has = [book.terms_of(tenant_id, now_at).plan for tenant_id in book.terms]
    return [
        PlanView(
            name,
            [one for one in discounts if one.plan == name],
            [one for one in own if one.plan == name],
            _discount_now(discounts, name, now_at),
            has.count(name),
        )
        for name in sorted(book.plans)
    ]


def _discount_now(discounts: Iterable[PlanDiscount], plan: str, now_at: float) -> int:
    """Of the plan; the entries come by date."""
    held = [each for each in discounts if each.plan == plan and each.valid_from <= now_at]
    return held[-1].discount_bp if held else 0


def _notice_s(context: OperatorContext) -> float:
    """By then every gateway has read a change."""
    return NOTICE_POLLS * context.settings.key_cache_poll_s


def _check_far(context: OperatorContext, valid_from: float, now_at: float) -> None:
    """Raises InvalidValue where some gateway might learn too late that it was withdrawn."""
    if valid_from < now_at + _notice_s(context):
        raise InvalidValue("it begins in a few seconds: set another one instead")


def _start(context: OperatorContext, valid_from: float | None, now_at: float) -> float:
    """When it begins. Raises InvalidValue where some gateway might learn of it too late.

    To be asked for inside the writing session, which may have waited for others for seconds.
    """
    notice_s = _notice_s(context)
    earliest_at = float(math.ceil(now_at + notice_s))
    if valid_from is None:
        return earliest_at
    if not valid_from <= LATEST_AT:
        raise InvalidValue("the date must be before the year 10000")
    if valid_from < now_at + notice_s:
        raise InvalidValue(
            f"the date must be at least {notice_s:g} s from now, so that all gateways have the "
            "price in time; leave it out for the earliest possible time"
        )
    return valid_from


@dataclass(frozen=True, slots=True)
class PriceLine:
    """A model and what it costs now. `next_at`: when another price begins, if one is set."""

    model: str
    task: str
    price: PriceRecord | None
    next_at: float | None


def _nanos(name: str) -> Callable[[PriceLine], int]:
    return lambda row: getattr(row.price, name) if row.price else 0


PRICE_SORTS: Final[Mapping[str, Callable[[PriceLine], str | float]]] = {
    "name": lambda row: row.model,
    "input": lambda row: _nanos("prompt_nanos")(row) or _nanos("embedding_nanos")(row),
    "cached": _nanos("cached_nanos"),
    "output": _nanos("completion_nanos"),
    "next": lambda row: row.next_at or LATEST_AT,
}


@dataclass(frozen=True, slots=True)
class PriceView:
    """One model's prices, the newest first; `now` is the one that holds."""

    model: str
    task: str
    now: PriceRecord
    dated: list[PriceRecord]


@dataclass(frozen=True, slots=True)
class Effect:
    """Last month at its own prices and at another: at list prices, and as billed, where discounts
    leave the same share of either."""

    month: Period
    used: Consumed
    list_nanos: int
    cost_nanos: int


@operation("prices.read", on="tenant")
def prices_page(context: OperatorContext, text: str, sort: str, cut: Cut) -> Listed[PriceLine]:
    """A page of the ready models, by one of PRICE_SORTS."""
    now_at = context.clock()
    query = select(Model.name, Model.task).where(Model.state == "ready")
    if text:
        query = query.where(Model.name.contains(text, autoescape=True))
    with context.reading() as session:
        held = prices.prices_at(session, now_at)
        far = prices.prices_at(session, float(2**53))
        rows = []
        for name, task in session.execute(query):
            last = far.get(name)
            later = last.valid_from if last and last.valid_from > now_at else None
            rows.append(PriceLine(name, task, held.get(name), later))
        return listed_rows(rows, PRICE_SORTS[sort], lambda row: row.model, cut)


@operation("prices.read", on="tenant")
def price_view(context: OperatorContext, model: str) -> PriceView:
    """Raises NotFound."""
    now_at = context.clock()
    with context.reading() as session:
        found = catalog.get_model(session, model)
        dated = prices.list_prices(session, found.name)[::-1]
        held = prices.price_at(session, found.name, now_at)
        return PriceView(found.name, found.task, held, dated)


@operation("usage.read")
def price_effect_of(context: OperatorContext, price: PriceRecord) -> Effect:
    """What last month would have been with it. Nothing is stored."""
    prices.check_prices(price)
    this = period_of("month", context.clock())
    last = period_of("month", this.began_at - 1)
    with context.reading() as session:
        used = prices.consumed(session, price.model, last.began_at, last.ends_at)
    listed_nanos = used.at_list(price)
    share = used.cost_nanos, used.list_nanos
    cost = listed_nanos if not share[1] else listed_nanos * share[0] // share[1]
    return Effect(last, used, listed_nanos, cost)
