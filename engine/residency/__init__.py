"""Which models' weights are on the device: loads, evictions, moves.

Knows models and pages, and no requests. Who has to leave is decided in `policy/`.
"""

from engine.residency.loaded_models import PLAIN_LOAD, LoadRequest
from engine.residency.policy.eviction import EvictionPolicy
from engine.residency.residency import Residency
from engine.residency.weight_space import KvClaim

__all__ = ["PLAIN_LOAD", "EvictionPolicy", "KvClaim", "LoadRequest", "Residency"]
