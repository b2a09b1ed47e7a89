"""A group's extents, filed by what may be done with them, so that the right one is found at once.

An extent is filed by the state of its blocks (`kv_group.py`): open while it holds a live one, dead
while it holds cached ones only. It is taken out before it is changed, and filed again after it.
"""

import heapq
from dataclasses import dataclass, field

from engine.memory.policy.kv_value import Rank, ValueParams

# Stale entries in the heap of dead extents that are put up with before it is built anew.
HEAP_SLACK = 64


@dataclass(slots=True)
class Extent:
    """`free` slots and `cached` blocks (oldest first); its other blocks are live.

    depth    place in its sequence of the shallowest cached block
    death    which entry of the heap speaks of it
    """

    pages: list[int]
    free: list[int]
    cached: dict[int, None] = field(default_factory=dict)
    num_live: int = 0
    num_hits: int = 0
    depth: int = 0
    last_used_s: float = 0.0
    death: int = 0


class _ByNumber:
    """Extents by a number from 1 on; finds one with the smallest or the largest at once."""

    def __init__(self, largest: int) -> None:
        self._extents: list[dict[int, None]] = [{} for _ in range(largest + 1)]
        self._mask = 0  # bit n: some extent has the number n

    def add(self, extent_id: int, number: int) -> None:
        if number:
            self._extents[number][extent_id] = None
            self._mask |= 1 << number

    def remove(self, extent_id: int, number: int) -> None:
        if number:
            del self._extents[number][extent_id]
            if not self._extents[number]:
                self._mask &= ~(1 << number)

    def smallest(self) -> int | None:
        if not self._mask:
            return None
        return next(iter(self._extents[(self._mask & -self._mask).bit_length() - 1]))

    def largest_below(self, limit: int) -> int | None:
        mask = self._mask & ((1 << limit) - 1)
        return next(iter(self._extents[mask.bit_length() - 1])) if mask else None


class ExtentFiles:
    """Extents by what may be done with them; the right one is found at once, whatever their number.

    by_room, by_live   open ones by their free slots, and by their live blocks
    mixed              open ones with cached blocks, the last changed last: these may be overwritten
    dead               may go back whole, least valuable first

    An extent is taken out (`remove`) before it is changed and filed again (`add`) after it.
    """

    def __init__(self, num_slots: int, params: ValueParams, rank: Rank) -> None:
        self._params = params
        self._rank = rank
        self.by_room = _ByNumber(num_slots)
        self.by_live = _ByNumber(num_slots)
        self.mixed: dict[int, None] = {}
        self.dead: dict[int, Extent] = {}
        self._heap: list[tuple[float, int, int]] = []  # (rank, death, extent id)
        self._num_deaths = 0
        self.num_dead_cached = 0  # blocks
        self.num_dead_free = 0

    def add(self, extent_id: int, extent: Extent) -> None:
        """File an extent that holds a live or a cached block."""
        if extent.num_live:
            self.by_room.add(extent_id, len(extent.free))
            self.by_live.add(extent_id, extent.num_live)
            if extent.cached:
                self.mixed[extent_id] = None
            return
        self.dead[extent_id] = extent
        self.num_dead_cached += len(extent.cached)
        self.num_dead_free += len(extent.free)
        self._num_deaths += 1
        extent.death = self._num_deaths
        value = self._rank(
            len(extent.cached), extent.num_hits, extent.depth, extent.last_used_s, self._params
        )
        heapq.heappush(self._heap, (value, extent.death, extent_id))
        if len(self._heap) > 2 * len(self.dead) + HEAP_SLACK:
            self._heap = [entry for entry in self._heap if self._speaks(entry[1], entry[2])]
            heapq.heapify(self._heap)

    def remove(self, extent_id: int, extent: Extent) -> None:
        """Take it out."""
        if extent.num_live:
            self.by_room.remove(extent_id, len(extent.free))
            self.by_live.remove(extent_id, extent.num_live)
            self.mixed.pop(extent_id, None)
        else:
            del self.dead[extent_id]
            self.num_dead_cached -= len(extent.cached)
            self.num_dead_free -= len(extent.free)

    def least_valuable(self) -> tuple[float, int] | None:
        """(rank, extent id) of the dead extent that should go first."""
        while self._heap:
            value, death, extent_id = self._heap[0]
            if self._speaks(death, extent_id):
                return value, extent_id
            heapq.heappop(self._heap)
        return None

    def is_filed(self, extent_id: int, extent: Extent) -> bool:
        """Whether the extent is in the files where it belongs (for check_integrity)."""
        if bool(extent.num_live and extent.cached) != (extent_id in self.mixed):
            return False
        if extent.num_live:
            return extent_id not in self.dead
        return self.dead.get(extent_id) is extent and bool(extent.cached)

    def _speaks(self, death: int, extent_id: int) -> bool:
        extent = self.dead.get(extent_id)
        return extent is not None and extent.death == death
