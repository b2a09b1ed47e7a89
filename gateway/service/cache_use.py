"""The verb that shows what the cache has answered, and what its checks say (control.py).

Beside service/cache.py, which asks the stores. The share of checks that differed estimates that of
false hits; of few checks it says little, so its upper bound stands beside it.
"""

import math

from gateway.service.control import Control, require
from registry import cache_use
from registry.cache_use import CacheUse

RECENT_S = 86_400.0
Z = 1.96
"""Of a normal distribution: 95 in a hundred lie within it."""


def cache_uses(control: Control) -> list[CacheUse]:
    """By tenant and model, of the last day. Raises Forbidden."""
    require(control, "cache.read")
    require(control, "usage.read")
    with control.reading() as session:
        return cache_use.by_tenant_and_model(session, control.clock() - RECENT_S)


def upper_bound(num_bad: int, num_all: int) -> float:
    """What a share is at most, with 95 % confidence (Wilson's score interval); 1.0 of nothing."""
    if not num_all:
        return 1.0
    share = num_bad / num_all
    middle = share + Z**2 / (2 * num_all)
    spread = Z * math.sqrt(share * (1 - share) / num_all + Z**2 / (4 * num_all**2))
    return min(1.0, (middle + spread) / (1 + Z**2 / num_all))
