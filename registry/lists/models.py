"""Models as a list shows them: in pages, with their price now and what was asked of them lately.

Read only. What was asked comes from the roll-ups by hour, so it is some seconds behind. Where a
model is (resident, warm) is the workers' to say; a caller that filters by it gives names.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import Session

from registry.base import record_of
from registry.lists.tenants import recent
from registry.models.catalog import NEXT, Model, ModelRecord
from registry.money.ledger import CORRECTION
from registry.money.prices import PriceRecord, prices_at, prices_of
from registry.money.rollups import HOUR_S, RollupRow
from registry.paging import Cut, Listed, listed, listed_rows

SORTS: Final = ("name", "state", "requests", "failed", "size", "load", "price", "created")


@dataclass(frozen=True, slots=True)
class ModelFilter:
    """What a list is to show; what is empty or None is not asked for.

    names, not_names   only these, all but these
    """

    text: str = ""
    state: str = ""
    task: str = ""
    pinned: bool | None = None
    names: Collection[str] | None = None
    not_names: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One row. `base_name`: the model that a registration of a new revision is for."""

    name: str
    base_name: str
    state: str
    phase: str
    done_bytes: int
    total_bytes: int
    reason_code: str
    reason: str
    family: str
    dtype: str
    task: str
    weight_bytes: int
    pinned: bool
    created_at: float
    num_requests: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    price: PriceRecord | None = None


@dataclass(frozen=True, slots=True)
class Hour:
    """What was asked of a model in one hour, beginning at `at`."""

    at: float
    num_requests: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_nanos: int = 0
    ttft_s: float = 0.0
    """All of them together."""


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """How many there are, by state."""

    by_state: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All but removed ones."""
        return sum(self.by_state.values())


_NUMBERS: Final = ("num_requests", "num_failed", "num_tokens")
_COLUMNS = (
    *(Model.name, Model.state, Model.phase, Model.done_bytes, Model.total_bytes),
    *(Model.reason_code, Model.reason, Model.family, Model.dtype, Model.requested_dtype),
    *(Model.task, Model.weight_bytes, Model.pinned, Model.created_at),
)


def page(
    session: Session,
    wanted: ModelFilter,
    sort: str,
    cut: Cut,
    *,
    since_at: float,
    now_at: float,
    load_s: Mapping[str, float] | None = None,
) -> Listed[ModelLine]:
    """A page of models that are not removed; requests since `since_at`, prices as of `now_at`.
    `load_s`: what loads take, as workers know it; other models come before these."""
    if sort in ("load", "price"):
        values = load_s or {} if sort == "load" else _prices(session, now_at)
        every = session.scalars(select(Model.name).where(*_where(wanted)))
        some = listed_rows(every, lambda name: values.get(name, -1.0), str, cut)
        of_page = ModelFilter(names=some.rows)
        whole = Cut(max(1, len(some.rows)))
        lines = page(session, of_page, "name", whole, since_at=since_at, now_at=now_at).rows
        lines.sort(key=lambda line: some.rows.index(line.name))
        return Listed(lines, some.previous, some.next)
    usage = recent(RollupRow.model, since_at).subquery()
    num_requests = func.coalesce(usage.c.num_requests, 0)
    num_failed = func.coalesce(usage.c.num_failed, 0)
    query: Select[*tuple[Any, ...]] = select(*_COLUMNS).where(*_where(wanted))
    orders: dict[str, Any] = {
        "name": Model.name,
        "state": Model.state,
        "requests": num_requests,
        "failed": num_failed,
        "size": Model.weight_bytes,
        "created": Model.created_at,
    }
    by_usage = sort in ("requests", "failed")
    if by_usage:
        tokens = func.coalesce(usage.c.num_tokens, 0)
        counted = (num_requests.label("num_requests"), num_failed.label("num_failed"))
        query = query.add_columns(*counted, tokens.label("num_tokens"))
        query = query.outerjoin(usage, usage.c.owner == Model.name)
    found = listed(session, query, orders[sort], Model.name, cut)
    names = [row.name for row in found.rows]
    if by_usage:
        used = {row.name: row for row in found.rows}
    else:
        of_usage = recent(RollupRow.model, since_at).where(RollupRow.model.in_(names))
        used = {row.owner: row for row in session.execute(of_usage)}
    prices = prices_of(session, names, now_at)
    lines = [_line(row, used.get(row.name), prices.get(row.name)) for row in found.rows]
    return Listed(lines, found.previous, found.next)


def _prices(session: Session, now_at: float) -> dict[str, float]:
    """Of a prompt's token, or of an encoder's."""
    held = prices_at(session, now_at).items()
    return {name: float(price.prompt_nanos or price.embedding_nanos) for name, price in held}


def counts(session: Session) -> ModelCounts:
    """By state, removed ones left out."""
    num = func.count().label("num")
    query = select(Model.state, num).where(Model.state != "removed").group_by(Model.state)
    return ModelCounts({row.state: int(row.num) for row in session.execute(query)})


def registering(session: Session) -> list[ModelRecord]:
    """Registrations that have not ended."""
    rows = session.scalars(select(Model).where(Model.state == "registering"))
    return [record_of(ModelRecord, row) for row in rows]


def served_names(session: Session) -> list[str]:
    """Of ready models, the oldest first."""
    query = select(Model.name).where(Model.state == "ready")
    return list(session.scalars(query.order_by(Model.created_at, Model.id)))


def sharing(session: Session, names: Collection[str]) -> dict[str, list[str]]:
    """Of each of these that is ready, all ready models that are served from its pack."""
    ready = Model.state == "ready"
    packs = select(Model.pack).where(ready, Model.name.in_(names))
    rows = session.execute(
        select(Model.name, Model.pack).where(ready, Model.pack.in_(packs)).order_by(Model.name)
    )
    by_pack: dict[str, list[str]] = {}
    for name, pack in rows:
        by_pack.setdefault(pack, []).append(name)
    return {name: found for found in by_pack.values() for name in found if name in names}


def requests(session: Session, names: Collection[str], since_at: float) -> dict[str, int]:
    """How many each of these was asked since then."""
    query = recent(RollupRow.model, since_at).where(RollupRow.model.in_(names))
    return {row.owner: int(row.num_requests) for row in session.execute(query)}


def pinned(session: Session, names: Collection[str]) -> set[str]:
    """Which of these are."""
    return set(session.scalars(select(Model.name).where(Model.pinned, Model.name.in_(names))))


def hours(session: Session, model: str, from_at: float, to_at: float) -> list[Hour]:
    """Hour by hour, those without a request too."""
    first, last = (int(at // HOUR_S) * HOUR_S for at in (from_at, to_at))
    failed = func.sum(case((RollupRow.outcome == "failed", RollupRow.num_postings), else_=0))
    query = (
        select(
            RollupRow.began_at,
            func.sum(RollupRow.num_postings),
            failed,
            func.sum(RollupRow.prompt_tokens),
            func.sum(RollupRow.completion_tokens),
            func.sum(RollupRow.cost_nanos),
            func.sum(RollupRow.ttft_us),
        )
        .where(
            RollupRow.span_s == HOUR_S,
            RollupRow.began_at.between(first, last),
            RollupRow.model == model,
            RollupRow.outcome != CORRECTION,
        )
        .group_by(RollupRow.began_at)
    )
    found = {
        int(at): Hour(at, int(n), int(bad), int(p), int(c), int(cost), int(ttft) / 1e6)
        for at, n, bad, p, c, cost, ttft in session.execute(query)
    }
    return [found.get(at, Hour(at)) for at in range(first, last + 1, HOUR_S)]


def _where(wanted: ModelFilter) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = [Model.state != "removed"]
    if wanted.text:
        lower = wanted.text.lower()
        named = func.lower(Model.name).contains(lower, autoescape=True)
        where.append(named | func.lower(Model.family).contains(lower, autoescape=True))
    if wanted.state:
        where.append(Model.state == wanted.state)
    if wanted.task:
        where.append(Model.task == wanted.task)
    if wanted.pinned is not None:
        where.append(Model.pinned.is_(wanted.pinned))
    if wanted.names is not None:
        where.append(Model.name.in_(wanted.names))
    if wanted.not_names:
        where.append(Model.name.not_in(wanted.not_names))
    return where


def _line(row: Any, used: Any, price: PriceRecord | None) -> ModelLine:
    columns = row._mapping
    own = set(ModelLine.__dataclass_fields__) - set(_NUMBERS)
    shown: dict[str, Any] = {name: columns[name] for name in own if name in columns}
    shown["dtype"] = columns["dtype"] or columns["requested_dtype"]
    usage: dict[str, Any] = (
        {name: int(getattr(used, name)) for name in _NUMBERS} if used is not None else {}
    )
    base_name = columns["name"].removesuffix(NEXT)
    return ModelLine(**shown, base_name=base_name, price=price, **usage)
