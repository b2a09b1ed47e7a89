"""The verbs that show tenants, page by page and one: for the operator's pages (control.py)."""

from dataclasses import dataclass

from gateway.limits.periods import period_of
from gateway.service.control import Control, find_tenant, visible
from registry import api_keys, floors, quotas, tenant_list
from registry.floors import ModelFloor
from registry.paging import Cut, Listed
from registry.quotas import Limits
from registry.tenant_list import TenantCounts, TenantFilter, TenantLine
from registry.tenants import TenantRecord
from registry.usage_sums import Amounts, UsageFilter, total

RECENT_S = 86_400.0


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


def tenants_page(
    control: Control, wanted: TenantFilter, sort: str, cut: Cut
) -> tuple[Listed[TenantLine], TenantCounts]:
    """A page of those that who asks may see, and how many these are."""
    seen = visible(control, "tenants.read")
    since_at = control.clock() - RECENT_S
    only = TenantFilter(wanted.text, wanted.priority, wanted.disabled, seen)
    with control.reading() as session:
        page = tenant_list.page(session, only, sort, cut, since_at=since_at)
        return page, tenant_list.counts(session, seen)


def tenant_view(control: Control, tenant: str) -> TenantView:
    """The tenant of that name or id. Raises NotFound."""
    now_at = control.clock()
    day, month = (period_of(kind, now_at).began_at for kind in ("day", "month"))
    with control.reading() as session:
        found = find_tenant(control, session, tenant, "tenants.read")
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
