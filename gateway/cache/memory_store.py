"""Kept answers in this process: the store of a server without a Redis. See store.py for the seam.

A scope's vectors are searched exactly (matrix.py). An index belongs to a scope in one epoch, so
what has been invalidated is neither found nor in the way. Everything but the search is done on the
event loop, in slices where it may be long.
"""

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

from gateway.cache.selection import selects
from gateway.cache.shelf import Kept, Shelf, size_of
from gateway.cache.store import SIMILARITY_FLOOR, Size, StoreUnavailable
from gateway.cache.types import Entry, Epoch, Found, Neighbour, Scope, Selector, Vector
from gateway.policy.cache_confidence import Confidence

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
        self._shelves: dict[str, Shelf] = {}
        self._num_bytes = 0
        self._tenant_epochs: dict[str, int] = {}
        self._model_epochs: dict[str, int] = {}
        self._purges = 0
        self._threads = ThreadPoolExecutor(1, "cache-search")
        self._sweeps: set[asyncio.Task[object]] = set()

    async def exact(self, scope: Scope, exact_key: bytes) -> Found:
        """See AnswerStore."""
        kept = self._find(scope, exact_key)
        return Found(kept.entry if kept else None, self._epoch(scope.tenant_id, scope.model_name))

    async def nearest(self, scope: Scope, vector: Vector, k: int) -> list[Neighbour]:
        """See AnswerStore."""
        shelf = self._shelves.get(scope.tenant_id)
        index = shelf.indexes.get(self._index_key(scope)) if shelf else None
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
        shelf = self._shelves.get(tenant_id, Shelf())
        chosen = (
            entry
            for entry in (kept.entry for kept in reversed(shelf.entries.values()))
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
        shelf = self._shelves.setdefault(scope.tenant_id, Shelf())
        with self._counted(scope.tenant_id):
            shelf.expire(self._clock())
            shelf.put(entry, self._index_key(scope))
            while shelf.num_bytes > self._tenant_max_bytes:
                shelf.drop_least()
        while self._num_bytes > self._max_bytes:
            largest = max(self._shelves, key=lambda one: self._shelves[one].num_bytes)
            with self._counted(largest):
                self._shelves[largest].drop_least()

    async def used(self, entry: Entry, saved_nanos: int) -> None:
        """See AnswerStore."""
        kept = self._find(entry.scope, entry.exact_key)
        if kept is not None and kept.entry.entry_id == entry.entry_id:
            self._shelves[entry.scope.tenant_id].use(kept, saved_nanos)

    async def learn(self, entry: Entry, confidence: Confidence) -> bool:
        """See AnswerStore."""
        kept = self._find(entry.scope, entry.exact_key)
        if kept is None or kept.entry.entry_id != entry.entry_id:
            return False
        if kept.entry.confidence != entry.confidence:
            return False
        self._shelves[entry.scope.tenant_id].learn(kept, confidence)
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
        tenants = [selector.tenant_id] if selector.tenant_id else list(self._shelves)
        return await self._drop_all(tenants, lambda kept: selects(selector, kept.entry))

    async def invalidate(self, tenant_id: str = "", model_name: str = "") -> None:
        """See AnswerStore."""
        if tenant_id:
            self._forget_tenant(tenant_id)
        if model_name:
            self._count_model(model_name)
            self._sweep(self._drop_all(list(self._shelves), self._is_old))

    async def size(self) -> Size:
        """See AnswerStore."""
        num_entries = sum(len(shelf.entries) for shelf in self._shelves.values())
        return Size(num_entries, self._num_bytes)

    async def close(self) -> None:
        """See AnswerStore."""
        for sweep in list(self._sweeps):
            sweep.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, scope: Scope, exact_key: bytes) -> Kept | None:
        """What may be served."""
        shelf = self._shelves.get(scope.tenant_id)
        kept = shelf.entries.get(exact_key) if shelf else None
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
        shelf = self._shelves.pop(tenant_id, Shelf())
        self._num_bytes -= shelf.num_bytes
        num_entries = len(shelf.entries)
        self._sweep(_empty(shelf))
        return num_entries

    async def _drop_all(self, tenant_ids: Iterable[str], is_one: Callable[[Kept], bool]) -> int:
        num_dropped = 0
        for tenant_id in tenant_ids:
            keys = list(self._shelves.get(tenant_id, Shelf()).entries)
            for start in range(0, len(keys), SLICE):
                shelf = self._shelves.get(tenant_id)
                if shelf is None:
                    break
                with self._counted(tenant_id):
                    for key in keys[start : start + SLICE]:
                        kept = shelf.entries.get(key)
                        if kept is not None and is_one(kept):
                            shelf.drop(key)
                            num_dropped += 1
                await asyncio.sleep(0)
        return num_dropped

    def _sweep(self, work: Coroutine[Any, Any, object]) -> None:
        sweep = asyncio.create_task(work, name="cache-sweep")
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)

    @contextmanager
    def _counted(self, tenant_id: str) -> Iterator[None]:
        """Around what changes a tenant's shelf; one that is empty afterwards is forgotten."""
        shelf = self._shelves[tenant_id]
        before = shelf.num_bytes
        yield
        self._num_bytes += shelf.num_bytes - before
        if not shelf.entries:
            del self._shelves[tenant_id]

    def check_integrity(self) -> None:
        """Sums and indexes say what the entries say."""
        for shelf in self._shelves.values():
            shelf.check_integrity()
            assert shelf.num_bytes <= self._tenant_max_bytes
        assert self._num_bytes == sum(shelf.num_bytes for shelf in self._shelves.values())
        assert self._num_bytes <= self._max_bytes


async def _empty(shelf: Shelf) -> None:
    """A hundred thousand entries at once would stop the event loop for tens of milliseconds."""
    while shelf.entries:
        for _ in range(min(SLICE, len(shelf.entries))):
            shelf.entries.popitem()
        await asyncio.sleep(0)
