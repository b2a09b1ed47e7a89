"""What stands on an invoice: from sums of postings to lines, tax and a total.

Comes in: sums by model and span between price changes, corrections, who bills whom. Goes out:
lines, tax, and of a `Document` (text and integers; put together in admin/operations/invoices.py)
the canonical JSON, which an issued invoice keeps and its digest is of, and the HTML. The PDF is
invoice_pdf.py's.

Money. Lines are the ledger's nano-units, exact. Their sum is rounded once, down to the currency's
smallest coin (in the client's favour, a credit's too); tax is taken of that and rounded half up.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2

from admin.billing.export_rows import decimal_text, short_decimal
from admin.billing.focus import NANOS_PLACES, SHARE_PLACES, FocusWriter
from registry.money.exports import Corrected, HourSum

MILLION_PLACES = 6
TAX_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Terms:
    """What every invoice of an issuer has alike."""

    issuer: str
    issuer_details: str
    currency: str
    decimals: int
    tax_name: str
    tax_bp: int


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """A meter of a model at one price. `price`: per million tokens, or per second, as agreed;
    `list_price`: everybody's. `note`: usage of earlier months, what is corrected."""

    model: str
    meter: str
    quantity: str
    unit: str
    price: str
    list_price: str
    amount_nanos: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """An invoice. Dates are ISO, UTC; `last_day` is included."""

    number: str
    issued_on: str
    first_day: str
    last_day: str
    tenant_id: str
    tenant_name: str
    customer_details: str
    issuer: str
    issuer_details: str
    currency: str
    decimals: int
    lines: tuple[InvoiceLine, ...]
    list_nanos: int
    net_nanos: int
    net_rounded_nanos: int
    tax_name: str
    tax_bp: int
    tax_nanos: int
    total_nanos: int
    num_postings: int
    after_seq: int
    through_seq: int

    def to_json(self) -> str:
        """Canonical: the same document is the same text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(document: str) -> str:
    """Of a canonical JSON."""
    return hashlib.sha256(document.encode()).hexdigest()


def from_json(document: str) -> Document:
    """From what `to_json` made."""
    fields = json.loads(document)
    lines = tuple(InvoiceLine(**line) for line in fields.pop("lines"))
    return Document(lines=lines, **fields)


def usage_lines(writer: FocusWriter, sums: Iterable[HourSum], note: str = "") -> list[InvoiceLine]:
    """A line for each meter and price."""
    return [
        InvoiceLine(
            row.model,
            line.meter,
            short_decimal(line.quantity, line.places),
            "tokens" if line.unit == "Tokens" else "s",
            _price(line.agreed_nanos, line.unit),
            _price(line.listed_nanos, line.unit),
            line.billed_nanos,
            note,
        )
        for row in writer.merged(sums)
        for line in writer.lines(row)
    ]


def correction_lines(corrections: Sequence[Corrected]) -> list[InvoiceLine]:
    """One line each."""
    return [
        InvoiceLine(
            row.model, "Correction", "", "", "", "", row.cost_nanos, f"request {row.corrects}"
        )
        for row in corrections
    ]


def rounded_down(nanos: int, decimals: int) -> int:
    """To whole coins of 10^-decimals."""
    coin: int = 10 ** (NANOS_PLACES - decimals)
    return nanos // coin * coin


def tax_of(net_nanos: int, tax_bp: int, decimals: int) -> int:
    """Of whole coins, half up (away from zero)."""
    coin: int = 10 ** (NANOS_PLACES - decimals)
    exact = abs(net_nanos) // coin * tax_bp
    coins = (2 * exact + TAX_PARTS) // (2 * TAX_PARTS)
    return (coins if net_nanos >= 0 else -coins) * coin


def money(nanos: int, decimals: int) -> str:
    """With thousands parted; the coins, and what is beyond them where it is not nothing."""
    text = decimal_text(nanos, NANOS_PLACES)
    whole, _, rest = text.partition(".")
    kept = rest[:decimals] + rest[decimals:].rstrip("0")
    sign = "-" if whole.startswith("-") else ""
    grouped = f"{int(whole.removeprefix('-')):,}"
    return f"{sign}{grouped}.{kept}" if kept else f"{sign}{grouped}"


def line_places(document: Document) -> int:
    """Places behind the point that the lines' amounts need, one width for all."""
    shown = (money(line.amount_nanos, document.decimals) for line in document.lines)
    return max((len(text.partition(".")[2]) for text in shown), default=document.decimals)


def percent(basis_points: int) -> str:
    """19 of 1900."""
    return short_decimal(basis_points, 2)


def _price(exact: int, unit: str) -> str:
    places = NANOS_PLACES + SHARE_PLACES
    if unit == "Tokens":
        places -= MILLION_PLACES
    return short_decimal(exact, places)


TEMPLATE_PATH = Path(__file__).with_name("invoice.html")


def render(document: Document, digest: str) -> bytes:
    """The page; all that comes from people is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))
    page = template.render(
        invoice=document,
        digest=digest,
        money=money,
        percent=percent,
        places=line_places(document),
    )
    return page.encode()
