"""The ledger's tables: open records and postings. Stage 10 writes here, exports read here.

An open record is durable before a request's first token leaves the gateway; a posting closes it.
Both come here from the gateway's journal, in batches and in their order, and after a kill some come
again: every function is the same done twice. A posting's key is its request's id, so posting twice
is posting once. Postings are immutable: the database itself refuses UPDATE, and DELETE of what
retention has not given up (rollups.py). They hold the names of tenant, key and model as they
were, and no foreign keys: a bill outlives what it was for. A mistake is put right by a posting of
its own that names the wrong one (corrections.py).

`seq` numbers postings in the order in which they came here: what derives from them (rollups.py)
goes by it. On PostgreSQL numbers are drawn before a commit, so a writer holds `WRITERS_LOCK` shared
meanwhile; whoever gets it alone knows that every number drawn so far is there or never will be.

What this file does not do: decide prices or outcomes, batch writes, or commit. It runs inside the
caller's transaction (`registry.session.writing`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ColumnElement,
    Double,
    Index,
    String,
    UniqueConstraint,
    bindparam,
    cast,
    func,
    select,
    text,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.accounts.api_keys import ApiKey
from registry.accounts.tenants import Tenant
from registry.base import Base, Count, Id, Instant, Name, Nanos, Serial
from registry.errors import RegistryError
from registry.session import delete_keys, insert_new

OUTCOMES = ("finished", "disconnected", "failed", "cache_hit", "correction")
CORRECTION = "correction"
WRITERS_LOCK = 0x706F7374
"""Of PostgreSQL's advisory locks; any number that nothing else uses."""


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A request that may produce tokens: who pays, for which model, since when (epoch seconds).

    gateway_id      whose request it is, among all servers at this database: only that gateway
                    closes what a kill left open
    reserved_nanos  what it may cost at most
    streamed_tokens what the client of a stream had been sent at the last checkpoint
    """

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    revision: str
    prompt_tokens: int
    opened_at: float
    gateway_id: str = ""
    reserved_nanos: int = 0
    streamed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the client of an open request has been sent so far."""

    request_id: str
    streamed_tokens: int


@dataclass(frozen=True, slots=True)
class Posting:
    """What one request used and costs. Durations in seconds, money in nano-units.

    outcome    one of OUTCOMES; a `failed` posting costs nothing. A time that never came (no first
               token) is 0
    service_s  what fair shares count: the device's time, or that of the memory it held, the larger
    prefill_s, decode_s  the device's time, of the prompt and of what was generated
    load_s     what it has paid of its model's load
    arrived_at the instant whose prices hold (epoch seconds); 0: not known
    input_nanos ... load_nanos  what cost_nanos is made of, exactly; all 0 in postings made before
               there were parts
    list_nanos what it would have cost without the tenant's plan
    corrects   of a correction, the request it corrects: amounts are what is added, below 0 too
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
    arrived_at: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    input_nanos: int = 0
    cached_nanos: int = 0
    output_nanos: int = 0
    service_nanos: int = 0
    load_nanos: int = 0
    list_nanos: int = 0
    corrects: str = ""


class OpenRecordRow(Base):
    """See OpenRecord."""

    __tablename__ = "open_records"
    __table_args__ = (Index(None, "gateway_id"),)

    request_id: Mapped[Id] = mapped_column(primary_key=True)
    tenant_id: Mapped[Id]
    key_id: Mapped[Id]
    model: Mapped[Name]
    revision: Mapped[Name]
    prompt_tokens: Mapped[Count]
    opened_at: Mapped[Instant]
    gateway_id: Mapped[Id]
    reserved_nanos: Mapped[Nanos]
    streamed_tokens: Mapped[Count]


class PostingRow(Base):
    """See Posting."""

    __tablename__ = "postings"
    __table_args__ = (
        UniqueConstraint("request_id"),
        CheckConstraint(
            "outcome IN ('finished', 'disconnected', 'failed', 'cache_hit', 'correction')",
            name="outcome",
        ),
        CheckConstraint("outcome <> 'failed' OR cost_nanos = 0", name="failed_is_free"),
        CheckConstraint("(outcome = 'correction') = (corrects <> '')", name="corrects"),
        CheckConstraint(
            "outcome = 'correction' OR (prompt_tokens >= 0 AND cached_tokens >= 0"
            " AND completion_tokens >= 0 AND cost_nanos >= 0)",
            name="not_negative",
        ),
        Index(None, "posted_at", "request_id"),
        Index(None, "tenant_id", "posted_at"),
        Index(None, "corrects"),
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[Serial] = mapped_column(primary_key=True)
    request_id: Mapped[Id]
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
    arrived_at: Mapped[Instant]
    prefill_s: Mapped[float] = mapped_column(Double)
    decode_s: Mapped[float] = mapped_column(Double)
    load_s: Mapped[float] = mapped_column(Double)
    input_nanos: Mapped[Nanos]
    cached_nanos: Mapped[Nanos]
    output_nanos: Mapped[Nanos]
    service_nanos: Mapped[Nanos]
    load_nanos: Mapped[Nanos]
    list_nanos: Mapped[Nanos]
    corrects: Mapped[Id]


_OPEN_NAMES = tuple(field.name for field in fields(OpenRecord))
_POSTING_NAMES = tuple(field.name for field in fields(Posting))
_open_values = attrgetter(*_OPEN_NAMES)
_posting_values = attrgetter(*_POSTING_NAMES)


def open_many(session: Session, records: Sequence[OpenRecord]) -> None:
    """Write open records; one that is already open stays as it was."""
    rows = [_open_values(record) for record in records]
    insert_new(session, OpenRecordRow, "request_id", _OPEN_NAMES, rows)


def checkpoint_many(session: Session, checkpoints: Mapping[str, Checkpoint]) -> None:
    """How far streams have come, by request id; those that are not open are passed over."""
    if not checkpoints:
        return
    table = OpenRecordRow.__table__
    statement = (
        update(table)  # type: ignore[arg-type]
        .where(table.c.request_id == bindparam("of"))
        .values(streamed_tokens=bindparam("tokens"))
    )
    values = [{"of": c.request_id, "tokens": c.streamed_tokens} for c in checkpoints.values()]
    session.connection().execute(statement, values)


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


def usage_by_slot(
    session: Session, since_at: float, slot_s: int, tenants: Collection[str] | None = None
) -> list[SlotUsage]:
    """What counted against limits since then, by slots of `slot_s` seconds: no requests that we
    failed, no corrections, and no tokens of answers from the cache. Oldest slots first. `tenants`:
    of these only, by the index on them."""
    slot = span_start(session, slot_s).label("slot")
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
        .where(PostingRow.posted_at >= since_at, PostingRow.outcome.not_in(("failed", CORRECTION)))
        .where(*of_tenants(PostingRow.tenant_id, tenants))
        .group_by(PostingRow.tenant_id, PostingRow.key_id, PostingRow.model, slot)
        .order_by(slot)
    )
    return [
        SlotUsage(tenant, key, model, float(begun), num, int(prompt), int(completion))
        for tenant, key, model, begun, num, prompt, completion in rows
    ]


def of_tenants(column: Any, tenants: Collection[str] | None) -> tuple[ColumnElement[bool], ...]:
    """None: of all."""
    return () if tenants is None else (column.in_(sorted(tenants)),)


def span_start(session: Session, width_s: int) -> ColumnElement[int]:
    """Where the span of `width_s` seconds begins in which a posting came."""
    return whole(session, PostingRow.posted_at / width_s) * width_s


def whole(session: Session, number: ColumnElement[Any]) -> ColumnElement[int]:
    """Rounded down. Not every build of SQLite has floor(), and PostgreSQL's cast would round."""
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    return cast(number if on_sqlite else func.floor(number), BigInteger)


def whole_sum(column: Any) -> ColumnElement[int]:
    """PostgreSQL sums integers as numeric."""
    return cast(func.sum(column), BigInteger)


def post_many(session: Session, postings: Sequence[Posting]) -> int:
    """Write postings and close their open records. See `insert_postings`."""
    num_posted = insert_postings(session, postings)
    void_many(session, [posting.request_id for posting in postings])
    return num_posted


def insert_postings(session: Session, postings: Sequence[Posting]) -> int:
    """Returns how many are newly posted; open records are the caller's to close.

    A request that was posted before keeps its first posting.
    """
    if not postings:
        return 0
    tenant_names = _names(session, Tenant, {posting.tenant_id for posting in postings})
    key_names = _names(session, ApiKey, {posting.key_id for posting in postings})
    rows = [
        (
            *_posting_values(posting),
            tenant_names.get(posting.tenant_id, ""),
            key_names.get(posting.key_id, ""),
        )
        for posting in postings
    ]
    if session.get_bind().dialect.name == "postgresql":
        lock = text("SELECT pg_advisory_xact_lock_shared(:lock)")
        session.execute(lock, {"lock": WRITERS_LOCK})
    names = (*_POSTING_NAMES, "tenant_name", "key_name")
    return insert_new(session, PostingRow, "request_id", names, rows)


def find_differing(session: Session, postings: Sequence[Posting]) -> list[tuple[Posting, int]]:
    """Of these, those in whose place another posting of the request stands, with another amount:
    with what that one costs (nanos)."""
    names = [posting.request_id for posting in postings]
    columns = PostingRow.request_id, PostingRow.cost_nanos, PostingRow.completion_tokens
    rows = session.execute(select(*columns).where(PostingRow.request_id.in_(names)))
    there = {row[0]: (row[1], row[2]) for row in rows}
    return [
        (one, there[one.request_id][0])
        for one in postings
        if there.get(one.request_id) not in (None, (one.cost_nanos, one.completion_tokens))
    ]


def void_many(session: Session, request_ids: Sequence[str]) -> None:
    """Close open records without a posting: nothing was produced, nothing is billed."""
    delete_keys(session, OpenRecordRow, "request_id", request_ids)


def open_left(session: Session, gateway_id: str | None = None) -> list[OpenRecord]:
    """Open records that nobody has closed, of one gateway or of all, oldest first."""
    query = select(OpenRecordRow).order_by(OpenRecordRow.opened_at, OpenRecordRow.request_id)
    if gateway_id is not None:
        query = query.where(OpenRecordRow.gateway_id == gateway_id)
    return [OpenRecord(*_open_values(row)) for row in session.scalars(query)]


def adopt(session: Session, gateway_id: str, by: str) -> list[OpenRecord]:
    """Open records of a gateway that is gone are another's to close from here on: these, as they
    are now. Of several that ask for them each record goes to one."""
    table = OpenRecordRow.__table__
    left = update(table).where(table.c.gateway_id == gateway_id)  # type: ignore[arg-type]
    taken = left.values(gateway_id=by).returning(*(table.c[name] for name in _OPEN_NAMES))
    return [OpenRecord(*row) for row in session.connection().execute(taken)]


def check_integrity(session: Session) -> None:
    """Raises RegistryError if a request is both open and posted."""
    both = session.scalar(
        select(func.count())
        .select_from(OpenRecordRow)
        .join(PostingRow, PostingRow.request_id == OpenRecordRow.request_id)
    )
    if both:
        raise RegistryError(f"the ledger holds {both} requests that are both open and posted")


def _names(
    session: Session, table: type[Tenant] | type[ApiKey], ids: Iterable[str]
) -> dict[str, str]:
    rows = session.execute(select(table.id, table.name).where(table.id.in_(sorted(ids))))
    return {row[0]: row[1] for row in rows}


def find_receipt(session: Session, request_id: str) -> PostingRow | None:
    """None where it is not posted, or not yet."""
    return session.scalars(select(PostingRow).where(PostingRow.request_id == request_id)).first()
