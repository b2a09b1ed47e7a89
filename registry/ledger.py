"""The ledger's tables: open records and postings. Stage 10 writes here, exports read here.

An open record is made durable before a request's first token leaves the gateway; a posting closes
it. Postings are immutable (the database itself refuses UPDATE and DELETE) and their primary key is
the request's id, so posting twice is the same as posting once. They hold the names of tenant, key
and model as they were, and no foreign keys: a bill outlives what it was for.

What this file does not do: decide prices or outcomes, batch writes, or commit. It runs inside the
caller's transaction (`registry.session.writing`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from sqlalchemy import (
    CheckConstraint,
    Double,
    Index,
    Integer,
    String,
    cast,
    delete,
    func,
    select,
    tuple_,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.api_keys import ApiKey
from registry.base import Base, Count, Id, Instant, Name, Nanos, insert_ignore
from registry.errors import RegistryError
from registry.tenants import Tenant

OUTCOMES = ("finished", "disconnected", "failed", "cache_hit")
PAGE_ROWS = 1000
# SQLite's oldest builds take 999 variables a statement; ids are deleted in slices below that.
ID_SLICE = 500


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A request that may produce tokens: who pays, for which model, since when (epoch seconds)."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    revision: str
    prompt_tokens: int
    opened_at: float


@dataclass(frozen=True, slots=True)
class Posting:
    """What one request used and costs. Durations in seconds, money in nano-units.

    `outcome` is one of OUTCOMES; a `failed` posting costs nothing. A time that never came (no
    first token) is 0.
    """

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    revision: str
    kind: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    service_s: float
    queue_s: float
    ttft_s: float
    duration_s: float
    posted_at: float


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A posting as it is exported: with the names that tenant and key had when it was posted."""

    posting: Posting
    tenant_name: str
    key_name: str


class OpenRecordRow(Base):
    """See OpenRecord."""

    __tablename__ = "open_records"

    request_id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    key_id: Mapped[Id]
    model: Mapped[Name]
    revision: Mapped[Name]
    prompt_tokens: Mapped[Count]
    opened_at: Mapped[Instant]


class PostingRow(Base):
    """See Posting."""

    __tablename__ = "postings"
    __table_args__ = (
        CheckConstraint(
            "outcome IN ('finished', 'disconnected', 'failed', 'cache_hit')", name="outcome"
        ),
        CheckConstraint("outcome <> 'failed' OR cost_nanos = 0", name="failed_is_free"),
        CheckConstraint(
            "prompt_tokens >= 0 AND cached_tokens >= 0 AND completion_tokens >= 0"
            " AND cost_nanos >= 0",
            name="not_negative",
        ),
        Index(None, "posted_at", "request_id"),
        Index(None, "tenant_id", "posted_at"),
    )

    request_id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    tenant_name: Mapped[Name]
    key_id: Mapped[Id]
    key_name: Mapped[Name]
    model: Mapped[Name]
    revision: Mapped[Name]
    kind: Mapped[str] = mapped_column(String(32))
    outcome: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    completion_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]
    service_s: Mapped[float] = mapped_column(Double)
    queue_s: Mapped[float] = mapped_column(Double)
    ttft_s: Mapped[float] = mapped_column(Double)
    duration_s: Mapped[float] = mapped_column(Double)
    posted_at: Mapped[Instant]


def open_many(session: Session, records: Sequence[OpenRecord]) -> None:
    """Write open records; one that is already open stays as it was."""
    insert_ignore(session, OpenRecordRow, "request_id", [asdict(record) for record in records])


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """What one key used of one model in the slot that began at `began_at`."""

    tenant_id: str
    key_id: str
    model: str
    began_at: float
    num_requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class SpendRow:
    """What one key was billed for one model."""

    tenant_id: str
    key_id: str
    model: str
    cost_nanos: int


def spend_since(session: Session, since_at: float) -> list[SpendRow]:
    """All that was billed since then."""
    who = (PostingRow.tenant_id, PostingRow.key_id, PostingRow.model)
    rows = session.execute(
        select(*who, func.sum(PostingRow.cost_nanos))
        .where(PostingRow.posted_at >= since_at, PostingRow.cost_nanos > 0)
        .group_by(*who)
    )
    return [SpendRow(tenant, key, model, int(cost)) for tenant, key, model, cost in rows]


def usage_by_slot(session: Session, since_at: float, slot_s: int) -> list[SlotUsage]:
    """What counted against limits since then, by slots of `slot_s` seconds: nothing of requests
    that we failed, and no tokens of answers from the cache. Oldest slots first."""
    number = PostingRow.posted_at / slot_s
    # Not every build of SQLite has floor(), and PostgreSQL's cast would round.
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    slot = (cast(number, Integer) if on_sqlite else func.floor(number)).label("slot")
    spent = PostingRow.outcome != "cache_hit"
    rows = session.execute(
        select(
            PostingRow.tenant_id,
            PostingRow.key_id,
            PostingRow.model,
            slot,
            func.count(),
            func.coalesce(func.sum(PostingRow.prompt_tokens).filter(spent), 0),
            func.coalesce(func.sum(PostingRow.completion_tokens).filter(spent), 0),
        )
        .where(PostingRow.posted_at >= since_at, PostingRow.outcome != "failed")
        .group_by(PostingRow.tenant_id, PostingRow.key_id, PostingRow.model, slot)
        .order_by(slot)
    )
    return [
        SlotUsage(tenant, key, model, float(begun) * slot_s, num, int(prompt), int(completion))
        for tenant, key, model, begun, num, prompt, completion in rows
    ]


def post_many(session: Session, postings: Sequence[Posting]) -> set[str]:
    """Write postings and close their open records. Returns the request ids newly posted.

    A request that was posted before keeps its first posting; its id is not in the answer.
    """
    tenant_names = _names(session, Tenant, {posting.tenant_id for posting in postings})
    key_names = _names(session, ApiKey, {posting.key_id for posting in postings})
    rows = [
        {
            **asdict(posting),
            "tenant_name": tenant_names.get(posting.tenant_id, ""),
            "key_name": key_names.get(posting.key_id, ""),
        }
        for posting in postings
    ]
    posted = insert_ignore(session, PostingRow, "request_id", rows)
    void_many(session, [posting.request_id for posting in postings])
    return posted


def void_many(session: Session, request_ids: Sequence[str]) -> None:
    """Close open records without a posting: nothing was produced, nothing is billed."""
    for start in range(0, len(request_ids), ID_SLICE):
        ids = request_ids[start : start + ID_SLICE]
        session.execute(delete(OpenRecordRow).where(OpenRecordRow.request_id.in_(ids)))


def open_left(session: Session) -> list[OpenRecord]:
    """Open records that nobody has closed, oldest first."""
    rows = session.scalars(
        select(OpenRecordRow).order_by(OpenRecordRow.opened_at, OpenRecordRow.request_id)
    )
    names = [field.name for field in fields(OpenRecord)]
    return [OpenRecord(**{name: getattr(row, name) for name in names}) for row in rows]


def usage_page(
    session: Session,
    from_at: float,
    to_at: float,
    after: tuple[float, str] | None = None,
    page_rows: int = PAGE_ROWS,
) -> list[UsageRow]:
    """Postings with from_at <= posted_at < to_at in order of (posted_at, request_id).

    `after` is that pair of the last row of the page before. Paging by key keeps no transaction
    open between pages, so a long export never holds back SQLite's checkpoints.
    """
    query = select(PostingRow).where(PostingRow.posted_at >= from_at, PostingRow.posted_at < to_at)
    if after is not None:
        query = query.where(tuple_(PostingRow.posted_at, PostingRow.request_id) > tuple_(*after))
    query = query.order_by(PostingRow.posted_at, PostingRow.request_id).limit(page_rows)
    return [_usage_row(row) for row in session.scalars(query)]


def iter_usage(session: Session, from_at: float, to_at: float) -> Iterator[UsageRow]:
    """All pages of `usage_page`, within the caller's session."""
    after: tuple[float, str] | None = None
    while True:
        page = usage_page(session, from_at, to_at, after)
        yield from page
        session.expunge_all()
        if len(page) < PAGE_ROWS:
            return
        after = (page[-1].posting.posted_at, page[-1].posting.request_id)


def check_integrity(session: Session) -> None:
    """Raises RegistryError if a request is both open and posted."""
    both = session.scalar(
        select(func.count())
        .select_from(OpenRecordRow)
        .join(PostingRow, PostingRow.request_id == OpenRecordRow.request_id)
    )
    if both:
        raise RegistryError(f"the ledger holds {both} requests that are both open and posted")


def _usage_row(row: PostingRow) -> UsageRow:
    names = [field.name for field in fields(Posting)]
    posting = Posting(**{name: getattr(row, name) for name in names})
    return UsageRow(posting, row.tenant_name, row.key_name)


def _names(
    session: Session, table: type[Tenant] | type[ApiKey], ids: Iterable[str]
) -> dict[str, str]:
    rows = session.execute(select(table.id, table.name).where(table.id.in_(sorted(ids))))
    return {row[0]: row[1] for row in rows}
