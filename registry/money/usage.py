"""Sums of usage for the operator's pages: by tenant, key, model, day or hour, exact to the unit.

The same figures as `exports.totals` has of the postings, made of roll-ups as far as these go and of
the postings behind their mark, in one snapshot: a posting counts once. A span is laid out with the
longest roll-ups that fit into it, so that a year costs little more than a week; the database adds
up, and of tenants, keys and models only the costliest leave it. What retention has deleted is still
in the roll-ups. Spans begin and end with whole hours, or reach beyond all postings.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Select,
    case,
    func,
    literal,
    select,
    union_all,
)
from sqlalchemy.orm import Session

from registry.accounts.api_keys import ID_SLICE, ApiKey
from registry.accounts.tenants import Tenant
from registry.errors import InvalidValue
from registry.money.ledger import CORRECTION, PostingRow, span_start, whole_sum
from registry.money.rollups import (
    ALL_SPANS_S,
    DAY_S,
    HOUR_S,
    ONLY_ROW,
    LedgerStateRow,
    RollupRow,
)

OWNERS: Final = ("tenant", "key", "model")
BY: Final = (*OWNERS, "day", "hour")
MAX_ROWS = 20_000
_WIDTHS: Final = {"day": DAY_S, "hour": HOUR_S}


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """[from_at, to_at), and of these tenants, keys and models where some are named."""

    from_at: int
    to_at: int
    tenant_ids: Collection[str] | None = None
    key_ids: Collection[str] | None = None
    models: Collection[str] | None = None


class Amounts(NamedTuple):
    """Corrections are in the costs and no requests; `prompt_tokens` has `cached_tokens` in it;
    `num_rows` has corrections and failed requests in it: what an export would have."""

    num_requests: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nanos: int = 0
    num_rows: int = 0

    def plus(self, other: Sequence[int]) -> "Amounts":
        """Both together."""
        return Amounts(*(a + int(b) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Top:
    """The costliest of many, the costliest first; `total` and `num` are of all of them."""

    lines: list[tuple[str, Amounts]]
    total: Amounts
    num: int


def total(session: Session, wanted: UsageFilter) -> Amounts:
    """Of all of it."""
    return sum_of(session, wanted).get("", Amounts())


def sum_of(session: Session, wanted: UsageFilter, by: str = "") -> dict[str, Amounts]:
    """Sums by one of BY; "" is apart by nothing. Days and hours are instants, as text, and only
    those with something. Raises InvalidValue where there are more than MAX_ROWS."""
    _check(by)
    found = session.execute(_sums(session, wanted, by).limit(MAX_ROWS + 1)).all()
    if len(found) > MAX_ROWS:
        raise InvalidValue(f"the result has more than {MAX_ROWS} rows: ask for a shorter time")
    return {str(ref): Amounts._make(map(int, amounts)) for ref, *amounts in found}


def top(session: Session, wanted: UsageFilter, by: str, limit: int) -> Top:
    """The costliest by one of OWNERS, at most `limit`; those that cost the same by their number of
    requests. The others are only in the total."""
    _check(by)
    sums = _sums(session, wanted, by).cte("sums")
    columns = [sums.c[name] for name in Amounts._fields]
    order = (sums.c.cost_nanos.desc(), sums.c.num_requests.desc(), sums.c.ref)
    first = select(literal(0).label("num"), sums.c.ref, *columns).order_by(*order).limit(limit)
    added = (func.coalesce(whole_sum(column), 0) for column in columns)
    whole = select(func.count(), literal(""), *added).select_from(sums)
    found: Any = session.execute(union_all(select(first.subquery()), whole)).all()
    *lines, (num, _, *amounts) = found
    listed = [(str(ref), Amounts._make(map(int, each))) for _, ref, *each in lines]
    return Top(listed, Amounts._make(map(int, amounts)), int(num))


def cost_series(
    session: Session, wanted: UsageFilter, by: str, refs: Sequence[str], unit: str
) -> dict[str, dict[int, int]]:
    """Nano-units by day or hour (their beginning) of each of these; "": of all others together."""
    found: dict[str, dict[int, int]] = {}
    whole: dict[int, int] = {}
    for table, span_s, which in _tables(session, wanted, unit):
        at, own = (_key(session, table, span_s, each).label(each) for each in (unit, by))
        cost = whole_sum(table.cost_nanos)
        rows = _of_owners(select(at, cost).where(*which), wanted, table)
        for began_at, nanos in session.execute(rows.group_by(at)):
            whole[int(began_at)] = whole.get(int(began_at), 0) + int(nanos)
        if not refs:
            continue
        # Apart from the others: an index that has the owner need not look at their rows. One begins
        # with the tenant, and is used where one tenant is asked for at a time.
        alone = by == "tenant" and table is RollupRow
        groups = [own == ref for ref in refs] if alone else [own.in_(refs)]
        parts = [rows.add_columns(own).where(group).group_by(at, own) for group in groups]
        for began_at, nanos, ref in session.execute(union_all(*parts)):
            costs = found.setdefault(str(ref), {})
            costs[int(began_at)] = costs.get(int(began_at), 0) + int(nanos)
    apart = list(found.values())
    found[""] = {at: nanos - sum(one.get(at, 0) for one in apart) for at, nanos in whole.items()}
    costly = {ref: {at: one for at, one in costs.items() if one} for ref, costs in found.items()}
    return {ref: costs for ref, costs in costly.items() if costs}


def _check(by: str) -> None:
    if by and by not in BY:
        raise InvalidValue(f"usage can be grouped by {', '.join(BY)}")


def _sums(session: Session, wanted: UsageFilter, by: str) -> Select[Any]:
    """(ref, *Amounts) of everything, added up by the database in one pass."""
    parts = []
    for table, span_s, which in _tables(session, wanted, by):
        number = table.num_postings if table is RollupRow else literal(1)
        amounts = {
            "num_requests": case((table.outcome == CORRECTION, 0), else_=number),
            "num_failed": case((table.outcome == "failed", number), else_=0),
            "prompt_tokens": table.prompt_tokens,
            "cached_tokens": table.cached_tokens,
            "completion_tokens": table.completion_tokens,
            "cost_nanos": table.cost_nanos,
            "num_rows": number,
        }
        ref = _key(session, table, span_s, by).label("ref")
        if by in OWNERS:
            query = select(ref, *(column.label(name) for name, column in amounts.items()))
        else:  # few groups, in the order of the index
            added = (whole_sum(one).label(name) for name, one in amounts.items())
            query = select(ref, *added).group_by(ref)
        parts.append(_of_owners(query.where(*which), wanted, table))
    each = union_all(*parts).subquery()
    added = (whole_sum(each.c[name]).label(name) for name in Amounts._fields)
    return select(each.c.ref, *added).group_by(each.c.ref)


def _tables(
    session: Session, wanted: UsageFilter, by: str
) -> Iterator[tuple[Any, int, Sequence[ColumnElement[bool]]]]:
    """What to add up: (table, a roll-up's span, which rows)."""
    finest = _WIDTHS.get(by, max(ALL_SPANS_S))
    spans = wanted if by in _WIDTHS else _widened(session, wanted)
    widths = sorted((each for each in ALL_SPANS_S if each <= finest), reverse=True)
    for span_s, from_at, to_at in _pieces(spans.from_at, spans.to_at, widths):
        row = RollupRow
        yield row, span_s, (row.span_s == span_s, row.began_at >= from_at, row.began_at < to_at)
    # Few, so they are found by their number. As a sum the instant can't lure a database into
    # walking its index of all postings of the span.
    rolled_seq = session.get_one(LedgerStateRow, ONLY_ROW).rolled_seq
    posted_at = PostingRow.posted_at + 0.0
    later = (posted_at >= wanted.from_at, posted_at < wanted.to_at)
    yield PostingRow, 0, (PostingRow.seq > rolled_seq, *later)


def _widened(session: Session, wanted: UsageFilter) -> UsageFilter:
    """The same roll-ups, with ends at the longest spans' where there is nothing beyond."""
    longest = max(ALL_SPANS_S)
    days = RollupRow.span_s == DAY_S
    first = session.scalar(select(func.min(RollupRow.began_at)).where(days))
    last = session.scalar(select(func.max(RollupRow.began_at)).where(days))
    if first is None or last is None:
        return wanted
    from_at = first // longest * longest if wanted.from_at <= first else wanted.from_at
    to_at = (last // longest + 1) * longest if wanted.to_at >= last + DAY_S else wanted.to_at
    return replace(wanted, from_at=from_at, to_at=max(from_at, to_at))


def _pieces(from_at: int, to_at: int, widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """[from_at, to_at) as (width, from, to): the widest where they fit, what is left at the ends
    by the next ones."""
    width, *finer = widths
    if not finer:
        if from_at < to_at:
            yield width, from_at, to_at
        return
    first, last = -(-from_at // width) * width, to_at // width * width
    if first >= last:
        yield from _pieces(from_at, to_at, finer)
        return
    yield width, first, last
    yield from _pieces(from_at, first, finer)
    yield from _pieces(last, to_at, finer)


def _of_owners(query: Select[Any], wanted: UsageFilter, table: Any) -> Select[Any]:
    """The tenancy filter of everything that is read here."""
    owners = (("tenant", wanted.tenant_ids), ("key", wanted.key_ids), ("model", wanted.models))
    for owner, names in owners:
        if names is not None:
            query = query.where(_owner(table, owner).in_(names))
    return query


def _owner(table: Any, by: str) -> Any:
    """Of postings as an expression, for the same reason as their instants in `_tables`."""
    column = {"tenant": table.tenant_id, "key": table.key_id, "model": table.model}[by]
    return column if table is RollupRow else column.concat("")


def _key(session: Session, table: Any, span_s: int, by: str) -> Any:
    if not by:
        return literal("")
    if by not in _WIDTHS:
        return _owner(table, by)
    width_s = _WIDTHS[by]
    if table is RollupRow:  # as it stands there it comes in the index's order: nothing is sorted
        at = table.began_at
        return at if span_s == width_s else at // width_s * width_s
    return span_start(session, width_s)


def names(session: Session, by: str, refs: Collection[str]) -> dict[str, str]:
    """What tenants and keys of these ids are called; neither is ever deleted."""
    row: Any = {"tenant": Tenant, "key": ApiKey}.get(by)
    if row is None:
        return {ref: ref for ref in refs}
    found: dict[str, str] = {}
    ids = sorted(refs)
    for start in range(0, len(ids), ID_SLICE):
        query = select(row.id, row.name).where(row.id.in_(ids[start : start + ID_SLICE]))
        found.update((ref, name) for ref, name in session.execute(query))
    return {ref: found.get(ref, ref) for ref in ids}
