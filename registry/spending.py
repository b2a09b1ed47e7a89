"""What was billed since the beginning of a period: where budgets begin their count.

Days that are summed up come from the roll-ups, the rest from the postings behind their mark: a
month costs as many rows as it has keys, models and days, not as many as it has postings. All of one
snapshot, so no posting counts twice or not at all.
"""

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from registry.ledger import PostingRow, SpendRow
from registry.rollups import DAY_S, LedgerStateRow, RollupRow


def spend_since(
    session: Session, since_at: float, before_at: float | None = None
) -> list[SpendRow]:
    """By tenant, key and model, from `since_at` (midnight in UTC) on; `before_at`: up to there."""
    sums: dict[tuple[str, str, str], int] = {}
    rolled = session.scalars(select(LedgerStateRow.rolled_seq)).one()
    days = (RollupRow.span_s == DAY_S, RollupRow.began_at >= int(since_at))
    behind = (PostingRow.seq > rolled, PostingRow.posted_at >= since_at)
    _add(sums, session, RollupRow, days, 1)
    _add(sums, session, PostingRow, behind, 1)
    if before_at is not None:
        _add(sums, session, PostingRow, (PostingRow.posted_at >= max(since_at, before_at),), -1)
    return [SpendRow(*owner, nanos) for owner, nanos in sums.items() if nanos]


def _add(
    sums: dict[tuple[str, str, str], int],
    session: Session,
    table: type[RollupRow] | type[PostingRow],
    which: tuple[ColumnElement[bool], ...],
    sign: int,
) -> None:
    owner = (table.tenant_id, table.key_id, table.model)
    rows = session.execute(
        select(*owner, func.sum(table.cost_nanos))
        .where(*which, table.cost_nanos != 0)
        .group_by(*owner)
    )
    for tenant_id, key_id, model, nanos in rows:
        key = (tenant_id, key_id, model)
        sums[key] = sums.get(key, 0) + sign * int(nanos)
