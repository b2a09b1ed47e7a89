"""KV of all models in one pool: what can be given back, what goes first, what is moved away.

    keep_watermark   before pages run out, the least valuable dead extents of any model go
    evict            the same, for somebody who needs so many pages now
    least_worth      what those are worth that would go first, beside idle weights
    clear            certain pages: dead extents go or move, pages with live blocks move
    compact          almost empty extents are copied into the room of others
    reclaim          pages whose fence has passed are free again

The scheduler gets pages here, and residency space (`KvSpace`). A moved page keeps its block ids,
only the chunk table changes; compaction renames blocks, in the tables of the requests too. Copies
go to the device in the order of the steps, so a step in flight is not disturbed; the pages that
were read are given back after that, and stay fenced until the copies have ended.

Does not know requests, models' weights, or the clock.
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.errors import IntegrityError
from engine.memory.extent_plan import ExtentPlan
from engine.memory.kv_cache import KvCache
from engine.memory.kv_group import BlockGroup
from engine.memory.page_pool import Owner, PagePool
from engine.memory.policy.kv_value import cost_rank, worth
from engine.memory.state_slots import Move

# An extent is copied away only while at most this share of it is live.
COMPACT_SHARE = 0.5
# So many extents at a step while nobody is short of pages yet.
COMPACT_EXTENTS = 8

_Place = tuple[str, int, int]  # model, group, extent


@dataclass(frozen=True, slots=True)
class _ModelKv:
    cache: KvCache
    ranks: tuple[float, ...]  # by group, what to add to an extent's rank
    token_s: Callable[[], float | None]


class StepDevice(Protocol):
    """What is asked of the device: copies in the order of the steps, and how far these are."""

    def copy_within(self, moves: Sequence[Move]) -> None:
        """As `Backend.copy_within`."""

    def last_done(self) -> int:
        """As `Backend.last_done`."""


class KvMemory:
    """All models' caches. Single-threaded, as they are."""

    def __init__(
        self,
        pool: PagePool,
        device: StepDevice,
        low_watermark_pages: int = 0,
        high_watermark_pages: int = 0,
    ) -> None:
        """`low_watermark_pages`: what an admission leaves to the requests that run, too."""
        if not 0 <= low_watermark_pages <= high_watermark_pages:
            raise ValueError("watermarks must be 0 <= low <= high")
        self._pool = pool
        self._device = device
        self.num_spare_pages = low_watermark_pages
        self._high = high_watermark_pages
        self._models: dict[str, _ModelKv] = {}
        self.num_evicted_pages = 0
        self.num_moved_pages = 0
        self.num_compactions = 0
        self.num_snapshots = 0

    def register(
        self,
        instance_id: str,
        cache: KvCache,
        cost_per_token: float = 1.0,
        token_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """A model has come; `cost_per_token`: of computing one again, in any unit all share;
        `token_s`: the device seconds of one, None while nobody knows."""
        ranks = tuple(
            cost_rank(
                cost_per_token,
                group.plan.pages_per_extent * self._pool.page_bytes / cache.plan.block_tokens,
            )
            for group in cache.all_groups
        )
        self._models[instance_id] = _ModelKv(cache, ranks, token_s)
        cache.evictable = self.num_evictable
        cache.spared_pages = cache.states.spared_pages = self.num_spare_pages
        cache.states.copy = self._copy
        cache.states.note_snapshot = self._note_snapshot

    def forget(self, instance_id: str) -> None:
        """A model has gone. Idempotent."""
        self._models.pop(instance_id, None)

    def reclaim(self) -> tuple[int, int]:
        """Free the pages whose fence has passed: (how many, how many are still fenced)."""
        freed = self._pool.retire(self._device.last_done())
        return len(freed), self._pool.num_fenced

    def make_room(self, num_pages: int) -> int:
        """Evict cached KV, then copy sparse extents together; pages on their way back (fenced)."""
        num_freed = self.evict(num_pages)
        if num_freed < num_pages:
            num_freed += self.compact(num_pages - num_freed)
        return num_freed

    def num_kv_pages(self) -> int:
        """Pages that KV could have beside the weights that are there."""
        by_owner = self._pool.pages_by_owner()
        return self._pool.num_pages - sum(
            count for owner, count in by_owner.items() if owner.kind == "weights"
        )

    @property
    def num_obtainable(self) -> int:
        """Pages that are free, will be once steps have ended, or hold cached KV only."""
        return self._pool.num_free + self._pool.num_fenced + self.num_evictable()

    def num_evictable(self) -> int:
        """Pages of extents without live blocks."""
        return sum(model.cache.num_cached_pages for model in self._models.values())

    def evictable_mask(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """bool [num_pages]: which these are."""
        mask = np.zeros(self._pool.num_pages, dtype=np.bool_)
        for _, group, _ in self._groups():
            mask[group.dead_pages()] = True
        return mask

    def evict(self, num_pages: int) -> int:
        """Give at least so many pages back, least valuable extents first. Returns how many.

        Values fade alike, so their order does not depend on the time.
        """
        groups = [(offset, group) for offset, group, _ in self._groups()]
        # The least valuable extent of each group; only that of the group it was taken from changes.
        heads = [
            (offset + found[0], i)
            for i, (offset, group) in enumerate(groups)
            if (found := group.least_valuable()) is not None
        ]
        heapq.heapify(heads)
        num_evicted = 0
        while heads and num_evicted < num_pages:
            _, i = heads[0]
            offset, group = groups[i]
            found = group.least_valuable()
            assert found is not None
            num_evicted += group.evict(found[1])
            found = group.least_valuable()
            if found is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (offset + found[0], i))
        self.num_evicted_pages += num_evicted
        return num_evicted

    @property
    def is_short(self) -> bool:
        """Whether fewer pages are free, or about to be, than the low watermark wants."""
        return self._pool.num_free + self._pool.num_fenced < self.num_spare_pages

    def least_worth(self, now_s: float) -> tuple[float, str] | None:
        """Device seconds a second, a byte, of what `evict` would take first, and whose it is.

        None: there is nothing to take, or nobody knows what a token of that model costs.
        """
        heads = [
            (offset + found[0], found[0], instance_id, group)
            for instance_id, model in self._models.items()
            for offset, group in zip(model.ranks, model.cache.all_groups, strict=True)
            if (found := group.least_valuable()) is not None
        ]
        if not heads:
            return None
        _, rank, instance_id, group = min(heads, key=lambda head: head[:3])
        model, plan = self._models[instance_id], group.plan
        token_s = model.token_s()
        if token_s is None:
            return None
        num_bytes = plan.pages_per_extent * self._pool.page_bytes
        rank += cost_rank(model.cache.plan.block_tokens, num_bytes)
        cache = model.cache
        return worth(rank, token_s, cache.reuse.chance, now_s, cache.params), instance_id

    def keep_watermark(self) -> int:
        """Where free pages are below the low mark: cached KV goes until the high one is reached.

        Then almost empty extents are copied together, a few at each call: whoever needs pages at
        once asks for more (`compact`). Returns the pages on their way back.
        """
        if not self.is_short:
            return 0
        wanted = self._high - self._pool.num_free - self._pool.num_fenced
        num_pages = self.evict(wanted)
        if num_pages < wanted:
            num_pages += self.compact(wanted - num_pages, COMPACT_EXTENTS)
        return num_pages

    def clear(self, pages: Collection[int]) -> bool:
        """Evict or move the KV on these pages. False, changing nothing: there is no room for it.

        `pages` are all that the caller is after, free ones and those of others too: nothing is
        moved into any of them.
        """
        in_the_way: dict[_Place, list[int]] = {}
        for page in sorted(pages):
            owner = self._pool.owner_of(page)
            if owner is not None and owner.kind == "kv":
                in_the_way.setdefault(self._find(owner, page), []).append(page)
        room = self._free_pages_outside(pages)
        live: list[tuple[_Place, list[int]]] = []
        dead: list[tuple[_Place, list[int]]] = []
        for place, lying in in_the_way.items():
            instance_id, g, extent_id = place
            is_dead = self._models[instance_id].cache.all_groups[g].is_dead(extent_id)
            (dead if is_dead else live).append((place, lying))
        num_needed = sum(len(lying) for _, lying in live)
        if num_needed > len(room):
            return False
        for (instance_id, g, extent_id), lying in dead:
            if num_needed + len(lying) + self._high <= len(room):
                num_needed += len(lying)
                live.append(((instance_id, g, extent_id), lying))
            else:
                group = self._models[instance_id].cache.all_groups[g]
                self.num_evicted_pages += group.evict(extent_id)
        self._move_pages(live, room)
        return True

    def compact(self, num_pages: int, max_extents: int | None = None) -> int:
        """Copy almost empty extents into others' room until so many pages are on their way back.

        The tables of requests are rewritten once a group, however many extents go.
        """
        num_freed = num_vacated = 0
        for _, group, cache in self._groups():
            most = int(group.plan.blocks_per_extent * COMPACT_SHARE)
            renamed = Renames()
            while num_freed < num_pages and 0 < most <= group.num_open_room:
                extent_id = group.emptiest(most)
                if extent_id is None or num_vacated == max_extents:
                    break
                renamed.add(self._vacate(cache, group, extent_id))
                num_freed += group.plan.pages_per_extent
                num_vacated += 1
            cache.rewrite(cache.all_groups.index(group), renamed.final)
        self.num_compactions += num_vacated
        return num_freed

    def check_integrity(self) -> None:
        """Raises IntegrityError where KV pages belong to nobody here."""
        known = {model.cache.owner for model in self._models.values()}
        strange = {o for o in self._pool.pages_by_owner() if o.kind == "kv"} - known
        if strange:
            raise IntegrityError(f"KV pages of models that are not known: {strange}")

    def _groups(self) -> list[tuple[float, BlockGroup[ExtentPlan], KvCache]]:
        return [
            (offset, group, model.cache)
            for model in self._models.values()
            for offset, group in zip(model.ranks, model.cache.all_groups, strict=True)
        ]

    def _find(self, owner: Owner, page: int) -> _Place:
        for instance_id, model in self._models.items():
            if model.cache.owner == owner:
                for g, group in enumerate(model.cache.all_groups):
                    extent_id = group.extent_of_page(page)
                    if extent_id is not None:
                        return instance_id, g, extent_id
        raise IntegrityError(f"page {page} of {owner} is in no extent")

    def _free_pages_outside(self, pages: Collection[int]) -> list[int]:
        """Free pages that may be moved to, the best (highest) last."""
        free = np.frombuffer(self._pool.kinds(), dtype=np.uint8) == PagePool.FREE
        free[list(pages)] = False
        return [int(page) for page in np.flatnonzero(free)]

    def _move_pages(self, extents: Sequence[tuple[_Place, list[int]]], room: list[int]) -> None:
        size = self._pool.page_bytes
        moves: list[Move] = []
        left: list[tuple[Owner, list[int]]] = []
        for (instance_id, g, extent_id), lying in extents:
            cache = self._models[instance_id].cache
            moved = {page: room.pop() for page in lying}
            self._pool.claim(cache.owner, moved.values())
            cache.all_groups[g].move_pages(extent_id, moved)
            moves += [(old * size, new * size, size) for old, new in moved.items()]
            left.append((cache.owner, lying))
        if moves:
            self._copy(moves)
        for owner, lying in left:
            self._pool.release(owner, lying)
        self.num_moved_pages += len(moves)

    def _note_snapshot(self) -> None:
        self.num_snapshots += 1

    def _copy(self, moves: Sequence[Move]) -> None:
        """Sources that are released from now on stay fenced until the copies have ended."""
        self._pool.begin_copies()
        self._device.copy_within(moves)

    def _vacate(
        self, cache: KvCache, group: BlockGroup[ExtentPlan], extent_id: int
    ) -> dict[int, int]:
        """Blocks by their old ids; nobody's table has the new ones yet."""
        moved, pages = group.vacate(extent_id)
        size = group.plan.block_bytes
        moves = [
            (source, target, size)
            for old, new in moved.items()
            for source, target in zip(
                group.chunks.block_offsets(old), group.chunks.block_offsets(new), strict=True
            )
        ]
        self._copy(moves)
        self._pool.release(cache.owner, pages)
        return moved


class Renames:
    """Several moves of blocks, one after the other, as one. `final`: where each has come to."""

    def __init__(self) -> None:
        self.final: dict[int, int] = {}
        self._origin: dict[int, int] = {}

    def add(self, moved: Mapping[int, int]) -> None:
        """The next ones; a block that was moved before may be among them."""
        for old, new in moved.items():
            origin = self._origin.pop(old, old)
            self.final[origin] = new
            self._origin[new] = origin
