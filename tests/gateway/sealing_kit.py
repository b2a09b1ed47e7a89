"""Seals of tenants for tests without a data folder, and those of a kit's server."""

from gateway.sealing.master_keys import MasterKey, read_keys
from gateway.sealing.seals import Seals, TenantSeal
from tests.gateway.edge_kit import Kit

MASTER = MasterKey("0123456789ab", b"k" * 32)
SEAL = Seals(lambda: [MASTER]).of("ten_1")


def seal_of(kit: Kit, tenant_id: str = "ten_1") -> TenantSeal:
    """A tenant's, of this server."""
    return Seals(lambda: read_keys(kit.edge.services.settings)).of(tenant_id)
