"""Operations on usage and on the ledger: sums, exports, receipts, roll-ups, corrections.

Every list, sum and export is of a `Scope`, and `scope_of` is where one is made.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from admin.billing import export_file, export_parquet, usage_export
from admin.billing.export_file import Proof
from admin.billing.usage_export import ExportOrder, Format
from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_key, find_tenant, require, visible
from admin.context.optimistic_lock import ChangedMeanwhile
from admin.context.policy.permissions import allowed
from gateway.auth.directory import price_book
from registry.accounts import tenants
from registry.accounts.api_keys import KeyRecord
from registry.accounts.tenants import TenantRecord
from registry.errors import InvalidValue, RegistryError
from registry.lists import search as finding
from registry.money import corrections, exports, invoices, ledger, rollups
from registry.money import usage as usage_sums
from registry.money.corrections import Right
from registry.money.exports import Scope
from registry.money.ledger import Posting
from registry.money.rollups import LedgerState
from registry.money.usage import Amounts, UsageFilter
from registry.session import appending

BY = {"tenant": "tenant_name", "key": "key_name", "model": "model", "outcome": "outcome"}
NUM_SERIES = 7
"""Apart in a picture; what is left is one more."""
_READ_BYTES = 1 << 16


@operation("usage.read", on="tenant")
def scope_of(
    context: OperatorContext,
    from_at: float,
    to_at: float,
    tenant: str | None = None,
    key: str | None = None,
    model: str | None = None,
) -> Scope:
    """What may be seen: of the span, and of a tenant, a key and a model where they are named; a key
    must be the tenant's. A model may be gone from the catalog. Raises NotFound, InvalidValue."""
    if from_at >= to_at:
        raise InvalidValue("--from must be before --to")
    seen = visible(context, "usage.read")
    with context.reading() as session:
        tenant_id = find_tenant(context, session, tenant, "usage.read").id if tenant else ""
        found = find_key(context, session, key, "usage.read") if key else None
    if found is not None and tenant_id not in ("", found.tenant_id):
        raise InvalidValue("the key does not belong to the tenant")
    if found is not None:
        tenant_id = found.tenant_id
    if seen is not None and not tenant_id:
        if len(seen) > 1:
            raise InvalidValue("name one of your tenants")
        (tenant_id,) = seen
    return Scope(from_at, to_at, tenant_id, found.id if found else "", model or "")


@operation("usage.read", on="tenant")
def order_export(
    context: OperatorContext, format_name: Format, scope: Scope, through_seq: int | None = None
) -> ExportOrder:
    """An export of the ledger as it is now, or as it was at `through_seq`. Raises InvalidValue
    where it was never so: what is posted later would change such an export."""
    if format_name == "parquet":
        export_parquet.require_pyarrow()
    settings = context.settings
    newest = newest_seq(context)
    through = newest if through_seq is None else through_seq
    if not 0 <= through <= newest:
        raise InvalidValue(f"the ledger has no posting number {through}; the newest is {newest}")
    return ExportOrder(format_name, scope, through, settings.invoice_issuer, settings.currency)


@operation("usage.read", on="tenant")
def export_stream(
    context: OperatorContext, order: ExportOrder, stream: BinaryIO, after: str = ""
) -> tuple[Proof, str]:
    """Write rows behind `after`; what was written, and where to go on."""
    require(context, "usage.read", order.scope.tenant_id)
    if order.format == "parquet":
        raise InvalidValue("Parquet needs a file; add --output FILE")
    with context.reading() as session:
        book = price_book(session)
        return export_file.write_stream(stream, session, order, book, after)


@operation("usage.read", on="tenant")
def export_file_to(context: OperatorContext, order: ExportOrder, path: Path) -> Proof:
    """Write a file and its proof."""
    require(context, "usage.read", order.scope.tenant_id)
    with context.reading() as session:
        return export_file.write_file(path, session, order, price_book(session))


@operation("usage.read", on="tenant")
def verify_export(context: OperatorContext, path: Path) -> Proof:
    """Prove a file from the ledger. Raises RegistryError where it cannot be."""
    order = export_file.read_proof(path).order
    require(context, "usage.read", order.scope.tenant_id)
    if not 0 <= order.through_seq <= newest_seq(context):
        raise RegistryError(f"{path.name} was not exported from this ledger")
    with context.reading() as session:
        return export_file.verify(path, session, price_book(session))


@operation("usage.read", on="tenant")
def usage_totals(
    context: OperatorContext, scope: Scope, by: Sequence[str]
) -> list[dict[str, object]]:
    """Sums over the scope, by names of BY; without any, one."""
    require(context, "usage.read", scope.tenant_id)
    through_seq = newest_seq(context)
    with context.reading() as session:
        found = exports.totals(session, scope, through_seq, [BY[name] for name in by])
    names = (*by, "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
    return [dict(zip(names, row, strict=True)) for row in found]


def newest_seq(context: OperatorContext) -> int:
    """The state of the ledger now, for what is to be the same later."""
    # On PostgreSQL it waits for a lock and must see what was committed meanwhile: no snapshot.
    if context.engine.dialect.name == "postgresql":
        with appending(context.engine, context.actor) as session:
            return rollups.newest_seq(session)
    with context.reading() as session:
        return rollups.newest_seq(session)


@dataclass(frozen=True, slots=True)
class UsageLine:
    """One sum. `ref`: an id, a model, or an instant as text; `name` for people."""

    ref: str
    name: str
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Series:
    """Costs by day or hour (their beginning -> nano-units). `ref` "": of all that are left."""

    ref: str
    name: str
    costs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class UsageView:
    """What a page shows. `lines` are the costliest first, of `num_lines`; of days and hours all, in
    their order. `kept_from`: postings before that may be deleted, and exports lack them."""

    tenant: TenantRecord | None
    key: KeyRecord | None
    total: Amounts
    lines: list[UsageLine]
    num_lines: int
    series: list[Series]
    kept_from: float


@operation("usage.read", on="tenant")
def usage_view(
    context: OperatorContext,
    from_at: float,
    to_at: float,
    by: str,
    unit: str,
    tenant: str = "",
    key: str = "",
    model: str = "",
    max_lines: int = 200,
) -> UsageView:
    """Of [from_at, to_at), apart by one of usage_sums.BY; `unit` of the picture: day or hour. Of
    tenants, keys and models at most `max_lines` are apart. Raises NotFound, Forbidden,
    InvalidValue."""
    if from_at >= to_at:
        raise InvalidValue("the first day must not be after the last")
    seen = visible(context, "usage.read")
    with context.reading() as session:
        of_tenant = find_tenant(context, session, tenant, "usage.read") if tenant else None
        of_key = find_key(context, session, key, "usage.read") if key else None
        if of_key and of_tenant and of_key.tenant_id != of_tenant.id:
            raise InvalidValue("the key does not belong to the tenant")
        owner = of_tenant.id if of_tenant else of_key.tenant_id if of_key else ""
        wanted = UsageFilter(
            int(from_at),
            int(to_at),
            (owner,) if owner else seen,
            (of_key.id,) if of_key else None,
            (model,) if model else None,
        )
        apart = by in usage_sums.OWNERS
        if apart:
            top = usage_sums.top(session, wanted, by, max_lines)
            found, total, num = top.lines, top.total, top.num
        else:
            sums = usage_sums.sum_of(session, wanted, by)
            found, num = sorted(sums.items(), key=lambda row: int(row[0])), len(sums)
            total = Amounts._make(map(sum, zip(*sums.values(), strict=True))) if sums else Amounts()
        names = usage_sums.names(session, by, [ref for ref, _ in found])
        if by == "key":  # many tenants call a key "production"
            titles = finding.key_titles(session, names)
            names |= {ref: f"{name} of {tenant}" for ref, name, tenant in titles}
        lines = [UsageLine(ref, names[ref], amounts) for ref, amounts in found]
        first = lines[:NUM_SERIES] if apart else []
        if by == unit:
            costs = {"": {int(ref): amounts.cost_nanos for ref, amounts in found}}
        else:
            refs = [line.ref for line in first]
            costs = usage_sums.cost_series(session, wanted, by, refs, unit)
        series = [Series(line.ref, line.name, costs.get(line.ref, {})) for line in first]
        if "" in costs:
            series.append(Series("", "others" if series else "all", costs[""]))
        kept_from = session.get_one(rollups.LedgerStateRow, rollups.ONLY_ROW).kept_from
        return UsageView(of_tenant, of_key, total, lines, num, series, kept_from)


@operation("usage.read", on="tenant")
def export_chunks(context: OperatorContext, order: ExportOrder) -> Iterator[bytes]:
    """The export's bytes, made as they are taken. Not on the event loop."""
    require(context, "usage.read", order.scope.tenant_id)
    return _parquet(context, order) if order.format == "parquet" else _text(context, order)


def _text(context: OperatorContext, order: ExportOrder) -> Iterator[bytes]:
    with context.reading() as session:
        yield usage_export.header(order)
        for chunk in usage_export.chunks(session, order, price_book(session)):
            yield chunk.data


def _parquet(context: OperatorContext, order: ExportOrder) -> Iterator[bytes]:
    """Its index is at its end: it is a file first."""
    with tempfile.TemporaryDirectory(dir=context.data_dir, prefix="export-") as folder:
        path = Path(folder) / "usage.parquet"
        with context.reading() as session:
            export_file.write_file(path, session, order, price_book(session))
        with path.open("rb") as stream:
            while data := stream.read(_READ_BYTES):
                yield data


@operation("usage.write")
def catch_up(context: OperatorContext) -> int:
    """Bring the roll-ups up to what is posted now. Returns how many postings were added."""
    with appending(context.engine, context.actor) as session:
        upto = rollups.newest_seq(session)
    total = 0
    while True:
        with appending(context.engine, context.actor) as session:
            num = rollups.roll(session, upto)
        total += num
        if not num:
            return total


@operation("usage.write")
def rebuild_rollups(context: OperatorContext) -> int:
    """Sum anew all that is kept. Returns the postings summed."""
    catch_up(context)
    with appending(context.engine, context.actor) as session:
        return rollups.rebuild(session)


@operation("usage.read")
def check_ledger(context: OperatorContext) -> LedgerState:
    """Raises RegistryError where a request is both open and posted, or sums are wrong."""
    with context.reading() as session:
        ledger.check_integrity(session)
        rollups.check_integrity(session)
        return rollups.state(session)


@operation("usage.write", audit=("ledger.keep",))
def keep_usage_from(context: OperatorContext, day_at: float) -> int:
    """Delete the postings before that day, slice by slice; the roll-ups stay. Returns how many.

    Raises RegistryError where they are still to be kept: where invoices are issued, until all that
    cost something is on one.
    """
    catch_up(context)
    with context.writing() as session:
        kept_from = rollups.state(session).kept_from
        if owing := invoices.not_billed(session, kept_from, day_at):
            more = "" if len(owing) == 1 else f" and {len(owing) - 1} more"
            raise RegistryError(
                f"{owing[0]!r}{more} have postings before that day that are not on an invoice; "
                "run `polyhost invoices create` first"
            )
        rollups.keep_postings_from(session, day_at, now_at=context.clock())
    total = 0
    while True:
        with appending(context.engine, context.actor) as session:
            num = rollups.delete_postings(session)
        total += num
        if not num:
            return total


@dataclass(frozen=True, slots=True)
class Standing:
    """A request as its posting and all corrections so far say."""

    request_id: str
    tenant_id: str
    tenant: str
    key_id: str
    model: str
    outcome: str
    posted_at: float
    amounts: Right


@operation("usage.read")
def standing(context: OperatorContext, request_id: str) -> Standing:
    """What a correction would start from. Raises NotFound."""
    with context.reading() as session:
        row, amounts = corrections.standing(session, request_id)
        name = tenants.get_tenant(session, row.tenant_id).name
        about = (row.key_id, row.model, row.outcome, row.posted_at)
        return Standing(request_id, row.tenant_id, name, *about, amounts)


@operation("usage.write", audit=("ledger.correct",))
def correct_usage(
    context: OperatorContext, request_id: str, right: Right, seen: Right | None = None
) -> Posting:
    """A posting that puts another one right. `seen`: what stood when that was decided. Raises
    ChangedMeanwhile where another correction came first."""
    with context.writing() as session:
        if seen is not None and corrections.standing(session, request_id)[1] != seen:
            raise ChangedMeanwhile("the request was corrected in the meantime; nothing was saved")
        return corrections.correct(session, request_id, right, now_at=context.clock())


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one request used and cost. Durations in seconds, money in nano-units."""

    request_id: str
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    queue_s: float
    ttft_s: float
    duration_s: float


@operation(on="own")
def receipt(context: OperatorContext, request_id: str) -> Receipt | None:
    """None where it is not in the database (yet), or another's: the two look alike."""
    with context.reading() as session:
        row = ledger.find_receipt(session, request_id)
        if row is None or not allowed(context.grants, "usage.read", row.tenant_id):
            return None
        return Receipt(
            row.request_id,
            row.model,
            row.outcome,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
            row.cost_nanos,
            row.queue_s,
            row.ttft_s,
            row.duration_s,
        )
