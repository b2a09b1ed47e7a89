"""Sums of usage for the operator's pages: by tenant, key, model, day or hour, exact to the unit.

The same figures as `exports.totals` has of the postings, made of roll-ups as far as these go and of
the postings behind their mark, in one snapshot: a posting counts once. What retention has deleted
is still in the roll-ups. Spans begin and end with whole hours, or reach beyond the newest posting.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Select, case, cast, func, literal, select
from sqlalchemy.orm import Session

from registry.api_keys import ID_SLICE, ApiKey
from registry.errors import InvalidValue
from registry.ledger import CORRECTION, PostingRow
from registry.rollups import DAY_S, HOUR_S, ONLY_ROW, LedgerStateRow, RollupRow
from registry.tenants import Tenant

BY: Final = ("tenant", "key", "model", "day", "hour")
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


def total(session: Session, wanted: UsageFilter) -> Amounts:
    """Of all of it."""
    return sum_of(session, wanted).get(("", ""), Amounts())


def sum_of(
    session: Session, wanted: UsageFilter, by: str = "", part: str = ""
) -> dict[tuple[str, str], Amounts]:
    """Sums by (by, part), of BY; "" is apart by nothing. Days and hours are instants, as text, and
    only those with something. Raises InvalidValue where there are more than MAX_ROWS."""
    if any(one and one not in BY for one in (by, part)):
        raise InvalidValue(f"usage is apart by {', '.join(BY)}")
    rolled_seq = session.get_one(LedgerStateRow, ONLY_ROW).rolled_seq
    sums: dict[tuple[str, str], Amounts] = {}
    hourly = "hour" in (by, part)
    for span_s, from_at, to_at in _pieces(wanted, hourly):
        which = (
            RollupRow.span_s == span_s,
            RollupRow.began_at >= from_at,
            RollupRow.began_at < to_at,
        )
        _add(sums, _rows(session, wanted, RollupRow, by, part, which))
    _add(sums, _rows(session, wanted, PostingRow, by, part, _later(wanted, rolled_seq)))
    return sums


def cost_series(
    session: Session, wanted: UsageFilter, by: str, refs: Sequence[str], unit: str
) -> dict[str, dict[int, int]]:
    """Nano-units by day or hour (their beginning) of each of these; "": of all others together."""
    rolled_seq = session.get_one(LedgerStateRow, ONLY_ROW).rolled_seq
    tables: list[tuple[Any, Sequence[ColumnElement[bool]]]] = [
        (RollupRow, (RollupRow.span_s == span_s, RollupRow.began_at >= from_at,
                     RollupRow.began_at < to_at))
        for span_s, from_at, to_at in _pieces(wanted, unit == "hour")
    ]  # fmt: skip
    tables.append((PostingRow, _later(wanted, rolled_seq)))
    found: dict[str, dict[int, int]] = {}
    for table, which in tables:
        at = _key(session, table, unit).label("at")
        own = _key(session, table, by)
        ref = (case((own.in_(refs), own), else_="") if refs else literal("")).label("ref")
        query = select(ref, at, cast(func.sum(table.cost_nanos), BigInteger)).where(*which)
        query = _of_owners(query, wanted, table).group_by(ref, at)
        for name, began_at, cost in session.execute(query):
            costs = found.setdefault(str(name), {})
            costs[int(began_at)] = costs.get(int(began_at), 0) + int(cost)
    return found


def _later(wanted: UsageFilter, rolled_seq: int) -> Sequence[ColumnElement[bool]]:
    """Postings that are in no roll-up yet: few, so they are found by their number. As a sum the
    instant can't lure a database into walking its index of all postings of the span."""
    posted_at = PostingRow.posted_at + 0.0
    return (PostingRow.seq > rolled_seq, posted_at >= wanted.from_at, posted_at < wanted.to_at)


def _of_owners(query: Select[Any], wanted: UsageFilter, table: Any) -> Select[Any]:
    """The tenancy filter of everything that is read here."""
    owners = (("tenant", wanted.tenant_ids), ("key", wanted.key_ids), ("model", wanted.models))
    for owner, names in owners:
        if names is not None:
            query = query.where(_owner(table, owner).in_(names))
    return query


def _pieces(wanted: UsageFilter, hourly: bool) -> Iterator[tuple[int, int, int]]:
    """Whole days by day, what is left at the ends by hour."""
    first, last = -(-wanted.from_at // DAY_S) * DAY_S, wanted.to_at // DAY_S * DAY_S
    if hourly or first >= last:
        yield HOUR_S, wanted.from_at, wanted.to_at
        return
    yield DAY_S, first, last
    if wanted.from_at < first:
        yield HOUR_S, wanted.from_at, first
    if last < wanted.to_at:
        yield HOUR_S, last, wanted.to_at


def _rows(
    session: Session,
    wanted: UsageFilter,
    table: Any,
    by: str,
    part: str,
    which: Sequence[ColumnElement[bool]],
) -> Sequence[Any]:
    keys = [_key(session, table, one).label(f"by_{place}") for place, one in enumerate((by, part))]
    rolled = table is RollupRow
    number = table.num_postings if rolled else literal(1)
    counts = (
        case((table.outcome == CORRECTION, 0), else_=number),
        case((table.outcome == "failed", number), else_=0),
        table.prompt_tokens,
        table.cached_tokens,
        table.completion_tokens,
        table.cost_nanos,
        number,
    )
    query = select(*keys, *(cast(func.sum(one), BigInteger) for one in counts)).where(*which)
    query = _of_owners(query, wanted, table)
    found = session.execute(query.group_by(*keys).limit(MAX_ROWS + 1)).all()
    if len(found) > MAX_ROWS:
        raise InvalidValue(f"more than {MAX_ROWS} sums: ask for a shorter time")
    return found


def _owner(table: Any, by: str) -> Any:
    """Of postings as an expression, for the same reason as in `_later`."""
    column = {"tenant": table.tenant_id, "key": table.key_id, "model": table.model}[by]
    return column if table is RollupRow else column.concat("")


def _key(session: Session, table: Any, by: str) -> Any:
    if not by:
        return literal("")
    if by not in _WIDTHS:
        return _owner(table, by)
    width_s = _WIDTHS[by]
    if table is RollupRow:
        return table.began_at // width_s * width_s
    # Not every build of SQLite has floor(), and PostgreSQL's cast would round.
    number = table.posted_at / width_s
    whole = number if session.get_bind().dialect.name == "sqlite" else func.floor(number)
    return cast(whole, BigInteger) * width_s


def _add(sums: dict[tuple[str, str], Amounts], found: Sequence[Any]) -> None:
    for by, part, *amounts in found:
        if amounts[-1] is not None:  # a sum of no rows
            key = (str(by), str(part))
            here, before = Amounts._make(map(int, amounts)), sums.get(key)
            sums[key] = here if before is None else before.plus(here)


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
