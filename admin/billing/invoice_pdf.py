"""An invoice as PDF: the same content as the page of HTML, on A4, with numbered pages.

The same document gives the same bytes. Needs reportlab (`pip install 'polyhost[export]'`), which
nothing else of the gateway does. Its own fonts have Latin signs only: where a name has others, a
font file must be given; a sign that no font has is an error, for a name on a bill must be right.
"""

import importlib
import io
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from admin.billing.invoice_document import Document, InvoiceLine, line_places, money, percent
from registry.errors import RegistryError

GREY, INK, LINE = "#5b6675", "#1c2430", "#d9dee6"
_MM = 72 / 25.4
_MARGIN = 16 * _MM
_FRAME = 6.0
"""What reportlab leaves free inside its frames."""
_WIDTH = 210 * _MM - 2 * (_MARGIN + _FRAME)
_COLUMNS = tuple(_WIDTH * share for share in (0.22, 0.21, 0.19, 0.22, 0.16))


class _Fonts(NamedTuple):
    regular: str
    bold: str


def render(document: Document, digest: str, font_path: Path | None = None) -> bytes:
    """The file. Raises RegistryError where reportlab or a sign of the font is missing."""
    _require()
    fonts = _fonts(document, font_path)
    platypus: Any = importlib.import_module("reportlab.platypus")
    buffer = io.BytesIO()
    paper = platypus.SimpleDocTemplate(
        buffer,
        pagesize=(210 * _MM, 297 * _MM),
        leftMargin=_MARGIN,
        rightMargin=_MARGIN,
        topMargin=18 * _MM,
        bottomMargin=20 * _MM,
        title=f"Invoice {document.number}",
        author=document.issuer,
        invariant=1,
    )
    story = [
        _head(platypus, document, fonts),
        platypus.Spacer(1, 9 * _MM),
        _parties(platypus, document, fonts),
        platypus.Spacer(1, 9 * _MM),
        _lines(platypus, document, fonts),
        platypus.Spacer(1, 5 * _MM),
        _sums(platypus, document, fonts),
        platypus.Spacer(1, 10 * _MM),
        _foot(document, digest, fonts),
    ]
    number_page = partial(_number_page, document, fonts)
    paper.build(story, onFirstPage=number_page, onLaterPages=number_page)
    return buffer.getvalue()


def _require() -> None:
    try:
        importlib.import_module("reportlab")
    except ImportError as error:
        raise RegistryError(
            "PDF needs reportlab, which is not installed: pip install 'polyhost[export]'"
        ) from error


def _fonts(document: Document, font_path: Path | None) -> _Fonts:
    """Embedded fonts that have every sign of the document."""
    ttfonts: Any = importlib.import_module("reportlab.pdfbase.ttfonts")
    metrics: Any = importlib.import_module("reportlab.pdfbase.pdfmetrics")
    files = ("Vera.ttf", "VeraBd.ttf") if font_path is None else (str(font_path), str(font_path))
    names = _Fonts(f"{files[0]}-regular", f"{files[1]}-bold")
    for name, file in zip(names, files, strict=True):
        try:
            font = ttfonts.TTFont(name, file)
        except ttfonts.TTFError as error:
            raise RegistryError(f"the font of PDF invoices cannot be read: {error}") from error
        missing = {sign for sign in _text_of(document) if ord(sign) not in font.face.charToGlyph}
        if missing:
            raise RegistryError(
                f"the font of PDF invoices has no sign for {''.join(sorted(missing))!r}: name one "
                "that has by the setting invoice_font, or export HTML"
            )
        metrics.registerFont(font)
    return names


def _text_of(document: Document) -> str:
    names = [line.model for line in document.lines]
    parties = (document.tenant_name, document.customer_details, document.issuer, document.tax_name)
    return "".join([*names, *parties, document.issuer_details]).replace("\n", "")


def _paragraph(
    text: str, font: str, size: float = 9, colour: str = INK, align: int = 0, leading: float = 1.35
) -> Any:
    styles: Any = importlib.import_module("reportlab.lib.styles")
    platypus: Any = importlib.import_module("reportlab.platypus")
    style = styles.ParagraphStyle(
        "cell",
        fontName=font,
        fontSize=size,
        leading=size * leading,
        textColor=colour,
        alignment=align,
        splitLongWords=True,
    )
    return platypus.Paragraph(text, style)


def _broken(text: str) -> str:
    """Escaped, with its lines kept."""
    return escape(text).replace("\n", "<br/>")


def _head(platypus: Any, document: Document, fonts: _Fonts) -> Any:
    title = [
        _paragraph("Invoice", fonts.bold, 20),
        _paragraph(escape(document.number or "preview, not issued"), fonts.regular, 10, GREY),
    ]
    issuer = [
        _paragraph(escape(document.issuer), fonts.bold, 11, align=2),
        _paragraph(_broken(document.issuer_details), fonts.regular, align=2),
    ]
    return _table(platypus, [[title, issuer]], (_WIDTH * 0.5, _WIDTH * 0.5))


def _parties(platypus: Any, document: Document, fonts: _Fonts) -> Any:
    customer = [
        _paragraph("Billed to", fonts.regular, 7.5, GREY),
        _paragraph(escape(document.tenant_name), fonts.bold, 11),
        _paragraph(_broken(document.customer_details), fonts.regular),
        _paragraph(f"Account {escape(document.tenant_id)}", fonts.regular, 7.5, GREY),
    ]
    facts = [
        ("Date", document.issued_on),
        ("Period", f"{document.first_day} to {document.last_day}"),
        ("Currency", document.currency),
    ]
    details = _table(
        platypus,
        [
            [_paragraph(name, fonts.regular, colour=GREY), _paragraph(fact, fonts.regular, align=2)]
            for name, fact in facts
        ],
        (20 * _MM, 56 * _MM),
    )
    return _table(platypus, [[customer, details]], (_WIDTH - 76 * _MM, 76 * _MM))


def _lines(platypus: Any, document: Document, fonts: _Fonts) -> Any:
    small = partial(_paragraph, font=fonts.bold, size=7.5, colour=GREY)
    heads = [
        small("Model"),
        small("Meter"),
        small("Quantity", align=2),
        small("Price per million / second", align=2),
        small(f"Amount {document.currency}", align=2),
    ]
    places = line_places(document)
    rows = [heads, *(_line_cells(line, places, fonts) for line in document.lines)]
    rules = [
        ("LINEBELOW", (0, 0), (-1, 0), 1, INK),
        ("LINEBELOW", (0, 1), (-1, -1), 0.5, LINE),
        ("TOPPADDING", (0, 1), (-1, -1), 4),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 4),
        ("VALIGN", (0, 0), (-1, 0), "BOTTOM"),
    ]
    return _table(platypus, rows, _COLUMNS, rules, repeat=1)


def _line_cells(line: InvoiceLine, decimals: int, fonts: _Fonts) -> list[Any]:
    right = partial(_paragraph, font=fonts.regular, align=2)
    small = partial(_paragraph, font=fonts.regular, size=7.5, colour=GREY)
    quantity = line.quantity
    if line.unit == "tokens":
        quantity = f"{int(quantity):,}"
    name = [_paragraph(escape(line.model), fonts.regular)]
    if line.note:
        name.append(small(escape(line.note)))
    price = [right(line.price)]
    if line.list_price != line.price:
        price.append(small(f"list {line.list_price}", align=2))
    return [
        name,
        _paragraph(line.meter, fonts.regular),
        right(f'{quantity} <font size="7.5" color="{GREY}">{line.unit}</font>'),
        price,
        right(money(line.amount_nanos, decimals)),
    ]


def _sums(platypus: Any, document: Document, fonts: _Fonts) -> Any:
    shown = partial(money, decimals=document.decimals)
    rows: list[tuple[str, str, str]] = []
    if document.list_nanos != document.net_nanos:
        rows.append(("At list prices", shown(document.list_nanos), GREY))
        off = document.net_nanos - document.list_nanos
        rows.append(("Plan and discount", shown(off), GREY))
    if document.net_nanos != document.net_rounded_nanos:
        rows.append(("Sum of lines", shown(document.net_nanos), GREY))
    rows.append(("Net", shown(document.net_rounded_nanos), INK))
    if document.tax_name:
        tax = f"{document.tax_name} {percent(document.tax_bp)} %"
        rows.append((tax, shown(document.tax_nanos), INK))
    cells = [
        [
            _paragraph(escape(name), fonts.regular, colour=colour),
            _paragraph(amount, fonts.regular, colour=colour, align=2),
        ]
        for name, amount, colour in rows
    ]
    total = "Total" if document.total_nanos >= 0 else "Credit"
    cells.append(
        [
            _paragraph(f"{total} {document.currency}", fonts.bold, 12),
            _paragraph(shown(document.total_nanos), fonts.bold, 12, align=2),
        ]
    )
    rules = [
        ("LINEABOVE", (0, -1), (-1, -1), 1, INK),
        ("TOPPADDING", (0, 0), (-1, -2), 2),
        ("TOPPADDING", (0, -1), (-1, -1), 6),
    ]
    table = _table(platypus, cells, (42 * _MM, 42 * _MM), rules)
    table.hAlign = "RIGHT"
    return platypus.KeepTogether([table])


def _foot(document: Document, digest: str, fonts: _Fonts) -> Any:
    text = (
        f"{document.num_postings:,} requests. Amounts are exact; their sum is rounded down once. "
        "What reaches the ledger later, and corrections, are on the next invoice.<br/>"
        f"SHA-256 {digest}"
    )
    return _paragraph(text, fonts.regular, 7, GREY)


def _table(
    platypus: Any,
    rows: list[list[Any]],
    widths: tuple[float, ...],
    rules: Iterable[tuple[Any, ...]] = (),
    repeat: int = 0,
) -> Any:
    colors: Any = importlib.import_module("reportlab.lib.colors")
    plain = [
        ("LEFTPADDING", (0, 0), (-1, -1), 0),
        ("RIGHTPADDING", (0, 0), (-2, -1), 6),
        ("RIGHTPADDING", (-1, 0), (-1, -1), 0),
        ("TOPPADDING", (0, 0), (-1, -1), 0),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 2),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ]
    ruled = [
        (*rule[:-1], colors.HexColor(rule[-1])) if rule[0].startswith("LINE") else rule
        for rule in rules
    ]
    return platypus.Table(
        rows, colWidths=list(widths), repeatRows=repeat, style=[*plain, *ruled], hAlign="LEFT"
    )


def _number_page(document: Document, fonts: _Fonts, canvas: Any, paper: Any) -> None:
    colors: Any = importlib.import_module("reportlab.lib.colors")
    canvas.saveState()
    canvas.setFont(fonts.regular, 7)
    canvas.setFillColor(colors.HexColor(GREY))
    canvas.drawString(
        _MARGIN + _FRAME, 11 * _MM, f"{document.number}  {document.first_day[:7]}".strip()
    )
    canvas.drawRightString(210 * _MM - _MARGIN - _FRAME, 11 * _MM, f"Page {paper.page}")
    canvas.restoreState()
