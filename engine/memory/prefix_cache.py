"""Prefixes by hash: which block already holds the KV of a sequence's first tokens. Pure.

A block's hash names all tokens up to its end, and whose they are:

    root(tenant)  ->  h_0 = H(root, tokens of block 0)  ->  h_1 = H(h_0, tokens of block 1)  -> ...

so that equal hashes mean equal prefixes, and a tenant finds its own blocks only (one never learns
by timing what another has asked). 16 bytes of BLAKE2b: an accidental collision is out of the
question, and a deliberate one would harm only the tenant who makes it.

Lives here: hashes, one group's table of them, and how long a hit is. Does not: references, memory.
"""

import functools
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.errors import IntegrityError

HASH_BYTES = 16
_TOKEN_BYTES = array("q").itemsize


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
        return True

    def remove(self, block: int) -> None:
        """The block is about to hold something else."""
        del self._block[self._hash.pop(block)]

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
) -> int:
    """Leading blocks that need not be computed, `hashes` being those of the candidates.

    A hit of n tokens needs every block before n of a group with full attention, and of one with a
    window those that a query at n still sees.
    """
    length = full_hit(indexes, windows, hashes)
    windowed = [(i, w) for i, w in zip(indexes, windows, strict=True) if w]
    settled = False
    while length and not settled:
        settled = True
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
