"""The layer's operations as the kernels are given them, by definition: what kernels are held to.

`decoder_layer.REFERENCE` works on a step's padded groups (`Rows`); here is the same on what a
device gets: flat rows on the device, padding rows of context 0, tokens of chunk -1 that are written
nowhere. Lengths are read from the tensors, as a launched kernel reads them, so that a graph in
which this is one opaque call replays over whatever they are by then.
"""

from dataclasses import replace

import torch

from kernels.decoder_layer import REFERENCE, LayerForm, LayerStep
from kernels.kv_write import rotary_write_ref
from kernels.paged_attention import PagedBatch, Rows, attend_rows_ref, gather_kv_ref
from kernels.paged_rows import FlatRows
from kernels.prefill_shape import capability, launch_shape, tile_tokens
from kernels.rotary import rotary_ref


def write_flat_ref(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: LayerForm, step: LayerStep
) -> torch.Tensor:
    """q rotated, of all tokens; K and V of those that have a place are written."""
    batch, cos, sin = step.batch, step.cos, step.sin
    real = (batch.token_chunk >= 0).nonzero().squeeze(-1)
    placed = PagedBatch(
        batch.table,
        batch.token_chunk[real].long(),
        batch.token_slot[real].long(),
        batch.token_offset[real].long(),
        (),
    )
    rotary_write_ref(
        step.arena,
        step.geometry,
        step.chunk_table,
        placed,
        query[real],
        key[real],
        value[real],
        None if cos is None else cos[real],
        None if sin is None else sin[real],
        form.interleaved,
    )
    if cos is None or sin is None:
        return query
    return rotary_ref(query, cos, sin, form.interleaved).to(query.dtype)


def attend_flat_ref(query: torch.Tensor, form: LayerForm, step: LayerStep) -> torch.Tensor:
    """query [T, heads, k_dim] -> [T, heads, v_dim]; zeros for rows of context 0.

    NaN for tokens of no row, and for those of chunks that no tile covers.
    """
    shape = (len(query), form.num_heads, step.geometry.layer.v_dim)
    out = query.new_full(shape, float("nan"))
    if step.rows is not None and step.tiles is not None:
        attended = torch.zeros_like(out)
        _attend_rows(query, form, step, step.rows, attended)
        shown = _covered(form, step, step.rows, step.tiles)
        out[shown] = attended[shown]
    if step.decode is not None:
        _attend_rows(query, form, step, step.decode, out)
        out[step.decode.q_start[step.decode.context_len == 0].long()] = 0
    return out


def _covered(form: LayerForm, step: LayerStep, rows: FlatRows, tiles: torch.Tensor) -> torch.Tensor:
    """The tokens of the tiles' queries."""
    layer = step.geometry.layer
    shape = launch_shape(layer, capability(tiles.device))
    size = tile_tokens(form.num_heads // layer.num_kv_heads, shape.block_m)
    lengths, starts = rows.q_len.tolist(), rows.q_start.tolist()
    tokens = [
        starts[row] + place
        for row, start in tiles.tolist()
        for place in range(start, min(start + size, lengths[row]))
    ]
    return torch.tensor(tokens, dtype=torch.int64)


def _attend_rows(
    query: torch.Tensor, form: LayerForm, step: LayerStep, rows: FlatRows, out: torch.Tensor
) -> None:
    tokens = step.geometry.block_tokens
    for r, length in enumerate(rows.q_len.tolist()):
        context, first = int(rows.context_len[r]), int(rows.first[r])
        if not context:
            continue
        blocks = -(-(context - first) // tokens)
        place = int(rows.q_start[r]) + torch.arange(length)
        one = Rows(
            place[None],
            rows.chunk[r : r + 1, :blocks].long(),
            rows.slot[r : r + 1, :blocks].long(),
            rows.context_len[r : r + 1].long(),
            rows.first[r : r + 1].long(),
        )
        key, value = gather_kv_ref(step.arena, step.geometry, step.chunk_table, one)
        attended = attend_rows_ref(
            query[place].transpose(0, 1)[None],
            key,
            value,
            one.context_len,
            one.first,
            form.scale,
            step.geometry.layer.window,
            form.softcap,
            form.sinks,
            step.geometry.layer.chunk,
        )
        out[place] = attended[0, ..., : out.shape[2]].transpose(0, 1)


FLAT_REFERENCE = replace(REFERENCE, write=write_flat_ref, attend=attend_flat_ref)
