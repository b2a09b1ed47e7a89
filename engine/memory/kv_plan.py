"""How a model's KV lies in a given pool: layer groups, chunks, extents, addresses.

A layer group is the layers of one KV geometry. A chunk holds `blocks_per_chunk` blocks of one layer
side by side and never crosses a page. An extent is what KV grows and shrinks by: `num_chunks`
chunks of every layer of its group, packed into `pages_per_extent` pages that need not be
neighbours. Block b lies in chunk b // blocks_per_chunk of every layer, at slot
b % blocks_per_chunk, and in extent b // blocks_per_extent.

`ChunkTable` has the addresses, for attention kernels. A step in flight must go on reading those it
was launched with, whatever comes, goes or moves meanwhile. So changes go to a copy on the host, and
the next batch captures a new tensor; the columns of an extent that is gone keep their addresses
until another extent gets the id. A device with streams keeps one table that its captured steps know
by address, and writes into it what has changed, between two steps and in their order:
`note_changes` when a step is laid out, `apply_changes` when it runs.

Lives here: the choice of the extent. Does not: which block belongs to whom (`kv_group.py`).
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from engine.pack import KvGroup
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


FIRST_COLUMNS = 8
NO_SOURCES: Mapping[int, int] = MappingProxyType({})


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
        """Positions a query sees at most, itself included; 0: all. Those of a chunk, too."""
        return self.block.layer.reach

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
        return self.block.layer.first_seen(num_computed) // self.block.block_tokens

    def extents_for(self, num_blocks: int) -> int:
        """Extents that hold so many blocks."""
        return -(-num_blocks // self.blocks_per_extent)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A model's KV layout. `layer_group`: by layer, (its group, its place in the group).

    A layer that reads another's KV has that one's place.
    """

    groups: tuple[GroupPlan, ...]
    layer_group: tuple[tuple[int, int], ...]
    block_tokens: int

    def writes(self, layer: int) -> bool:
        """Whether the layer has KV of its own, and does not read that of another."""
        group, place = self.layer_group[layer]
        return self.groups[group].layers[place] == layer

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
    sources: Mapping[int, int] = NO_SOURCES,
) -> KvPlan:
    """Group the layers by geometry and choose each group's extent.

    `sources`: layers without KV of their own -> those whose KV they read. Raises ValueError where
    one block of one layer is larger than a page.
    """
    members: dict[LayerGeometry, list[int]] = {}
    for number, layer in enumerate(layers):
        if number not in sources:
            members.setdefault(layer, []).append(number)
    groups = tuple(
        _plan_group(geometry, tuple(numbers), dtype, block_tokens, page_bytes, num_pages)
        for geometry, numbers in members.items()
    )
    places = {
        layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)
    }
    by_layer = tuple(places[sources.get(layer, layer)] for layer in range(len(layers)))
    return KvPlan(groups, by_layer, block_tokens)


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
        layer: LayerGeometry(
            group.num_kv_heads, group.k_dim, group.v_dim, group.window, group.chunk
        )
        for group in kv_groups
        for layer in (*group.layers, *(reader for reader, _ in group.readers))
    }
    geometries = [layers[number] for number in range(len(layers))]
    sources = dict(pair for group in kv_groups for pair in group.readers)
    dtype = getattr(torch, kv_dtype)
    return plan_kv(geometries, dtype, block_tokens, page_bytes, num_pages, sources)


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
            f"a block of {block_tokens} positions needs {block_bytes} bytes, more than a page of "
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


class ChunkTable:
    """Addresses in units of `plan.block.unit_bytes`, by layer of the group and chunk."""

    def __init__(self, plan: GroupPlan, page_bytes: int, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        # Chunks of an extent in the order in which they fill its pages: layer after layer, again
        # and again. [layers, chunks of the extent]
        number = np.arange(plan.num_chunks) * len(plan.layers)
        order = np.arange(len(plan.layers))[:, None] + number
        self._units_per_page = page_bytes // plan.block.unit_bytes
        self._page = order // plan.chunks_per_page
        chunk_units = plan.blocks_per_chunk * plan.block.block_units
        self._unit_in_page = order % plan.chunks_per_page * chunk_units
        self._addresses = np.zeros((len(plan.layers), FIRST_COLUMNS), dtype=np.int64)
        self._captured: torch.Tensor | None = None
        self._moved: dict[int, list[int]] = {}  # placed, and not written yet
        self._written: set[int] = set()  # extents written since `note_changes` was called last
        self._num_noted = 0
        # (number, columns [n], addresses [layers, n]), noted and not applied yet.
        self._changes: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()

    @property
    def num_columns(self) -> int:
        """Chunks that the table reaches, as of the last look."""
        return self._addresses.shape[1]

    def note_changes(self) -> int:
        """What has changed since the last call is kept for `apply_changes`. Returns its number."""
        self._write()
        if self._written:
            count = self._plan.num_chunks
            first = np.fromiter(sorted(self._written), dtype=np.int64) * count
            columns = (first[:, None] + np.arange(count)).reshape(-1)
            self._written.clear()
            self._num_noted += 1
            self._changes.append(
                (
                    self._num_noted,
                    torch.from_numpy(columns),
                    torch.from_numpy(self._addresses[:, columns]),
                )
            )
        return self._num_noted

    def apply_changes(
        self, table: torch.Tensor, number: int, bring: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Write what was noted up to `number` into table int64 [layers, chunks]."""
        while self._changes and self._changes[0][0] <= number:
            _, columns, addresses = self._changes.popleft()
            table.index_copy_(1, bring(columns), bring(addresses))

    def capture(self) -> torch.Tensor:
        """int64 [layers of the group, chunks] as of now; it is never written again."""
        self._write()
        if self._captured is None:
            self._captured = torch.from_numpy(self._addresses.copy()).to(self._device)
        return self._captured

    def place(self, extent_id: int, pages: Sequence[int]) -> None:
        """The extent lies on these pages from now on."""
        self._moved[extent_id] = list(pages)

    def block_offsets(self, block: int) -> list[int]:
        """The byte of the arena at which the block begins, for each layer of the group."""
        self._write()
        chunk, slot = divmod(block, self._plan.blocks_per_chunk)
        units = self._addresses[:, chunk] + slot * self._plan.block.block_units
        return [int(unit) * self._plan.block.unit_bytes for unit in units]

    def _write(self) -> None:
        """Addresses of what was placed since somebody looked, all at once."""
        if not self._moved:
            return
        count = self._plan.num_chunks
        end, columns = (max(self._moved) + 1) * count, self._addresses.shape[1]
        if end > columns:
            self._addresses = np.pad(self._addresses, ((0, 0), (0, max(columns, end - columns))))
        for extent_id, pages in self._moved.items():
            page = np.asarray(pages, dtype=np.int64)[self._page]
            first = extent_id * count
            self._written.add(extent_id)
            self._addresses[:, first : first + count] = (
                page * self._units_per_page + self._unit_in_page
            )
        self._moved.clear()
        self._captured = None
