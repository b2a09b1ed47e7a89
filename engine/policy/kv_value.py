"""What a cached extent is worth: which one goes first when pages are short. Pure.

A cached extent is worth what it would cost to compute its blocks again, times how likely somebody
asks for them, for each byte it holds:

    value(now) = (blocks + hits) x cost of a block / bytes x 2^(-(now - last use) / half-life)

All values fade at one rate, so their order never changes between two uses. `rank` is the logarithm
of the value with `now` left out: computed once when an extent loses its last live block, good for
ever after, and comparable over all extents of all models.

A block is of use only while all before it are there: `DEPTH_COST` makes the end of a long sequence
go before its beginning.
"""

import math
from dataclasses import dataclass

DEPTH_COST = 1 / 1024  # doublings of value for each block that lies before it


@dataclass(frozen=True, slots=True)
class ValueParams:
    """`half_life_s`: an extent that is not used for so long is worth half."""

    half_life_s: float = 120.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.half_life_s <= 0:
            raise ValueError("half_life_s must be positive")


def rank(
    num_blocks: int, num_hits: int, depth: int, last_used_s: float, params: ValueParams
) -> float:
    """log2 of an extent's value per unit of cost; `depth`: blocks before its first one."""
    return math.log2(num_blocks + num_hits) - depth * DEPTH_COST + last_used_s / params.half_life_s


def cost_rank(cost_per_token: float, bytes_per_token: float) -> float:
    """What to add to `rank` for a group of layers, so that unlike models compare.

    The cost is that of a whole token whatever the group: without the blocks of one group those of
    the others are of no use.
    """
    if cost_per_token <= 0 or bytes_per_token <= 0:
        raise ValueError("cost and bytes of a token must be positive")
    return math.log2(cost_per_token / bytes_per_token)
