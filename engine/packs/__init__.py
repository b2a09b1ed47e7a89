"""Packs on the disk, their copies in host memory, and the way of their bytes to the device.

The format is `engine/pack.py`; packs are written by `engine/registration/`. Which model's weights
should lie where is decided in `engine/residency/`.
"""

from engine.packs.host_tier import HostTier
from engine.packs.policy.host_tier import RESIDENT_SHARE
from engine.packs.weight_store import DiskWeightStore, LoadJob, WeightStore
from engine.packs.weights import (
    DiskPacks,
    PackSource,
    WeightViews,
    build_views,
    check_pack,
    verify_blob,
)

__all__ = [
    "RESIDENT_SHARE",
    "DiskPacks",
    "DiskWeightStore",
    "HostTier",
    "LoadJob",
    "PackSource",
    "WeightStore",
    "WeightViews",
    "build_views",
    "check_pack",
    "verify_blob",
]
