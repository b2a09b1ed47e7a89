"""What one request holds of its unit's KvCache, and what it still needs.

Plain records: `kv_cache.py` fills and empties them, `batch.py` reads the tables.
"""

from dataclasses import dataclass, field

import numpy as np

BlockIds = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

HOLE = -1


@dataclass(frozen=True, slots=True)
class Demand:
    """Blocks still needed, by group."""

    blocks: tuple[int, ...]

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True)))


@dataclass(frozen=True, slots=True)
class Hit:
    """What a cache has of a request's tokens, before anything of it is referred to.

    num_tokens   of the prefix
    num_pages    of extents that could be given back and no longer can once it is referred to
    room         by group, how many blocks more extents with live blocks can take then
    missing      name of the first block that groups without a window lack; None: they have all
    version      of the requests that hold blocks, when it was looked for
    """

    num_tokens: int
    num_pages: int = 0
    room: tuple[int, ...] = ()
    missing: bytes | None = None
    version: int = -1


NO_HIT = Hit(0)


@dataclass(slots=True, eq=False)
class RequestKv:
    """What one request holds of a KvCache. Empty before `match` and after `release`.

    tables           by group, block ids by block number; HOLE where it left the window
    first            by group, the first block number that is no hole
    hashes           of the leading full blocks; good for as long as the tokens are
    num_registered   blocks that have been offered to the index
    num_cached       tokens that `match` found
    next_advance     `advance` has nothing to do for fewer tokens than this
    """

    salt: bytes
    tables: list[list[int]]
    first: list[int]
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_cached: int = 0
    next_advance: int = 0
    _arrays: list[tuple[BlockIds, int]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Block numbers that the tables reach; the same in all groups."""
        return len(self.tables[0])

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.tables[0]

    def array(self, group: int) -> BlockIds:
        """The group's table as int64, holes undefined. Costs what came since the last call."""
        if not self._arrays:
            self._arrays = [(np.empty(16, dtype=np.int64), 0) for _ in self.tables]
        array, filled = self._arrays[group]
        table = self.tables[group]
        if filled < len(table):
            if len(table) > len(array):
                array = np.concatenate([array[:filled], np.empty(len(table), dtype=np.int64)])
            array[filled : len(table)] = table[filled:]
            self._arrays[group] = array, len(table)
        return array[: len(table)]

    def rewritten(self) -> None:
        """Entries of a table were changed other than by appending."""
        self._arrays.clear()
