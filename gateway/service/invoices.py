"""The verbs on invoices, for the CLI and, later, the admin API and pages (control.py).

An invoice bills what no earlier one of its tenant has. The last one covers all that was posted
before its month's end and numbered up to its `through_seq`; so the next one has what was posted
since, and what reached the ledger late. Corrections are postings of the moment when they are made.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy.orm import Session

from gateway.billing import invoice, invoice_html, invoice_pdf
from gateway.billing.focus import FocusWriter, Seller
from gateway.billing.invoice import Document, InvoiceLine, Terms
from gateway.billing.usage_export import changes_of, spans
from gateway.policy.price_book import PriceBook
from gateway.policy.pricing import MAX_BILLED_S, MICROS
from gateway.service import usage as service_usage
from gateway.service.control import Control, find_tenant, require, visible
from gateway.service.prices import price_book
from registry import exports, invoices, tenants
from registry.errors import AlreadyExists, InvalidValue, NotFound, RegistryError
from registry.exports import Corrected, Scope
from registry.invoices import InvoiceRecord, IssuedInvoice
from registry.paging import Cut, Listed
from registry.tenants import TenantRecord

EARLIER = "earlier months"


class NothingOwed(RegistryError):
    """An invoice would have no lines."""


@dataclass(frozen=True, slots=True)
class Month:
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


def month_of(text: str) -> Month:
    """2026-10. Raises InvalidValue."""
    try:
        first = datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC)
        after = (first + timedelta(days=31)).replace(day=1)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{text!r} is not a month such as 2026-01") from error
    return Month(first.timestamp(), after.timestamp())


def preview_invoice(control: Control, tenant: str, month: Month) -> Document:
    """What would stand on it now; the month need not be over. Nothing is stored."""
    visible(control, "usage.read")
    through_seq = service_usage.newest_seq(control)
    with control.reading() as session:
        found = find_tenant(control, session, tenant, "usage.read")
        return _document(control, session, found, month, through_seq, "", "")


def create_invoice(
    control: Control, tenant: str, month: Month, customer_details: str = ""
) -> InvoiceRecord:
    """Issue it. Raises NothingOwed, and RegistryError where the month is not over or a later one
    has been billed."""
    require(control, "usage.write")
    if not all(line.isprintable() for line in customer_details.split("\n")):
        raise InvalidValue("details are printable text in lines: an invoice is never changed")
    now_at = control.clock()
    if now_at < month.ended_at:
        raise RegistryError(f"the month ends on {month.last_day}: see `polyhost invoices preview`")
    through_seq = service_usage.newest_seq(control)
    with control.writing() as session:
        found = tenants.get_tenant(session, tenant)
        sequence = invoices.next_sequence(session)
        number = f"{control.settings.invoice_prefix}{sequence:06}"
        document = _document(control, session, found, month, through_seq, number, customer_details)
        if not document.lines:
            raise NothingOwed(f"there is nothing to bill {found.name!r} for")
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
            digest=invoice.digest_of(text),
        )
        return invoices.issue(session, record, now_at=now_at)


def tenants_to_bill(control: Control, month: Month) -> list[TenantRecord]:
    """Those who have used something up to the month's end and have no invoice for it; some of them
    may owe nothing since their last one."""
    require(control, "usage.read")
    scope = Scope(0.0, month.ended_at)
    through_seq = service_usage.newest_seq(control)
    with control.reading() as session:
        used = {row[0] for row in exports.totals(session, scope, through_seq, ["tenant_id"])}
        billed = {
            one.tenant_id
            for one in invoices.list_invoices(session)
            if one.began_at >= month.began_at
        }
        found = tenants.list_tenants(session)
    return [one for one in found if one.id in used - billed]


def list_invoices(control: Control, tenant: str | None = None) -> list[InvoiceRecord]:
    """Of all tenants or one, in order of issue."""
    seen = visible(control, "usage.read")
    with control.reading() as session:
        only = None if tenant is None else find_tenant(control, session, tenant, "usage.read").id
        found = invoices.list_invoices(session, only)
    return [one for one in found if seen is None or one.tenant_id in seen]


def invoices_page(
    control: Control, tenant: str, text: str, cut: Cut
) -> tuple[Listed[IssuedInvoice], int]:
    """A page of those that who asks may see, of one tenant where it is named, and how many."""
    seen = visible(control, "usage.read")
    with control.reading() as session:
        only = (find_tenant(control, session, tenant, "usage.read").id,) if tenant else seen
        return invoices.page(session, only, text, cut)


def get_invoice(control: Control, number: str) -> tuple[InvoiceRecord, Document]:
    """As it was issued. Raises NotFound; Forbidden, to those who may not see all, whether there is
    such a number or not; RegistryError where the stored text is not what was issued."""
    seen = visible(control, "usage.read")
    with control.reading() as session:
        try:
            record = invoices.get_invoice(session, number)
        except NotFound:
            require(control, "usage.read")
            raise
    if seen is not None and record.tenant_id not in seen:
        require(control, "usage.read")
    if invoice.digest_of(record.document) != record.digest:
        raise RegistryError(f"invoice {number} is not as it was issued: its digest does not fit")
    return record, invoice.from_json(record.document)


def render_invoice(control: Control, number: str, form: str) -> bytes:
    """As a page of HTML, PDF or JSON."""
    record, document = get_invoice(control, number)
    if form == "json":
        return record.document.encode()
    if form == "html":
        return invoice_html.render(document, record.digest)
    font = control.settings.invoice_font
    return invoice_pdf.render(document, record.digest, Path(font) if font else None)


def _document(
    control: Control,
    session: Session,
    tenant: TenantRecord,
    month: Month,
    through_seq: int,
    number: str,
    customer_details: str,
) -> Document:
    last = invoices.latest_of(session, tenant.id)
    after_seq = 0 if last is None else last.through_seq
    billed_upto = 0.0 if last is None else last.ended_at
    if last is not None and last.began_at > month.began_at:
        raise RegistryError(f"{tenant.name!r} has been billed for a later month: {last.number}")
    if through_seq < after_seq:
        raise RegistryError("somebody else billed this tenant at the same moment: try again")
    if last is not None and last.began_at == month.began_at and number:
        raise AlreadyExists(
            f"{tenant.name!r} has {last.number} for that month: what came later goes on the next"
        )
    seller = Seller(control.settings.invoice_issuer, control.settings.currency)
    span = _Billing(session, price_book(session), through_seq, seller)
    new = max(month.began_at, billed_upto)
    lines = span.lines(Scope(new, month.ended_at, tenant.id))
    lines += span.lines(Scope(billed_upto, month.began_at, tenant.id), EARLIER)
    lines += span.lines(Scope(0.0, billed_upto, tenant.id), EARLIER, after_seq)
    lines += invoice.correction_lines(span.corrections)
    net = sum(line.amount_nanos for line in lines)
    corrected = sum(row.cost_nanos for row in span.corrections)
    terms = _terms(control)
    rounded = invoice.rounded_down(net, terms.decimals)
    tax = invoice.tax_of(rounded, terms.tax_bp, terms.decimals) if terms.tax_name else 0
    return Document(
        number=number,
        issued_on=_day(control.clock()),
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
            found += invoice.usage_lines(writer, sums, note)
        return found


def _terms(control: Control) -> Terms:
    settings = control.settings
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
