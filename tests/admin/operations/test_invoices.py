"""Invoices on both databases: every posting on exactly one, numbers that stay, names that are
escaped."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.exc import DatabaseError

from admin.billing import invoice_document
from admin.billing.invoice_document import money, rounded_down, tax_of
from admin.context.operator_context import OperatorContext
from admin.operations import invoices as service_invoices
from admin.operations import usage as service_ledger
from admin.operations import usage as service_usage
from admin.operations.invoices import InvoiceMonth, month_of
from gateway.settings.settings import Settings
from registry import audit
from registry.errors import AlreadyExists, Forbidden, InvalidValue, NotFound, RegistryError
from registry.money.exports import Scope
from registry.session import reading, writing
from tests.admin.billing import billing_kit
from tests.admin.billing.billing_kit import NOVEMBER, OCTOBER, Books, correction

SEPTEMBER_, OCTOBER_, NOVEMBER_ = map(month_of, ("2025-09", "2025-10", "2025-11"))
EVIL = '=HYPERLINK("http://x")'
SETTINGS = Settings(
    currency="EUR",
    invoice_issuer="Häuser <b>& Co</b>",
    invoice_details="Street 1\n12345 Town <script>",
    invoice_tax_name="VAT",
    invoice_tax_bp=1900,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with billing_kit.registry(request, tmp_path) as engine:
        yield engine


@pytest.fixture
def books(engine: Engine) -> Books:
    return billing_kit.fill(engine, 120)


@pytest.fixture
def context(engine: Engine, tmp_path: Path) -> OperatorContext:
    return OperatorContext(engine, tmp_path, "test", lambda: NOVEMBER + 40 * 86400.0, SETTINGS)


def owed(books: Books, tenant: str, before_at: float, since_at: float = 0.0) -> int:
    return sum(
        posting.cost_nanos
        for posting in books.postings
        if posting.tenant_id == books.tenants[tenant] and since_at <= posting.posted_at < before_at
    )


def test_months_are_billed_one_after_the_other_and_nothing_twice(
    context: OperatorContext, books: Books
) -> None:
    first = service_invoices.create_invoice(context, "acme", SEPTEMBER_)
    second = service_invoices.create_invoice(context, "acme", OCTOBER_, "Road 2\nCity")
    other = service_invoices.create_invoice(context, EVIL, OCTOBER_)
    assert [first.number, second.number, other.number] == ["INV-000001", "INV-000002", "INV-000003"]
    (_, one), (_, two) = (
        service_invoices.get_invoice(context, number) for number in (first.number, second.number)
    )
    assert one.net_nanos == owed(books, "acme", OCTOBER)
    assert two.net_nanos == owed(books, "acme", NOVEMBER, OCTOBER)
    assert {line.note for line in one.lines} == {""}
    assert (two.first_day, two.last_day) == ("2025-10-01", "2025-10-31")
    assert two.customer_details == "Road 2\nCity"
    # Nobody billed this tenant for September: it is on October's.
    _, three = service_invoices.get_invoice(context, other.number)
    assert three.net_nanos == owed(books, EVIL, NOVEMBER)
    assert any(line.note == "earlier months" for line in three.lines)


def test_lines_add_up_and_say_their_prices(context: OperatorContext, books: Books) -> None:
    document = service_invoices.preview_invoice(context, "acme", OCTOBER_)
    assert document.number == ""
    assert sum(line.amount_nanos for line in document.lines) == document.net_nanos
    lost = Fraction(0)
    for line in document.lines:
        if line.price:
            per = 10**6 if line.unit == "tokens" else 1
            exact = Fraction(line.quantity) * Fraction(line.price) / per * 10**9
            lost += exact - line.amount_nanos
    assert 0 <= lost < len(books.postings)
    prices = {line.price for line in document.lines if line.meter == "Input Tokens"}
    assert len(prices) > 2, "the price changed within the month"
    assert document.list_nanos > document.net_nanos


def test_totals_are_rounded_once_and_taxed(context: OperatorContext, books: Books) -> None:
    document = service_invoices.preview_invoice(context, "acme", OCTOBER_)
    cent = 10**7
    assert document.net_rounded_nanos == document.net_nanos // cent * cent
    cents = Fraction(document.net_rounded_nanos, cent) * Fraction(19, 100)
    assert document.tax_nanos == int(cents + Fraction(1, 2)) * cent
    assert document.total_nanos == document.net_rounded_nanos + document.tax_nanos


def test_what_comes_later_is_on_the_next_one(
    context: OperatorContext, engine: Engine, books: Books
) -> None:
    first = service_invoices.create_invoice(context, "acme", OCTOBER_)
    mine = [posting for posting in books.postings if posting.tenant_id == books.tenants["acme"]]
    served = next(posting for posting in mine if posting.cost_nanos > 0)
    late = replace(served, request_id="late", posted_at=OCTOBER + 99)
    billing_kit.post(engine, late, correction(served, "corr-9", -5, NOVEMBER + 3))
    assert service_invoices.get_invoice(context, first.number)[0] == first
    second = service_invoices.create_invoice(context, "acme", NOVEMBER_)
    _, document = service_invoices.get_invoice(context, second.number)
    assert document.net_nanos == served.cost_nanos - 5
    assert (document.after_seq, document.num_postings) == (first.through_seq, 2)
    notes = [line.note for line in document.lines]
    assert f"request {served.request_id}" in notes
    assert "earlier months" in notes


def test_a_credit_is_rounded_in_the_clients_favour(
    context: OperatorContext, engine: Engine, books: Books
) -> None:
    service_invoices.create_invoice(context, "acme", OCTOBER_)
    mine = next(p for p in books.postings if p.tenant_id == books.tenants["acme"])
    billing_kit.post(engine, correction(mine, "corr-9", -15_000_001, NOVEMBER + 3))
    document = service_invoices.preview_invoice(context, "acme", NOVEMBER_)
    assert (document.net_rounded_nanos, document.total_nanos) == (-20_000_000, -20_000_000)


def test_an_issued_invoice_is_never_changed(
    context: OperatorContext, engine: Engine, books: Books
) -> None:
    made = service_invoices.create_invoice(context, "acme", OCTOBER_)
    assert made.digest == invoice_document.digest_of(made.document)
    for statement in ("UPDATE invoices SET total_nanos = 0", "DELETE FROM invoices"):
        with pytest.raises(DatabaseError, match="append-only"), writing(engine, "test") as session:
            session.execute(text(statement))
    with reading(engine) as session:
        assert audit.latest(session)[0].action == "invoice.issue"


def test_refusals_say_why(context: OperatorContext, books: Books) -> None:
    early = replace(context, clock=lambda: NOVEMBER - 1)
    with pytest.raises(RegistryError, match="ends on 2025-10-31"):
        service_invoices.create_invoice(early, "acme", OCTOBER_)
    service_invoices.create_invoice(context, "acme", OCTOBER_)
    with pytest.raises(AlreadyExists, match="INV-000001"):
        service_invoices.create_invoice(context, "acme", OCTOBER_)
    with pytest.raises(RegistryError, match="later month: INV-000001"):
        service_invoices.create_invoice(context, "acme", SEPTEMBER_)
    with pytest.raises(RegistryError, match="nothing to bill"):
        service_invoices.create_invoice(context, "acme", NOVEMBER_)
    with pytest.raises(NotFound, match="invoices list"):
        service_invoices.get_invoice(context, "INV-9")
    for month in ("2025-13", "9999-12"):
        with pytest.raises(InvalidValue, match=month):
            month_of(month)
    for details in ("Road\x00", "Road\x1b[2J", "Road \udcff"):
        with pytest.raises(InvalidValue, match="printable"):
            service_invoices.create_invoice(context, "plain", OCTOBER_, details)
    # None of these has taken a number.
    assert service_invoices.create_invoice(context, "plain", OCTOBER_).number == "INV-000002"


def test_numbers_have_no_gap_when_several_bill_at_once(
    context: OperatorContext, books: Books
) -> None:
    tenants = list(books.tenants)
    asked = [(tenant, month) for tenant in tenants for month in (SEPTEMBER_, OCTOBER_)] * 2

    def bill(of: tuple[str, InvoiceMonth]) -> str | None:
        try:
            return service_invoices.create_invoice(context, *of).number
        except RegistryError:
            return None

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for number in pool.map(bill, asked) if number]
    made = service_invoices.list_invoices(context)
    assert [one.sequence for one in made] == list(range(1, len(made) + 1))
    assert sorted(numbers) == [one.number for one in made]
    for tenant, tenant_id in books.tenants.items():
        billed = [
            service_invoices.get_invoice(context, one.number)[1].net_nanos
            for one in made
            if one.tenant_id == tenant_id
        ]
        assert sum(billed) == owed(books, tenant, NOVEMBER)


def test_who_is_left_to_bill(context: OperatorContext, books: Books) -> None:
    service_invoices.create_invoice(context, "acme", OCTOBER_)
    left = [one.name for one in service_invoices.tenants_to_bill(context, OCTOBER_)]
    assert left == [EVIL, "plain"]
    assert service_invoices.list_invoices(context, "plain") == []
    assert len(service_invoices.list_invoices(context)) == 1


def test_what_is_on_no_invoice_is_not_deleted(context: OperatorContext, books: Books) -> None:
    service_invoices.create_invoice(context, "acme", OCTOBER_)
    with pytest.raises(RegistryError, match="and 1 more have postings before"):
        service_ledger.keep_usage_from(context, NOVEMBER)
    service_invoices.create_invoice(context, EVIL, OCTOBER_)
    service_invoices.create_invoice(context, "plain", SEPTEMBER_)
    with pytest.raises(RegistryError, match="'plain' have"):
        service_ledger.keep_usage_from(context, NOVEMBER)
    assert service_ledger.keep_usage_from(context, OCTOBER) > 0
    service_invoices.create_invoice(context, "plain", OCTOBER_)
    assert service_ledger.keep_usage_from(context, NOVEMBER) > 0
    assert service_usage.usage_totals(context, Scope(0.0, NOVEMBER), [])[0]["requests"] == 0


def test_where_nobody_issues_invoices_postings_may_go(
    context: OperatorContext, books: Books
) -> None:
    assert service_ledger.keep_usage_from(context, NOVEMBER) == len(books.postings)


def test_a_tenants_viewer_sees_its_invoices_alone(context: OperatorContext, books: Books) -> None:
    own = service_invoices.create_invoice(context, "plain", OCTOBER_)
    other = service_invoices.create_invoice(context, "acme", OCTOBER_)
    viewer = replace(context, grants={books.tenants["plain"]: "viewer"})
    assert service_invoices.list_invoices(viewer) == [own]
    assert service_invoices.get_invoice(viewer, own.number)[0] == own
    for forbidden in (
        lambda: service_invoices.get_invoice(viewer, other.number),
        lambda: service_invoices.render_invoice(viewer, other.number, "html"),
        lambda: service_invoices.list_invoices(viewer, "acme"),
        lambda: service_invoices.preview_invoice(viewer, "acme", OCTOBER_),
        lambda: service_invoices.create_invoice(viewer, "plain", NOVEMBER_),
        lambda: service_invoices.tenants_to_bill(viewer, OCTOBER_),
    ):
        with pytest.raises(Forbidden):
            forbidden()
    # Whether there is such a number is not told either.
    refused = []
    for number in (other.number, "INV-999999"):
        with pytest.raises(Forbidden) as refusal:
            service_invoices.get_invoice(viewer, number)
        refused.append(str(refusal.value))
    assert len(set(refused)) == 1


def test_the_page_escapes_and_fetches_nothing(context: OperatorContext, books: Books) -> None:
    made = service_invoices.create_invoice(context, EVIL, OCTOBER_, "<img src=x onerror=y>")
    page = service_invoices.render_invoice(context, made.number, "html").decode()
    assert "=HYPERLINK(&#34;http://x&#34;)" in page
    assert "<img" not in page
    assert "<script" not in page
    assert "Häuser &lt;b&gt;" in page
    assert made.digest in page
    assert not [word for word in ("href=", "url(", "@import") if word in page]
    total = money(made.total_nanos, 2)
    assert f">{total}<" in page
    told = json.loads(service_invoices.render_invoice(context, made.number, "json"))
    assert told["total_nanos"] == made.total_nanos


def test_the_pdf_is_the_same_every_time(context: OperatorContext, books: Books) -> None:
    made = service_invoices.create_invoice(context, EVIL, OCTOBER_, "A & B <i>")
    data = service_invoices.render_invoice(context, made.number, "pdf")
    assert data.startswith(b"%PDF-")
    assert data.rstrip().endswith(b"%%EOF")
    assert data == service_invoices.render_invoice(context, made.number, "pdf")


def test_a_sign_that_the_font_lacks_is_told(context: OperatorContext, books: Books) -> None:
    made = service_invoices.create_invoice(context, "acme", OCTOBER_, "株式会社")
    with pytest.raises(RegistryError, match="invoice_font"):
        service_invoices.render_invoice(context, made.number, "pdf")
    assert "株式会社" in service_invoices.render_invoice(context, made.number, "html").decode()
    wrong = replace(context, settings=Settings(invoice_font=__file__))
    with pytest.raises(RegistryError, match="cannot be read"):
        service_invoices.render_invoice(wrong, made.number, "pdf")


@given(st.integers(-(10**15), 10**15), st.integers(0, 9), st.integers(0, 10_000))
def test_rounding_and_tax_against_fractions(nanos: int, decimals: int, tax_bp: int) -> None:
    coin = 10 ** (9 - decimals)
    net = rounded_down(nanos, decimals)
    assert net % coin == 0
    assert 0 <= nanos - net < coin
    exact = Fraction(net * tax_bp, 10_000)
    tax = tax_of(net, tax_bp, decimals)
    assert tax % coin == 0
    assert abs(tax - exact) <= Fraction(coin, 2)


def test_money_as_people_read_it() -> None:
    assert money(1_234_567_890_000_000, 2) == "1,234,567.89"
    assert money(-1, 2) == "-0.000000001"
    assert money(5_000_000_000, 0) == "5"
    assert money(0, 2) == "0.00"
