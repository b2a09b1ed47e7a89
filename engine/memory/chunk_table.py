"""Where the chunks of one layer group's extents lie: the table that attention kernels read.

A step in flight must go on reading the addresses it was launched with, whatever comes, goes or
moves meanwhile. So changes go to a copy on the host, and the next batch captures a new tensor; the
columns of an extent that is gone keep their addresses until another extent gets the id.

A device with streams keeps one table that its captured steps know by address, and writes into it
what has changed, between two steps and in their order: `note_changes` when a step is laid out,
`apply_changes` when it runs.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.memory.kv_plan import GroupPlan

FIRST_COLUMNS = 8


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
