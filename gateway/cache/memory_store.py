"""Kept answers in this process: the store of a server without a Redis. See types.py for the seam.

A tenant's entries are bounded in bytes, each for its time, and the least worth goes first
(`worth_when_used`). The order by worth is a heap in which what is out of date stays until it comes
up; one that has grown to several times the entries is made anew. All entries live equally long, so
they end in the order in which they came; where the clock was set, some are forgotten later.

A scope's vectors are searched exactly (vector_index.py). An index belongs to a scope in one epoch,
so what has been invalidated is neither found nor in the way. Everything but the search is done on
the event loop, in slices where it may be long.
"""

import asyncio
import heapq
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from gateway.cache.policy.cache_confidence import Confidence
from gateway.cache.types import (
    SIMILARITY_FLOOR,
    Entry,
    Epoch,
    Found,
    Neighbour,
    Scope,
    Selector,
    Size,
    StoreUnavailable,
    Vector,
)
from gateway.cache.vector_index import VECTOR_OVERHEAD, VectorIndex

ENTRY_OVERHEAD_BYTES = 1536
"""What an entry takes besides its texts and its vector: objects, keys, heap (measured)."""
HEAP_SLACK = 4


@dataclass(slots=True)
class Kept:
    """`entry` without its vector, which lies in the index `index_key`, if it had one."""

    entry: Entry
    index_key: bytes
    size_bytes: int
    worth: float


@dataclass(slots=True)
class TenantCache:
    """See above. `num_bytes` as entries are counted; `indexes` by whatever `put` is given."""

    entries: OrderedDict[bytes, Kept] = field(default_factory=OrderedDict)
    indexes: dict[bytes, VectorIndex] = field(default_factory=dict)
    num_bytes: int = 0
    _clock: float = 0.0
    _by_worth: list[tuple[float, bytes]] = field(default_factory=list)

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
        while self.entries:
            first = next(iter(self.entries.values())).entry
            if first.expires_at > now_s:
                return
            self.drop(first.exact_key)

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
        for key, kept in self.entries.items():
            assert (kept.worth, key) in ranked
        for index_key, index in self.indexes.items():
            assert all(self.entries[key].index_key == index_key for key in index.keys)

    def _rank(self, kept: Kept) -> None:
        heapq.heappush(self._by_worth, (kept.worth, kept.entry.exact_key))
        if len(self._by_worth) > HEAP_SLACK * (len(self.entries) + 1):
            self._by_worth = [(one.worth, key) for key, one in self.entries.items()]
            heapq.heapify(self._by_worth)


def size_of(entry: Entry) -> int:
    """As it is counted."""
    size = len(entry.question.encode()) + len(entry.answer.text.encode()) + ENTRY_OVERHEAD_BYTES
    return size if entry.vector is None else size + int(entry.vector.nbytes * VECTOR_OVERHEAD)


def worth_when_made(clock: float, cost_nanos: int, size_bytes: int) -> float:
    """Of an entry that nobody has used yet."""
    return clock + max(1, cost_nanos) / size_bytes


def worth_when_used(worth: float, clock: float, saved_nanos: int, size_bytes: int) -> float:
    """After one more hit."""
    return max(worth, clock) + max(1, saved_nanos) / size_bytes


SLICE = 256
SEARCH_S = 0.1
"""How long a search may wait for its thread and take: those that pile up are misses."""
_EPOCH = struct.Struct(">QQQ")
_VALID = 16
"""Bytes of an epoch that an entry is found by; the rest says which purges it has seen."""


class MemoryAnswers:
    """See AnswerStore. Used on the event loop only. `max_bytes` for all tenants together."""

    def __init__(
        self,
        max_bytes: int,
        tenant_max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._tenant_max_bytes = min(tenant_max_bytes, max_bytes)
        self._clock = clock
        self._tenants: dict[str, TenantCache] = {}
        self._num_bytes = 0
        self._tenant_epochs: dict[str, int] = {}
        self._model_epochs: dict[str, int] = {}
        self._purges = 0
        self._threads = ThreadPoolExecutor(1, "cache-search")
        self._sweeps: set[asyncio.Task[object]] = set()

    @property
    def kind(self) -> str:
        """See AnswerStore."""
        return "memory"

    async def start(self) -> None:
        """See AnswerStore. It is here."""

    async def exact(self, scope: Scope, exact_key: bytes) -> Found:
        """See AnswerStore."""
        kept = self._find(scope, exact_key)
        return Found(kept.entry if kept else None, self._epoch(scope.tenant_id, scope.model_name))

    async def nearest(self, scope: Scope, vector: Vector, k: int) -> list[Neighbour]:
        """See AnswerStore."""
        cache = self._tenants.get(scope.tenant_id)
        index = cache.indexes.get(self._index_key(scope)) if cache else None
        if index is None or index.num_dims != len(vector):
            return []
        try:
            async with asyncio.timeout(SEARCH_S):
                near = await index.nearest(vector, k, SIMILARITY_FLOOR, self._threads)
        except TimeoutError as error:
            raise StoreUnavailable("too many searches at once") from error
        found = [(self._find(scope, exact_key), cosine) for exact_key, cosine in near]
        return [Neighbour(kept.entry, cosine) for kept, cosine in found if kept]

    async def entries(
        self, tenant_id: str, entry_id: str = "", model_name: str = "", limit: int = 1
    ) -> list[Entry]:
        """See AnswerStore. The newest first."""
        cache = self._tenants.get(tenant_id, TenantCache())
        chosen = (
            entry
            for entry in (kept.entry for kept in reversed(cache.entries.values()))
            if entry_id in ("", entry.entry_id)
            and model_name in ("", entry.scope.model_name)
            and self._find(entry.scope, entry.exact_key)
        )
        return list(islice(chosen, limit))

    async def keep(self, entry: Entry) -> None:
        """See AnswerStore."""
        scope, size_bytes = entry.scope, size_of(entry)
        is_late = entry.epoch != self._epoch(scope.tenant_id, scope.model_name)
        if is_late or entry.expires_at <= self._clock() or size_bytes > self._tenant_max_bytes:
            return
        cache = self._tenants.setdefault(scope.tenant_id, TenantCache())
        with self._counted(scope.tenant_id):
            cache.expire(self._clock())
            cache.put(entry, self._index_key(scope))
            while cache.num_bytes > self._tenant_max_bytes:
                cache.drop_least()
        while self._num_bytes > self._max_bytes:
            largest = max(self._tenants, key=lambda one: self._tenants[one].num_bytes)
            with self._counted(largest):
                self._tenants[largest].drop_least()

    async def used(self, entry: Entry, saved_nanos: int) -> None:
        """See AnswerStore."""
        kept = self._find(entry.scope, entry.exact_key)
        if kept is not None and kept.entry.entry_id == entry.entry_id:
            self._tenants[entry.scope.tenant_id].use(kept, saved_nanos)

    async def learn(self, entry: Entry, confidence: Confidence) -> bool:
        """See AnswerStore."""
        kept = self._find(entry.scope, entry.exact_key)
        if kept is None or kept.entry.entry_id != entry.entry_id:
            return False
        if kept.entry.confidence != entry.confidence:
            return False
        self._tenants[entry.scope.tenant_id].learn(kept, confidence)
        return True

    async def purge(self, selector: Selector) -> int:
        """See AnswerStore."""
        if selector == Selector():
            raise ValueError("a purge has to say what of")
        self._purges += 1
        if selector == Selector(tenant_id=selector.tenant_id):
            return self._forget_tenant(selector.tenant_id)
        if selector == Selector(model_name=selector.model_name):
            self._count_model(selector.model_name)
        tenants = [selector.tenant_id] if selector.tenant_id else list(self._tenants)
        return await self._drop_all(tenants, lambda kept: selects(selector, kept.entry))

    async def invalidate(self, tenant_id: str = "", model_name: str = "") -> None:
        """See AnswerStore."""
        if tenant_id:
            self._forget_tenant(tenant_id)
        if model_name:
            self._count_model(model_name)
            self._sweep(self._drop_all(list(self._tenants), self._is_old))

    async def size(self) -> Size:
        """See AnswerStore."""
        num_entries = sum(len(cache.entries) for cache in self._tenants.values())
        return Size(num_entries, self._num_bytes)

    async def close(self) -> None:
        """See AnswerStore."""
        for sweep in list(self._sweeps):
            sweep.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, scope: Scope, exact_key: bytes) -> Kept | None:
        """What may be served."""
        cache = self._tenants.get(scope.tenant_id)
        kept = cache.entries.get(exact_key) if cache else None
        if kept is None or kept.entry.scope != scope or self._is_old(kept):
            return None
        return kept if kept.entry.expires_at > self._clock() else None

    def _epoch(self, tenant_id: str, model_name: str) -> Epoch:
        tenant, model = self._tenant_epochs.get(tenant_id, 0), self._model_epochs.get(model_name, 0)
        return _EPOCH.pack(tenant, model, self._purges)

    def _index_key(self, scope: Scope) -> bytes:
        return scope.digest + self._epoch(scope.tenant_id, scope.model_name)[:_VALID]

    def _is_old(self, kept: Kept) -> bool:
        scope = kept.entry.scope
        return kept.entry.epoch[:_VALID] != self._epoch(scope.tenant_id, scope.model_name)[:_VALID]

    def _count_model(self, model_name: str) -> None:
        self._model_epochs[model_name] = self._model_epochs.get(model_name, 0) + 1

    def _forget_tenant(self, tenant_id: str) -> int:
        self._tenant_epochs[tenant_id] = self._tenant_epochs.get(tenant_id, 0) + 1
        cache = self._tenants.pop(tenant_id, TenantCache())
        self._num_bytes -= cache.num_bytes
        num_entries = len(cache.entries)
        self._sweep(_empty(cache))
        return num_entries

    async def _drop_all(self, tenant_ids: Iterable[str], is_one: Callable[[Kept], bool]) -> int:
        num_dropped = 0
        for tenant_id in tenant_ids:
            keys = list(self._tenants.get(tenant_id, TenantCache()).entries)
            for start in range(0, len(keys), SLICE):
                cache = self._tenants.get(tenant_id)
                if cache is None:
                    break
                with self._counted(tenant_id):
                    for key in keys[start : start + SLICE]:
                        kept = cache.entries.get(key)
                        if kept is not None and is_one(kept):
                            cache.drop(key)
                            num_dropped += 1
                await asyncio.sleep(0)
        return num_dropped

    def _sweep(self, work: Coroutine[Any, Any, object]) -> None:
        sweep = asyncio.create_task(work, name="cache-sweep")
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)

    @contextmanager
    def _counted(self, tenant_id: str) -> Iterator[None]:
        """Around what changes a tenant's entries; one without any is forgotten afterwards."""
        cache = self._tenants[tenant_id]
        before = cache.num_bytes
        yield
        self._num_bytes += cache.num_bytes - before
        if not cache.entries:
            del self._tenants[tenant_id]

    def check_integrity(self) -> None:
        """Sums and indexes say what the entries say."""
        for cache in self._tenants.values():
            cache.check_integrity()
            assert cache.num_bytes <= self._tenant_max_bytes
        assert self._num_bytes == sum(cache.num_bytes for cache in self._tenants.values())
        assert self._num_bytes <= self._max_bytes


async def _empty(cache: TenantCache) -> None:
    """A hundred thousand entries at once would stop the event loop for tens of milliseconds."""
    while cache.entries:
        for _ in range(min(SLICE, len(cache.entries))):
            cache.entries.popitem()
        await asyncio.sleep(0)


def selects(selector: Selector, entry: Entry) -> bool:
    """Everything that is asked for holds."""
    wanted = (
        (selector.tenant_id, entry.scope.tenant_id),
        (selector.model_name, entry.scope.model_name),
        (selector.key_id, entry.key_id),
        (selector.question, entry.question),
    )
    return all(asked in ("", had) for asked, had in wanted)
