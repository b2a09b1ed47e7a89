"""How long postings are kept. Roll-ups stay for ever; what they were made from may go.

    keep_from   from now on, postings before this day may be deleted: refused while any of them is
                not in the roll-ups
    delete      a slice of them, oldest first; call until it returns 0

The triggers on the table refuse every other DELETE. Ten to the ninth rows: a slice is one short
transaction that nobody waits for, found by the index on time; roll-ups answer for what is gone.
PostgreSQL's partitions would drop a month at once, but a unique key must then hold the partition's
column, and that a request is posted once, whenever, is what the ledger stands on.

A journal that lay aside for longer than postings are kept must not be brought in: its requests
would be posted a second time.
"""

from sqlalchemy import delete as sql_delete
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from registry import audit
from registry.errors import RegistryError
from registry.ledger import PostingRow
from registry.rollups import DAY_S, ONLY_ROW, LedgerStateRow

MIN_KEPT_DAYS = 35
"""A month's bill is made from postings."""
SLICE_ROWS = 5_000


def keep_from(session: Session, day_at: float, *, now_at: float) -> None:
    """Postings before that day (an instant in it, UTC) may be deleted. Raises RegistryError."""
    kept_from = float(int(day_at // DAY_S) * DAY_S)
    row = session.get_one(LedgerStateRow, ONLY_ROW, with_for_update=True)
    if kept_from > now_at - MIN_KEPT_DAYS * DAY_S:
        raise RegistryError(f"the last {MIN_KEPT_DAYS} days of postings are always kept")
    if kept_from < row.kept_from:
        raise RegistryError("postings before a later day were given up already")
    waiting = session.scalar(
        select(func.count())
        .select_from(PostingRow)
        .where(PostingRow.seq > row.rolled_seq, PostingRow.posted_at < kept_from)
    )
    if waiting:
        raise RegistryError(f"{waiting} postings before that day are not in the roll-ups yet")
    before = {"kept_from": row.kept_from}
    session.execute(update(LedgerStateRow).values(kept_from=kept_from))
    audit.record(session, now_at, "ledger.keep", "postings", before, {"kept_from": kept_from})


def delete(session: Session, slice_rows: int = SLICE_ROWS) -> int:
    """Delete a slice of what may go; how many were deleted."""
    row = session.get_one(LedgerStateRow, ONLY_ROW)
    oldest = (
        select(PostingRow.seq)
        .where(PostingRow.posted_at < row.kept_from, PostingRow.seq <= row.rolled_seq)
        .order_by(PostingRow.posted_at, PostingRow.request_id)
        .limit(slice_rows)
    )
    seqs = list(session.scalars(oldest))
    if not seqs:
        return 0
    session.execute(
        sql_delete(PostingRow).where(
            PostingRow.seq.in_(oldest.scalar_subquery()), PostingRow.posted_at < row.kept_from
        ),
        execution_options={"synchronize_session": False},
    )
    return len(seqs)
