"""One step's batch for a device with streams: everything it reads in one pinned buffer, one copy.

The sibling of `batch.build_batch`. Comes in: scheduled rows of one model, blocks already reserved.
Goes out: `DeviceBatch`: what the step pipeline reads of a step, and `packed`, the bytes of all
inputs with the fields that say where each lies. `device_step.py` brings them to the device.

Rows, tokens and tables are padded to sizes of short lists, so that steps of one `StepForm` have all
fields at the same places and one captured graph serves them all:

    decodes       a step in which every row has one token and samples: rows and tokens alike
    mixed steps   rows of one token, rows of more (chunks), tokens and logits each by themselves, up
                  to MOST_RECORDED_TOKENS; tiles, into which attention cuts the chunks, follow

Padding tokens have chunk -1: their K and V go nowhere. Padding rows have context 0: they read
nothing and give zeros. Padding tokens belong to padding rows of a decode, or to the first padding
chunk of a mixed step; padding tiles lie behind its last. A form costs tokens that are computed for
nothing: a quarter at most where a GPU is busy with them.

What a row samples with lies behind these fields, by itself: it is no part of a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from engine.backend import Device
from engine.gpu.block_matrix import BlockMatrix, Ints, Places
from engine.gpu.device_sampling import Field, Packer, SamplingFields, pack_sampling
from engine.memory import ChunkTable, GroupPlan, KvCache
from engine.running import ScheduledRow, StepBatch, score_positions
from engine.running.state_batch import grouped_state_rows, state_batches
from engine.sampling import build_sampling
from kernels.prefill_shape import cut_rows

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Of decodes. Beyond the last in steps of it."""
MIXED_ROW_BUCKETS = (16, 32, 64, 128, 256)
"""Rows of one token beside chunks: fewer sizes, for a row too many costs attention next to nothing.
Beyond the last in steps of it."""
TOKEN_BUCKETS = (
    *(32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)
"""Of mixed steps. Up to 128 tokens a GPU reads the weights for as long as it computes."""
MOST_RECORDED_TOKENS = TOKEN_BUCKETS[-1]
"""A step of more takes a device longer than launching it takes the host."""
LEAST_CHUNKS = 4
FIRST_WIDTH = 16
FIRST_CHUNK_WIDTH = 256
WIDTH_FACTOR = 4
CPU = torch.device("cpu")


def bucket(number: int, sizes: Sequence[int], most: int) -> int:
    """The padded number of rows; never above `most` unless `number` is."""
    fitting = next((size for size in sizes if size >= number), None)
    if fitting is None:
        fitting = -(-number // sizes[-1]) * sizes[-1]
    return max(number, min(fitting, most))


def row_bucket(num_rows: int, most: int) -> int:
    """The padded number of rows of a decode; never above `most` unless `num_rows` is."""
    return bucket(num_rows, ROW_BUCKETS, most)


def width_bucket(num_blocks: int, first: int = FIRST_WIDTH) -> int:
    """The padded number of blocks in a row's table."""
    width = first
    while width < num_blocks:
        width *= WIDTH_FACTOR
    return width


@dataclass(frozen=True, slots=True)
class StepForm:
    """What steps of one graph have in common, padding included.

    num_decodes   rows of one token                num_chunks   rows of several; 0: a decode
    num_tokens    of all rows                      num_logits   states for the head; 0: all tokens
    widths        blocks of a decode row by layer group       chunk_widths   of a chunk's; 0: none
    """

    num_decodes: int
    num_chunks: int
    num_tokens: int
    num_logits: int
    widths: tuple[int, ...]
    chunk_widths: tuple[int, ...]

    def num_tiles(self, tile_tokens: int) -> int:
        """As many as any chunks of this form are cut into, or more."""
        return self.num_tokens // tile_tokens + self.num_chunks


class DeviceKvCache(KvCache):
    """A model's KV, and what laying out a step asks of its model.

    tile_tokens    by layer group, the positions of a row that one program of attention takes
    records_decodes, records_chunks  which steps are recorded, and so are padded to a form
    """

    tile_tokens: tuple[int, ...] = ()
    records_decodes = True
    records_chunks = True

    @cached_property
    def matrices(self) -> tuple[BlockMatrix, ...]:
        """By layer group, the tables of rows that decode."""
        plans = (group.plan for group in self.groups)
        return tuple(BlockMatrix(g, plan.blocks_per_chunk) for g, plan in enumerate(plans))


@dataclass(frozen=True, slots=True)
class RowFields:
    """FlatRows of kernels/paged_rows.py."""

    chunk: Field
    slot: Field
    context_len: Field
    first: Field
    q_start: Field
    q_len: Field


@dataclass(frozen=True, slots=True)
class GroupFields:
    """One layer group: where tokens go, and the rows that decode and those that have more tokens.

    longest   the longest context that a decode row may have
    tiles     int32 [tiles, 2], how attention cuts the latter, `tile_tokens` queries a tile
    """

    token_chunk: Field
    token_slot: Field
    token_offset: Field
    decode: RowFields | None
    prefill: RowFields | None
    longest: int
    tiles: Field | None
    tile_tokens: int


@dataclass(frozen=True, slots=True)
class InputFields:
    """Where everything lies. source: int32 [T], the row of the step before that samples it, or -1.

    logit_index: of the sampling rows, then of the others, then padding; None in a recorded decode:
    of every token.
    """

    ids: Field
    positions: Field
    source: Field
    logit_index: Field | None
    groups: tuple[GroupFields, ...]
    sampling: SamplingFields


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch(StepBatch):
    """A StepBatch whose tensors are the host's, with everything packed for the device.

    form     None where the step is not recorded
    lengths  of the rows with more than one token, and the positions that they end at
    chunks   by layer group, the table of chunks and the number of its last change before this step
    known    what the step before has sampled, once that is handed over
    """

    packed: torch.Tensor
    fields: InputFields
    form: StepForm | None
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    chunks: tuple[tuple[ChunkTable, int], ...]
    known: list[torch.Tensor] = field(default_factory=list)

    def resolve(self, previous_token_ids: torch.Tensor) -> None:
        """Kept until the inputs are on the device."""
        self.known.append(previous_token_ids)


class DeviceLayOut:
    """Implements `batch.LayOut`."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        self._device = device
        self._max_num_seqs = max_num_seqs

    def __call__(
        self, rows: Sequence[ScheduledRow], cache: KvCache, device: torch.device
    ) -> DeviceBatch:
        """Lay the rows out. Every row's tables must already reach its last scheduled token."""
        del device  # everything stays with the host until the step runs
        assert isinstance(cache, DeviceKvCache)
        flat = _Flat(rows)
        spans = [_Span.of(flat, group.plan) for group in cache.groups]
        sampling_rows = tuple(row for row in rows if row.samples)
        scoring = score_positions(rows, flat.starts, CPU)
        recorded = cache.records_decodes if flat.is_decode else cache.records_chunks
        form = self._form(flat, spans) if scoring is None and recorded else None
        packer = Packer()
        num_tokens = form.num_tokens if form else len(flat.ids)
        ids, positions, source = (packer.add(_padded(a, num_tokens, b)) for a, b in flat.tokens())
        logit_index = None
        if form is None or form.num_logits:
            num_logits = form.num_logits if form else len(rows)
            logit_index = packer.add(_padded(flat.logit_index, num_logits, 0))
        groups = tuple(_group(packer, cache, g, flat, span, form) for g, span in enumerate(spans))
        states = [row.request.sampling for row in sampling_rows]
        sampling = pack_sampling(packer, states, [row.end for row in sampling_rows])
        fields = InputFields(ids, positions, source, logit_index, groups, sampling)
        edits = any(row.request.edits_logits for row in sampling_rows)
        inputs = [row.request.sample_input for row in sampling_rows] if edits else []
        packed = self._device.host_buffer(packer.num_bytes)
        packer.write(packed.numpy())
        return DeviceBatch(
            rows=tuple(rows),
            sampling_rows=sampling_rows,
            input_ids=torch.from_numpy(flat.ids)[None],
            position_ids=torch.from_numpy(flat.positions)[None],
            logit_index=torch.tensor(flat.logit_index),
            plan=cache.plan,
            groups=(),
            sampling=build_sampling(inputs, CPU),
            pending_index=torch.tensor(flat.pending, dtype=torch.int64),
            pending_source=torch.tensor(flat.pending_source, dtype=torch.int64),
            scoring=scoring,
            packed=packed,
            fields=fields,
            form=form,
            lengths=flat.chunk_lengths,
            chunks=tuple((group.chunks, group.chunks.note_changes()) for group in cache.groups),
            states=state_batches(rows, cache, CPU),
            state_rows=grouped_state_rows(rows, flat.starts, CPU) if cache.states.groups else (),
        )

    def _form(self, flat: "_Flat", spans: Sequence["_Span"]) -> StepForm | None:
        """None where the step is longer than what is recorded."""
        num_ones, num_more = len(flat.ones), len(flat.more)
        widths = tuple(width_bucket(span.most(flat.ones)) if num_ones else 0 for span in spans)
        if flat.is_decode:
            num_rows = row_bucket(num_ones, self._max_num_seqs)
            return StepForm(num_rows, 0, num_rows, 0, widths, (0,) * len(spans))
        decodes = bucket(num_ones, MIXED_ROW_BUCKETS, self._max_num_seqs) if num_ones else 0
        # One more than there are, at least.
        chunks = max(LEAST_CHUNKS, 1 << num_more.bit_length())
        # Padding rows of one token write zeros where one of padding is.
        needed = len(flat.ids) + (decodes > num_ones)
        num_tokens = next((size for size in TOKEN_BUCKETS if size >= needed), None)
        if num_tokens is None:
            return None
        blocks = (span.most(flat.more) if num_more else 0 for span in spans)
        chunk_widths = tuple(width_bucket(most, FIRST_CHUNK_WIDTH) for most in blocks)
        return StepForm(decodes, chunks, num_tokens, decodes + chunks, widths, chunk_widths)


class _Flat:
    """The rows' tokens end to end; numpy, int32."""

    def __init__(self, rows: Sequence[ScheduledRow]) -> None:
        ids: list[int] = []
        self.rows = rows
        self.pending: list[int] = []
        self.pending_source: list[int] = []
        sampling: list[int] = []
        others: list[int] = []
        for row in rows:
            tokens, first = row.request.token_ids, row.first
            if row.source >= 0:
                ids += tokens[first : first + row.num_scheduled_tokens]
                self.pending.append(len(ids))
                self.pending_source.append(row.source)
                ids.append(0)
            elif row.num_scheduled_tokens == 1:
                ids.append(tokens[first])
            else:
                ids += tokens[first : row.end]
            (sampling if row.samples else others).append(len(ids) - 1)
        self.logit_index = sampling + others
        self.is_decode = len(ids) == len(rows) and not others
        self.ids = np.array(ids, dtype=np.int32)
        self.lengths = np.array([row.num_scheduled_tokens for row in rows], dtype=np.int32)
        self.first = np.array([row.first for row in rows], dtype=np.int32)
        self.ones = np.flatnonzero(self.lengths == 1)
        self.more = np.flatnonzero(self.lengths > 1)
        self.starts = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        within = np.arange(len(ids), dtype=np.int32) - np.repeat(self.starts, self.lengths)
        self.positions = np.repeat(self.first, self.lengths) + within
        self.source = np.full(len(ids), -1, dtype=np.int32)
        self.source[self.pending] = self.pending_source

    @property
    def chunk_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the rows with more than one token, and the positions that they end at."""
        lengths = self.lengths[self.more]
        return tuple(lengths.tolist()), tuple((self.first[self.more] + lengths).tolist())

    def tokens(self) -> tuple[tuple[Ints, int], ...]:
        """ids, positions, source, each with what it is padded with."""
        return (self.ids, 0), (self.positions, 0), (self.source, -1)


@dataclass(frozen=True, slots=True)
class _Span:
    """Which blocks of their tables the rows need in one layer group: numbers low to high."""

    low: Ints
    high: Ints

    @classmethod
    def of(cls, flat: _Flat, plan: GroupPlan) -> "_Span":
        """By GroupPlan.first_needed."""
        tokens = plan.block.block_tokens
        low = np.zeros_like(flat.first)
        layer = plan.block.layer
        if layer.window:
            low = np.maximum(flat.first - (layer.window - 1), 0) // tokens
        if layer.chunk:
            low = flat.first // layer.chunk * layer.chunk // tokens
        return cls(low, -(-(flat.first + flat.lengths) // tokens))

    def most(self, members: Places) -> int:
        """Blocks of any of these rows."""
        return int((self.high[members] - self.low[members]).max())


def _group(
    packer: Packer,
    cache: DeviceKvCache,
    g: int,
    flat: _Flat,
    span: _Span,
    form: StepForm | None,
) -> GroupFields:
    plan, step = cache.groups[g].plan, cache.tile_tokens[g]
    num_tokens = form.num_tokens if form else len(flat.ids)
    block_tokens = plan.block.block_tokens
    written = np.full((2, num_tokens), -1, dtype=np.int32)  # chunk and slot of each token
    decode, prefill, tiles, longest = None, None, None, 0
    if len(flat.ones):
        width = form.widths[g] if form else _width(span.most(flat.ones))
        table = np.zeros((2, form.num_decodes if form else len(flat.ones), width), dtype=np.int32)
        _decode_tables(cache.matrices[g], flat, g, span, table, written)
        decode = _rows(packer, flat, flat.ones, table, span.low * block_tokens, num_tokens)
        longest = width * block_tokens
    num_chunks = form.num_chunks if form else len(flat.more)
    if num_chunks:
        width = form.chunk_widths[g] if form else _width(span.most(flat.more))
        table = np.zeros((2, num_chunks, width), dtype=np.int32)
        _chunk_tables(plan, flat, g, span, table, written)
        prefill = _rows(packer, flat, flat.more, table, span.low * block_tokens, num_tokens)
        tiles = packer.add(_tiles(flat, step, form))
    offset = packer.add(_padded(flat.positions % block_tokens, num_tokens, 0))
    chunk, slot = packer.add(written[0]), packer.add(written[1])
    return GroupFields(chunk, slot, offset, decode, prefill, longest, tiles, step)


def _decode_tables(
    matrix: BlockMatrix, flat: _Flat, g: int, span: _Span, table: Ints, written: Ints
) -> None:
    """Of rows with one token: their tables, and where the token goes."""
    low = span.low[flat.ones]
    places = matrix.places([flat.rows[i].kv for i in flat.ones.tolist()], low.tolist())
    last = span.high[flat.ones] - low - 1
    width = min(table.shape[2], matrix.chunk.shape[1])
    for out, to, values in zip(table, written, (matrix.chunk, matrix.slot), strict=True):
        out[: len(places), :width] = values[places, :width]
        to[flat.starts[flat.ones]] = values[places, last]


def _chunk_tables(
    plan: GroupPlan, flat: _Flat, g: int, span: _Span, table: Ints, written: Ints
) -> None:
    """The same of rows with more."""
    for place, i in enumerate(flat.more.tolist()):
        row, low, start = flat.rows[i], int(span.low[i]), int(flat.starts[i])
        blocks = row.kv.array(g)
        needed = blocks[low : int(span.high[i])]
        mine = blocks[np.arange(row.first, row.end) // plan.block.block_tokens]
        for out, to, of in zip(table, written, (np.floor_divide, np.remainder), strict=True):
            out[place, : len(needed)] = of(needed, plan.blocks_per_chunk)
            to[start : start + len(mine)] = of(mine, plan.blocks_per_chunk)


def _tiles(flat: _Flat, step: int, form: StepForm | None) -> Ints:
    lengths, contexts = flat.chunk_lengths
    if form is None:
        return np.array(cut_rows(lengths, contexts, step), dtype=np.int32)
    padding = form.num_tokens - len(flat.ids)
    tiles = cut_rows((*lengths, padding), (*contexts, 0), step)
    found = np.full((form.num_tiles(step), 2), (len(lengths), padding), dtype=np.int32)
    if tiles:
        found[: len(tiles)] = tiles
    return found


def _rows(
    packer: Packer, flat: _Flat, members: Places, table: Ints, first: Ints, num_tokens: int
) -> RowFields:
    """`table`: chunk and slot by row, padding included; `first`: by row of the step."""
    num_members, num_rows = len(members), table.shape[1]
    # Padding rows that decode have tokens of padding, the first chunk of padding has all of them.
    lengths = _padded(flat.lengths[members], num_rows, 0)
    starts = np.arange(num_rows, dtype=np.int32) + (len(flat.ids) - num_members)
    np.minimum(starts, num_tokens - 1, out=starts)
    starts[:num_members] = flat.starts[members]
    if num_rows > num_members:
        lengths[num_members] = num_tokens - len(flat.ids)
    contexts = flat.first[members] + flat.lengths[members]
    return RowFields(
        packer.add(table[0]),
        packer.add(table[1]),
        packer.add(_padded(contexts, num_rows, 0)),
        packer.add(_padded(first[members], num_rows, 0)),
        packer.add(starts),
        packer.add(lengths),
    )


def _width(most: int) -> int:
    """Of a table that no graph knows.

    In whole steps all the same: a kernel is compiled anew for a stride that 16 does not divide, and
    a step that waits for a compiler takes a second.
    """
    return -(-most // FIRST_WIDTH) * FIRST_WIDTH


def _padded(values: Any, length: int, filler: int) -> Ints:
    out = np.full(length, filler, dtype=np.int32)
    out[: len(values)] = values
    return out
