"""Attention over chosen positions of paged KV: the maths, the shapes, and the torch reference.

As in paged_attention.py, but a query row i attends over a set C_i of positions that something
before it has chosen, all of them at most p_i:

    o_i = softmax_{j in C_i}( softcap(scale * q_i . k_j) ) v_j

with an optional sink logit per head. A set is given as k positions, -1 where there are fewer; it is
the same for all heads, or each KV head has its own.

K and V of the chosen positions alone are gathered, those of some queries at a time: between the
products lie PIECE_BYTES, or what one query takes, however long prompt and context are.

Bytes moved by one decode step of one layer: sum over rows of k * kv_heads * (k_dim + v_dim), or
k_dim where V lies in K, and not of the context.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.paged_attention import BlockGeometry, Rows

PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the queries of a step see in one layer.

    by_rows   by group of rows of the step's batch: int32 [R, 1 or kv_heads, q_len, k], positions in
              the row's context, -1: none; None: these rows see all of their context
    """

    by_rows: tuple[torch.Tensor | None, ...]


def pieces(num_rows: int, q_len: int, query_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cut [num_rows, q_len] queries that take so many bytes each: PIECE_BYTES a piece, or one."""
    most = max(1, PIECE_BYTES // query_bytes)
    rows, queries = max(1, most // q_len), min(most, q_len)
    for row in range(0, num_rows, rows):
        for query in range(0, q_len, queries):
            yield slice(row, row + rows), slice(query, query + queries)


def attend_chosen_ref(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    rows: Rows,
    positions: torch.Tensor,
    query: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [R, heads, q_len, k_dim] -> [R, heads, q_len, v_dim]; `positions`: see `Chosen`.

    At least one position of a query is chosen. Scores and softmax in float32.
    """
    layer = geometry.layer
    num_rows, num_heads, q_len, _ = query.shape
    out = query.new_empty(num_rows, num_heads, q_len, layer.v_dim)
    kept = layer.num_kv_heads * layer.row_dim * geometry.dtype.itemsize
    each = positions.shape[3] * (2 * kept + num_heads * 8)
    for row, part in pieces(num_rows, q_len, each):
        places = positions[row, :, part]
        key, value = _gather(arena, geometry, chunk_table, rows, row, places)
        own = query[row, :, part].transpose(1, 2)
        own = own.reshape(*own.shape[:2], layer.num_kv_heads, -1, layer.k_dim)
        # [R, n, kv_heads, group, dim] over [R, n, kv_heads, k, dim]
        scores = torch.matmul(own, key.transpose(-1, -2)).float().mul_(scale)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores.masked_fill_((places < 0).transpose(1, 2).unsqueeze(3), float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            sink = sinks.float().view(layer.num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        attended = torch.matmul(weights.to(value.dtype), value)
        out[row, :, part] = attended.flatten(2, 3).transpose(1, 2)
    return out


def _gather(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    rows: Rows,
    row: slice,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [R, n, kv_heads, k, dim] of `positions` [R, 1 or kv_heads, n, k] of some rows.

    Where none is chosen lies the first position of the table, which is always written.
    """
    layer, size = geometry.layer, geometry.block_tokens
    first = rows.first[row, None, None, None]
    place = (positions - first).clamp_(min=0).transpose(1, 2)
    block, offset = place // size, place % size
    flat = block.flatten(1)
    chunk = rows.chunk[row].gather(1, flat).view_as(block)
    slot = rows.slot[row].gather(1, flat).view_as(block)
    base = chunk_table[chunk] + slot * geometry.block_units
    heads = torch.arange(layer.num_kv_heads, device=arena.device)[:, None] * size
    typed, step = arena.view(geometry.dtype), geometry.unit_elements
    parts = [(0, geometry.k_row_units, layer.k_dim)]
    if not layer.v_in_k:
        parts.append((geometry.v_start_units, geometry.v_row_units, layer.v_dim))
    out = []
    for start, row_units, dim in parts:
        # Overlapping rows, one starting at every unit, as in `gather_kv_ref`.
        every = typed.as_strided(((typed.numel() - dim) // step + 1, dim), (step, 1))
        index = base + start + (heads + offset) * row_units
        out.append(every.index_select(0, index.flatten()).view(*index.shape, dim))
    return out[0], out[-1][..., : layer.v_dim]
