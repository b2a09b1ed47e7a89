"""KV of a residency's tests: whole pages, live or cached, that are evicted and moved as KV is.

Every page is stamped, and its stamp must be there as long as somebody has the page. Moves are
copies in device order, as the real KvMemory makes them.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.backend.cpu import CpuBackend
from engine.errors import OutOfPages
from engine.memory.page_pool import Owner, PagePool


@dataclass(slots=True)
class KvPage:
    """A page with its stamp. `live`: some request needs it."""

    page: int
    owner: Owner
    stamp: int
    live: bool


class PagedKv:
    """Implements `engine.residency.weight_space.KvSpace`. `stubborn`: live pages cannot be
    moved."""

    def __init__(self, pool: PagePool, backend: CpuBackend, stubborn: bool = False) -> None:
        self.pages: list[KvPage] = []
        self.stubborn = stubborn
        self.num_moved = 0
        self.num_evicted = 0
        self._pool = pool
        self._backend = backend
        self._num_stamps = 0

    def grow(self, instance: str, num_pages: int, live: bool = True) -> bool:
        """A request takes pages; cached ones give way. False: there are none."""
        owner = Owner(instance, "kv")
        try:
            found = self._pool.alloc_pages(owner, num_pages)
        except OutOfPages:
            self.evict(num_pages)
            return False
        for page in found:
            self._num_stamps += 1
            self.pages.append(KvPage(page, owner, self._num_stamps % 251, live))
            size = self._pool.page_bytes
            self._backend.arena[page * size : (page + 1) * size] = self._num_stamps % 251
        return True

    def drop(self, instance: str) -> None:
        """All KV of a model."""
        self._release([held for held in self.pages if held.owner.model_id == instance])

    def check(self) -> None:
        """Every page is its owner's and holds what was written last."""
        size = self._pool.page_bytes
        for held in self.pages:
            assert self._pool.owner_of(held.page) == held.owner
            content = self._backend.arena[held.page * size : (held.page + 1) * size]
            assert bool((content == held.stamp).all()), f"page {held.page} was overwritten"
        owned = sum(n for o, n in self._pool.pages_by_owner().items() if o.kind == "kv")
        assert owned == len(self.pages)

    def num_evictable(self) -> int:
        return sum(not held.live for held in self.pages)

    def evictable_mask(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self._pool.num_pages, dtype=np.bool_)
        mask[[held.page for held in self.pages if not held.live]] = True
        return mask

    def evict(self, num_pages: int) -> int:
        victims = [held for held in self.pages if not held.live][:num_pages]
        self.num_evicted += len(victims)
        self._release(victims)
        return len(victims)

    def clear(self, pages: Collection[int]) -> bool:
        there = [held for held in self.pages if held.page in pages]
        assert len(there) == len(pages)
        live = [held for held in there if held.live]
        if live and self.stubborn:
            return False
        targets: dict[Owner, list[int]] = {}
        if len(live) > self._pool.num_free:
            return False
        for held in live:
            targets.setdefault(held.owner, []).extend(self._pool.alloc_pages(held.owner, 1))
        cached = [held for held in there if not held.live]
        self.num_evicted += len(cached)
        self._release(cached)
        self._pool.begin_copies()
        size = self._pool.page_bytes
        for held in live:
            source, held.page = held.page, targets[held.owner].pop()
            assert held.page not in pages
            self._backend.copy_within([(source * size, held.page * size, size)])
            self._pool.release(held.owner, [source])
            self.num_moved += 1
        return True

    def _release(self, victims: list[KvPage]) -> None:
        for held in victims:
            self.pages.remove(held)
            self._pool.release(held.owner, [held.page])


class NoKv:
    """A KvSpace without caches: whatever KV pages there are stay where they are."""

    def __init__(self, num_pages: int) -> None:
        self._none = np.zeros(num_pages, dtype=np.bool_)

    def num_evictable(self) -> int:
        """None."""
        return 0

    def evictable_mask(self) -> npt.NDArray[np.bool_]:
        """None."""
        return self._none

    def evict(self, num_pages: int) -> int:
        """Nothing to evict."""
        return 0

    def clear(self, pages: Collection[int]) -> bool:
        """Nothing moves."""
        return not pages
