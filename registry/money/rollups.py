"""Sums of postings by hour and by day, by week and by four weeks: derived, kept up behind the
postings, made anew at will.

    roll      what came since the last time is added, in slices; sums and the mark up to which they
              go (ledger_state.rolled_seq) move in one transaction, so each posting counts once
    rebuild   what retention has kept is summed anew
    check     compares the two

Everything is integers (times are microseconds, each posting's rounded once), so that sums are the
same in whatever order they are made. A row tells of one span, tenant, key, model, revision, kind
and outcome, with the names that tenant and key had. It counts at the time of its posting. The long
spans are sums of days, begin with the epoch's, and are there so that sums over months read little.

Roll-ups stay for ever; the postings that they were made from may go:

    keep_postings_from   from now on, postings before this day may be deleted: refused while any of
                         them is not in the roll-ups
    delete_postings      a slice of them, oldest first; call until it returns 0

The triggers on the table refuse every other DELETE. Ten to the ninth rows: a slice is one short
transaction that nobody waits for, found by the index on time; roll-ups answer for what is gone.
PostgreSQL's partitions would drop a month at once, but a unique key must then hold the partition's
column, and that a request is posted once, whenever, is what the ledger stands on. A journal that
lay aside for longer than postings are kept must not be brought in: its requests would be posted a
second time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Index,
    Integer,
    Select,
    String,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Count, Id, Instant, Name, Nanos
from registry.errors import RegistryError
from registry.money.ledger import (
    WRITERS_LOCK,
    PostingRow,
    SpendRow,
    of_tenants,
    span_start,
    whole_sum,
)

HOUR_S = 3600
DAY_S = 86_400
WEEK_S = 7 * DAY_S
SPANS_S = (HOUR_S, DAY_S)
LONG_SPANS_S = (WEEK_S, 4 * WEEK_S)
ALL_SPANS_S = (*SPANS_S, *LONG_SPANS_S)
SLICE_ROWS = 20_000
"""Postings of one transaction at most."""
DELETED_ROWS = 5_000
MIN_KEPT_DAYS = 35
"""A month's bill is made from postings."""
ONLY_ROW = 1


class LedgerStateRow(Base):
    """One row, made by the migration.

    rolled_seq  postings up to here are in the roll-ups
    kept_from   start of a day: postings before it may be deleted (`keep_postings_from`)
    """

    __tablename__ = "ledger_state"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rolled_seq: Mapped[Count]
    kept_from: Mapped[Instant]


class RollupRow(Base):
    """See the module."""

    __tablename__ = "usage_rollups"
    __table_args__ = (Index(None, "tenant_id", "span_s", "began_at"),)

    span_s: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    began_at: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant_id: Mapped[Id] = mapped_column(primary_key=True)
    key_id: Mapped[Id] = mapped_column(primary_key=True)
    model: Mapped[Name] = mapped_column(primary_key=True)
    revision: Mapped[Name] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    outcome: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_name: Mapped[Name]
    key_name: Mapped[Name]
    num_postings: Mapped[Count]
    prompt_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    completion_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]
    input_nanos: Mapped[Nanos]
    cached_nanos: Mapped[Nanos]
    output_nanos: Mapped[Nanos]
    service_nanos: Mapped[Nanos]
    load_nanos: Mapped[Nanos]
    list_nanos: Mapped[Nanos]
    service_us: Mapped[Count]
    prefill_us: Mapped[Count]
    decode_us: Mapped[Count]
    load_us: Mapped[Count]
    queue_us: Mapped[Count]
    ttft_us: Mapped[Count]
    duration_us: Mapped[Count]


KEY = ("span_s", "began_at", "tenant_id", "key_id", "model", "revision", "kind", "outcome")
NAMES = ("tenant_name", "key_name")
COUNTS = (
    *("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "input_nanos"),
    *("cached_nanos", "output_nanos", "service_nanos", "load_nanos", "list_nanos"),
)
TIMES = ("service", "prefill", "decode", "load", "queue", "ttft", "duration")
SUMS = ("num_postings", *COUNTS, *(f"{name}_us" for name in TIMES))


@dataclass(frozen=True, slots=True)
class LedgerState:
    """How far derived things go."""

    rolled_seq: int
    kept_from: float
    num_behind: int
    """Postings that are not in the roll-ups yet."""


def state(session: Session) -> LedgerState:
    """As of this session's transaction."""
    row = session.get_one(LedgerStateRow, ONLY_ROW)
    behind = select(func.count()).select_from(PostingRow).where(PostingRow.seq > row.rolled_seq)
    return LedgerState(row.rolled_seq, row.kept_from, session.scalar(behind) or 0)


def newest_seq(session: Session) -> int:
    """The number up to which every posting is there. In a transaction of its own, which does
    nothing else: on PostgreSQL it waits for postings being committed, and holds others up."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": WRITERS_LOCK})
    return session.scalar(select(func.max(PostingRow.seq))) or 0


def roll(session: Session, upto_seq: int, slice_rows: int = SLICE_ROWS) -> int:
    """Add the next slice of postings up to that number. Returns how many; 0: nothing is left, or
    another process is at it."""
    rolled = _claim(session)
    if rolled is None or rolled >= upto_seq:
        return 0
    later = (PostingRow.seq > rolled, PostingRow.seq <= upto_seq)
    bound = select(PostingRow.seq).where(*later).order_by(PostingRow.seq)
    last = session.scalar(bound.offset(slice_rows - 1).limit(1)) or upto_seq
    num = _add(session, (PostingRow.seq > rolled, PostingRow.seq <= last))
    session.execute(update(LedgerStateRow).values(rolled_seq=last))
    return num


def rebuild(session: Session) -> int:
    """Sum anew what retention has kept. Returns the postings summed; those behind the mark stay
    for `roll`."""
    rolled = _claim(session, wait=True)
    kept_from = session.get_one(LedgerStateRow, ONLY_ROW).kept_from
    days = (RollupRow.span_s.in_(SPANS_S), RollupRow.began_at >= kept_from)
    session.execute(delete(RollupRow).where(*days))
    kept = (PostingRow.seq <= (rolled or 0), PostingRow.posted_at >= kept_from)
    num = _add(session, kept, SPANS_S)
    for span_s in LONG_SPANS_S:  # what began before may be of days whose postings are gone
        session.execute(delete(RollupRow).where(RollupRow.span_s == span_s))
        session.execute(insert(RollupRow).from_select([*KEY, *NAMES, *SUMS], _sums_of_days(span_s)))
    return num


def check_integrity(session: Session) -> None:
    """Raises RegistryError unless the roll-ups are the sums of what retention has kept."""
    row = session.get_one(LedgerStateRow, ONLY_ROW)
    kept = (PostingRow.seq <= row.rolled_seq, PostingRow.posted_at >= row.kept_from)
    for span_s in ALL_SPANS_S:
        days = span_s in LONG_SPANS_S
        stored = _by_key(
            session,
            select(*(getattr(RollupRow, name) for name in (*KEY, *SUMS))).where(
                RollupRow.span_s == span_s, RollupRow.began_at >= (0 if days else row.kept_from)
            ),
        )
        made_of = _sums_of_days(span_s, with_names=False)
        if not days:
            made_of = _sums(session, span_s, kept, with_names=False)
        summed = _by_key(session, made_of)
        wrong = [key for key in {*stored, *summed} if stored.get(key) != summed.get(key)]
        if wrong:
            raise RegistryError(
                f"{len(wrong)} roll-ups of {span_s} s differ from the sums of their postings, "
                f"among them {min(wrong)}: run `polyhost usage rebuild`"
            )


def _by_key(session: Session, query: Select[Any]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    return {
        tuple(found[: len(KEY)]): tuple(int(value) for value in found[len(KEY) :])
        for found in session.execute(query)
    }


def _claim(session: Session, wait: bool = False) -> int | None:
    """The mark, this transaction's alone from here on; None where another has it."""
    query = select(LedgerStateRow.rolled_seq).where(LedgerStateRow.id == ONLY_ROW)
    return session.scalar(query.with_for_update(skip_locked=not wait))


def _add(
    session: Session, which: Sequence[ColumnElement[bool]], spans_s: Sequence[int] = ALL_SPANS_S
) -> int:
    """Sums of these postings onto what is there."""
    names = [*KEY, *NAMES, *SUMS]
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    dialect = sqlite if on_sqlite else postgresql
    for span_s in spans_s:
        new = dialect.insert(RollupRow).from_select(names, _sums(session, span_s, which))
        more = {name: getattr(RollupRow, name) + new.excluded[name] for name in SUMS}
        newer = {name: new.excluded[name] for name in NAMES}
        session.execute(new.on_conflict_do_update(index_elements=list(KEY), set_={**newer, **more}))
    count = select(func.count()).select_from(PostingRow).where(*which)
    return session.scalar(count) or 0


def _sums(
    session: Session, span_s: int, which: Sequence[ColumnElement[bool]], with_names: bool = True
) -> Select[Any]:
    """Columns as KEY, NAMES, SUMS have them."""
    began_at = span_start(session, span_s).label("began_at")
    owners = [getattr(PostingRow, name) for name in KEY[2:]]
    names = [func.max(getattr(PostingRow, name)).label(name) for name in NAMES]
    counts = [func.sum(getattr(PostingRow, name)).label(name) for name in COUNTS]
    times = [
        func.sum(
            cast(func.round(getattr(PostingRow, f"{name}_s") * 1_000_000.0), BigInteger)
        ).label(f"{name}_us")
        for name in TIMES
    ]
    return (
        select(
            literal(span_s, Integer).label("span_s"),
            began_at,
            *owners,
            *(names if with_names else ()),
            func.count().label("num_postings"),
            *counts,
            *times,
        )
        .where(*which)
        .group_by(began_at, *owners)
    )


def _sums_of_days(span_s: int, with_names: bool = True) -> Select[Any]:
    """A long span's rows, as KEY, NAMES, SUMS have them."""
    began_at = (RollupRow.began_at // span_s * span_s).label("began")
    owners = [getattr(RollupRow, name) for name in KEY[2:]]
    names = [func.max(getattr(RollupRow, name)) for name in NAMES]
    sums = [whole_sum(getattr(RollupRow, name)) for name in SUMS]
    return (
        select(literal(span_s, Integer), began_at, *owners, *(names if with_names else ()), *sums)
        .where(RollupRow.span_s == DAY_S)
        .group_by(began_at, *owners)
    )


def spend_since(
    session: Session,
    since_at: float,
    before_at: float | None = None,
    tenants: Collection[str] | None = None,
) -> list[SpendRow]:
    """What was billed by tenant, key and model, from `since_at` (midnight in UTC) on; `before_at`:
    up to there; `tenants`: these only. Budgets begin their count with it.

    Days that are summed up come from the roll-ups, the rest from the postings behind their mark: a
    month costs as many rows as it has keys, models and days, not as many as it has postings. All of
    one snapshot, so no posting counts twice or not at all.
    """
    sums: dict[tuple[str, str, str], int] = {}
    rolled = session.scalars(select(LedgerStateRow.rolled_seq)).one()
    days = (
        RollupRow.span_s == DAY_S,
        RollupRow.began_at >= int(since_at),
        *of_tenants(RollupRow.tenant_id, tenants),
    )
    behind = (PostingRow.seq > rolled, PostingRow.posted_at >= since_at)
    own = of_tenants(PostingRow.tenant_id, tenants)
    _add_spend(sums, session, RollupRow, days, 1)
    _add_spend(sums, session, PostingRow, (*behind, *own), 1)
    if before_at is not None:
        later = (PostingRow.posted_at >= max(since_at, before_at), *own)
        _add_spend(sums, session, PostingRow, later, -1)
    return [SpendRow(*owner, nanos) for owner, nanos in sums.items() if nanos]


def _add_spend(
    sums: dict[tuple[str, str, str], int],
    session: Session,
    table: type[RollupRow] | type[PostingRow],
    which: Sequence[ColumnElement[bool]],
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


def keep_postings_from(session: Session, day_at: float, *, now_at: float) -> None:
    """Postings before that day (an instant in it, UTC) may be deleted. Raises RegistryError."""
    kept_from = float(int(day_at // DAY_S) * DAY_S)
    row = session.get_one(LedgerStateRow, ONLY_ROW, with_for_update=True)
    if kept_from > now_at - MIN_KEPT_DAYS * DAY_S:
        raise RegistryError(
            f"postings of the last {MIN_KEPT_DAYS} days cannot be deleted: choose an earlier day"
        )
    if kept_from < row.kept_from:
        raise RegistryError("postings before a later day have already been deleted")
    waiting = session.scalar(
        select(func.count())
        .select_from(PostingRow)
        .where(PostingRow.seq > row.rolled_seq, PostingRow.posted_at < kept_from)
    )
    if waiting:
        raise RegistryError(
            f"{waiting} postings before that day are not in the roll-ups yet: try again later"
        )
    before = {"kept_from": row.kept_from}
    session.execute(update(LedgerStateRow).values(kept_from=kept_from))
    audit.record(session, now_at, "ledger.keep", "postings", before, {"kept_from": kept_from})


def delete_postings(session: Session, slice_rows: int = DELETED_ROWS) -> int:
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
        delete(PostingRow).where(
            PostingRow.seq.in_(oldest.scalar_subquery()), PostingRow.posted_at < row.kept_from
        ),
        execution_options={"synchronize_session": False},
    )
    return len(seqs)
