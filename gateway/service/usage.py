"""The verbs on usage, for the CLI and, later, the admin API and pages (control.py).

Every list, sum and export is of a `Scope`, and `scope_of` is where one is made.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from gateway.billing import export_file, export_parquet
from gateway.billing.export_file import Proof
from gateway.billing.usage_export import ExportOrder, Format
from gateway.service.control import Control, find_key, find_tenant, require, visible
from gateway.service.prices import price_book
from registry import exports, rollups
from registry.errors import InvalidValue, RegistryError
from registry.exports import Scope
from registry.session import appending

BY = {"tenant": "tenant_name", "key": "key_name", "model": "model", "outcome": "outcome"}


def scope_of(
    control: Control,
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
    seen = visible(control, "usage.read")
    with control.reading() as session:
        tenant_id = find_tenant(control, session, tenant, "usage.read").id if tenant else ""
        found = find_key(control, session, key, "usage.read") if key else None
    if found is not None and tenant_id not in ("", found.tenant_id):
        raise InvalidValue("that key is not that tenant's")
    if found is not None:
        tenant_id = found.tenant_id
    if seen is not None and not tenant_id:
        if len(seen) > 1:
            raise InvalidValue("name one of your tenants")
        (tenant_id,) = seen
    return Scope(from_at, to_at, tenant_id, found.id if found else "", model or "")


def order_export(
    control: Control, format_name: Format, scope: Scope, through_seq: int | None = None
) -> ExportOrder:
    """An export of the ledger as it is now, or as it was at `through_seq`. Raises InvalidValue
    where it was never so: what is posted later would change such an export."""
    if format_name == "parquet":
        export_parquet.require_pyarrow()
    settings = control.settings
    newest = newest_seq(control)
    through = newest if through_seq is None else through_seq
    if not 0 <= through <= newest:
        raise InvalidValue(f"the ledger was never as of {through}: its newest number is {newest}")
    return ExportOrder(format_name, scope, through, settings.invoice_issuer, settings.currency)


def export_stream(
    control: Control, order: ExportOrder, stream: BinaryIO, after: str = ""
) -> tuple[Proof, str]:
    """Write rows behind `after`; what was written, and where to go on."""
    require(control, "usage.read", order.scope.tenant_id)
    if order.format == "parquet":
        raise InvalidValue("Parquet needs a file: --output FILE")
    with control.reading() as session:
        book = price_book(session)
        return export_file.write_stream(stream, session, order, book, after)


def export_file_to(control: Control, order: ExportOrder, path: Path) -> Proof:
    """Write a file and its proof."""
    require(control, "usage.read", order.scope.tenant_id)
    with control.reading() as session:
        return export_file.write_file(path, session, order, price_book(session))


def verify_export(control: Control, path: Path) -> Proof:
    """Prove a file from the ledger. Raises RegistryError where it cannot be."""
    order = export_file.read_proof(path).order
    require(control, "usage.read", order.scope.tenant_id)
    if not 0 <= order.through_seq <= newest_seq(control):
        raise RegistryError(f"{path.name} is of a state that this ledger has never had")
    with control.reading() as session:
        return export_file.verify(path, session, price_book(session))


def usage_totals(control: Control, scope: Scope, by: Sequence[str]) -> list[dict[str, object]]:
    """Sums over the scope, by names of BY; without any, one."""
    require(control, "usage.read", scope.tenant_id)
    through_seq = newest_seq(control)
    with control.reading() as session:
        found = exports.totals(session, scope, through_seq, [BY[name] for name in by])
    names = (*by, "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
    return [dict(zip(names, row, strict=True)) for row in found]


def newest_seq(control: Control) -> int:
    """The state of the ledger now, for what is to be the same later."""
    # On PostgreSQL it waits for a lock and must see what was committed meanwhile: no snapshot.
    if control.engine.dialect.name == "postgresql":
        with appending(control.engine, control.actor) as session:
            return rollups.newest_seq(session)
    with control.reading() as session:
        return rollups.newest_seq(session)
