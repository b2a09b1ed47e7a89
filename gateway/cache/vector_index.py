"""The nearest of a scope's vectors, exactly: one product with all of them.

Comes in: keys and unit vectors (float32); goes out: keys and cosines. No entries.

Large searches run in a thread, with the rows as they were when it began: rows are never moved, and
one that was written since is left out of the result. The rows are handed to BLAS some at a time,
too few for it to begin threads of its own, which wait for one another wherever the machine is busy
(measured: 1.6 ms became 15).

Vectors that lie with entries in a Redis without vector sets are mirrored here. Whether such an
entry is still there, its store finds out when it fetches it; one that is not is removed. Scopes are
read when they are asked for, a little at a time, the rest of a large one in the background. Bounded
in bytes: the scope goes first that was asked for longest ago.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, KeysView
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gateway.cache.codec import decode_vector
from gateway.cache.types import Vector

INLINE_SIZE = 1 << 20
"""Numbers in all vectors: up to here a search takes no longer than the way to a thread and back."""
SCAN_ROWS = 64
"""Handed to BLAS at a time."""
LARGE_ROWS = 4096
VECTOR_OVERHEAD = 1.5
"""Times a vector's own bytes: few rows grow by halves."""

_Matrix: TypeAlias = NDArray[np.float32]


class VectorIndex:
    """Used on the event loop only."""

    def __init__(self, num_dims: int) -> None:
        self.num_dims = num_dims
        self._rows: _Matrix = np.zeros((0, num_dims), np.float32)
        """A free row is 0: its cosine reaches no floor."""
        self._keys: list[bytes | None] = []
        self._row_of: dict[bytes, int] = {}
        self._free: list[int] = []
        self._written: list[int] = []  # when a row was last written, in changes
        self._changes = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    @property
    def keys(self) -> KeysView[bytes]:
        """In no order."""
        return self._row_of.keys()

    def add(self, key: bytes, vector: Vector) -> None:
        """In place of the key's earlier vector, if there is one."""
        self.remove(key)
        row = self._free.pop() if self._free else len(self._keys)
        if row == len(self._keys):
            self._keys.append(None)
            self._written.append(0)
            if row == len(self._rows):  # New rows: a search goes on with the old ones.
                larger = np.zeros((_grown(row), self.num_dims), np.float32)
                larger[:row] = self._rows
                self._rows = larger
        self._row_of[key] = row
        self._write(row, key, vector)

    def remove(self, key: bytes) -> None:
        """Nothing where there is no such key."""
        row = self._row_of.pop(key, None)
        if row is not None:
            self._free.append(row)
            self._write(row, None, 0)

    async def nearest(
        self, vector: Vector, k: int, floor: float, threads: Executor
    ) -> list[tuple[bytes, float]]:
        """At most k keys and their cosines, none below the floor (> 0), the nearest first."""
        rows, began = self._rows[: len(self._keys)], self._changes
        if rows.size <= INLINE_SIZE:
            found = _search(rows, vector, k, floor)
        else:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(threads, _search, rows, vector, k, floor)
        alive = [(self._keys[row], cosine, row) for row, cosine in found]
        return [(key, cos) for key, cos, row in alive if key and self._written[row] <= began]

    def _write(self, row: int, key: bytes | None, vector: Vector | int) -> None:
        self._changes += 1
        self._written[row] = self._changes
        self._keys[row] = key
        self._rows[row] = vector


def _grown(num_rows: int) -> int:
    """Copying many rows stops the event loop; memory that nobody has written to costs nothing."""
    return num_rows + max(1, num_rows // 2) if num_rows < LARGE_ROWS else num_rows * 8


def _search(rows: _Matrix, vector: Vector, k: int, floor: float) -> list[tuple[int, float]]:
    """(row, cosine), the nearest first."""
    num_rows, num_dims = rows.shape
    end = num_rows - num_rows % SCAN_ROWS
    cosines = np.empty(num_rows, np.float32)
    pieces = rows[:end].reshape(-1, SCAN_ROWS, num_dims)
    np.matmul(pieces, vector, out=cosines[:end].reshape(-1, SCAN_ROWS))
    np.vecdot(rows[end:], vector, out=cosines[end:])
    near = np.flatnonzero(cosines >= floor)
    if len(near) > k:
        near = near[np.argpartition(cosines[near], -k)[-k:]]
    near = near[np.argsort(-cosines[near], kind="stable")]
    return [(int(row), float(cosines[row])) for row in near]


FIRST_READ = 64
"""Additions read while a request waits."""
READ = 512
SLACK = 2
"""Times as many rows as members: then most are of what is gone, and the scope is read anew."""
ROW_OVERHEAD_BYTES = 256
FLOAT_BYTES = 4
SCOPE_OVERHEAD_BYTES = 4096

_Since: TypeAlias = Callable[[bytes, int], Awaitable[list[Any]]]
_Later: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], bool]


class _Copy:
    def __init__(self) -> None:
        self.index: VectorIndex | None = None
        self.after = b"0"
        self.is_being_read = False

    @property
    def num_rows(self) -> int:
        return 0 if self.index is None else len(self.index)

    @property
    def num_bytes(self) -> int:
        num_dims = 0 if self.index is None else self.index.num_dims
        row_bytes = int(num_dims * FLOAT_BYTES * VECTOR_OVERHEAD) + ROW_OVERHEAD_BYTES
        return SCOPE_OVERHEAD_BYTES + self.num_rows * row_bytes

    def add(self, name: bytes, vector: Vector) -> None:
        if self.index is None or self.index.num_dims != len(vector):
            self.index = VectorIndex(len(vector))
        self.index.add(name, vector)


class RedisVectorMirror:
    """Used on the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._copies: OrderedDict[bytes, _Copy] = OrderedDict()
        self._threads = ThreadPoolExecutor(1, "cache-search")

    @property
    def num_bytes(self) -> int:
        """What the copies take."""
        return self._num_bytes

    async def read(self, set_id: bytes, since: _Since, later: _Later) -> None:
        """Learn what was added. `since(after, limit)` says how many members there are, then (id,
        when, vector) of each that was added after `after`; `later` does the rest."""
        copy = self._copies.get(set_id)
        if copy is None:
            copy = self._copies[set_id] = _Copy()
            self._num_bytes += copy.num_bytes
        self._copies.move_to_end(set_id)
        if copy.is_being_read:
            return
        if await self._read_some(set_id, copy, since, FIRST_READ):
            self._go_on(set_id, copy, since, later)

    async def nearest(
        self, set_id: bytes, vector: Vector, k: int, floor: float
    ) -> list[tuple[bytes, float]]:
        """(id, cosine) of what has been read, the nearest first."""
        copy = self._copies.get(set_id)
        if copy is None or copy.index is None or copy.index.num_dims != len(vector):
            return []
        return await copy.index.nearest(vector, k, floor, self._threads)

    def remove(self, set_id: bytes, name: bytes) -> None:
        """It is gone."""
        copy = self._copies.get(set_id)
        if copy is not None and copy.index is not None:
            before = copy.num_bytes
            copy.index.remove(name)
            self._num_bytes += copy.num_bytes - before

    def clear(self) -> None:
        """All of it is gone."""
        self._copies.clear()
        self._num_bytes = 0

    def close(self) -> None:
        """At the end of the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _go_on(self, set_id: bytes, copy: _Copy, since: _Since, later: _Later) -> None:
        """One piece, with the time of one call, then the next."""

        async def read_on() -> None:
            copy.is_being_read = False
            is_current = self._copies.get(set_id) is copy
            if is_current and await self._read_some(set_id, copy, since, READ):
                self._go_on(set_id, copy, since, later)

        copy.is_being_read = later(read_on)

    async def _read_some(self, set_id: bytes, copy: _Copy, since: _Since, limit: int) -> bool:
        """Whether there may be more."""
        num_members, *added = await since(copy.after, limit)
        if self._copies.get(set_id) is not copy:
            return False
        before = copy.num_bytes
        for name, when, vector in added:
            copy.after = when
            if vector:
                copy.add(name, decode_vector(vector))
        is_mostly_gone = copy.num_rows > SLACK * num_members + FIRST_READ
        if is_mostly_gone:
            copy.index, copy.after = None, b"0"
        self._num_bytes += copy.num_bytes - before
        while self._num_bytes > self._max_bytes and self._copies:
            _, oldest = self._copies.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return is_mostly_gone or len(added) >= limit
