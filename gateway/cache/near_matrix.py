"""Vectors that lie with entries in a Redis without vector sets: copies of them here, to search.

Comes in: what was added to a scope since it was last read; goes out: ids that may be near. Whether
such an entry is still there, its store finds out when it fetches it; one that is not is removed.
Scopes are read when they are asked for, a little at a time, the rest of a large one in the
background. Bounded in bytes: the scope goes first that was asked for longest ago.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from gateway.cache.codec import decode_vector
from gateway.cache.matrix import VECTOR_OVERHEAD, VectorIndex
from gateway.cache.types import Vector

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


class NearMatrix:
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
