"""Tenants with a key each, and postings of theirs, for pages that add up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from admin.context.operator_context import OperatorContext
from registry.accounts import api_keys, tenants
from registry.accounts.api_keys import KeyRecord
from registry.accounts.tenants import TenantRecord
from registry.money import ledger, rollups
from registry.money.ledger import Posting
from registry.session import appending

DAY_S = 86_400
POSTING = Posting(
    *("r", "ten_1", "key_1", "tiny", "rev1", "chat", "finished", 10, 2, 5, 1001),
    *(0.25, 0.125, 0.5, 1.0, 0.0),
)


@dataclass(frozen=True, slots=True)
class Owner:
    """A tenant and the key that it asks with."""

    tenant: TenantRecord
    key: KeyRecord

    def posting(self, request_id: str, **facts: Any) -> Posting:
        """POSTING, but of this one's."""
        mine = replace(POSTING, tenant_id=self.tenant.id, key_id=self.key.id)
        return replace(mine, request_id=request_id, **facts)


def add_owners(context: OperatorContext, *names: str, key_name: str = "key of {}") -> list[Owner]:
    """New tenants of these names."""
    owners = []
    with context.writing() as session:
        for name in names:
            now_at = context.clock()
            tenant = tenants.create_tenant(session, name, now_at=now_at)
            called = key_name.format(name)
            key, _ = api_keys.create_key(session, tenant.id, called, now_at=now_at)
            owners.append(Owner(tenant, key))
    return owners


def post(context: OperatorContext, rows: Sequence[Posting], num_rolled: int = 0) -> None:
    """Into the ledger, and the first so many into the roll-ups."""
    with appending(context.engine, "test") as session:
        ledger.insert_postings(session, rows)
    if num_rolled:
        with appending(context.engine, "test") as session:
            rollups.roll(session, num_rolled)
