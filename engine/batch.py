"""One step's batch: scheduled rows of one model as flat tensors.

Comes in: rows (a request and how many of its uncomputed tokens run now), blocks already reserved.
Goes out: `StepBatch`, all a model runner needs. Mixed prefill chunks and decodes lie in one flat
sequence of T tokens, request after request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache import KvPlan
from engine.request import Request
from kernels.paged_attention import PagedBatch, Rows

# Decode rows whose tables differ by less than this many blocks share one padded table.
SMALL_TABLE_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`num_tokens` of the request's uncomputed tokens run in this step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the row's last token is the request's last: then a new one is sampled."""
        return self.num_tokens == self.request.num_uncomputed


@dataclass(frozen=True, slots=True)
class StepBatch:
    """input_ids, position_ids int64 [1, T]; logit_index int64 [num sampling rows]."""

    rows: tuple[ScheduledRow, ...]
    sampling_rows: tuple[ScheduledRow, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_index: torch.Tensor
    paged: PagedBatch

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.input_ids.shape[1]


def build_batch(rows: Sequence[ScheduledRow], plan: KvPlan, device: torch.device) -> StepBatch:
    """Lay the rows out. Every row's block table must already reach its last scheduled token."""
    ids: list[int] = []
    positions: list[int] = []
    chunk: list[int] = []
    slot: list[int] = []
    logit_index: list[int] = []
    starts: list[int] = []
    block_tokens, per_chunk = plan.block_tokens, plan.blocks_per_chunk
    for row in rows:
        request = row.request
        first, last = request.num_computed, request.num_computed + row.num_tokens
        starts.append(len(ids))
        ids.extend(request.token_ids[first:last])
        positions.extend(range(first, last))
        for position in range(first, last):
            block = request.block_table[position // block_tokens]
            chunk.append(block // per_chunk)
            slot.append(block % per_chunk)
        if row.samples:
            logit_index.append(len(ids) - 1)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    position_ids = tensor(positions)
    return StepBatch(
        rows=tuple(rows),
        sampling_rows=tuple(row for row in rows if row.samples),
        input_ids=tensor(ids)[None],
        position_ids=position_ids[None],
        logit_index=tensor(logit_index),
        paged=PagedBatch(
            token_chunk=tensor(chunk),
            token_slot=tensor(slot),
            token_offset=position_ids % block_tokens,
            rows=tuple(
                _rows([(rows[i], starts[i]) for i in group], plan, device)
                for group in _groups(rows, block_tokens)
            ),
        ),
    )


def _groups(rows: Sequence[ScheduledRow], block_tokens: int) -> list[list[int]]:
    """Rows that attend together: each prefill chunk alone, decodes by size of their tables."""
    prefills: list[list[int]] = []
    decodes: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.num_tokens > 1:
            prefills.append([i])
        else:
            num_blocks = row.request.num_computed // block_tokens + 1
            size = max(num_blocks, SMALL_TABLE_BLOCKS).bit_length()
            decodes.setdefault(size, []).append(i)
    return prefills + list(decodes.values())


def _rows(group: list[tuple[ScheduledRow, int]], plan: KvPlan, device: torch.device) -> Rows:
    contexts = [row.request.num_computed + row.num_tokens for row, _ in group]
    width = -(-max(contexts) // plan.block_tokens)
    tables: list[list[int]] = []
    for (row, _), context in zip(group, contexts, strict=True):
        num_blocks = -(-context // plan.block_tokens)
        table = row.request.block_table[:num_blocks]
        # A short row is padded with a block of its own: always valid memory, always masked.
        tables.append(table + [table[0]] * (width - num_blocks))
    blocks = torch.tensor(tables, dtype=torch.int64)
    index = [list(range(start, start + row.num_tokens)) for row, start in group]
    return Rows(
        token_index=torch.tensor(index, dtype=torch.int64, device=device),
        chunk=(blocks // plan.blocks_per_chunk).to(device),
        slot=(blocks % plan.blocks_per_chunk).to(device),
        context_len=torch.tensor(contexts, dtype=torch.int64, device=device),
    )
