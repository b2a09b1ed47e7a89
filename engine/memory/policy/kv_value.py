"""What a cached extent is worth: which one goes first, and whether idle weights go before. Pure.

A cached extent is worth what it would cost to compute its blocks again, times how likely somebody
asks for them, for each byte it holds:

    value(now) = (blocks + hits) x cost of a block / bytes x 2^(-(now - last use) / half-life)

All values fade at one rate, so their order never changes between two uses. `rank` is the logarithm
of the value with `now` left out: computed once when an extent loses its last live block, good for
ever after, and comparable over all extents of all models.

`worth` puts `now` back in, to compare an extent with the weights of an idle model
(engine/residency/policy): device seconds that keeping it saves a second, a byte. What a request
computes now is asked for again with a chance that `Reuse` measures.

A snapshot of states (`snapshot_rank`) is worth the tokens that it stands for.

A block is of use only while all before it are there: `DEPTH_COST` makes the end of a long sequence
go before its beginning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

DEPTH_COST = 1 / 1024  # doublings of value for each block that lies before it


@dataclass(frozen=True, slots=True)
class ValueParams:
    """`half_life_s`: an extent that is not used for so long is worth half. `snapshot_tokens`: a
    snapshot of states is not taken where it saves fewer tokens."""

    half_life_s: float = 120.0
    snapshot_tokens: int = 256

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.half_life_s <= 0:
            raise ValueError("half_life_s must be positive")


def rank(
    num_blocks: int, num_hits: int, depth: int, last_used_s: float, params: ValueParams
) -> float:
    """log2 of an extent's value per unit of cost; `depth`: blocks before its first one."""
    return math.log2(num_blocks + num_hits) - depth * DEPTH_COST + last_used_s / params.half_life_s


Rank: TypeAlias = Callable[[int, int, int, float, ValueParams], float]


def snapshot_rank(
    num_slots: int, num_hits: int, depth: int, last_used_s: float, params: ValueParams
) -> float:
    """The same for an extent of snapshots: one stands for all tokens before it, and the deeper it
    is the more it saves. `depth`: the block whose end the shallowest one stands for."""
    return math.log2((num_slots + num_hits) * (depth + 1)) + last_used_s / params.half_life_s


def worth(rank: float, token_s: float, chance: float, now_s: float, params: ValueParams) -> float:
    """Device seconds that an extent saves, per second and byte.

    rank     `rank` of the extent plus `cost_rank(tokens of a block, bytes of the extent)`
    token_s  device seconds to compute a token again
    chance   that a use comes again, 0 to 1
    """
    faded = math.exp2(rank - now_s / params.half_life_s)
    return chance * token_s * faded * math.log(2) / params.half_life_s


def cost_rank(cost_per_token: float, bytes_per_token: float) -> float:
    """What to add to `rank` for a group of layers, so that unlike models compare.

    The cost is that of a whole token whatever the group: without the blocks of one group those of
    the others are of no use.
    """
    if cost_per_token <= 0 or bytes_per_token <= 0:
        raise ValueError("cost and bytes of a token must be positive")
    return math.log2(cost_per_token / bytes_per_token)


class Reuse:
    """How many of the blocks that requests begin with had been asked for before. Decays."""

    KEEP = 0.98  # of what was counted, at each request
    PRIOR = 8.0  # blocks found, and as many not, before anything is known

    def __init__(self) -> None:
        self._asked = 0.0
        self._known = 0.0

    def add(self, num_asked: int, num_known: int) -> None:
        """A request begins with so many full blocks, the first `num_known` of which were computed
        before, whether they are still there or not."""
        self._asked = self._asked * self.KEEP + num_asked
        self._known = self._known * self.KEEP + num_known

    @property
    def chance(self) -> float:
        """That a block is asked for again, 0 to 1."""
        return (self._known + self.PRIOR) / (self._asked + 2 * self.PRIOR)
