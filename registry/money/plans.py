"""Price plans and what tenants agreed: everything dated, nothing changed afterwards.

What has not begun can be withdrawn.

    plan_discounts   a plan's basis points off list prices, from a date on; a plan exists from its
                     first one on
    plan_prices      a plan's own price of a model, from a date on, in place of the list price
                     (no discount of the plan goes off it); `ended` rows take it back
    tenant_terms     a tenant's plan ("" for none) and its own basis points off, from a date on

The arithmetic, and which of these wins, is gateway/pricing/policy/pricing.py's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Integer, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.accounts.tenants import check_display_name
from registry.base import Base, Id, Instant, JsonObject, Name, Nanos, record_of, values_of
from registry.errors import AlreadyExists, InvalidValue, NotFound
from registry.money.prices import PRICE_NAMES, PriceRecord, check_prices

MAX_DISCOUNT_BP = 10_000


@dataclass(frozen=True, slots=True)
class PlanDiscount:
    """Basis points off list prices, for all who have the plan."""

    plan: str
    valid_from: float
    discount_bp: int


@dataclass(frozen=True, slots=True)
class PlanPrice:
    """A plan's own price of a model; None where from then on it has none."""

    plan: str
    valid_from: float
    model: str
    price: PriceRecord | None


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """A tenant's plan, "" for none, and basis points off whatever the plan says."""

    tenant_id: str
    valid_from: float
    plan: str
    discount_bp: int


class PlanDiscountRow(Base):
    """See PlanDiscount."""

    __tablename__ = "plan_discounts"

    plan: Mapped[Name] = mapped_column(primary_key=True)
    valid_from: Mapped[Instant] = mapped_column(primary_key=True)
    discount_bp: Mapped[int] = mapped_column(Integer)


class PlanPriceRow(Base):
    """See PlanPrice."""

    __tablename__ = "plan_prices"

    plan: Mapped[Name] = mapped_column(primary_key=True)
    model: Mapped[Name] = mapped_column(primary_key=True)
    valid_from: Mapped[Instant] = mapped_column(primary_key=True)
    ended: Mapped[bool]
    prompt_nanos: Mapped[Nanos]
    cached_nanos: Mapped[Nanos]
    completion_nanos: Mapped[Nanos]
    embedding_nanos: Mapped[Nanos]
    service_second_nanos: Mapped[Nanos]
    load_second_nanos: Mapped[Nanos]


class TenantTermsRow(Base):
    """See TenantTerms."""

    __tablename__ = "tenant_terms"

    tenant_id: Mapped[Id] = mapped_column(primary_key=True)
    valid_from: Mapped[Instant] = mapped_column(primary_key=True)
    plan: Mapped[Name]
    discount_bp: Mapped[int] = mapped_column(Integer)


def create_plan(session: Session, plan: PlanDiscount, *, now_at: float) -> PlanDiscount:
    """A new plan. Raises AlreadyExists or InvalidValue."""
    check_display_name("plan", plan.plan)
    if _exists(session, plan.plan):
        raise AlreadyExists(f"plan {plan.plan!r} already exists")
    return _put_discount(session, plan, "plan.create", None, now_at)


def set_discount(session: Session, plan: PlanDiscount, *, now_at: float) -> PlanDiscount:
    """Another discount from its date on. Raises NotFound or InvalidValue."""
    _require(session, plan.plan)
    before = _held(list_discounts(session, plan.plan), plan.valid_from)
    return _put_discount(session, plan, "plan.discount", before, now_at)


def set_plan_price(session: Session, price: PlanPrice, *, now_at: float) -> PlanPrice:
    """A plan's own price of a model from its date on, or its end. Raises NotFound, InvalidValue."""
    _require(session, price.plan)
    _check_start(price.valid_from, now_at)
    if price.price is not None:
        check_prices(price.price)
    shown = PriceRecord(price.model, price.valid_from) if price.price is None else price.price
    held = [one for one in list_plan_prices(session, price.plan) if one.model == price.model]
    session.merge(
        PlanPriceRow(
            plan=price.plan,
            model=price.model,
            valid_from=price.valid_from,
            ended=price.price is None,
            **values_of(shown, *PRICE_NAMES),
        )
    )
    session.flush()
    before = _held(held, price.valid_from)
    audit.record(session, now_at, "plan.price", price.plan, before, asdict(price))
    return price


def set_terms(session: Session, terms: TenantTerms, *, now_at: float) -> TenantTerms:
    """What a tenant agreed, from its date on. Raises NotFound or InvalidValue."""
    if terms.plan:
        _require(session, terms.plan)
    _check_start(terms.valid_from, now_at)
    _check_discount(terms.discount_bp)
    before = _held(list_terms(session, terms.tenant_id), terms.valid_from)
    session.merge(TenantTermsRow(**asdict(terms)))
    session.flush()
    audit.record(session, now_at, "tenant.terms", terms.tenant_id, before, asdict(terms))
    return terms


def withdraw_discount(session: Session, plan: str, valid_from: float, *, now_at: float) -> None:
    """Take back a discount that has not begun; the one before it goes on. Raises NotFound, or
    InvalidValue for one that has begun or is the plan's only one."""
    row = session.get(PlanDiscountRow, (plan, valid_from))
    if row is not None and len(list_discounts(session, plan)) == 1:
        raise InvalidValue(f"plan {plan!r} has only this discount: set another one instead")
    gone = None if row is None else record_of(PlanDiscount, row)
    _withdraw(session, row, valid_from, now_at)
    after = _held(list_discounts(session, plan), valid_from)
    audit.record(session, now_at, "plan.withdraw", plan, _shown(gone), after)


def withdraw_plan_price(
    session: Session, plan: str, model: str, valid_from: float, *, now_at: float
) -> None:
    """Take back a plan's own price, or its end, that has not begun. Raises NotFound or
    InvalidValue."""
    own = [one for one in list_plan_prices(session, plan) if one.model == model]
    gone = next((one for one in own if one.valid_from == valid_from), None)
    row = session.get(PlanPriceRow, (plan, model, valid_from))
    _withdraw(session, row, valid_from, now_at)
    after = _held([one for one in own if one != gone], valid_from)
    audit.record(session, now_at, "plan.withdraw", plan, _shown(gone), after)


def withdraw_terms(session: Session, tenant_id: str, valid_from: float, *, now_at: float) -> None:
    """Take back terms of a tenant that have not begun. Raises NotFound or InvalidValue."""
    row = session.get(TenantTermsRow, (tenant_id, valid_from))
    gone = None if row is None else record_of(TenantTerms, row)
    _withdraw(session, row, valid_from, now_at)
    after = _held(list_terms(session, tenant_id), valid_from)
    audit.record(session, now_at, "tenant.withdraw", tenant_id, _shown(gone), after)


def list_discounts(session: Session, plan: str | None = None) -> list[PlanDiscount]:
    """Of all plans or one, by plan and date."""
    query = select(PlanDiscountRow).order_by(PlanDiscountRow.plan, PlanDiscountRow.valid_from)
    if plan is not None:
        query = query.where(PlanDiscountRow.plan == plan)
    return [record_of(PlanDiscount, row) for row in session.scalars(query)]


def list_plan_prices(session: Session, plan: str | None = None) -> list[PlanPrice]:
    """Of all plans or one, by plan, model and date."""
    query = select(PlanPriceRow).order_by(
        PlanPriceRow.plan, PlanPriceRow.model, PlanPriceRow.valid_from
    )
    if plan is not None:
        query = query.where(PlanPriceRow.plan == plan)
    return [
        record_of(PlanPrice, row, price=None if row.ended else record_of(PriceRecord, row))
        for row in session.scalars(query)
    ]


def list_terms(session: Session, tenant_id: str | None = None) -> list[TenantTerms]:
    """Of all tenants or one, by tenant and date."""
    query = select(TenantTermsRow).order_by(TenantTermsRow.tenant_id, TenantTermsRow.valid_from)
    if tenant_id is not None:
        query = query.where(TenantTermsRow.tenant_id == tenant_id)
    return [record_of(TenantTerms, row) for row in session.scalars(query)]


def _withdraw(session: Session, row: Base | None, valid_from: float, now_at: float) -> None:
    if row is None:
        raise NotFound("nothing begins at that time: see `polyhost plans list` and `plans terms`")
    if valid_from <= now_at:
        raise InvalidValue("it is in effect already: set another one instead")
    session.delete(row)
    session.flush()


def _shown(gone: PlanDiscount | PlanPrice | TenantTerms | None) -> JsonObject | None:
    return None if gone is None else asdict(gone)


def _held(dated: Sequence[PlanDiscount | PlanPrice | TenantTerms], at: float) -> JsonObject | None:
    """What holds at that time, of entries in the order of their dates."""
    held = [one for one in dated if one.valid_from <= at]
    return asdict(held[-1]) if held else None


def _put_discount(
    session: Session,
    plan: PlanDiscount,
    action: str,
    before: JsonObject | None,
    now_at: float,
) -> PlanDiscount:
    _check_start(plan.valid_from, now_at)
    _check_discount(plan.discount_bp)
    session.merge(PlanDiscountRow(**asdict(plan)))
    session.flush()
    audit.record(session, now_at, action, plan.plan, before, asdict(plan))
    return plan


def _exists(session: Session, plan: str) -> bool:
    query = select(PlanDiscountRow.plan).where(PlanDiscountRow.plan == plan).limit(1)
    return session.scalar(query) is not None


def _require(session: Session, plan: str) -> None:
    if not _exists(session, plan):
        raise NotFound(f"unknown plan {plan!r}: see `polyhost plans list`")


def _check_start(valid_from: float, now_at: float) -> None:
    if valid_from < now_at:
        raise InvalidValue(
            "the start must not be in the past: the cost of existing postings never changes"
        )


def _check_discount(discount_bp: int) -> None:
    if not 0 <= discount_bp <= MAX_DISCOUNT_BP:
        raise InvalidValue(
            f"a discount must be 0 to {MAX_DISCOUNT_BP} basis points, got {discount_bp}"
        )
