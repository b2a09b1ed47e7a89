"""Who may do what: roles and verbs as data. Pure.

A role is held for the whole installation or for one tenant. Who holds one for a tenant sees that
tenant alone, and never sets what it is given: its weight, its limits, its prices and its budget are
the installation's to say. An owner may do everything and alone decides who the users are; an owner
of a tenant decides that for the tenant.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

Verb: TypeAlias = Literal[
    "tenants.read",
    "tenants.write",
    "keys.read",
    "keys.write",
    "limits.read",
    "limits.write",
    "models.read",
    "models.write",
    "prices.read",
    "prices.write",
    "usage.read",
    "usage.write",
    "users.read",
    "users.write",
    "audit.read",
    "cache.read",
    "cache.write",
]
Grants: TypeAlias = Mapping[str, str]
"""Roles by tenant id; INSTALLATION for everything."""

INSTALLATION: Final = ""
VERBS: Final[frozenset[str]] = frozenset(get_args(Verb))
OPERATING_SYSTEM: Final[Grants] = {INSTALLATION: "owner"}
"""Whoever can run commands on the data folder could read it anyway."""

_READS: Final = frozenset(verb for verb in VERBS if verb.endswith(".read"))
EVERYWHERE: Final[Mapping[str, frozenset[str]]] = {
    "owner": VERBS,
    "admin": VERBS - {"users.read", "users.write"},
    "viewer": _READS - {"users.read"},
}
_OF_A_TENANT: Final = frozenset(
    {"tenants.read", "keys.read", "limits.read", "prices.read", "usage.read"}
)
IN_TENANT: Final[Mapping[str, frozenset[str]]] = {
    "owner": _OF_A_TENANT | {"keys.write", "cache.write", "users.read", "users.write"},
    "admin": _OF_A_TENANT | {"keys.write", "cache.write"},
    "viewer": _OF_A_TENANT,
}


def allowed(grants: Grants, verb: Verb, tenant_id: str = INSTALLATION) -> bool:
    """May who holds these roles do this, to a tenant's things or (INSTALLATION) to all?"""
    if verb in EVERYWHERE.get(grants.get(INSTALLATION, ""), frozenset()):
        return True
    return tenant_id != INSTALLATION and verb in IN_TENANT.get(
        grants.get(tenant_id, ""), frozenset()
    )


def tenants_allowed(grants: Grants, verb: Verb) -> frozenset[str] | None:
    """The tenants whose things may be had; None: all."""
    if allowed(grants, verb):
        return None
    return frozenset(
        tenant_id
        for tenant_id in grants
        if tenant_id != INSTALLATION and allowed(grants, verb, tenant_id)
    )
