"""What one request holds of its model's KV, and the names by which others find its blocks.

`RequestKv`, `Hit` and `BlockDemand` are plain records: `kv_cache.py` fills and empties them,
`batch.py` reads the tables. A block's hash names all tokens up to its end, and whose they are:

    root(tenant)  ->  h_0 = H(root, tokens of block 0)  ->  h_1 = H(h_0, tokens of block 1)  -> ...

so that equal hashes mean equal prefixes, and a tenant finds its own blocks only (one never learns
by timing what another has asked). 16 bytes of BLAKE2b: an accidental collision is out of the
question, and a deliberate one would harm only the tenant who makes it.

Of a state group the name is that of the last block that a snapshot stands for.

Lives here: tables, hashes, one group's index of them, and how long a hit is. Does not: references,
memory.
"""

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from engine.errors import IntegrityError

BlockIds = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

HOLE = -1


HASH_BYTES = 16
MOST_GONE = 4096
"""Names of blocks that are remembered after the blocks are gone, in each group."""
_TOKEN_BYTES = array("q").itemsize


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """Blocks still needed, by group."""

    blocks: tuple[int, ...]

    def __add__(self, other: "BlockDemand") -> "BlockDemand":
        return BlockDemand(tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True)))


@dataclass(frozen=True, slots=True)
class Hit:
    """What a cache has of a request's tokens, before anything of it is referred to.

    num_tokens   of the prefix
    num_pages    of extents that could be given back and no longer can once it is referred to
    room         by group, how many blocks more extents with live blocks can take then
    missing      name of the first block that groups without a window lack; None: they have all
    version      of the requests that hold blocks, when it was looked for
    """

    num_tokens: int = 0
    num_pages: int = 0
    room: tuple[int, ...] = ()
    missing: bytes | None = None
    version: int = -1


@dataclass(slots=True, eq=False)
class HeldStates:
    """What one request holds of its model's states.

    num_versions   slots of each group that it needs: 2 where a token may be computed twice
    slots          by state group, one for each version; empty before the first `reserve`
    ends           by version, the tokens that it stands for; -1: none
    read, write    versions of the row that was begun last
    num_good       tokens that are known to be computed, at a block's end
    found          by state group, the snapshot that `match` found, until it is copied
    points         where snapshots are wanted, in blocks
    branch         the one where others have left the same beginning; 0: none
    snapshots      by blocks, copies without a name yet: the slot of each group
    """

    num_versions: int = 1
    slots: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    read: int = 0
    write: int = 0
    num_good: int = 0
    found: list[int] = field(default_factory=list)
    points: list[int] = field(default_factory=list)
    branch: int = 0
    snapshots: dict[int, list[int]] = field(default_factory=dict)

    def held(self, group: int) -> list[int]:
        """All slots of a group that it refers to."""
        found = self.found[group : group + 1]
        return [*self.slots[group], *found, *(slots[group] for slots in self.snapshots.values())]


@dataclass(slots=True, eq=False)
class RequestKv:
    """What one request holds of a KvCache. Empty before `match` and after `release`.

    tables           by group, block ids by block number; HOLE where it left the window
    first            by group, the first block number that is no hole
    hashes           of the leading full blocks; good for as long as the tokens are
    num_registered   blocks that have been offered to the index
    num_cached       tokens that `match` found
    num_blocks       block numbers that the tables reach; the same in all groups
    states           what it holds beside: nothing where the model has KV only
    is_counted       what it asks for has been counted for `Reuse`
    next_advance     `advance` has nothing to do for fewer tokens than this
    version          another one when entries of a table were changed other than by appending
    """

    salt: bytes
    tables: list[list[int]]
    first: list[int]
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_cached: int = 0
    next_advance: int = 0
    num_blocks: int = 0
    states: HeldStates = field(default_factory=HeldStates)
    is_counted: bool = False
    version: int = 0
    _arrays: list[tuple[BlockIds, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not self.num_blocks

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
        self.version += 1


@functools.lru_cache(maxsize=1 << 16)
def root_hash(tenant_id: str) -> bytes:
    """Where a tenant's chains begin."""
    return blake2b(tenant_id.encode(), digest_size=HASH_BYTES, person=b"tenant").digest()


def extend_hashes(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_tokens: int, num_blocks: int
) -> None:
    """Append the hashes of the full blocks up to `num_blocks` (about 1 us each)."""
    first = len(hashes)
    if num_blocks <= first:
        return
    size = block_tokens * _TOKEN_BYTES
    data = memoryview(array("q", token_ids[first * block_tokens : num_blocks * block_tokens]))
    flat = data.cast("B")
    parent = hashes[-1] if hashes else root
    for start in range(0, len(flat), size):
        state = blake2b(parent, digest_size=HASH_BYTES)
        state.update(flat[start : start + size])
        parent = state.digest()
        hashes.append(parent)


class PrefixIndex:
    """One group's full blocks by hash. A hash names one block, a block has at most one hash."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}
        self._gone: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._block)

    def __contains__(self, block: int) -> bool:
        return block in self._hash

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content."""
        return self._block.get(block_hash)

    def add(self, block_hash: bytes, block: int) -> bool:
        """False where the content is known already: two requests computed it at once.

        The second block stays its request's own and is free when that ends.
        """
        if block_hash in self._block or block in self._hash:
            return False
        self._block[block_hash] = block
        self._hash[block] = block_hash
        self._gone.pop(block_hash, None)
        return True

    def remove(self, block: int) -> None:
        """The block is about to hold something else."""
        block_hash = self._hash.pop(block)
        del self._block[block_hash]
        self._gone[block_hash] = None
        if len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def num_known(self, hashes: Sequence[bytes], start: int) -> int:
        """Of these names, how many in a row from the first are those of blocks that are there (as
        the first `start` are) or are remembered."""
        length = len(hashes)
        names = range(start, length)
        known = (i for i in names if hashes[i] not in self._block and hashes[i] not in self._gone)
        return next(known, length)

    def rename(self, block: int, new: int) -> None:
        """The content has been copied to block `new`."""
        block_hash = self._hash.pop(block)
        self._block[block_hash] = new
        self._hash[new] = block_hash

    def clear(self) -> None:
        """Forget all."""
        self._block.clear()
        self._hash.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless both directions agree."""
        if {block: key for key, block in self._block.items()} != self._hash:
            raise IntegrityError("the prefix index does not agree with itself")


def full_hit(
    indexes: Sequence[PrefixIndex], windows: Sequence[int], hashes: Sequence[bytes]
) -> int:
    """Leading blocks that every group without a window has."""
    length = len(hashes)
    for index, window in zip(indexes, windows, strict=True):
        if not window:
            length = next((i for i in range(length) if index.find(hashes[i]) is None), length)
    return length


def longest_hit(
    indexes: Sequence[PrefixIndex],
    windows: Sequence[int],
    hashes: Sequence[bytes],
    block_tokens: int,
    states: Sequence[PrefixIndex] = (),
) -> int:
    """Leading blocks that need not be computed, `hashes` being those of the candidates.

    A hit of n tokens needs every block before n of a group with full attention, of one with a
    window those that a query at n still sees, and of a state group a snapshot at n.
    """
    length = full_hit(indexes, windows, hashes)
    windowed = [(i, w) for i, w in zip(indexes, windows, strict=True) if w]
    settled = False
    while length and not settled:
        settled = True
        while length and any(index.find(hashes[length - 1]) is None for index in states):
            length -= 1
        for index, window in windowed:
            shorter = _windowed_hit(index, window, hashes, block_tokens, length)
            settled = settled and shorter == length
            length = shorter
    return length


def _windowed_hit(
    index: PrefixIndex, window: int, hashes: Sequence[bytes], block_tokens: int, length: int
) -> int:
    """The longest hit of at most `length` blocks. Looks each block up at most once."""
    block = length - 1
    while block >= max(0, length * block_tokens - window + 1) // block_tokens:
        if index.find(hashes[block]) is None:
            # Whatever hit reaches beyond this block but not beyond `length` sees it too.
            length = block
        block -= 1
    return length
