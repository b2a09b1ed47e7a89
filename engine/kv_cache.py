"""KV of one resident model: blocks handed out of extents, extents taken from the page pool.

A chunk holds `blocks_per_chunk` blocks of one layer side by side and never crosses a page; an
extent is one chunk of every layer, in `pages_per_extent` pages that need not be neighbours. Block b
lies in extent b // blocks_per_chunk, at slot b % blocks_per_chunk, in every layer. New blocks fill
the fullest extent, and an extent without live blocks is given back at once, so that a model's KV
shrinks as its requests end.

Does not know requests or scheduling; raises OutOfPages and changes nothing when the pool is empty.
"""

from dataclasses import dataclass

import torch

from engine.errors import IntegrityError
from engine.page_pool import Owner, PagePool
from kernels.paged_attention import BlockGeometry, LayerGeometry, largest_unit_bytes

# Long chunks keep many blocks of one layer together, which GPUs want; but KV grows by extents,
# so an extent should be a small share of the pool. Where no extent is that small (small devices),
# what is lost by rounding is weighed against what a half-used extent holds back.
EXTENT_SHARE = 1 / 1000
UTILISATION_SLACK = 0.03
HALF_USED_EXTENTS = 4


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A model's KV layout in a given pool."""

    blocks: tuple[BlockGeometry, ...]  # one per layer
    unit_bytes: int
    chunk_bytes: int
    blocks_per_chunk: int
    chunks_per_page: int
    pages_per_extent: int
    block_tokens: int

    @property
    def tokens_per_extent(self) -> int:
        """Positions one extent holds."""
        return self.blocks_per_chunk * self.block_tokens

    def bytes_per_token(self, page_bytes: int) -> int:
        """Arena bytes a cached token costs, rounding included."""
        return -(-self.pages_per_extent * page_bytes // self.tokens_per_extent)


def plan_kv(
    layers: list[LayerGeometry],
    dtype: torch.dtype,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
) -> KvPlan:
    """Choose the chunk size: the largest whose extent is a small enough share of the pool.

    Raises ValueError where one block of one layer is larger than a page.
    """
    unit = min(largest_unit_bytes(layer, dtype, page_bytes) for layer in layers)
    blocks = tuple(BlockGeometry(layer, block_tokens, dtype, unit) for layer in layers)
    largest_block = max(block.block_units for block in blocks) * unit
    if largest_block > page_bytes:
        raise ValueError(
            f"a block of {block_tokens} positions takes {largest_block} bytes, a page has "
            f"{page_bytes}: use larger pages or smaller blocks"
        )
    chosen = _choose_extent(len(layers), largest_block, page_bytes, num_pages)
    chunks_per_page = -(-len(layers) // chosen)
    blocks_per_chunk = page_bytes // chunks_per_page // largest_block
    return KvPlan(
        blocks=blocks,
        unit_bytes=unit,
        chunk_bytes=blocks_per_chunk * largest_block,
        blocks_per_chunk=blocks_per_chunk,
        chunks_per_page=chunks_per_page,
        pages_per_extent=-(-len(layers) // chunks_per_page),
        block_tokens=block_tokens,
    )


def _choose_extent(num_layers: int, block_bytes: int, page_bytes: int, num_pages: int) -> int:
    """Pages per extent: the longest chunks among small extents, else the least overhead."""
    utilisation: dict[int, float] = {}
    for pages in range(1, num_layers + 1):
        chunks_per_page = -(-num_layers // pages)
        blocks = page_bytes // chunks_per_page // block_bytes
        if blocks and -(-num_layers // chunks_per_page) == pages:
            utilisation[pages] = num_layers * blocks * block_bytes / (pages * page_bytes)
    best = max(utilisation.values())
    for pages in sorted(utilisation, reverse=True):
        if pages <= num_pages * EXTENT_SHARE and utilisation[pages] >= best - UTILISATION_SLACK:
            return pages
    return min(
        utilisation,
        key=lambda pages: 1 - utilisation[pages] + HALF_USED_EXTENTS * pages / num_pages,
    )


@dataclass(slots=True)
class _Extent:
    pages: list[int]
    free_slots: list[int]


class KvCache:
    """Blocks of one model. Kernels read `chunk_table`: int64 [layers, extents], in units."""

    def __init__(self, owner: Owner, plan: KvPlan, pool: PagePool, device: torch.device) -> None:
        self.plan = plan
        self.owner = owner
        self._pool = pool
        self._device = device
        self._extents: dict[int, _Extent] = {}
        self._free_extent_ids: list[int] = []
        self._num_live = 0
        self.chunk_table = torch.zeros(len(plan.blocks), 8, dtype=torch.int64, device=device)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that need no new extent."""
        return len(self._extents) * self.plan.blocks_per_chunk - self._num_live

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.plan.block_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that an empty cache takes for `num_tokens` positions."""
        extents = -(-self.blocks_for(num_tokens) // self.plan.blocks_per_chunk)
        return extents * self.plan.pages_per_extent

    def available_blocks(self) -> int:
        """Blocks that `alloc` could give now, with the pool's free pages."""
        extents = self._pool.num_free // self.plan.pages_per_extent
        return self.num_free_blocks + extents * self.plan.blocks_per_chunk

    def alloc(self, num_blocks: int) -> list[int]:
        """Block ids, all or nothing. Raises OutOfPages."""
        missing = num_blocks - self.num_free_blocks
        if missing > 0:
            num_extents = -(-missing // self.plan.blocks_per_chunk)
            pages = self._pool.alloc_pages(self.owner, num_extents * self.plan.pages_per_extent)
            size = self.plan.pages_per_extent
            for i in range(num_extents):
                self._add_extent(pages[i * size : (i + 1) * size])
        blocks: list[int] = []
        while len(blocks) < num_blocks:
            blocks.extend(self._take_blocks(num_blocks - len(blocks)))
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back; extents that become empty return to the pool (fenced)."""
        per_chunk = self.plan.blocks_per_chunk
        for block in blocks:
            extent = self._extents.get(block // per_chunk)
            if extent is None or block % per_chunk in extent.free_slots:
                raise IntegrityError(f"block {block} of {self.owner.model_id} is freed twice")
            extent.free_slots.append(block % per_chunk)
            self._num_live -= 1
            if len(extent.free_slots) == per_chunk:
                self._drop_extent(block // per_chunk)

    def drop_all(self) -> None:
        """Give every page back, live blocks or not (the model is being evicted)."""
        for extent_id in list(self._extents):
            self._drop_extent(extent_id)
        self._num_live = 0

    def check_integrity(self, live_blocks: list[int]) -> None:
        """Raises IntegrityError unless exactly `live_blocks` are handed out, each once."""
        if len(set(live_blocks)) != len(live_blocks) or len(live_blocks) != self._num_live:
            raise IntegrityError(f"{self.owner.model_id}: {self._num_live} blocks booked as live")
        per_chunk = self.plan.blocks_per_chunk
        for block in live_blocks:
            extent = self._extents.get(block // per_chunk)
            if extent is None or block % per_chunk in extent.free_slots:
                raise IntegrityError(f"{self.owner.model_id}: live block {block} is free")
        if sum(len(extent.free_slots) for extent in self._extents.values()) != self.num_free_blocks:
            raise IntegrityError(f"{self.owner.model_id}: a block is neither live nor free")
        held = sum(len(extent.pages) for extent in self._extents.values())
        if held != self._pool.owned(self.owner):
            raise IntegrityError(f"{self.owner}: holds {held} pages, pool says otherwise")

    def _take_blocks(self, num_blocks: int) -> list[int]:
        """At most `num_blocks`, all from one extent: looking for it costs a pass over all."""
        # The fullest that still has room: others empty out and can be given back.
        extent_id = min(
            (i for i, extent in self._extents.items() if extent.free_slots),
            key=lambda i: len(self._extents[i].free_slots),
        )
        free_slots = self._extents[extent_id].free_slots
        first = extent_id * self.plan.blocks_per_chunk
        taken = [first + free_slots.pop() for _ in range(min(num_blocks, len(free_slots)))]
        self._num_live += len(taken)
        return taken

    def _add_extent(self, pages: list[int]) -> None:
        extent_id = self._free_extent_ids.pop() if self._free_extent_ids else len(self._extents)
        if extent_id >= self.chunk_table.shape[1]:
            grown = torch.zeros_like(self.chunk_table).repeat(1, 2)
            grown[:, : self.chunk_table.shape[1]] = self.chunk_table
            self.chunk_table = grown
        units_per_page = self._pool.page_bytes // self.plan.unit_bytes
        units_per_chunk = self.plan.chunk_bytes // self.plan.unit_bytes
        per_page = self.plan.chunks_per_page
        addresses = [
            pages[layer // per_page] * units_per_page + layer % per_page * units_per_chunk
            for layer in range(len(self.plan.blocks))
        ]
        self.chunk_table[:, extent_id] = torch.tensor(addresses, device=self._device)
        slots = list(range(self.plan.blocks_per_chunk - 1, -1, -1))
        self._extents[extent_id] = _Extent(pages, slots)

    def _drop_extent(self, extent_id: int) -> None:
        extent = self._extents.pop(extent_id)
        self._free_extent_ids.append(extent_id)
        self._pool.release(self.owner, extent.pages)
