"""What an export is made of: an order in, chunks of a file out.

An `ExportOrder` names everything that the bytes depend on, the ledger's state included
(`through_seq`), so that the same order gives the same bytes for ever: that is how an interrupted
file goes on, and how a file is proved from the ledger (export_file.py). Parquet is
export_parquet.py's.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from typing import Literal, TypeAlias, TypeVar

import msgspec
from sqlalchemy.orm import Session

from admin.billing import export_rows, focus
from admin.billing.export_rows import POSTED_AT, REQUEST_ID, Row, numbered
from admin.billing.focus import FocusWriter, Seller
from gateway.pricing.policy.pricing import MAX_BILLED_S, MICROS, PriceBook
from registry.errors import InvalidValue
from registry.money import exports
from registry.money.exports import HOUR_S, HourSum, Scope

_T = TypeVar("_T")
Format: TypeAlias = Literal["csv", "jsonl", "parquet", "focus"]

DAY_S = 86_400
MAX_CHANGES = 200
"""Of prices in one query; spans with more are cut."""
FOCUS_ROWS = 2000
_HOUR_TOKEN = "hour:"


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """All that an export's bytes depend on."""

    format: Format
    scope: Scope
    through_seq: int
    issuer: str
    currency: str

    def to_json(self) -> dict[str, object]:
        """For a file beside the export."""
        return {"version": 1, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines. `token`: where to go on behind them."""

    data: bytes
    num_rows: int
    cost_nanos: int
    token: str


def order_from_json(content: dict[str, object]) -> ExportOrder:
    """The order that `to_json` wrote. Raises InvalidValue."""
    try:
        return msgspec.convert(content, ExportOrder)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"not a proof of an export: {error}") from error


def header(order: ExportOrder) -> bytes:
    """What stands before the first row."""
    if order.format == "focus":
        return focus.header()
    return export_rows.csv_header() if order.format == "csv" else b""


def chunks(
    session: Session, order: ExportOrder, book: PriceBook, after: str = ""
) -> Iterator[Chunk]:
    """Lines of csv, jsonl or focus, behind the token `after`. Raises InvalidValue."""
    if order.format == "focus":
        yield from _focus_chunks(session, order, book, after)
        return
    encode = export_rows.csv_lines if order.format == "csv" else export_rows.jsonl_lines
    for batch, cost in posting_batches(session, order, after):
        yield Chunk(encode(batch), len(batch), cost, token_of(batch[-1]))


def posting_batches(
    session: Session, order: ExportOrder, after: str = ""
) -> Iterator[tuple[Sequence[Row], int]]:
    """Postings as rows, with what they cost."""
    behind = None if not after else _parse_token(after)
    return numbered(_ahead(exports.rows(session, order.scope, order.through_seq, behind)))


def _ahead(batches: Iterator[Sequence[_T]]) -> Iterator[Sequence[_T]]:
    """The database is at the next batch while this one is written; no other thread uses it."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def token_of(row: Row) -> str:
    """Where to go on behind this row."""
    return f"{row[POSTED_AT]!r}:{row[REQUEST_ID]}"


def hour_token(began_at: int) -> str:
    """Where to go on with this hour, in FOCUS."""
    return f"{_HOUR_TOKEN}{began_at}"


def _parse_token(after: str) -> tuple[float, str]:
    instant, _, request_id = after.partition(":")
    try:
        posted_at = float(instant)
    except ValueError:
        posted_at = math.nan
    if not math.isfinite(posted_at):  # behind "nan" there is nothing: an export that lost all
        raise InvalidValue(f"this export cannot continue from {after!r}")
    return posted_at, request_id


def _focus_chunks(
    session: Session, order: ExportOrder, book: PriceBook, after: str
) -> Iterator[Chunk]:
    scope = order.scope
    if after:
        from_at = after.removeprefix(_HOUR_TOKEN)
        if from_at == after or not from_at.isdecimal():
            raise InvalidValue(f"this export cannot continue from {after!r}")
        scope = replace(scope, from_at=max(scope.from_at, float(from_at)))
    seller = Seller(order.issuer, order.currency)
    for day in _days(session, scope, order.through_seq):
        for span in spans(day, book):
            before_at, changes = changes_of(span, book)
            writer = FocusWriter(book, before_at, changes, seller)
            yield from _span_chunks(session, span, order.through_seq, writer, changes)
            session.rollback()


def _days(session: Session, scope: Scope, through_seq: int) -> Iterator[Scope]:
    """The scope by days, so that no query is long, without those before and behind all postings."""
    ends = exports.bounds(session, scope, through_seq)
    if ends is None:
        return
    day = ends[0] // DAY_S * DAY_S
    while day <= ends[1]:
        from_at, to_at = max(scope.from_at, day), min(scope.to_at, day + DAY_S)
        if from_at < to_at:
            yield replace(scope, from_at=from_at, to_at=to_at)
        day += DAY_S


def _span_chunks(
    session: Session,
    span: Scope,
    through_seq: int,
    writer: FocusWriter,
    changes: Sequence[float],
) -> Iterator[Chunk]:
    """Hour by hour, each hour's corrections behind its usage."""
    left = exports.corrections(session, span, through_seq)[::-1]
    most_us = MAX_BILLED_S * MICROS
    batches = _ahead(_slices(exports.hours(session, span, through_seq, changes, most_us)))
    found = writer.merged(chain.from_iterable(batches))
    for hour, rows in groupby(found, lambda row: row.began_at):
        corrected = []
        while left and left[-1].posted_at < hour:
            corrected.append(left.pop())
        if corrected:
            at = int(corrected[-1].posted_at // HOUR_S) * HOUR_S
            yield _chunk(writer.corrections(corrected), sum(c.cost_nanos for c in corrected), at)
        for some in _slices(rows):
            yield _chunk(writer.usage(some), sum(map(_billed, some)), hour)
    if left:
        at = int(left[0].posted_at // HOUR_S) * HOUR_S
        yield _chunk(writer.corrections(left[::-1]), sum(c.cost_nanos for c in left), at)


def _chunk(data: bytes, cost_nanos: int, hour: int) -> Chunk:
    return Chunk(data, data.count(b"\n"), cost_nanos, hour_token(hour + HOUR_S))


def _slices(rows: Iterator[HourSum]) -> Iterator[list[HourSum]]:
    some: list[HourSum] = []
    for row in rows:
        some.append(row)
        if len(some) == FOCUS_ROWS:
            yield some
            some = []
    if some:
        yield some


def _billed(row: HourSum) -> int:
    tokens = row.input_nanos + row.cached_nanos + row.output_nanos
    return tokens + row.service_nanos + row.load_nanos


def spans(scope: Scope, book: PriceBook) -> Iterator[Scope]:
    """The scope in pieces that have no more than MAX_CHANGES of prices each."""
    _, changes = changes_of(scope, book)
    if len(changes) <= MAX_CHANGES or scope.to_at - scope.from_at <= HOUR_S:
        yield scope
        return
    middle = sorted(changes)[len(changes) // 2]
    cut = max(scope.from_at, min(scope.to_at, middle // HOUR_S * HOUR_S))
    if cut in (scope.from_at, scope.to_at):
        cut = (scope.from_at + HOUR_S) // HOUR_S * HOUR_S
    if not scope.from_at < cut < scope.to_at:
        yield scope
        return
    yield from spans(replace(scope, to_at=cut), book)
    yield from spans(replace(scope, from_at=cut), book)


def changes_of(scope: Scope, book: PriceBook) -> tuple[float, list[float]]:
    """When prices change for what was posted in the scope, and an instant before that. A request
    came at most a day before its posting."""
    before_at = scope.from_at - DAY_S
    return before_at, book.changes(before_at, scope.to_at, scope.tenant_id or None)
