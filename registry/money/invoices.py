"""Invoices as they were issued: a number, a tenant, a month, and the whole text with its digest.

An invoice is never changed: the database refuses UPDATE and DELETE. Numbers have no gaps and go up
in the order of issue. A tenant has one invoice a month at most. With its earlier ones it covers all
postings before the month's end that are numbered up to `through_seq` (`postings.seq`); `after_seq`
is the last one's. Whatever comes later, for whatever month, is the next one's.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy import ColumnElement, Text, UniqueConstraint, func, or_, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Count, Id, Instant, Name, Nanos, record_of
from registry.errors import AlreadyExists, NotFound
from registry.money.rollups import DAY_S, RollupRow
from registry.paging import Cut, Listed, listed


@dataclass(frozen=True, slots=True)
class InvoiceRecord:
    """An issued invoice. Instants in epoch seconds; `total_nanos` is what is to be paid.

    `document`: everything that stands on it, as canonical JSON; `digest`: its SHA-256, in hex.
    """

    number: str
    sequence: int
    tenant_id: str
    tenant_name: str
    began_at: float
    ended_at: float
    after_seq: int
    through_seq: int
    currency: str
    total_nanos: int
    issued_at: float
    document: str
    digest: str


@dataclass(frozen=True, slots=True)
class IssuedInvoice:
    """One of a list: without its text."""

    number: str
    tenant_id: str
    tenant_name: str
    began_at: float
    issued_at: float
    currency: str
    total_nanos: int


class InvoiceRow(Base):
    """See InvoiceRecord."""

    __tablename__ = "invoices"
    __table_args__ = (UniqueConstraint("sequence"), UniqueConstraint("tenant_id", "began_at"))

    number: Mapped[Id] = mapped_column(primary_key=True)
    sequence: Mapped[Count]
    tenant_id: Mapped[Id]
    tenant_name: Mapped[Name]
    began_at: Mapped[Instant]
    ended_at: Mapped[Instant]
    after_seq: Mapped[Count]
    through_seq: Mapped[Count]
    currency: Mapped[Id]
    total_nanos: Mapped[Nanos]
    issued_at: Mapped[Instant]
    document: Mapped[str] = mapped_column(Text)
    digest: Mapped[Id]


InvoiceSort: TypeAlias = Literal["number", "tenant", "month", "total"]
_SHOWN = tuple(IssuedInvoice.__dataclass_fields__)


def issue(session: Session, invoice: InvoiceRecord, *, now_at: float) -> InvoiceRecord:
    """Store it for ever. Raises AlreadyExists."""
    held = select(InvoiceRow.number).where(
        InvoiceRow.tenant_id == invoice.tenant_id, InvoiceRow.began_at == invoice.began_at
    )
    number = session.scalar(held)
    if number is not None:
        raise AlreadyExists(
            f"tenant {invoice.tenant_name!r} already has the invoice {number} for that month: "
            "later usage goes on the next one"
        )
    session.add(InvoiceRow(**asdict(invoice)))
    session.flush()
    shown = {name: value for name, value in asdict(invoice).items() if name != "document"}
    audit.record(session, now_at, "invoice.issue", invoice.number, None, shown)
    return invoice


def next_sequence(session: Session) -> int:
    """After the last one. Whoever comes second with the same is refused at its commit."""
    return (session.scalar(select(func.max(InvoiceRow.sequence))) or 0) + 1


def latest_of(session: Session, tenant_id: str) -> InvoiceRecord | None:
    """The tenant's invoice for the latest month."""
    query = (
        select(InvoiceRow)
        .where(InvoiceRow.tenant_id == tenant_id)
        .order_by(InvoiceRow.began_at.desc())
        .limit(1)
    )
    row = session.scalar(query)
    return None if row is None else _record(row)


def not_billed(session: Session, from_at: float, before_at: float) -> list[str]:
    """Names of tenants with costs in the days from `from_at` to `before_at` that no invoice has; of
    nobody where no invoice was ever issued: then bills are made elsewhere. By the roll-ups."""
    if session.scalar(select(InvoiceRow.sequence).limit(1)) is None:
        return []
    billed = (
        select(InvoiceRow.tenant_id, func.max(InvoiceRow.ended_at).label("upto"))
        .group_by(InvoiceRow.tenant_id)
        .subquery()
    )
    query = (
        select(RollupRow.tenant_name)
        .outerjoin(billed, billed.c.tenant_id == RollupRow.tenant_id)
        .where(
            RollupRow.span_s == DAY_S,
            RollupRow.began_at >= func.coalesce(billed.c.upto, 0.0),
            RollupRow.began_at >= from_at,
            RollupRow.began_at < before_at,
            RollupRow.cost_nanos != 0,
        )
        .distinct()
        .order_by(RollupRow.tenant_name)
    )
    return list(session.scalars(query))


def list_invoices(session: Session, tenant_id: str | None = None) -> list[InvoiceRecord]:
    """Of all tenants or one, in order of issue."""
    query = select(InvoiceRow).order_by(InvoiceRow.sequence)
    if tenant_id is not None:
        query = query.where(InvoiceRow.tenant_id == tenant_id)
    return [_record(row) for row in session.scalars(query)]


def page(
    session: Session,
    tenant_ids: Collection[str] | None,
    text: str,
    cut: Cut,
    sort: InvoiceSort = "number",
) -> tuple[Listed[IssuedInvoice], int]:
    """A page by order of issue or another column, and how many there are; of these tenants or
    (None) of all, where `text` is a part of the number or of the tenant's name."""
    where: list[ColumnElement[bool]] = []
    if tenant_ids is not None:
        where.append(InvoiceRow.tenant_id.in_(tenant_ids))
    if text:
        parts = (InvoiceRow.number, InvoiceRow.tenant_name)
        where.append(or_(*(part.icontains(text, autoescape=True) for part in parts)))
    columns = [getattr(InvoiceRow, name) for name in _SHOWN]
    query = select(*columns).where(*where)
    by: dict[InvoiceSort, Any] = {
        "number": InvoiceRow.sequence,
        "tenant": InvoiceRow.tenant_name,
        "month": InvoiceRow.began_at,
        "total": InvoiceRow.total_nanos,
    }
    found = listed(session, query, by[sort], InvoiceRow.number, cut)
    rows = [IssuedInvoice(*row[: len(_SHOWN)]) for row in found.rows]
    num = session.scalar(select(func.count()).select_from(InvoiceRow).where(*where)) or 0
    return Listed(rows, found.previous, found.next), num


def get_invoice(session: Session, number: str) -> InvoiceRecord:
    """Raises NotFound."""
    row = session.get(InvoiceRow, number)
    if row is None:
        raise NotFound(f"unknown invoice {number!r}: see `polyhost invoices list`")
    return _record(row)


def _record(row: InvoiceRow) -> InvoiceRecord:
    return record_of(InvoiceRecord, row)
