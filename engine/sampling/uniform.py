"""Counter-based random numbers: a row's number depends on its seed and its position only.

Never on what a row is batched with or how often it was preempted, so a seeded request repeats
exactly. Two rounds of splitmix64 (Steele et al., 2014).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) from (seed, position)."""
    return float(uniforms([seed], [position])[0])


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number a pair; seeds are taken modulo 2**64."""
    seed = np.array([value & _MASK for value in seeds], dtype=np.uint64)
    state = _mix(seed + _STEP * (np.array(positions, dtype=np.uint64) + np.uint64(1)))
    bits = _mix(state ^ seed) >> np.uint64(11)
    # The half keeps 0 out; the minimum keeps out the 1 that the largest value would round to.
    return np.minimum((bits.astype(np.float64) + 0.5) / (1 << 53), 1.0 - 2.0**-53)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
