"""What the attention kernels get: rows of any length over one table, and how a tile's KV is found.

`FlatRows` is a step's `Rows` (kernels/paged_attention.py) as one launch wants them: one padded
table for all, rows of unlike lengths side by side, their lengths known to the host too, which lays
out the grid. Memory is exactly as there: block b of a row lies at

    table[chunk[r, b]] + slot[r, b] * block_units        in units

`page_bases` is that line for the pages of one tile, loaded once for all their tokens. It is 64-bit:
an arena has more than 2^31 elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.paged_attention import (
    BlockGeometry,
    PagedBatch,
    Rows,
    attend_rows_ref,
    gather_kv_ref,
)
from kernels.triton_api import jit, next_power_of_2, tl

# What a masked score is. Not -inf: the difference of two of them has to be a number. A row that has
# seen nothing else sums garbage (finite: V is masked too) that its first real score scales to 0.
MASKED: tl.constexpr = tl.constexpr(-1.0e30)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of a step, on the device but for the last two.

    Steps that are recorded have other lengths at each replay, so their host side is empty.

    chunk, slot   int32 [num_rows, max_blocks]; behind a row's last block anything may stand
    context_len   int32 [num_rows]    positions cached after this step's write; 0: a padding row
    first         int32 [num_rows]    position of the first table entry's first token
    q_start       int32 [num_rows]    the row's first token in the flat batch; the rest follow it
    q_len         int32 [num_rows]    tokens of the row: the last of its context
    q_lens        the same, on the host; () where only the device knows them
    contexts      context_len on the host; () likewise
    """

    chunk: torch.Tensor
    slot: torch.Tensor
    context_len: torch.Tensor
    first: torch.Tensor
    q_start: torch.Tensor
    q_len: torch.Tensor
    q_lens: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """How many, padding included."""
        return self.chunk.shape[0]


def flat_rows(groups: Sequence[Rows], device: torch.device | str = "cpu") -> FlatRows:
    """Groups of equal rows as one. Reads them on the host: before they go to the device."""
    width = max(rows.chunk.shape[1] for rows in groups)

    def padded(table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(table, (0, width - table.shape[1]))

    def flat(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).to(torch.int32).to(device)

    lengths = [rows.token_index.shape[1] for rows in groups for _ in range(len(rows.chunk))]
    return FlatRows(
        flat([padded(rows.chunk) for rows in groups]),
        flat([padded(rows.slot) for rows in groups]),
        flat([rows.context_len for rows in groups]),
        flat([rows.first for rows in groups]),
        flat([rows.token_index[:, 0] for rows in groups]),
        flat([torch.tensor(lengths)]),
        tuple(lengths),
        tuple(int(length) for rows in groups for length in rows.context_len),
    )


def check_geometry(geometry: BlockGeometry, table: torch.Tensor) -> None:
    """Raises ValueError for what the kernels cannot address."""
    tokens = geometry.block_tokens
    if tokens & (tokens - 1):
        raise ValueError(f"blocks of {tokens} tokens: a power of two is needed")
    if table.dtype != torch.int64 or table.stride(-1) != 1:
        raise ValueError("the table of chunks is int64 and contiguous")


def attention_constants(
    geometry: BlockGeometry, num_heads: int, softcap: float, has_sinks: bool
) -> dict[str, Any]:
    """What an attention kernel is compiled for, but for the shape of its blocks.

    K_PAD is the width of the block that K is read in; where V lies in K, of what is behind V.
    """
    layer = geometry.layer
    k_width = layer.k_dim - layer.v_dim if layer.v_in_k else layer.k_dim
    k_pad, v_pad = (max(16, next_power_of_2(dim)) for dim in (k_width, layer.v_dim))
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // layer.num_kv_heads,
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "BLOCK_TOKENS": geometry.block_tokens,
        "UNIT": geometry.unit_elements,
        "BLOCK_UNITS": geometry.block_units,
        "V_START": geometry.v_start_units,
        "V_IN_K": layer.v_in_k,
        # Below 0: of a chunk.
        "WINDOW": layer.window - layer.chunk,
        "SOFTCAP": softcap,
        "HAS_SINKS": has_sinks,
        "K_PAD": k_pad,
        "V_PAD": v_pad,
    }


def wide_attention_ref(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    query: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, heads, k_dim] -> float64 [T, heads, v_dim].

    All of the arithmetic is in float64, softmax and scores of `attend_rows_ref` in float32.
    """
    out = query.new_empty(*query.shape[:2], geometry.layer.v_dim, dtype=torch.float64)
    for rows in batch.rows:
        key, value = gather_kv_ref(arena, geometry, chunk_table, rows)
        attended = attend_rows_ref(
            query[rows.token_index].transpose(1, 2).double(),
            key.double(),
            value.double(),
            rows.context_len,
            rows.first,
            scale,
            geometry.layer.window,
            softcap,
            sinks,
            geometry.layer.chunk,
        )
        out[rows.token_index] = attended[..., : geometry.layer.v_dim].transpose(1, 2)
    return out


@jit
def page_bases(
    table_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    tile: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    PAGES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
) -> tl.tensor:
    """Where the PAGES pages of a tile begin, in elements.

    Places `low` to `high` of the row are seen; the table is read for pages with any of them only.
    """
    page = tile * PAGES + tl.arange(0, PAGES)
    live = (page * BLOCK_TOKENS < high) & ((page + 1) * BLOCK_TOKENS > low)
    chunk = tl.load(chunk_ptr + page, mask=live, other=0)
    slot = tl.load(slot_ptr + page, mask=live, other=0)
    base = tl.load(table_ptr + chunk, mask=live, other=0)
    return (base + slot.to(tl.int64) * BLOCK_UNITS) * UNIT


@jit
def capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """SOFTCAP * tanh(scores / SOFTCAP), by the exponential that the hardware has."""
    return SOFTCAP * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / SOFTCAP)) + 1))
