"""How a model's KV lies in a given pool: layer groups, chunks, extents. Pure arithmetic.

A layer group is the layers of one KV geometry. A chunk holds `blocks_per_chunk` blocks of one layer
side by side and never crosses a page. An extent is what KV grows and shrinks by: `num_chunks`
chunks of every layer of its group, packed into `pages_per_extent` pages that need not be
neighbours. Block b lies in chunk b // blocks_per_chunk of every layer, at slot
b % blocks_per_chunk, and in extent b // blocks_per_extent.

Lives here: the choice of the extent. Does not: which block belongs to whom (`kv_group.py`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.packs.pack import KvGroup
from kernels.paged_attention import BlockGeometry, LayerGeometry, largest_unit_bytes

# What an extent costs beside its share of pages that no block fills: half of one for each sequence
# of about so many tokens, and some half-used ones in a pool of so many pages.
SEQUENCE_TOKENS = 1024
HALF_USED_EXTENTS = 4
# Many blocks of one layer together are what GPUs want (one block after the other of all layers
# costs attention 31-56 %): extents are not made smaller than this, and of those that cost about
# the same the one with the longest chunks is taken.
LEAST_EXTENT_TOKENS = 64
OVERHEAD_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Layers of one geometry. `block` is the same for all of them."""

    layers: tuple[int, ...]
    block: BlockGeometry
    blocks_per_chunk: int
    chunks_per_page: int
    num_chunks: int
    pages_per_extent: int

    @property
    def window(self) -> int:
        """Positions a query sees, itself included; 0: all."""
        return self.block.layer.window

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block.block_units * self.block.unit_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.blocks_per_chunk * self.block_bytes

    @property
    def blocks_per_extent(self) -> int:
        """Blocks (of every layer) that one extent holds."""
        return self.num_chunks * self.blocks_per_chunk

    @property
    def tokens_per_extent(self) -> int:
        """Positions one extent holds."""
        return self.blocks_per_extent * self.block.block_tokens

    def first_needed(self, num_computed: int) -> int:
        """The first block that a query at position `num_computed` or later may still see."""
        if not self.window:
            return 0
        return max(0, num_computed - self.window + 1) // self.block.block_tokens

    def extents_for(self, num_blocks: int) -> int:
        """Extents that hold so many blocks."""
        return -(-num_blocks // self.blocks_per_extent)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A model's KV layout. `layer_group`: by layer, (its group, its place in the group)."""

    groups: tuple[GroupPlan, ...]
    layer_group: tuple[tuple[int, int], ...]
    block_tokens: int

    def bytes_per_token(self, page_bytes: int) -> int:
        """Arena bytes a cached token costs while all groups hold it, rounding included."""
        return sum(
            -(-group.pages_per_extent * page_bytes // group.tokens_per_extent)
            for group in self.groups
        )

    def page_rates(self) -> tuple[tuple[float, float], ...]:
        """By layer group: pages a position takes, and the most positions that it keeps."""
        return tuple(
            (
                group.pages_per_extent / group.tokens_per_extent,
                float(group.window + self.block_tokens) if group.window else math.inf,
            )
            for group in self.groups
        )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that an empty cache takes for the first `num_tokens` positions of a sequence."""
        num_blocks = -(-num_tokens // self.block_tokens)
        return sum(group.extents_for(num_blocks) * group.pages_per_extent for group in self.groups)


def plan_kv(
    layers: Sequence[LayerGeometry],
    dtype: torch.dtype,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
) -> KvPlan:
    """Group the layers by geometry and choose each group's extent.

    Raises ValueError where one block of one layer is larger than a page.
    """
    members: dict[LayerGeometry, list[int]] = {}
    for number, layer in enumerate(layers):
        members.setdefault(layer, []).append(number)
    groups = tuple(
        _plan_group(geometry, tuple(numbers), dtype, block_tokens, page_bytes, num_pages)
        for geometry, numbers in members.items()
    )
    places = {
        layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)
    }
    return KvPlan(groups, tuple(places[layer] for layer in range(len(layers))), block_tokens)


@functools.lru_cache(maxsize=256)
def plan_pack(
    kv_groups: tuple[KvGroup, ...],
    kv_dtype: str,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
) -> KvPlan:
    """`plan_kv` for a pack; the many models of one shape share it. Raises ValueError alike."""
    layers = {
        layer: LayerGeometry(group.num_kv_heads, group.k_dim, group.v_dim, group.window)
        for group in kv_groups
        for layer in group.layers
    }
    geometries = [layers[number] for number in range(len(layers))]
    return plan_kv(geometries, getattr(torch, kv_dtype), block_tokens, page_bytes, num_pages)


def _plan_group(
    geometry: LayerGeometry,
    layers: tuple[int, ...],
    dtype: torch.dtype,
    block_tokens: int,
    page_bytes: int,
    num_pages: int,
) -> GroupPlan:
    unit = largest_unit_bytes(geometry, dtype, page_bytes)
    block = BlockGeometry(geometry, block_tokens, dtype, unit)
    block_bytes = block.block_units * unit
    if block_bytes > page_bytes:
        raise ValueError(
            f"a block of {block_tokens} positions takes {block_bytes} bytes, a page has "
            f"{page_bytes}: use larger pages or smaller blocks"
        )
    options = [
        plan
        for pages in range(1, len(layers) + 1)
        for plan in _cuts(layers, block, page_bytes // block_bytes, pages)
    ]
    return _choose(options, page_bytes, num_pages)


def _cuts(
    layers: tuple[int, ...], block: BlockGeometry, blocks_per_page: int, pages: int
) -> list[GroupPlan]:
    """All ways to fill so many pages with chunks of all layers."""
    plans = []
    blocks_per_chunk = blocks_per_page
    while blocks_per_chunk:
        chunks_per_page = blocks_per_page // blocks_per_chunk
        num_chunks = pages * chunks_per_page // len(layers)
        if num_chunks and -(-num_chunks * len(layers) // chunks_per_page) == pages:
            plans.append(
                GroupPlan(layers, block, blocks_per_chunk, chunks_per_page, num_chunks, pages)
            )
        # The next shorter chunk of which more fit into a page.
        blocks_per_chunk = blocks_per_page // (chunks_per_page + 1)
    return plans


def _choose(options: Sequence[GroupPlan], page_bytes: int, num_pages: int) -> GroupPlan:
    """The longest chunks among those that cost about the least."""

    def overhead(plan: GroupPlan) -> float:
        used = plan.blocks_per_extent * len(plan.layers) * plan.block_bytes
        return (
            plan.pages_per_extent * page_bytes / used
            - 1
            + plan.tokens_per_extent / 2 / SEQUENCE_TOKENS
            + HALF_USED_EXTENTS * plan.pages_per_extent / num_pages
        )

    least = min(LEAST_EXTENT_TOKENS, max(plan.tokens_per_extent for plan in options))
    options = [plan for plan in options if plan.tokens_per_extent >= least]
    best = min(map(overhead, options))
    return max(
        (plan for plan in options if overhead(plan) <= best + OVERHEAD_SLACK),
        key=lambda plan: (plan.blocks_per_chunk, -overhead(plan)),
    )
