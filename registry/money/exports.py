"""Postings as exports, lists and bills read them: whose, which, in what order, as of when.

`Scope` is the one filter: what may be seen of whom is decided where a Scope is made, and every
query here goes through `_where`. `through_seq` fixes a state of the ledger: with it a query gives
the same rows for ever, however much is posted meanwhile (as long as retention keeps them).

    rows(...)        single postings by (posted_at, request_id); PostgreSQL: a cursor on the server;
                     SQLite: pages, so that no long transaction holds back its checkpoints
    hours(...)       sums by hour, key, model and span between price changes, for bills by meter
    corrections(...) corrections beside the instant of what they correct
    totals(...)      sums by a choice of columns
    bounds(...)      the span in which there is something

What this file does not do: formats, prices, whose filter it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Float,
    Integer,
    Select,
    case,
    cast,
    func,
    select,
    tuple_,
)
from sqlalchemy.orm import Session, aliased

from registry.money.ledger import CORRECTION, Posting, PostingRow, span_start, whole, whole_sum

BATCH_ROWS = 5000
HOUR_S = 3600
ENCODER_KINDS = ("embedding", "classify", "rerank", "score")
COLUMNS = (*(field.name for field in fields(Posting)), "tenant_name", "key_name")
"""What `rows` gives, in this order."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which postings: of [from_at, to_at), and of one tenant, key or model where it is named."""

    from_at: float
    to_at: float
    tenant_id: str = ""
    key_id: str = ""
    model: str = ""


class HourSum(NamedTuple):
    """What one key used of one model in an hour, between two changes of prices. Amounts by meter;
    `segment` counts the changes of prices before its requests came. A tuple: exports have millions.
    """

    began_at: int
    tenant_id: str
    key_id: str
    model: str
    is_encoder: bool
    segment: int
    tenant_name: str
    key_name: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    service_us: int
    load_us: int
    input_nanos: int
    cached_nanos: int
    output_nanos: int
    service_nanos: int
    load_nanos: int
    list_nanos: int
    num_postings: int


HOUR_AMOUNTS = HourSum._fields[8:]
"""Those of its fields that add up."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """A correction, and when what it corrects was posted (0: it is not kept any more)."""

    request_id: str
    corrects: str
    tenant_id: str
    key_id: str
    model: str
    tenant_name: str
    key_name: str
    cost_nanos: int
    posted_at: float
    corrected_at: float


def rows(
    session: Session, scope: Scope, through_seq: int, after: tuple[float, str] | None = None
) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Batches of tuples of COLUMNS in order of (posted_at, request_id), behind `after`."""
    table = PostingRow.__table__
    order = (PostingRow.posted_at, PostingRow.request_id)
    query = _where(select(*(table.c[name] for name in COLUMNS)), scope, through_seq)
    query = query.order_by(*order)
    on_server = session.get_bind().dialect.name == "postgresql"
    if on_server:
        if after is not None:
            query = query.where(tuple_(*order) > tuple_(*after))
        options = {"stream_results": True, "max_row_buffer": BATCH_ROWS}
        found = session.connection().execute(query, execution_options=options)
        yield from found.partitions(BATCH_ROWS)
        return
    posted_at, request_id = COLUMNS.index("posted_at"), COLUMNS.index("request_id")
    while True:
        page = query if after is None else query.where(tuple_(*order) > tuple_(*after))
        batch = session.connection().execute(page.limit(BATCH_ROWS)).all()
        session.rollback()
        if batch:
            yield batch
        if len(batch) < BATCH_ROWS:
            return
        after = (batch[-1][posted_at], batch[-1][request_id])


def bounds(session: Session, scope: Scope, through_seq: int) -> tuple[float, float] | None:
    """When the first and the last were posted; None where there are none."""
    posted_at = PostingRow.posted_at
    first = _where(select(func.min(posted_at)), scope, through_seq)
    last = _where(select(func.max(posted_at)), scope, through_seq)
    ends = (session.scalar(first), session.scalar(last))
    return None if ends[0] is None or ends[1] is None else (ends[0], ends[1])


def hours(
    session: Session, scope: Scope, through_seq: int, changes: Sequence[float], max_us: int
) -> Iterator[HourSum]:
    """In order of hour, tenant, key and model. No failed postings and no corrections.

    `changes`: instants at which prices change, ascending; a request belongs to the segment in which
    it arrived. `max_us`: of service, and of loading, no more is billed to a request.
    """
    row = PostingRow
    hour = span_start(session, HOUR_S).label("hour")
    is_encoder = case((row.kind.in_(ENCODER_KINDS), 1), else_=0).label("is_encoder")
    segment = _segment(changes).label("segment")
    keys = (hour, row.tenant_id, row.key_id, row.model, is_encoder, segment)
    query = select(*keys, *_meters(session, max_us)).where(
        row.outcome.not_in(("failed", CORRECTION))
    )
    query = _where(query, scope, through_seq).group_by(*keys).order_by(*keys)
    options = {"stream_results": True, "max_row_buffer": BATCH_ROWS}
    found = session.connection().execute(query, execution_options=options)
    for batch in found.partitions(BATCH_ROWS):
        for values in batch:
            yield _hour_sum(values)


def sums(
    session: Session,
    scope: Scope,
    through_seq: int,
    changes: Sequence[float],
    max_us: int,
    after_seq: int = 0,
) -> list[HourSum]:
    """As `hours`, but over the whole span and all keys: what an invoice is made of. Of postings
    above `after_seq`; `began_at` 0, keys and names empty, in order of model."""
    row = PostingRow
    is_encoder = case((row.kind.in_(ENCODER_KINDS), 1), else_=0).label("is_encoder")
    segment = _segment(changes).label("segment")
    keys = (row.tenant_id, row.model, is_encoder, segment)
    query = select(*keys, *_meters(session, max_us)).where(
        row.outcome.not_in(("failed", CORRECTION)), row.seq > after_seq
    )
    query = _where(query, scope, through_seq).group_by(*keys)
    query = query.order_by(row.model, is_encoder, segment)
    return [
        _hour_sum((0, tenant, "", model, encoder, number, *rest))
        for tenant, model, encoder, number, *rest in session.execute(query)
    ]


def corrections(
    session: Session, scope: Scope, through_seq: int, after_seq: int = 0
) -> list[Corrected]:
    """In order of posting."""
    row, wrong = PostingRow, aliased(PostingRow)
    columns: list[Any] = [
        row.request_id,
        row.corrects,
        row.tenant_id,
        row.key_id,
        row.model,
        row.tenant_name,
        row.key_name,
        row.cost_nanos,
        row.posted_at,
        func.coalesce(wrong.posted_at, 0.0),
    ]
    query = (
        select(*columns)
        .outerjoin(wrong, wrong.request_id == row.corrects)
        .where(row.outcome == CORRECTION, row.seq > after_seq)
        .order_by(row.posted_at, row.request_id)
    )
    found = session.execute(_where(query, scope, through_seq))
    return [Corrected(*tuple(values)) for values in found]


def totals(
    session: Session, scope: Scope, through_seq: int, by: Sequence[str] = ()
) -> list[tuple[Any, ...]]:
    """Rows of the named columns, then: postings, prompt, cached and completion tokens, nano-units
    billed. Corrections are in all but the first."""
    table = PostingRow.__table__
    keys = [table.c[name] for name in by]
    ordinary = case((PostingRow.outcome == CORRECTION, 0), else_=1)
    counted = (ordinary, *(table.c[name] for name in _SUMMED))
    query = select(*keys, *(func.coalesce(whole_sum(one), 0) for one in counted))
    query = _where(query, scope, through_seq)
    if keys:
        query = query.group_by(*keys).order_by(*keys)
    return [tuple(row) for row in session.execute(query)]


_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


def _where(query: Select[Any], scope: Scope, through_seq: int) -> Select[Any]:
    """The tenancy filter of everything that is read here."""
    query = query.where(
        PostingRow.posted_at >= scope.from_at,
        PostingRow.posted_at < scope.to_at,
        PostingRow.seq <= through_seq,
    )
    if scope.tenant_id:
        query = query.where(PostingRow.tenant_id == scope.tenant_id)
    if scope.key_id:
        query = query.where(PostingRow.key_id == scope.key_id)
    if scope.model:
        query = query.where(PostingRow.model == scope.model)
    return query


def _meters(session: Session, max_us: int) -> list[ColumnElement[Any]]:
    row = PostingRow
    is_hit = row.outcome == "cache_hit"
    fresh = case((is_hit, 0), else_=row.prompt_tokens - row.cached_tokens)
    read = case((is_hit, row.prompt_tokens + row.completion_tokens), else_=row.cached_tokens)
    made = case((is_hit, 0), else_=row.completion_tokens)
    seconds = [
        case((is_hit, 0), else_=_micros(session, column, max_us))
        for column in (row.service_s, row.load_s)
    ]
    other = row.cached_nanos + row.output_nanos + row.service_nanos + row.load_nanos
    # Postings made before there were parts have their whole cost on the first meter.
    nanos = (
        row.cost_nanos - other,
        row.cached_nanos,
        row.output_nanos,
        row.service_nanos,
        row.load_nanos,
        row.list_nanos,
    )
    summed = [whole_sum(one) for one in (fresh, read, made, *seconds, *nanos)]
    return [func.max(row.tenant_name), func.max(row.key_name), *summed, func.count()]


def _segment(changes: Sequence[float]) -> ColumnElement[Any]:
    """How many of the changes were before the request came."""
    came_at = case((PostingRow.arrived_at > 0, PostingRow.arrived_at), else_=PostingRow.posted_at)
    if not changes:
        return cast(PostingRow.seq * 0, Integer)
    return case(*((came_at < at, n) for n, at in enumerate(changes)), else_=len(changes))


def _micros(session: Session, seconds: Any, max_us: int) -> ColumnElement[Any]:
    """As gateway/pricing/policy/pricing.py counts them: one product of doubles, rounded down."""
    micros = whole(session, cast(seconds, Float(53)) * 1e6)
    return case((micros > max_us, max_us), (micros < 0, 0), else_=micros)


def _hour_sum(values: Sequence[Any]) -> HourSum:
    began, tenant, key, model, is_encoder, segment, *rest = values
    return HourSum(int(began), tenant, key, model, bool(is_encoder), int(segment), *rest)
