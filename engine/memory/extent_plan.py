"""How blocks lie in a given pool: chunks, extents, addresses.

A group of layers has blocks of one size. A chunk holds `blocks_per_chunk` blocks of one layer side
by side and never crosses a page. An extent is what a group grows and shrinks by: `num_chunks`
chunks of every layer, packed into `pages_per_extent` pages that need not be neighbours. Block b
lies in chunk b // blocks_per_chunk of every layer, at slot b % blocks_per_chunk, and in extent
b // blocks_per_extent.

`ChunkTable` has the addresses, for kernels. A step in flight must go on reading those it was
launched with, whatever comes, goes or moves meanwhile. So changes go to a copy on the host, and the
next batch captures a new tensor; the columns of an extent that is gone keep their addresses until
another extent gets the id. A device with streams keeps one table that its captured steps know by
address, and writes into it what has changed, between two steps and in their order: `note_changes`
when a step is laid out, `apply_changes` when it runs.

Does not know what a block holds: positions of KV (`GroupPlan`) or the state of a sequence
(`StatePlan`), both in `kv_plan.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FIRST_COLUMNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the pages of an extent are cut into chunks."""

    blocks_per_chunk: int
    chunks_per_page: int
    num_chunks: int
    pages_per_extent: int

    @property
    def blocks_per_extent(self) -> int:
        """Blocks (of every layer) that one extent holds."""
        return self.num_chunks * self.blocks_per_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentPlan(Cut):
    """A group's extents. `num_layers`: rows of its table; `block_units`: of a block of one of
    them, in units of `unit_bytes`."""

    num_layers: int
    unit_bytes: int
    block_units: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_units * self.unit_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.blocks_per_chunk * self.block_bytes

    @property
    def pages_per_block(self) -> float:
        """Pages that a block of all layers takes, in extents without free slots."""
        return self.pages_per_extent / self.blocks_per_extent

    def extents_for(self, num_blocks: int) -> int:
        """Extents that hold so many blocks."""
        return -(-num_blocks // self.blocks_per_extent)


def all_cuts(num_layers: int, blocks_per_page: int) -> Iterator[Cut]:
    """All ways to fill pages with chunks of all layers; a page holds `blocks_per_page` blocks."""
    for pages in range(1, num_layers + 1):
        blocks_per_chunk = blocks_per_page
        while blocks_per_chunk:
            chunks_per_page = blocks_per_page // blocks_per_chunk
            num_chunks = pages * chunks_per_page // num_layers
            if num_chunks and -(-num_chunks * num_layers // chunks_per_page) == pages:
                yield Cut(
                    blocks_per_chunk=blocks_per_chunk,
                    chunks_per_page=chunks_per_page,
                    num_chunks=num_chunks,
                    pages_per_extent=pages,
                )
            # The next shorter chunk of which more fit into a page.
            blocks_per_chunk = blocks_per_page // (chunks_per_page + 1)


class ChunkTable:
    """Addresses in units of `plan.unit_bytes`, by layer of the group and chunk."""

    def __init__(self, plan: ExtentPlan, page_bytes: int, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        # Chunks of an extent in the order in which they fill its pages: layer after layer, again
        # and again. [layers, chunks of the extent]
        number = np.arange(plan.num_chunks) * plan.num_layers
        order = np.arange(plan.num_layers)[:, None] + number
        self._units_per_page = page_bytes // plan.unit_bytes
        self._page = order // plan.chunks_per_page
        chunk_units = plan.blocks_per_chunk * plan.block_units
        self._unit_in_page = order % plan.chunks_per_page * chunk_units
        self._addresses = np.zeros((plan.num_layers, FIRST_COLUMNS), dtype=np.int64)
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
        units = self._addresses[:, chunk] + slot * self._plan.block_units
        return [int(unit) * self._plan.unit_bytes for unit in units]

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
