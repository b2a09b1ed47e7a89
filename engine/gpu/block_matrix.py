"""One layer group's tables of blocks as the rows of the last step had them, ready to be packed.

A row of one token adds a block to its table every few steps, and 256 tables written anew in each
step are half of what laying it out takes. So they stay, each in a place of its own, and only what
changed is written. A row that sits out a step gives its place back.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from engine.memory import RequestKv

Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int32]]"
Places: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.intp]]"

FIRST_PLACES = 16
FIRST_COLUMNS = 16


class BlockMatrix:
    """Chunk and slot of each block, from the first block that a row needs on."""

    def __init__(self, group: int, blocks_per_chunk: int) -> None:
        self._group = group
        self._per_chunk = blocks_per_chunk
        self.chunk: Ints = np.zeros((FIRST_PLACES, FIRST_COLUMNS), dtype=np.int32)
        self.slot: Ints = np.zeros((FIRST_PLACES, FIRST_COLUMNS), dtype=np.int32)
        # By row: its place, the blocks its table had, the first one needed, the table's version.
        self._known: dict[RequestKv, tuple[int, int, int, int]] = {}
        self._free = list(range(FIRST_PLACES))

    def places(self, rows: Sequence[RequestKv], lows: Sequence[int]) -> Places:
        """Of each row's table from block lows[i] on, written as of now. No row comes twice.

        `chunk` and `slot` are other arrays after this.
        """
        known, g = self._known, self._group
        fresh: dict[RequestKv, tuple[int, int, int, int]] = {}
        places, new_rows = [], []
        for i, (kv, low) in enumerate(zip(rows, lows, strict=True)):
            found = known.pop(kv, None)
            if found is None:
                new_rows.append(i)
                places.append(-1)
                continue
            place, length, old_low, version = found
            now = len(kv.tables[g])
            if now != length or low != old_low or version != kv.version:
                same = low == old_low and version == kv.version and now > length
                self._write(place, kv, low, length if same else low)
                found = (place, now, low, kv.version)
            fresh[kv] = found
            places.append(place)
        self._free += [place for place, *_ in known.values()]
        for i in new_rows:
            if not self._free:
                self._grow(2 * len(self.chunk), self.chunk.shape[1])
            kv, low = rows[i], lows[i]
            place = places[i] = self._free.pop()
            fresh[kv] = (place, len(kv.tables[g]), low, kv.version)
            self._write(place, kv, low, low)
        self._known = fresh
        return np.array(places, dtype=np.intp)

    def _write(self, place: int, kv: RequestKv, low: int, begin: int) -> None:
        """The row's blocks from number `begin` on."""
        blocks = kv.array(self._group)[begin:]
        first, end = begin - low, begin - low + len(blocks)
        if end > self.chunk.shape[1]:
            self._grow(len(self.chunk), max(end, 2 * self.chunk.shape[1]))
        self.chunk[place, first:end] = blocks // self._per_chunk
        self.slot[place, first:end] = blocks % self._per_chunk

    def _grow(self, num_places: int, num_columns: int) -> None:
        self._free += range(len(self.chunk), num_places)
        old = self.chunk, self.slot
        self.chunk, self.slot = (np.zeros((num_places, num_columns), np.int32) for _ in old)
        for wider, narrow in zip((self.chunk, self.slot), old, strict=True):
            wider[: narrow.shape[0], : narrow.shape[1]] = narrow
