"""Paged KV for kernel tests: rows of unlike length over poison.

Everything that no query of a row may see is NaN: memory between chunks, blocks of nobody, positions
before a window and behind a context. Table entries behind a row's last block name a chunk of NaN.
"""

from dataclasses import dataclass, field, replace

import torch

from kernels.paged_attention import (
    BlockGeometry,
    LayerGeometry,
    PagedBatch,
    Rows,
    largest_unit_bytes,
    write_kv_ref,
)
from kernels.paged_rows import FlatRows, flat_rows, wide_attention_ref
from tests.kernels.guarded import Guards

BLOCKS_PER_CHUNK = 3
GAP_UNITS = 5
SCALE = 0.3
Row = tuple[int, int]
"""(positions cached after the step, how many of them are queries)"""


@dataclass
class PagedCase:
    """A layer's cache with KV of `rows`, and queries for them.

    `inputs` are guarded; `check` after the launch.
    """

    layer: LayerGeometry
    rows: list[Row]
    heads: int
    dtype: torch.dtype = torch.float32
    block_tokens: int = 4
    softcap: float = 0.0
    has_sinks: bool = False
    guards: Guards = field(default_factory=Guards)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(7)
        unit = largest_unit_bytes(self.layer, self.dtype, 4096)
        self.geometry = BlockGeometry(self.layer, self.block_tokens, self.dtype, unit)
        tables = self._tables()
        num_blocks = max(max(table) for table in tables) + 1
        num_chunks = num_blocks // BLOCKS_PER_CHUNK + 1
        step = self.geometry.block_units * BLOCKS_PER_CHUNK + GAP_UNITS
        # One chunk more than there are blocks for: nobody's, NaN.
        order = torch.randperm(num_chunks + 1, generator=self.random)
        table = order * step + GAP_UNITS
        arena = torch.full(((num_chunks + 1) * step * unit + GAP_UNITS * unit,), 0xFF).byte()
        self.batch = self._batch(table[None], tables)
        for (context, q_len), blocks in zip(self.rows, tables, strict=True):
            self._write(arena, table, blocks, context, q_len)
        self.chunk_table = self.guards.input(table)
        self.arena = self.guards.input(arena)
        flat = flat_rows(self.batch.rows)
        chunk = flat.chunk.clone()
        for row, blocks in enumerate(tables):
            chunk[row, sum(block >= 0 for block in blocks) :] = num_chunks
        self.flat: FlatRows = replace(
            flat,
            chunk=self.guards.input(chunk, row_gap=2),
            slot=self.guards.input(flat.slot, row_gap=2),
            context_len=self.guards.input(flat.context_len),
            first=self.guards.input(flat.first),
            q_start=self.guards.input(flat.q_start),
            q_len=self.guards.input(flat.q_len),
        )
        num_tokens = sum(q_len for _, q_len in self.rows)
        query = self.normal(num_tokens, self.heads, self.layer.k_dim).to(self.dtype)
        self.query = self.guards.input(query, row_gap=3)
        self.sinks = self.guards.input(self.normal(self.heads)) if self.has_sinks else None
        self.out = self.guards.output(num_tokens, self.heads, self.layer.v_dim, dtype=self.dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.random)

    def expected(self) -> torch.Tensor:
        """float64, by the reference."""
        return wide_attention_ref(
            self.arena,
            self.geometry,
            self.chunk_table,
            self.batch,
            self.query,
            SCALE,
            self.softcap,
            self.sinks,
        )

    def difference(self) -> float:
        """How far `out` is from the reference; NaN counts as infinitely far."""
        error = (self.out.double() - self.expected()).abs().max()
        return float(error.nan_to_num(nan=float("inf")))

    def is_right(self, bound: float = 1e-5) -> bool:
        """Whether `out` is the reference's and nothing else was touched."""
        return self.guards.are_whole() and self.difference() < bound

    def _tables(self) -> list[list[int]]:
        """Blocks of each row, -1 for those before what its first query sees."""
        counts = [-(-context // self.block_tokens) for context, _ in self.rows]
        blocks = (torch.randperm(sum(counts) + 3, generator=self.random)).tolist()
        tables = []
        for (context, q_len), count in zip(self.rows, counts, strict=True):
            gone = self.layer.first_seen(context - q_len) // self.block_tokens
            tables.append([-1] * gone + [blocks.pop() for _ in range(count - gone)])
        return tables

    def _batch(self, table: torch.Tensor, tables: list[list[int]]) -> PagedBatch:
        groups, start = [], 0
        for (context, q_len), blocks in zip(self.rows, tables, strict=True):
            gone = sum(block < 0 for block in blocks)
            ids = torch.tensor([blocks[gone:]])
            groups.append(
                Rows(
                    torch.arange(start, start + q_len)[None],
                    ids // BLOCKS_PER_CHUNK,
                    ids % BLOCKS_PER_CHUNK,
                    torch.tensor([context]),
                    torch.tensor([gone * self.block_tokens]),
                )
            )
            start += q_len
        none = torch.empty(0, dtype=torch.int64)
        return PagedBatch(table, none, none, none, tuple(groups))

    def _write(
        self, arena: torch.Tensor, table: torch.Tensor, blocks: list[int], context: int, q_len: int
    ) -> None:
        """KV of what the row's queries see, and no more."""
        low = self.layer.first_seen(context - q_len)
        position = torch.arange(low, context)
        block = torch.tensor(blocks)[position // self.block_tokens]
        where = PagedBatch(
            table[None],
            block // BLOCKS_PER_CHUNK,
            block % BLOCKS_PER_CHUNK,
            position % self.block_tokens,
            (),
        )
        kv_heads = self.layer.num_kv_heads
        key, value = (
            self.normal(len(position), kv_heads, dim).to(self.dtype)
            for dim in (self.layer.k_dim, self.layer.v_dim)
        )
        write_kv_ref(arena, self.geometry, table, where, key, value)
