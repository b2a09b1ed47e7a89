"""A paged cache of one layer for benchmarks and tests of kernels: memory, addresses, steps.

Blocks of a sequence lie scattered over chunks, as in a worker that has run for a while. Memory
starts as NaN, so whatever a kernel reads that was never written shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from kernels.kv_write import rotary_write_ref
from kernels.paged_attention import (
    BlockGeometry,
    LayerGeometry,
    PagedBatch,
    Rows,
    largest_unit_bytes,
)
from kernels.paged_prefill import tiles_of
from kernels.paged_rows import FlatRows, flat_rows

PAGE_BYTES = 2 << 20
BLOCKS_PER_CHUNK = 4


@dataclass(frozen=True, slots=True)
class CacheStep:
    """Rows of a step: addresses for references (batch) and for kernels (the rest)."""

    batch: PagedBatch
    rows: FlatRows
    tiles: torch.Tensor


class Cache:
    """Room for `num_sequences` of up to `max_tokens` positions: arena, geometry and table."""

    def __init__(
        self,
        layer: LayerGeometry,
        dtype: torch.dtype,
        num_sequences: int,
        max_tokens: int,
        block_tokens: int = 16,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        unit = largest_unit_bytes(layer, dtype, PAGE_BYTES)
        self.geometry = BlockGeometry(layer, block_tokens, dtype, unit)
        self.device = torch.device(device)
        self.blocks_each = -(-max_tokens // block_tokens)
        num_blocks = num_sequences * self.blocks_each
        generator = torch.Generator().manual_seed(seed)
        self.blocks = torch.randperm(num_blocks, generator=generator).view(num_sequences, -1)
        num_chunks = -(-num_blocks // BLOCKS_PER_CHUNK)
        units = self.geometry.block_units * BLOCKS_PER_CHUNK
        order = torch.randperm(num_chunks, generator=generator)
        self.table = (order * units).to(self.device)
        size = num_chunks * units * unit
        self.arena = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device)

    def step(self, rows: Sequence[tuple[int, int]], group: int = 1) -> CacheStep:
        """rows[i]: first position and number of sequence i's tokens. `group`: heads a KV head."""
        chunk, slot, offset, parts, start = [], [], [], [], 0
        for i, (first, tokens) in enumerate(rows):
            position = torch.arange(first, first + tokens)
            block = self.blocks[i, position // self.geometry.block_tokens]
            chunk.append(block // BLOCKS_PER_CHUNK)
            slot.append(block % BLOCKS_PER_CHUNK)
            offset.append(position % self.geometry.block_tokens)
            used = self.blocks[i, : -(-(first + tokens) // self.geometry.block_tokens)][None]
            parts.append(
                Rows(
                    torch.arange(start, start + tokens)[None],
                    used // BLOCKS_PER_CHUNK,
                    used % BLOCKS_PER_CHUNK,
                    torch.tensor([first + tokens]),
                    torch.zeros(1, dtype=torch.int64),
                )
            )
            start += tokens
        flat = flat_rows(parts, self.device)
        batch = PagedBatch(
            self.table[None],
            torch.cat(chunk).to(self.device),
            torch.cat(slot).to(self.device),
            torch.cat(offset).to(self.device),
            tuple(self._moved(part) for part in parts),
        )
        return CacheStep(batch, flat, tiles_of(flat, group))

    def _moved(self, rows: Rows) -> Rows:
        moved = {field.name: getattr(rows, field.name).to(self.device) for field in fields(rows)}
        return replace(rows, **moved)

    def fill(self, step: CacheStep, generator: torch.Generator) -> None:
        """Random K and V at all positions of a step's rows."""
        everything = self.step([(0, context) for context in step.rows.contexts]).batch
        layer, num_tokens = self.geometry.layer, sum(step.rows.contexts)
        key, value = (
            torch.randn(
                num_tokens, layer.num_kv_heads, dim, generator=generator, device=self.device
            )
            for dim in (layer.k_dim, layer.v_dim)
        )
        rotary_write_ref(
            self.arena, self.geometry, self.table, everything, key, key, value, None, None
        )
