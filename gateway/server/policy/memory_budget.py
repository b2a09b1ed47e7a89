"""How much memory a worker gets where the settings say "choose" (pure).

Device budget. A quarter of the memory that is free at start: on a CPU worker the arena is ordinary
memory, touched page by page as it is used, and the page cache, the host tier and the other
processes need room beside it. With the demo and nothing but its models, the sum of their weights:
two of them fit with room to work, the last only in the place of another, so that anyone sees
models come and go.

Host tier. An eighth of the free memory and at most half of what the shared memory's file system
has: writing beyond that would fail (or kill) whoever touches the next page.

Reserve. What a step's activations may take beside the arena: half of what the two leave.
"""

from collections.abc import Mapping

DEVICE_SHARE = 4
HOST_SHARE = 8
SHM_SHARE = 2
MIN_DEVICE_BYTES = 8 << 20
MIN_RESERVE_BYTES = 512 << 20


def device_budget_bytes(
    configured: int,
    free_bytes: int,
    weights: Mapping[str, int],
    demo_models: frozenset[str],
) -> int:
    """Bytes of the arena. `weights`: bytes of each hosted model; `demo_models` empty: no demo."""
    if configured:
        return configured
    if len(weights) > 1 and demo_models.issuperset(weights):
        return max(MIN_DEVICE_BYTES, sum(weights.values()))
    return max(MIN_DEVICE_BYTES, free_bytes // DEVICE_SHARE)


def host_tier_bytes(configured: int, free_bytes: int, free_shm_bytes: int) -> int:
    """Bytes of the warm tier. `configured` -1: choose."""
    if configured >= 0:
        return configured
    return max(0, min(free_bytes // HOST_SHARE, free_shm_bytes // SHM_SHARE))


def reserve_bytes(setting: int, left_bytes: int) -> int:
    """What steps may take beside the arena; 0: not checked. `left_bytes`: free, nobody's yet."""
    if setting >= 0:
        return setting
    # An operator's own budget may leave nothing: that is no reason to serve no model.
    return max(left_bytes // 2, MIN_RESERVE_BYTES)
