"""Operations on tenants."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_tenant, visible
from admin.context.optimistic_lock import check_unchanged, version_of
from gateway.auth.directory import price_book
from gateway.limits.limits import period_of
from gateway.pricing.policy.pricing import Rates
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.key_terms import INFERENCE
from registry.accounts.quotas import Limits
from registry.accounts.tenants import TenantRecord
from registry.lists import tenants as tenant_list
from registry.lists.tenants import TenantCounts, TenantFilter, TenantLine
from registry.models import floors
from registry.models.catalog import Model
from registry.models.floors import ModelFloor
from registry.money.usage import Amounts, UsageFilter, total
from registry.paging import Cut, Listed, listed

RECENT_S = 86_400.0


@operation("tenants.write", audit=("tenant.create",))
def create_tenant(
    context: OperatorContext, name: str, weight: float = 1.0, internal: bool = False
) -> TenantRecord:
    """A new tenant."""
    with context.writing() as session:
        return tenants.create_tenant(session, name, weight, internal, now_at=context.clock())


@operation("tenants.read", on="tenant")
def list_tenants(context: OperatorContext) -> list[TenantRecord]:
    """All tenants that who asks may see, by name."""
    seen = visible(context, "tenants.read")
    with context.reading() as session:
        every = tenants.list_tenants(session)
    return [tenant for tenant in every if seen is None or tenant.id in seen]


@operation("tenants.write", audit=("tenant.update",))
def update_tenant(
    context: OperatorContext,
    name: str,
    weight: float | None = None,
    disabled: bool | None = None,
    priority: str | None = None,
    reserved_share: float | None = None,
    internal: bool | None = None,
    response_retention_days: int | None = None,
    seen: str = "",
) -> TenantRecord:
    """Change what is given; a retention of tenants.SERVERS_RETENTION is none of its own. `seen`:
    the mark of the share that was looked at. Raises
    ChangedMeanwhile where it is another by now."""
    with context.writing() as session:
        if seen:
            now = tenants.get_tenant(session, name)
            check_unchanged("the tenant's share", share_mark(now), seen)
        return tenants.update_tenant(
            session,
            name,
            weight=weight,
            disabled=disabled,
            priority=priority,
            reserved_share=reserved_share,
            internal=internal,
            response_retention_days=response_retention_days,
            now_at=context.clock(),
        )


@operation("tenants.write", audit=("tenant.floor",))
def set_model_floor(
    context: OperatorContext, name: str, size_bytes: int, models: Sequence[str], seen: str = ""
) -> ModelFloor:
    """So many bytes of these models, which are the tenant's, stay on a worker that has them,
    whatever others load; 0 takes the floor away. `seen`: the mark of the floor that was looked at.
    Raises ChangedMeanwhile where it is another by now."""
    with context.writing() as session:
        if seen:
            now = floors.get_floor(session, tenants.get_tenant(session, name).id)
            check_unchanged("the tenant's floor", floor_mark(now), seen)
        return floors.set_floor(session, name, size_bytes, models, now_at=context.clock())


@operation("tenants.read", on="tenant")
def list_model_floors(context: OperatorContext) -> list[ModelFloor]:
    """Of the tenants that who asks may see."""
    seen = visible(context, "tenants.read")
    with context.reading() as session:
        every = floors.list_floors(session)
    return [floor for floor in every if seen is None or floor.tenant_id in seen]


def floor_mark(floor: ModelFloor | None) -> str:
    """Of a tenant's floor, or of there being none."""
    return version_of(None if floor is None else (floor.size_bytes, floor.models))


def share_mark(tenant: TenantRecord) -> str:
    """Of all that decides what the tenant gets, and whose it is."""
    shown = tenant.weight, tenant.priority, tenant.reserved_share, tenant.internal
    return version_of((*shown, tenant.response_retention_days))


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant. `key_id`: of a key that is let in, by which a gateway knows the tenant's limits;
    "": there is none."""

    tenant: TenantRecord
    floor: ModelFloor | None
    limits: Limits
    gateway_limits: Limits
    today: Amounts
    month: Amounts
    num_keys: int
    key_id: str


@operation("tenants.read", on="tenant")
def tenants_page(
    context: OperatorContext, wanted: TenantFilter, sort: str, cut: Cut
) -> tuple[Listed[TenantLine], TenantCounts]:
    """A page of those that who asks may see, and how many these are."""
    seen = visible(context, "tenants.read")
    since_at = context.clock() - RECENT_S
    only = TenantFilter(wanted.text, wanted.priority, wanted.disabled, seen)
    with context.reading() as session:
        page = tenant_list.page(session, only, sort, cut, since_at=since_at)
        return page, tenant_list.counts(session, seen)


@operation("tenants.read", on="tenant")
def tenant_view(context: OperatorContext, tenant: str) -> TenantView:
    """The tenant of that name or id. Raises NotFound."""
    now_at = context.clock()
    day, month = (period_of(kind, now_at).began_at for kind in ("day", "month"))
    with context.reading() as session:
        found = find_tenant(context, session, tenant, "tenants.read")
        keys = api_keys.list_keys(session, found.id)
        usable = [key for key in keys if key.usable(now_at)]
        wanted = UsageFilter(int(day), int(now_at) + 1, (found.id,))
        return TenantView(
            tenant=found,
            floor=floors.get_floor(session, found.id),
            limits=quotas.get_limits(session, "tenant", found.id),
            gateway_limits=quotas.get_limits(session, "gateway"),
            today=total(session, wanted),
            month=total(session, UsageFilter(int(month), int(now_at) + 1, (found.id,))),
            num_keys=len(usable),
            key_id=usable[0].id if usable else "",
        )


@dataclass(frozen=True, slots=True)
class TenantModel:
    """A model that the tenant's keys may ask. `rates`: what it pays now; `limits`: the model's own,
    over all tenants; `num_keys`: keys in use that may ask it."""

    name: str
    task: str
    max_context: int
    rates: Rates
    limits: Limits
    num_keys: int


@operation("prices.read", on="tenant")
def tenant_models(
    context: OperatorContext, tenant: str, text: str, cut: Cut
) -> tuple[TenantRecord, Listed[TenantModel]]:
    """A page of the ready models that a tenant's keys may ask, by name. Raises NotFound."""
    now_at = context.clock()
    query = select(Model.name, Model.task, Model.max_context).where(Model.state == "ready")
    if text:
        query = query.where(Model.name.contains(text, autoescape=True))
    with context.reading() as session:
        found = find_tenant(context, session, tenant, "prices.read")
        keys = [key for key in api_keys.list_keys(session, found.id) if key.usable(now_at)]
        allowed = [key.allowed_models for key in keys if INFERENCE in key.scopes]
        if None not in allowed:
            names = {name for each in allowed for name in each or ()}
            query = query.where(Model.name.in_(names))
        page = listed(session, query, Model.name, Model.name, cut)
        book, limits = price_book(session), quotas.all_limits(session, "model")
        rows = [
            TenantModel(
                row.name,
                row.task,
                row.max_context,
                book.rates(found.id, row.name, now_at),
                limits.get(row.name, quotas.UNLIMITED),
                sum(each is None or row.name in each for each in allowed),
            )
            for row in page.rows
        ]
    return found, Listed(rows, page.previous, page.next)
