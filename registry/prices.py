"""Dated prices per model, in nano-units of the operator's currency.

A price belongs to the public name (what stands on the bill), not to a catalog row, so it outlives
the model's removal. It holds from `valid_from` until the next one; setting a price never changes
an earlier one, except that the same instant may be corrected. No price means free of charge.
What single tenants pay instead is in plans.py.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Instant, Name, Nanos
from registry.errors import InvalidValue

# 2^40 nano-units are about 1100 units for one token: more is a slip of the keyboard, and it keeps
# any request's cost (tokens x price) far below 2^63.
MAX_PRICE_NANOS = 2**40
PRICE_NAMES = (
    "prompt_nanos",
    "cached_nanos",
    "completion_nanos",
    "embedding_nanos",
    "service_second_nanos",
    "load_second_nanos",
)


@dataclass(frozen=True, slots=True)
class PriceRecord:
    """Nano-units per token: prompt, prompt tokens found in a cache, generated, an encoder's input;
    and per second of service and of loading."""

    model: str
    valid_from: float
    prompt_nanos: int = 0
    cached_nanos: int = 0
    completion_nanos: int = 0
    embedding_nanos: int = 0
    service_second_nanos: int = 0
    load_second_nanos: int = 0


class Price(Base):
    """See PriceRecord."""

    __tablename__ = "prices"

    model: Mapped[Name] = mapped_column(primary_key=True)
    valid_from: Mapped[Instant] = mapped_column(primary_key=True)
    prompt_nanos: Mapped[Nanos]
    cached_nanos: Mapped[Nanos]
    completion_nanos: Mapped[Nanos]
    embedding_nanos: Mapped[Nanos] = mapped_column(server_default="0")
    service_second_nanos: Mapped[Nanos] = mapped_column(server_default="0")
    load_second_nanos: Mapped[Nanos] = mapped_column(server_default="0")


def check_prices(price: PriceRecord) -> None:
    """Raises InvalidValue on a price that nobody can mean."""
    for name in PRICE_NAMES:
        value = getattr(price, name)
        if not 0 <= value <= MAX_PRICE_NANOS:
            raise InvalidValue(f"{name} must be between 0 and {MAX_PRICE_NANOS}, got {value}")


def set_price(session: Session, price: PriceRecord, *, now_at: float) -> PriceRecord:
    """Store a price that holds from `price.valid_from`. Raises InvalidValue.

    A start in the past is refused: what was posted meanwhile was billed at the old price.
    """
    check_prices(price)
    if price.valid_from < now_at:
        raise InvalidValue("a price cannot begin in the past: postings keep what they cost")
    before = price_at(session, price.model, price.valid_from)
    session.merge(Price(**asdict(price)))
    session.flush()
    audit.record(session, now_at, "price.set", price.model, asdict(before), asdict(price))
    return price


def price_at(session: Session, model: str, at: float) -> PriceRecord:
    """The price that holds at `at`; zero where none was set."""
    return prices_at(session, at, model).get(model, PriceRecord(model, 0.0))


def prices_at(session: Session, at: float, model: str | None = None) -> dict[str, PriceRecord]:
    """Prices that hold at `at`, by model name; models without a price are not there."""
    newest = select(Price.model, func.max(Price.valid_from).label("valid_from")).where(
        Price.valid_from <= at
    )
    if model is not None:
        newest = newest.where(Price.model == model)
    latest = newest.group_by(Price.model).subquery()
    query = select(Price).join(
        latest, (Price.model == latest.c.model) & (Price.valid_from == latest.c.valid_from)
    )
    return {row.model: _record(row) for row in session.scalars(query)}


def prices_of(session: Session, models: Collection[str], at: float) -> dict[str, PriceRecord]:
    """As `prices_at`, of these models."""
    query = (
        select(Price)
        .where(Price.model.in_(models), Price.valid_from <= at)
        .order_by(Price.valid_from)
    )
    return {row.model: _record(row) for row in session.scalars(query)}


def list_prices(session: Session, model: str | None = None) -> list[PriceRecord]:
    """All prices, by model and start."""
    query = select(Price).order_by(Price.model, Price.valid_from)
    if model is not None:
        query = query.where(Price.model == model)
    return [_record(row) for row in session.scalars(query)]


def _record(row: Price) -> PriceRecord:
    return PriceRecord(row.model, row.valid_from, *(getattr(row, name) for name in PRICE_NAMES))
