"""The verbs on usage as the operator's pages show it, and on exports as downloads (control.py).

The sums are those of an export of the same filters, to the unit: `num_rows` of a sum is how many
rows such an export has.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.billing import export_file, usage_export
from gateway.billing.usage_export import ExportOrder
from gateway.service.control import Control, find_key, find_tenant, require, visible
from gateway.service.prices import price_book
from registry import rollups, usage_sums
from registry.api_keys import KeyRecord
from registry.errors import InvalidValue
from registry.tenants import TenantRecord
from registry.usage_sums import Amounts, UsageFilter

NUM_SERIES = 7
"""Apart in a picture; what is left is one more."""
_READ_BYTES = 1 << 16


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


def usage_view(
    control: Control,
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
        raise InvalidValue("the first day is behind the last")
    seen = visible(control, "usage.read")
    with control.reading() as session:
        of_tenant = find_tenant(control, session, tenant, "usage.read") if tenant else None
        of_key = find_key(control, session, key, "usage.read") if key else None
        if of_key and of_tenant and of_key.tenant_id != of_tenant.id:
            raise InvalidValue("that key is not that tenant's")
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


def export_chunks(control: Control, order: ExportOrder) -> Iterator[bytes]:
    """The export's bytes, made as they are taken. Not on the event loop."""
    require(control, "usage.read", order.scope.tenant_id)
    return _parquet(control, order) if order.format == "parquet" else _text(control, order)


def _text(control: Control, order: ExportOrder) -> Iterator[bytes]:
    with control.reading() as session:
        yield usage_export.header(order)
        for chunk in usage_export.chunks(session, order, price_book(session)):
            yield chunk.data


def _parquet(control: Control, order: ExportOrder) -> Iterator[bytes]:
    """Its index is at its end: it is a file first."""
    with tempfile.TemporaryDirectory(dir=control.data_dir, prefix="export-") as folder:
        path = Path(folder) / "usage.parquet"
        with control.reading() as session:
            export_file.write_file(path, session, order, price_book(session))
        with path.open("rb") as stream:
            while data := stream.read(_READ_BYTES):
                yield data
