"""Usage by minute, hour or day: sums for a tenant that asks how much it has used.

Hours and days come from roll-ups, and what is not in those yet from postings, so that it is cheap
whatever the span, and goes further back than postings are kept; minutes come from postings alone.
Postings of failed requests, which cost nothing, are left out; corrections are in the costs, and no
requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, case, cast, literal, select
from sqlalchemy.orm import Session

from registry.errors import InvalidValue
from registry.money.ledger import CORRECTION, PostingRow, span_start, whole_sum
from registry.money.rollups import ONLY_ROW, SPANS_S, LedgerStateRow, RollupRow

MINUTE_S = 60
MAX_ROWS = 20_000
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BucketQuery:
    """One tenant's, of [from_at, to_at) in whole buckets of `width_s` (a minute, an hour or a day).
    Of these keys, models and kinds where some are named; apart by `by`: "key_id", "model"."""

    tenant_id: str
    from_at: int
    to_at: int
    width_s: int
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    by: tuple[str, ...] = ()


class BucketSum(NamedTuple):
    """`key_id`, `model`: "" where sums are not apart by them. Amounts of money in nano-units, by
    what they are for; `prompt_tokens` has `cached_tokens` in it."""

    began_at: int
    key_id: str
    model: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    cached_nanos: int
    output_nanos: int
    service_nanos: int
    load_nanos: int


_SUMMED = BucketSum._fields[4:]


def bucket_sums(session: Session, query: BucketQuery) -> list[BucketSum]:
    """In order of bucket, key and model; buckets without any are left out. Raises InvalidValue
    where there are more than MAX_ROWS."""
    rolled_seq = 0
    found: list[Sequence[Any]] = []
    if query.width_s in SPANS_S:
        rolled_seq = session.get_one(LedgerStateRow, ONLY_ROW).rolled_seq
        row, ordinary = RollupRow, RollupRow.num_postings
        which = (
            row.span_s == query.width_s,
            row.began_at >= query.from_at,
            row.began_at < query.to_at,
        )
        found += _rows(session, query, row, row.began_at, ordinary, which)
    began_at = span_start(session, query.width_s)
    later = (
        PostingRow.seq > rolled_seq,
        PostingRow.posted_at >= query.from_at,
        PostingRow.posted_at < query.to_at,
    )
    found += _rows(session, query, PostingRow, began_at, literal(1), later)
    sums: dict[tuple[Any, ...], list[int]] = {}
    for values in found:
        amounts = sums.setdefault(tuple(values[:3]), [0] * (len(_SUMMED) + 1))
        for place, amount in enumerate(values[3:]):
            amounts[place] += int(amount)
    return [
        BucketSum(int(at), key, model, *sums[at, key, model]) for at, key, model in sorted(sums)
    ]


def _rows(
    session: Session,
    query: BucketQuery,
    row: Any,
    began_at: Any,
    ordinary: Any,
    which: Sequence[ColumnElement[bool]],
) -> list[Sequence[Any]]:
    began_at = cast(began_at, BigInteger).label("bucket")
    keys = [
        (getattr(row, name) if name in query.by else literal("")).label(f"by_{name}")
        for name in ("key_id", "model")
    ]
    counts = [case((row.outcome == CORRECTION, 0), else_=ordinary)]
    counts += [getattr(row, name) for name in _SUMMED]
    asked = select(began_at, *keys, *(whole_sum(one) for one in counts)).where(
        row.tenant_id == query.tenant_id, row.outcome != FAILED, *which
    )
    for name, wanted in (("key_id", query.key_ids), ("model", query.models), ("kind", query.kinds)):
        if wanted:
            asked = asked.where(getattr(row, name).in_(wanted))
    found = session.execute(asked.group_by(began_at, *keys).limit(MAX_ROWS + 1)).all()
    if len(found) > MAX_ROWS:
        raise InvalidValue(
            f"the result has more than {MAX_ROWS} rows: ask for a shorter time or fewer groups"
        )
    return [tuple(each) for each in found]
