"""Blocks of one layer group or state group: who refers to them and which extents hold them.

A block is in one of three states, and an extent is filed by those of its blocks (`ExtentFiles`):

    free    may be taken at once
    live    referred to by at least one request
    cached  full, hashed, referred to by nobody: a later request may find it, or it is overwritten

    open extent     holds a live block: stays
    dead extent     holds cached blocks but no live one: given back when pages are short
    (an extent that holds neither is given back at once)

New blocks fill the fullest extent, so that others empty. A block that is given back may be written
by any later step, for steps run in the order in which they were launched; pages go back to the
pool, which fences them.

Does not know tokens, requests or tenants.
"""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import torch

from engine.errors import IntegrityError
from engine.memory.extent_files import Extent, ExtentFiles
from engine.memory.extent_plan import ChunkTable, ExtentPlan
from engine.memory.page_pool import Owner, PagePool
from engine.memory.policy.kv_value import Rank, ValueParams, rank
from engine.memory.prefix_cache import PrefixIndex

Plan = TypeVar("Plan", bound=ExtentPlan, covariant=True)


class BlockGroup(Generic[Plan]):
    """All blocks of one group of one model. Block ids are extent id * slots + slot."""

    def __init__(
        self,
        owner: Owner,
        plan: Plan,
        pool: PagePool,
        device: torch.device,
        params: ValueParams,
        rank: Rank = rank,
    ) -> None:
        """`rank`: what an extent of cached blocks is worth."""
        self.plan = plan
        self._rank = rank
        self.owner = owner
        self._pool = pool
        self._device = device
        self._params = params
        self._reset()

    def _reset(self) -> None:
        self.index = PrefixIndex()
        self.chunks = ChunkTable(self.plan, self._pool.page_bytes, self._device)
        self.num_live = 0  # blocks, as the next two
        self.num_cached = 0
        self.num_free = 0
        self._files = ExtentFiles(self.plan.blocks_per_extent, self._params, self._rank)
        self._extents: dict[int, Extent] = {}
        self._refs: list[int] = []
        self._unused_ids: list[int] = []
        self._extent_of_page: dict[int, int] = {}

    @property
    def table(self) -> torch.Tensor:
        """int64 [layers of the group, chunks], in units; never written after this call."""
        return self.chunks.capture()

    @property
    def num_extents(self) -> int:
        """Extents, open and dead."""
        return len(self._extents)

    @property
    def num_dead(self) -> int:
        """Extents that may be given back."""
        return len(self._files.dead)

    @property
    def num_open_room(self) -> int:
        """Blocks that open extents can take, over cached ones too: they cost no page."""
        return self.num_open_free + self.num_cached - self._files.num_dead_cached

    @property
    def num_open_free(self) -> int:
        """Free blocks of open extents."""
        return self.num_free - self._files.num_dead_free

    def extents_needed(self, num_blocks: int) -> tuple[int, int, int]:
        """New extents that `take` needs for so many blocks.

        (over every cached block, over those of open extents only, over none)
        """
        in_dead = self.num_dead * self.plan.blocks_per_extent
        return (
            self.plan.extents_for(max(0, num_blocks - self.num_open_room - in_dead)),
            self.plan.extents_for(max(0, num_blocks - self.num_open_room)),
            self.plan.extents_for(max(0, num_blocks - self.num_open_free)),
        )

    def dead_pages(self) -> list[int]:
        """Pages of extents without live blocks."""
        return [page for extent in self._files.dead.values() for page in extent.pages]

    def extent_of_page(self, page: int) -> int | None:
        """The extent on this page, if it is this group's."""
        return self._extent_of_page.get(page)

    def is_dead(self, extent_id: int) -> bool:
        """Whether the extent holds no live block."""
        return extent_id in self._files.dead

    def take(self, num_blocks: int, pages: list[int]) -> list[int]:
        """Blocks with one reference each. `pages`, newly the owner's, become extents.

        Free slots of open extents first, then the new extents, then over cached blocks of open
        extents, then the least valuable dead extent. The caller has made sure that it is enough.
        A dead extent's free slots are left alone, for a live block in it would hold all of it.
        """
        blocks: list[int] = []
        size, start = self.plan.pages_per_extent, 0
        while len(blocks) < num_blocks:
            wanted = num_blocks - len(blocks)
            extent_id = self._files.by_room.smallest()
            if extent_id is not None:
                self._unfile(extent_id)
            elif start < len(pages):
                extent_id = self._add_extent(pages[start : start + size])
                start += size
            else:
                extent_id = self._overwrite(wanted)
            blocks += self._take_slots(extent_id, wanted)
        return blocks

    def ref(self, blocks: Iterable[int], now_s: float) -> int:
        """One reference more on each of these hits. Returns how many were cached before."""
        num_revived = 0
        for block in blocks:
            extent_id = block // self.plan.blocks_per_extent
            extent = self._extents[extent_id]
            extent.num_hits += 1
            extent.last_used_s = now_s
            self._refs[block] += 1
            if self._refs[block] == 1:
                self._unfile(extent_id)
                del extent.cached[block]
                extent.num_live += 1
                self.num_live += 1
                self.num_cached -= 1
                self._file(extent_id)
                num_revived += 1
        return num_revived

    def note_hit(self, block: int) -> None:
        """A live block has been of use beyond the request that has it."""
        self._extents[block // self.plan.blocks_per_extent].num_hits += 1

    def pinned(self, blocks: Iterable[int]) -> tuple[int, int]:
        """What `ref` of these hits would change: (dead extents, `num_open_room`)."""
        cached = [b // self.plan.blocks_per_extent for b in blocks if not self._refs[b]]
        dead = self._files.dead.keys() & cached
        return len(dead), len(dead) * self.plan.blocks_per_extent - len(cached)

    def unref(self, blocks: Iterable[tuple[int, int]], now_s: float) -> int:
        """One reference less on each (place in its sequence, block); deepest first is best.

        Whoever has none left is cached where it has a hash, else free. Returns how many.
        Raises IntegrityError for a block without references.
        """
        loose: int | None = None  # the extent that is being changed: out of the files
        num_ended = 0
        per_extent = self.plan.blocks_per_extent
        for depth, block in blocks:
            extent_id = block // per_extent
            if extent_id not in self._extents or self._refs[block] < 1:
                raise IntegrityError(f"block {block} of {self.owner.model_id} is given back twice")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            num_ended += 1
            if extent_id != loose:
                if loose is not None:
                    self._file(loose)
                self._unfile(extent_id)
                loose = extent_id
            extent = self._extents[extent_id]
            extent.num_live -= 1
            self.num_live -= 1
            if block in self.index:
                extent.depth = min(extent.depth, depth) if extent.cached else depth
                extent.last_used_s = now_s
                extent.cached[block] = None
                self.num_cached += 1
            else:
                extent.free.append(block % per_extent)
                self.num_free += 1
        if loose is not None:
            self._file(loose)
        return num_ended

    def forget_hashes(self) -> None:
        """No block can be found any more: cached ones are free now, live ones will be."""
        for extent_id, extent in list(self._extents.items()):
            if extent.cached:
                self._unfile(extent_id)
                self._uncache(extent, self.plan.blocks_per_extent)
                self._file(extent_id)
        self.index.clear()

    def least_valuable(self) -> tuple[float, int] | None:
        """(rank, extent id) of the dead extent that should go first."""
        return self._files.least_valuable()

    def evict(self, extent_id: int) -> int:
        """Give a dead extent back. Returns its number of pages."""
        if not self.is_dead(extent_id):
            raise IntegrityError(f"{self.owner.model_id}: extent {extent_id} is in use")
        self._unfile(extent_id)
        self._uncache(self._extents[extent_id], self.plan.blocks_per_extent)
        self._file(extent_id)
        return self.plan.pages_per_extent

    def move_pages(self, extent_id: int, moved: Mapping[int, int]) -> None:
        """Pages of the extent have been copied, old -> new; the old ones are the caller's."""
        extent = self._extents[extent_id]
        for old, new in moved.items():
            del self._extent_of_page[old]
            self._extent_of_page[new] = extent_id
        extent.pages = [moved.get(page, page) for page in extent.pages]
        self.chunks.place(extent_id, extent.pages)

    def emptiest(self, max_live: int) -> int | None:
        """An open extent of at most so many live blocks that fit into the other open ones."""
        extent_id = self._files.by_live.smallest()
        if extent_id is None:
            return None
        extent = self._extents[extent_id]
        room_elsewhere = self.num_open_room - len(extent.free) - len(extent.cached)
        return extent_id if extent.num_live <= min(max_live, room_elsewhere) else None

    def vacate(self, extent_id: int) -> tuple[dict[int, int], list[int]]:
        """Take an `emptiest` extent apart: (live block -> its new id, the extent's pages).

        The caller copies the blocks and gives the pages back after that. Cached blocks are lost.
        """
        self._unfile(extent_id)
        extent = self._extents[extent_id]
        self._uncache(extent, self.plan.blocks_per_extent)
        first = extent_id * self.plan.blocks_per_extent
        free = set(extent.free)
        live = [first + s for s in range(self.plan.blocks_per_extent) if s not in free]
        taken: list[int] = []
        while len(taken) < len(live):
            target = self._files.by_live.largest_below(self.plan.blocks_per_extent)
            if target is None:
                raise IntegrityError(f"{self.owner.model_id}: no room for {len(live)} blocks")
            wanted = len(live) - len(taken)
            self._unfile(target)
            self._uncache(self._extents[target], wanted - len(self._extents[target].free))
            taken += self._take_slots(target, wanted)
        moved = dict(zip(live, taken, strict=True))
        for old, new in moved.items():
            self._refs[new], self._refs[old] = self._refs[old], 0
            if old in self.index:
                self.index.rename(old, new)
        self.num_live -= len(live)
        self.num_free -= len(free)
        self._forget_extent(extent_id)
        return moved, extent.pages

    def drop_all(self) -> None:
        """Give every page back, live blocks or not."""
        self._pool.release(self.owner, list(self._extent_of_page))
        self._reset()

    def check_integrity(self, refs: Mapping[int, int]) -> None:
        """Raises IntegrityError unless exactly these references are held and all counts agree."""
        who, per_extent = self.owner.model_id, self.plan.blocks_per_extent
        num_live = num_cached = num_free = dead_cached = dead_free = 0
        for extent_id, extent in self._extents.items():
            first = extent_id * per_extent
            live = [b for b in range(first, first + per_extent) if self._refs[b]]
            free = [first + slot for slot in extent.free]
            if sorted([*live, *free, *extent.cached]) != list(range(first, first + per_extent)):
                raise IntegrityError(f"{who}: blocks of extent {extent_id} are lost or shared")
            if extent.num_live != len(live) or any(refs.get(b) != self._refs[b] for b in live):
                raise IntegrityError(f"{who}: references on extent {extent_id} do not agree")
            if any(b in self.index for b in free) or any(
                b not in self.index for b in extent.cached
            ):
                raise IntegrityError(f"{who}: extent {extent_id} and the index do not agree")
            if not self._files.is_filed(extent_id, extent):
                raise IntegrityError(f"{who}: extent {extent_id} is misfiled")
            num_live += len(live)
            num_cached += len(extent.cached)
            num_free += len(free)
            if not live:
                dead_cached += len(extent.cached)
                dead_free += len(free)
        booked = (self.num_live, self.num_cached, self.num_free)
        dead = (self._files.num_dead_cached, self._files.num_dead_free)
        if booked != (num_live, num_cached, num_free) or dead != (dead_cached, dead_free):
            raise IntegrityError(f"{who}: {booked} blocks booked as live, cached, free")
        if num_live != len(refs):
            raise IntegrityError(f"{who}: {num_live} live blocks, {len(refs)} referred to")
        pages = {page: i for i, extent in self._extents.items() for page in extent.pages}
        if pages != self._extent_of_page or any(
            self._pool.owner_of(page) != self.owner for page in pages
        ):
            raise IntegrityError(f"{who}: pages of extents do not agree with the pool")
        self.index.check_integrity()

    def _take_slots(self, extent_id: int, num_blocks: int) -> list[int]:
        """At most so many blocks of an unfiled extent, which is filed then."""
        extent = self._extents[extent_id]
        first = extent_id * self.plan.blocks_per_extent
        number = min(num_blocks, len(extent.free))
        blocks = [first + extent.free.pop() for _ in range(number)]
        for block in blocks:
            self._refs[block] = 1
        extent.num_live += number
        self.num_live += number
        self.num_free -= number
        self._file(extent_id)
        return blocks

    def _overwrite(self, num_blocks: int) -> int:
        """An unfiled extent with room, made by forgetting cached blocks: no more than so many.

        Of an open extent if there is one with cached blocks, else of the least valuable dead one.
        """
        extent_id = next(iter(self._files.mixed), None)
        if extent_id is None:
            found = self._files.least_valuable()
            if found is None:
                raise IntegrityError(f"{self.owner.model_id}: promised blocks are not there")
            extent_id = found[1]
        self._unfile(extent_id)
        extent = self._extents[extent_id]
        self._uncache(extent, num_blocks - len(extent.free))
        return extent_id

    def _add_extent(self, pages: list[int]) -> int:
        per_extent = self.plan.blocks_per_extent
        extent_id = self._unused_ids.pop() if self._unused_ids else len(self._refs) // per_extent
        if extent_id * per_extent == len(self._refs):
            self._refs += [0] * per_extent
        self._extents[extent_id] = Extent(pages, list(range(per_extent - 1, -1, -1)))
        self._extent_of_page.update(dict.fromkeys(pages, extent_id))
        self.chunks.place(extent_id, pages)
        self.num_free += per_extent
        return extent_id

    def _forget_extent(self, extent_id: int) -> None:
        for page in self._extents.pop(extent_id).pages:
            del self._extent_of_page[page]
        self._unused_ids.append(extent_id)

    def _uncache(self, extent: Extent, num_blocks: int) -> None:
        """The oldest of an unfiled extent's cached blocks become free slots."""
        for block in list(extent.cached)[: max(0, num_blocks)]:
            del extent.cached[block]
            self.index.remove(block)
            extent.free.append(block % self.plan.blocks_per_extent)
            self.num_cached -= 1
            self.num_free += 1

    def _unfile(self, extent_id: int) -> None:
        self._files.remove(extent_id, self._extents[extent_id])

    def _file(self, extent_id: int) -> None:
        """File an extent by what it holds now; one that holds nothing goes back to the pool."""
        extent = self._extents[extent_id]
        if extent.num_live or extent.cached:
            self._files.add(extent_id, extent)
        else:
            self.num_free -= len(extent.free)
            self._forget_extent(extent_id)
            self._pool.release(self.owner, extent.pages)
