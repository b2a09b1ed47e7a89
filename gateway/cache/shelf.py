"""One tenant's entries in this process: bounded in bytes, each for its time. No epochs, no tenants.

The least worth goes first (policy/cache_worth.py). Both orders, by worth and by end, are heaps in
which what is out of date stays until it comes up; one that has grown to several times the entries
is made anew. Used on the event loop only.
"""

import heapq
from dataclasses import dataclass, field, replace

from gateway.cache.matrix import VECTOR_OVERHEAD, VectorIndex
from gateway.cache.types import Entry
from gateway.policy.cache_confidence import Confidence
from gateway.policy.cache_worth import worth_when_made, worth_when_used

ENTRY_OVERHEAD_BYTES = 1536
"""What an entry takes besides its texts and its vector: objects, keys, both heaps (measured by
bench.cache_store)."""
HEAP_SLACK = 4


@dataclass(slots=True)
class Kept:
    """`entry` without its vector, which lies in the index `index_key`, if it had one."""

    entry: Entry
    index_key: bytes
    size_bytes: int
    worth: float


@dataclass(slots=True)
class Shelf:
    """See above. `num_bytes` as entries are counted; `indexes` by whatever `put` is told."""

    entries: dict[bytes, Kept] = field(default_factory=dict)
    indexes: dict[bytes, VectorIndex] = field(default_factory=dict)
    num_bytes: int = 0
    _clock: float = 0.0
    _by_worth: list[tuple[float, bytes]] = field(default_factory=list)
    _by_end: list[tuple[float, bytes]] = field(default_factory=list)

    def put(self, entry: Entry, index_key: bytes) -> None:
        """In place of an entry of the same `exact_key`. Makes no room for it."""
        self.drop(entry.exact_key)
        size_bytes = size_of(entry)
        worth = worth_when_made(self._clock, entry.cost_nanos, size_bytes)
        kept = Kept(replace(entry, vector=None), index_key, size_bytes, worth)
        if entry.vector is not None:
            index = self.indexes.setdefault(index_key, VectorIndex(len(entry.vector)))
            index.add(entry.exact_key, entry.vector)
        self.entries[entry.exact_key] = kept
        self.num_bytes += size_bytes
        self._rank(kept)
        heapq.heappush(self._by_end, (entry.expires_at, entry.exact_key))

    def use(self, kept: Kept, saved_nanos: int) -> None:
        """It has saved that much."""
        kept.worth = worth_when_used(kept.worth, self._clock, saved_nanos, kept.size_bytes)
        self._rank(kept)

    def learn(self, kept: Kept, confidence: Confidence) -> None:
        """What is known of it now."""
        kept.entry = replace(kept.entry, confidence=confidence)

    def drop(self, exact_key: bytes) -> Entry | None:
        """The entry that was there."""
        kept = self.entries.pop(exact_key, None)
        if kept is None:
            return None
        self.num_bytes -= kept.size_bytes
        index = self.indexes.get(kept.index_key)
        if index is not None:
            index.remove(exact_key)
            if not len(index):
                del self.indexes[kept.index_key]
        return kept.entry

    def expire(self, now_s: float) -> None:
        """Drop what has had its time."""
        while self._by_end and self._by_end[0][0] <= now_s:
            ends_at, exact_key = heapq.heappop(self._by_end)
            kept = self.entries.get(exact_key)
            if kept is not None and kept.entry.expires_at <= ends_at:
                self.drop(exact_key)

    def drop_least(self) -> None:
        """One entry, the least worth. There has to be one."""
        while True:
            worth, exact_key = heapq.heappop(self._by_worth)
            kept = self.entries.get(exact_key)
            if kept is not None and kept.worth == worth:
                self._clock = max(self._clock, worth)
                self.drop(exact_key)
                return

    def check_integrity(self) -> None:
        """Sums and indexes say what the entries say."""
        kepts = self.entries.values()
        assert self.num_bytes == sum(kept.size_bytes for kept in kepts)
        ranked = set(self._by_worth)
        ends = set(self._by_end)
        for key, kept in self.entries.items():
            assert (kept.worth, key) in ranked
            assert (kept.entry.expires_at, key) in ends
        for index_key, index in self.indexes.items():
            assert all(self.entries[key].index_key == index_key for key in index.keys)

    def _rank(self, kept: Kept) -> None:
        heapq.heappush(self._by_worth, (kept.worth, kept.entry.exact_key))
        bound = HEAP_SLACK * len(self.entries) + HEAP_SLACK
        if len(self._by_worth) > bound:
            self._by_worth = [(one.worth, key) for key, one in self.entries.items()]
            heapq.heapify(self._by_worth)
        if len(self._by_end) > bound:
            self._by_end = [(one.entry.expires_at, key) for key, one in self.entries.items()]
            heapq.heapify(self._by_end)


def size_of(entry: Entry) -> int:
    """As it is counted."""
    size = len(entry.question.encode()) + len(entry.answer.text.encode()) + ENTRY_OVERHEAD_BYTES
    return size if entry.vector is None else size + int(entry.vector.nbytes * VECTOR_OVERHEAD)
