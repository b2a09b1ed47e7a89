"""Pure decisions on the KV memory of tenants: who may start, and who goes first.

While another tenant has unfinished work, a request of a tenant that runs something already starts
only within the tenant's share of the KV memory. Requests that run grow beyond it as long as memory
is free (to stop them would waste what they have computed); when it is short, they go first. One
request of each tenant, its oldest, is never held back or chosen for being above a share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """A running request. `order`: by arrival over all models."""

    tenant_id: str
    order: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a tenant may hold: `num_pages` now, or anything where nobody else has work."""

    num_pages: float
    contended: bool


def share_of(num_kv_pages: int, share: float, num_tenants: int) -> Share:
    """`num_tenants`: those with unfinished work."""
    return Share(num_kv_pages * share, share < 1 and num_tenants > 1)


def may_start(held: Mapping[str, float], tenant_id: str, num_pages: float, share: Share) -> bool:
    """Whether one more request that needs `num_pages` may start; a tenant's first always may."""
    if not share.contended or tenant_id not in held:
        return True
    return held[tenant_id] + num_pages <= share.num_pages


def choose_victim(holdings: Sequence[Holding], held: Mapping[str, float], share: Share) -> int:
    """Index of the running request that is preempted when memory is short.

    `held`: pages by tenant, those that several of its requests share counted once: a long prompt
    that a tenant asks many questions about does not put it above its share.

    The youngest of a tenant above its share, but for that tenant's oldest; where there is none, the
    youngest of all. So the oldest request of all is only chosen when it runs alone.
    """
    above: list[int] = []
    if share.contended:
        oldest = {holding.tenant_id: holding.order for holding in _youngest_first(holdings)}
        above = [
            i
            for i, holding in enumerate(holdings)
            if held[holding.tenant_id] > share.num_pages
            and holding.order != oldest[holding.tenant_id]
        ]
    return max(above or range(len(holdings)), key=lambda i: holdings[i].order)


def _youngest_first(holdings: Sequence[Holding]) -> list[Holding]:
    return sorted(holdings, key=lambda holding: -holding.order)
