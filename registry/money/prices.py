"""Dated prices per model, in nano-units of the operator's currency.

A price belongs to the public name (what stands on the bill), not to a catalog row, so it outlives
the model's removal. It holds from `valid_from` until the next one; setting a price never changes
an earlier one, except that the same instant may be corrected. No price means free of charge.
What single tenants pay instead is in plans.py.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Instant, Name, Nanos, record_of
from registry.errors import InvalidValue, NotFound
from registry.money.exports import ENCODER_KINDS
from registry.money.ledger import CORRECTION, whole_sum
from registry.money.rollups import DAY_S, RollupRow

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
        raise InvalidValue(
            "a price must not start in the past: the cost of existing postings never changes"
        )
    before = price_at(session, price.model, price.valid_from)
    session.merge(Price(**asdict(price)))
    session.flush()
    audit.record(session, now_at, "price.set", price.model, asdict(before), asdict(price))
    return price


def withdraw_price(
    session: Session, model: str, valid_from: float, *, now_at: float
) -> PriceRecord:
    """Take back a price that has not begun; the one before it goes on. Raises NotFound, or
    InvalidValue for one that has begun: what it cost stays."""
    row = session.get(Price, (model, valid_from))
    if row is None:
        raise NotFound(f"{model!r} has no price from that time on: see `polyhost prices show`")
    if valid_from <= now_at:
        raise InvalidValue("the price is in effect already: set another one instead")
    gone = _record(row)
    session.delete(row)
    session.flush()
    after = price_at(session, model, valid_from)
    audit.record(session, now_at, "price.withdraw", model, asdict(gone), asdict(after))
    return gone


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
    return record_of(PriceRecord, row)


MICROS = 10**6


@dataclass(frozen=True, slots=True)
class Consumed:
    """Amounts by what is billed for them, and what they came to. `read_tokens`: found in a cache,
    and those of whole answers out of one."""

    num_requests: int
    input_tokens: int
    encoder_tokens: int
    read_tokens: int
    output_tokens: int
    service_us: int
    load_us: int
    cost_nanos: int
    list_nanos: int

    def at_list(self, price: PriceRecord) -> int:
        """What all of it would cost at this price, without discounts; each request's last part of
        a nano-unit is in it too."""
        return (
            self.input_tokens * price.prompt_nanos
            + self.encoder_tokens * price.embedding_nanos
            + self.read_tokens * price.cached_nanos
            + self.output_tokens * price.completion_nanos
            + self.service_us * price.service_second_nanos // MICROS
            + self.load_us * price.load_second_nanos // MICROS
        )


def consumed(session: Session, model: str, from_at: float, to_at: float) -> Consumed:
    """Of whole days [from_at, to_at). Failed requests and corrections are no part of it."""
    row = RollupRow
    hit, encodes = row.outcome == "cache_hit", row.kind.in_(ENCODER_KINDS)
    fresh = row.prompt_tokens - row.cached_tokens
    amounts: tuple[Any, ...] = (
        row.num_postings,
        case((hit | encodes, 0), else_=fresh),
        case((hit, 0), (encodes, fresh), else_=0),
        case((hit, row.prompt_tokens + row.completion_tokens), else_=row.cached_tokens),
        case((hit, 0), else_=row.completion_tokens),
        case((hit, 0), else_=row.service_us),
        case((hit, 0), else_=row.load_us),
        row.cost_nanos,
        row.list_nanos,
    )
    sums = (func.coalesce(whole_sum(one), 0) for one in amounts)
    found = session.execute(
        select(*sums).where(
            row.span_s == DAY_S,
            row.began_at >= int(from_at),
            row.began_at < int(to_at),
            row.model == model,
            row.outcome.not_in(("failed", CORRECTION)),
        )
    ).one()
    return Consumed(*(int(one) for one in found))
