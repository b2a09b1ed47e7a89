"""The verbs that show API keys, page by page and one: for the operator's pages (control.py)."""

from dataclasses import dataclass, replace

from gateway.limits.periods import period_of
from gateway.service.control import Control, find_key, find_tenant, visible
from registry import key_list, quotas
from registry.api_keys import KeyRecord
from registry.key_list import KeyFilter, KeyLine
from registry.paging import Cut, Listed
from registry.quotas import Limits
from registry.tenants import TenantRecord
from registry.usage_sums import Amounts, UsageFilter, total

RECENT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class KeyView:
    """One key."""

    key: KeyRecord
    gateway_limits: Limits
    today: Amounts
    month: Amounts


def keys_page(
    control: Control, wanted: KeyFilter, sort: str, cut: Cut, tenant: str = ""
) -> tuple[Listed[KeyLine], int, TenantRecord | None]:
    """A page of those that who asks may see, of one tenant where it is named; how many there are of
    these, and that tenant."""
    seen = visible(control, "keys.read")
    now_at = control.clock()
    with control.reading() as session:
        one = find_tenant(control, session, tenant, "keys.read") if tenant else None
        only = replace(wanted, tenant_ids=seen if one is None else (one.id,))
        page = key_list.page(session, only, sort, cut, since_at=now_at - RECENT_S, now_at=now_at)
        return page, key_list.num_keys(session, only.tenant_ids), one


def key_view(control: Control, key: str) -> KeyView:
    """The key of that id or public id. Raises NotFound."""
    now_at = control.clock()
    day, month = (period_of(kind, now_at).began_at for kind in ("day", "month"))
    with control.reading() as session:
        found = find_key(control, session, key, "keys.read")
        upto, tenants, keys = int(now_at) + 1, (found.tenant_id,), (found.id,)
        return KeyView(
            key=found,
            gateway_limits=quotas.get_limits(session, "gateway"),
            today=total(session, UsageFilter(int(day), upto, tenants, keys)),
            month=total(session, UsageFilter(int(month), upto, tenants, keys)),
        )
