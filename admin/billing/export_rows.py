"""Postings as lines of text: CSV for spreadsheets, JSON lines for programs.

A row has a posting's fields, the names that tenant and key had, `posted_time` (ISO, UTC) and
`cost`. The cost stands twice: `cost_nanos`, exact and for adding up, and `cost`, the same as a
decimal number of currency units.

Names come from operators and model registrations, and a spreadsheet runs a cell that begins with
one of `= + - @`, a tab or a line's end as a formula (OWASP, CSV injection): in CSV such a name gets
a leading quote. JSON lines have names as they are, and amounts are numbers everywhere: a cost below
zero keeps its minus.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, get_type_hints

import msgspec

from registry.money.exports import COLUMNS as POSTING_COLUMNS
from registry.money.ledger import Posting

COLUMNS = (*POSTING_COLUMNS, "posted_time", "cost")

POSTED_AT = POSTING_COLUMNS.index("posted_at")
COST = POSTING_COLUMNS.index("cost_nanos")
REQUEST_ID = POSTING_COLUMNS.index("request_id")
_NAMES = tuple(POSTING_COLUMNS.index(name) for name in ("model", "tenant_name", "key_name"))
_TEXTS = tuple(
    name
    for name in POSTING_COLUMNS
    if name in ("tenant_name", "key_name") or get_type_hints(Posting)[name] is str
)
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are the wide ones of East Asian keyboards: some spreadsheets take them as well."""
_NANOS = 10**9
_NUM_COMMAS = len(COLUMNS) - 1
_NUM_QUOTES = 2 * (len(_TEXTS) + 2)

Row = Sequence[Any]
Encode = Callable[[Sequence[Row]], bytes]


def csv_header() -> bytes:
    """The first line."""
    return (",".join(COLUMNS) + "\n").encode()


def csv_lines(batch: Sequence[Row]) -> bytes:
    """One line a row. Floats as in JSON lines: the shortest text that reads back the same."""
    encode = msgspec.json.Encoder().encode
    return b"".join([_csv_line(row, encode) for row in batch])


def jsonl_lines(batch: Sequence[Row]) -> bytes:
    """One object a line, its fields in the order of COLUMNS."""
    encode = msgspec.json.Encoder().encode
    lines = [encode(dict(zip(COLUMNS, row_values(row), strict=True))) for row in batch]
    return b"\n".join([*lines, b""])


def row_values(row: Row) -> tuple[Any, ...]:
    """Values of COLUMNS."""
    return (*row, posted_time(row[POSTED_AT]), decimal_text(row[COST], 9))


def posted_time(posted_at: float) -> str:
    """2026-01-31T12:00:00.000+00:00"""
    return datetime.fromtimestamp(posted_at, UTC).isoformat(timespec="milliseconds")


def decimal_text(value: int, places: int) -> str:
    """value / 10^places as an exact decimal number with all its places."""
    if not places:
        return str(value)
    digits = str(value) if value >= 0 else str(-value)
    if len(digits) <= places:
        digits = digits.zfill(places + 1)
    text = f"{digits[:-places]}.{digits[-places:]}"
    return text if value >= 0 else "-" + text


def short_decimal(value: int, places: int) -> str:
    """The same without zeros at its end."""
    text = decimal_text(value, places)
    return text.rstrip("0").rstrip(".") if places else text


def harmless(cell: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return "'" + cell if cell.startswith(_FORMULA_STARTS) else cell


def _csv_line(row: Row, encode: Callable[[object], bytes]) -> bytes:
    """Made from the JSON of the row, whose quotes go, in half of what the csv module takes; a row
    with a cell that has to be quoted or made harmless goes the long way."""
    nanos = row[COST]
    cost = decimal_text(nanos, 9) if nanos < 0 else f"{nanos // _NANOS}.{nanos % _NANOS:09}"
    line = encode((*row, posted_time(row[POSTED_AT]), cost))
    if line.count(b",") != _NUM_COMMAS or line.count(b'"') != _NUM_QUOTES or b"\\" in line:
        return _quoted_line(row, encode)
    for index in _NAMES:
        if row[index].startswith(_FORMULA_STARTS):
            return _quoted_line(row, encode)
    return line[1:-1].replace(b'"', b"") + b"\n"


def _quoted_line(row: Row, encode: Callable[[object], bytes]) -> bytes:
    cells = list(row_values(row))
    for index in _NAMES:
        cells[index] = harmless(cells[index])
    spelled = [cell if isinstance(cell, str) else encode(cell).decode() for cell in cells]
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerow(spelled)
    return buffer.getvalue().encode()


def numbered(batches: Iterator[Sequence[Row]]) -> Iterator[tuple[Sequence[Row], int]]:
    """Each batch with what its rows cost together."""
    for batch in batches:
        yield batch, sum(row[COST] for row in batch)
