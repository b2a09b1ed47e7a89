"""Operations on invoices.

An invoice bills what no earlier one of its tenant has. The last one covers all that was posted
before its month's end and numbered up to its `through_seq`; so the next one has what was posted
since, and what reached the ledger late. Corrections are postings of the moment when they are made.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy.orm import Session

from admin.billing import invoice_document, invoice_pdf
from admin.billing.focus import FocusWriter, Seller
from admin.billing.invoice_document import Document, InvoiceLine, Terms
from admin.billing.usage_export import changes_of, spans
from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_tenant, require, visible
from admin.operations import usage as service_usage
from gateway.auth.directory import price_book
from gateway.pricing.policy.pricing import MAX_BILLED_S, MICROS, PriceBook
from registry.accounts import tenants
from registry.accounts.tenants import TenantRecord
from registry.errors import AlreadyExists, InvalidValue, NotFound, RegistryError
from registry.money import exports, invoices
from registry.money.exports import Corrected, Scope
from registry.money.invoices import InvoiceRecord, InvoiceSort, IssuedInvoice
from registry.paging import Cut, Listed

EARLIER = "earlier months"


class NothingOwed(RegistryError):
    """An invoice would have no lines."""


@dataclass(frozen=True, slots=True)
class InvoiceMonth:
    """A calendar month, UTC: [began_at, ended_at)."""

    began_at: float
    ended_at: float

    @property
    def first_day(self) -> str:
        """ISO."""
        return _day(self.began_at)

    @property
    def last_day(self) -> str:
        """ISO, included."""
        return _day(self.ended_at - 1)


def month_of(text: str) -> InvoiceMonth:
    """2026-10. Raises InvalidValue."""
    try:
        first = datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC)
        after = (first + timedelta(days=31)).replace(day=1)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{text!r} is not a month; write it as 2026-01") from error
    return InvoiceMonth(first.timestamp(), after.timestamp())


@operation("usage.read", on="tenant")
def preview_invoice(context: OperatorContext, tenant: str, month: InvoiceMonth) -> Document:
    """What would stand on it now; the month need not be over. Nothing is stored."""
    through_seq = service_usage.newest_seq(context)
    with context.reading() as session:
        found = find_tenant(context, session, tenant, "usage.read")
        return _document(context, session, found, month, through_seq, "", "")


@operation("usage.write", audit=("invoice.issue",))
def create_invoice(
    context: OperatorContext, tenant: str, month: InvoiceMonth, customer_details: str = ""
) -> InvoiceRecord:
    """Issue it. Raises NothingOwed, and RegistryError where the month is not over or a later one
    has been billed."""
    if not all(line.isprintable() for line in customer_details.split("\n")):
        raise InvalidValue("invoice details may contain only printable characters and line breaks")
    now_at = context.clock()
    if now_at < month.ended_at:
        raise RegistryError(
            f"the month ends on {month.last_day}; until then, use `polyhost invoices preview`"
        )
    through_seq = service_usage.newest_seq(context)
    with context.writing() as session:
        found = tenants.get_tenant(session, tenant)
        sequence = invoices.next_sequence(session)
        number = f"{context.settings.invoice_prefix}{sequence:06}"
        document = _document(context, session, found, month, through_seq, number, customer_details)
        if not document.lines:
            raise NothingOwed(f"{found.name!r} has nothing to bill")
        text = document.to_json()
        record = InvoiceRecord(
            number=number,
            sequence=sequence,
            tenant_id=found.id,
            tenant_name=found.name,
            began_at=month.began_at,
            ended_at=month.ended_at,
            after_seq=document.after_seq,
            through_seq=through_seq,
            currency=document.currency,
            total_nanos=document.total_nanos,
            issued_at=now_at,
            document=text,
            digest=invoice_document.digest_of(text),
        )
        return invoices.issue(session, record, now_at=now_at)


@operation("usage.read")
def tenants_to_bill(context: OperatorContext, month: InvoiceMonth) -> list[TenantRecord]:
    """Those who have used something up to the month's end and have no invoice for it; some of them
    may owe nothing since their last one."""
    scope = Scope(0.0, month.ended_at)
    through_seq = service_usage.newest_seq(context)
    with context.reading() as session:
        used = {row[0] for row in exports.totals(session, scope, through_seq, ["tenant_id"])}
        billed = {
            one.tenant_id
            for one in invoices.list_invoices(session)
            if one.began_at >= month.began_at
        }
        found = tenants.list_tenants(session)
    return [one for one in found if one.id in used - billed]


@operation("usage.read")
def preview_all(context: OperatorContext, month: InvoiceMonth) -> list[Document]:
    """What `create_all` would issue now, by tenant's name. Nothing is stored."""
    found = [preview_invoice(context, one.id, month) for one in tenants_to_bill(context, month)]
    return [document for document in found if document.lines]


@operation("usage.write", audit=("invoice.issue",))
def create_all(
    context: OperatorContext, month: InvoiceMonth, customer_details: str = ""
) -> list[InvoiceRecord]:
    """One for each tenant with charges and no invoice for the month; a tenant that owes nothing is
    skipped. What was issued stays where a later one fails; called again, it goes on from there.
    Raises as `create_invoice`."""
    made = []
    for tenant in tenants_to_bill(context, month):
        with suppress(NothingOwed, AlreadyExists):  # another operator may be at it too
            made.append(create_invoice(context, tenant.id, month, customer_details))
    return made


@operation("usage.read", on="tenant")
def list_invoices(context: OperatorContext, tenant: str | None = None) -> list[InvoiceRecord]:
    """Of all tenants or one, in order of issue."""
    seen = visible(context, "usage.read")
    with context.reading() as session:
        only = None if tenant is None else find_tenant(context, session, tenant, "usage.read").id
        found = invoices.list_invoices(session, only)
    return [one for one in found if seen is None or one.tenant_id in seen]


@operation("usage.read", on="tenant")
def invoices_page(
    context: OperatorContext, tenant: str, text: str, cut: Cut, sort: InvoiceSort = "number"
) -> tuple[Listed[IssuedInvoice], int]:
    """A page of those that who asks may see, of one tenant where it is named, and how many."""
    seen = visible(context, "usage.read")
    with context.reading() as session:
        only = (find_tenant(context, session, tenant, "usage.read").id,) if tenant else seen
        return invoices.page(session, only, text, cut, sort)


@operation("usage.read", on="tenant")
def get_invoice(context: OperatorContext, number: str) -> tuple[InvoiceRecord, Document]:
    """As it was issued. Raises NotFound; Forbidden, to those who may not see all, whether there is
    such a number or not; RegistryError where the stored text is not what was issued."""
    seen = visible(context, "usage.read")
    with context.reading() as session:
        try:
            record = invoices.get_invoice(session, number)
        except NotFound:
            require(context, "usage.read")
            raise
    if seen is not None and record.tenant_id not in seen:
        require(context, "usage.read")
    if invoice_document.digest_of(record.document) != record.digest:
        raise RegistryError(
            f"invoice {number} was changed after it was issued: its digest does not match"
        )
    return record, invoice_document.from_json(record.document)


@operation("usage.read", on="tenant")
def render_invoice(context: OperatorContext, number: str, form: str) -> bytes:
    """As a page of HTML, PDF or JSON."""
    record, document = get_invoice(context, number)
    if form == "json":
        return record.document.encode()
    if form == "html":
        return invoice_document.render(document, record.digest)
    font = context.settings.invoice_font
    return invoice_pdf.render(document, record.digest, Path(font) if font else None)


def _document(
    context: OperatorContext,
    session: Session,
    tenant: TenantRecord,
    month: InvoiceMonth,
    through_seq: int,
    number: str,
    customer_details: str,
) -> Document:
    last = invoices.latest_of(session, tenant.id)
    after_seq = 0 if last is None else last.through_seq
    billed_upto = 0.0 if last is None else last.ended_at
    if last is not None and last.began_at > month.began_at:
        raise RegistryError(
            f"{tenant.name!r} already has an invoice for a later month: {last.number}"
        )
    if through_seq < after_seq:
        raise RegistryError(
            "another invoice for this tenant was issued at the same time; try again"
        )
    if last is not None and last.began_at == month.began_at and number:
        raise AlreadyExists(
            f"{tenant.name!r} has {last.number} for that month; "
            "later usage goes on the next invoice"
        )
    seller = Seller(context.settings.invoice_issuer, context.settings.currency)
    span = _Billing(session, price_book(session), through_seq, seller)
    new = max(month.began_at, billed_upto)
    lines = span.lines(Scope(new, month.ended_at, tenant.id))
    lines += span.lines(Scope(billed_upto, month.began_at, tenant.id), EARLIER)
    lines += span.lines(Scope(0.0, billed_upto, tenant.id), EARLIER, after_seq)
    lines += invoice_document.correction_lines(span.corrections)
    net = sum(line.amount_nanos for line in lines)
    corrected = sum(row.cost_nanos for row in span.corrections)
    terms = _terms(context)
    rounded = invoice_document.rounded_down(net, terms.decimals)
    tax = invoice_document.tax_of(rounded, terms.tax_bp, terms.decimals) if terms.tax_name else 0
    return Document(
        number=number,
        issued_on=_day(context.clock()),
        first_day=month.first_day,
        last_day=month.last_day,
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        customer_details=customer_details,
        issuer=terms.issuer,
        issuer_details=terms.issuer_details,
        currency=terms.currency,
        decimals=terms.decimals,
        lines=tuple(lines),
        list_nanos=span.list_nanos + corrected,
        net_nanos=net,
        net_rounded_nanos=rounded,
        tax_name=terms.tax_name,
        tax_bp=terms.tax_bp if terms.tax_name else 0,
        tax_nanos=tax,
        total_nanos=rounded + tax,
        num_postings=span.num_postings + len(span.corrections),
        after_seq=after_seq,
        through_seq=through_seq,
    )


class _Billing:
    """Lines of spans of one tenant's postings, and what they come to."""

    def __init__(self, session: Session, book: PriceBook, through_seq: int, seller: Seller) -> None:
        self._session = session
        self._book = book
        self._through_seq = through_seq
        self._seller = seller
        self.list_nanos = 0
        self.num_postings = 0
        self.corrections: list[Corrected] = []

    def lines(self, scope: Scope, note: str = "", after_seq: int = 0) -> list[InvoiceLine]:
        """A line for each model, meter and price of what is numbered above `after_seq`."""
        found: list[InvoiceLine] = []
        if scope.from_at >= scope.to_at:
            return found
        self.corrections += exports.corrections(self._session, scope, self._through_seq, after_seq)
        for span in spans(scope, self._book):
            before_at, changes = changes_of(span, self._book)
            sums = exports.sums(
                self._session,
                span,
                self._through_seq,
                changes,
                MAX_BILLED_S * MICROS,
                after_seq,
            )
            self.list_nanos += sum(one.list_nanos for one in sums)
            self.num_postings += sum(one.num_postings for one in sums)
            writer = FocusWriter(self._book, before_at, changes, self._seller)
            found += invoice_document.usage_lines(writer, sums, note)
        return found


def _terms(context: OperatorContext) -> Terms:
    settings = context.settings
    return Terms(
        settings.invoice_issuer,
        settings.invoice_details,
        settings.currency,
        settings.currency_decimals,
        settings.invoice_tax_name,
        settings.invoice_tax_bp,
    )


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()
