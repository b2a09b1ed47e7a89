"""One step's batch for a device with streams: everything it reads in one pinned buffer, one copy.

The sibling of `batch.build_batch`. Comes in: scheduled rows of one model, blocks already reserved.
Goes out: `DeviceBatch`: what the step pipeline reads of a step, and `packed`, the bytes of all
inputs with the fields that say where each lies. `device_step.py` brings them to the device.

A step in which every row has one token is a *decode*. Its rows, tokens and tables are padded
to sizes of a short list (`row_bucket`, `width_bucket`), so that steps of one `DecodeForm` have all
fields at the same places and one captured graph serves them all. Padding rows have context 0,
padding tokens chunk -1: nothing is read or written for them.

What a row samples with lies behind these fields, by itself: it is no part of a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from engine.backend import Device
from engine.gpu.device_sampling import Field, Packer, SamplingFields, SamplingPlan, plan_sampling
from engine.memory import ChunkTable, GroupPlan, KvCache
from engine.running import ScheduledRow, StepBatch, score_positions
from engine.sampling import build_sampling

Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int32]]"

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Beyond the last in steps of it."""
FIRST_WIDTH = 16
WIDTH_FACTOR = 4
CPU = torch.device("cpu")


def row_bucket(num_rows: int, most: int) -> int:
    """The padded number of rows; never above `most` unless `num_rows` is."""
    fitting = next((size for size in ROW_BUCKETS if size >= num_rows), None)
    if fitting is None:
        fitting = -(-num_rows // ROW_BUCKETS[-1]) * ROW_BUCKETS[-1]
    return max(num_rows, min(fitting, most))


def width_bucket(num_blocks: int) -> int:
    """The padded number of blocks in a row's table."""
    width = FIRST_WIDTH
    while width < num_blocks:
        width *= WIDTH_FACTOR
    return width


@dataclass(frozen=True, slots=True)
class DecodeForm:
    """What decode steps of one graph have in common: rows, and blocks of a row by layer group."""

    num_rows: int
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowFields:
    """FlatRows of kernels/paged_rows.py; q_lens and contexts are the host's."""

    chunk: Field
    slot: Field
    context_len: Field
    first: Field
    q_start: Field
    q_len: Field
    q_lens: tuple[int, ...]
    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupFields:
    """One layer group: where tokens go, and the rows that decode and those that have more tokens.

    `longest`: the longest context that a decode row may have.
    """

    token_chunk: Field
    token_slot: Field
    token_offset: Field
    decode: RowFields | None
    prefill: RowFields | None
    longest: int


@dataclass(frozen=True, slots=True)
class InputFields:
    """Where everything lies. source: int32 [T], the row of the step before that samples it, or -1.

    logit_index: of the sampling rows, then of the others; None in a decode: every token.
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

    form     None where the step is no decode
    chunks   by layer group, the table of chunks and the number of its last change before this step
    known    what the step before has sampled, once that is handed over
    """

    packed: torch.Tensor
    fields: InputFields
    form: DecodeForm | None
    chunks: tuple[tuple[ChunkTable, int], ...]
    plan_of_sampling: SamplingPlan
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
        flat = _Flat(rows)
        sampling_rows = tuple(row for row in rows if row.samples)
        inputs = [row.request.sample_input for row in sampling_rows]
        scoring = score_positions(rows, flat.starts, CPU)
        form = None
        if flat.is_decode and scoring is None:
            form = self._form(rows, cache)
        packer = Packer()
        num_tokens = len(flat.ids) if form is None else form.num_rows
        ids, positions, source = (packer.add(_padded(a, num_tokens, b)) for a, b in flat.tokens())
        logit_index = None if form else packer.add(np.asarray(flat.logit_index, dtype=np.int32))
        groups = tuple(
            _group(packer, cache, g, flat, num_tokens, form) for g in range(len(cache.groups))
        )
        plan = plan_sampling(inputs)
        fields = InputFields(ids, positions, source, logit_index, groups, plan.pack(packer))
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
            sampling=build_sampling(inputs if plan.edits else (), CPU),
            pending_index=torch.tensor(flat.pending, dtype=torch.int64),
            pending_source=torch.tensor(flat.pending_source, dtype=torch.int64),
            scoring=scoring,
            packed=packed,
            fields=fields,
            form=form,
            chunks=tuple((group.chunks, group.chunks.note_changes()) for group in cache.groups),
            plan_of_sampling=plan,
        )

    def _form(self, rows: Sequence[ScheduledRow], cache: KvCache) -> DecodeForm:
        return DecodeForm(
            row_bucket(len(rows), self._max_num_seqs),
            tuple(width_bucket(_most_blocks(rows, group.plan)) for group in cache.groups),
        )


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
            ids += row.request.token_ids[row.first : row.end]
            if row.source >= 0:
                self.pending.append(len(ids))
                self.pending_source.append(row.source)
                ids.append(0)
            (sampling if row.samples else others).append(len(ids) - 1)
        self.logit_index = sampling + others
        self.is_decode = len(ids) == len(rows) and not others
        self.ids = np.asarray(ids, dtype=np.int32)
        self.lengths = np.array([row.num_scheduled_tokens for row in rows], dtype=np.int32)
        self.starts = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        self.first = np.array([row.first for row in rows], dtype=np.int32)
        self.row_of_token = np.repeat(np.arange(len(rows)), self.lengths)
        within = np.arange(len(self.row_of_token), dtype=np.int32) - self.starts[self.row_of_token]
        self.positions = self.first[self.row_of_token] + within
        self.source = np.full(len(ids), -1, dtype=np.int32)
        self.source[self.pending] = self.pending_source
        assert len(ids) == len(self.positions), "a row reaches beyond the tokens its request has"

    def tokens(self) -> tuple[tuple[Ints, int], ...]:
        """ids, positions, source, each with what it is padded with."""
        return (self.ids, 0), (self.positions, 0), (self.source, -1)


def _group(
    packer: Packer,
    cache: KvCache,
    g: int,
    flat: _Flat,
    num_tokens: int,
    form: DecodeForm | None,
) -> GroupFields:
    plan = cache.groups[g].plan
    block_tokens, per_chunk = plan.block.block_tokens, plan.blocks_per_chunk
    block = np.asarray(_written_blocks(flat.rows, g, block_tokens), dtype=np.int32)
    written = (
        (block // per_chunk, -1),
        (block % per_chunk, 0),
        (flat.positions % block_tokens, 0),
    )
    chunk, slot, offset = (packer.add(_padded(a, num_tokens, filler)) for a, filler in written)
    decode, prefill, longest = None, None, 0
    one = np.flatnonzero(flat.lengths == 1).tolist()
    if one:
        width = form.widths[g] if form else _width([flat.rows[i] for i in one], plan)
        decode = _rows(packer, flat, one, plan, g, width, form.num_rows if form else len(one))
        longest = width * block_tokens
    more = np.flatnonzero(flat.lengths > 1).tolist()
    if more:
        width = _width([flat.rows[i] for i in more], plan)
        prefill = _rows(packer, flat, more, plan, g, width, len(more))
    return GroupFields(chunk, slot, offset, decode, prefill, longest)


def _written_blocks(rows: Sequence[ScheduledRow], g: int, block_tokens: int) -> list[int]:
    """The block that each token's K and V go to."""
    blocks: list[int] = []
    for row in rows:
        if row.num_scheduled_tokens == 1:  # plain lists: a fifth of numpy's time for one number
            blocks.append(row.kv.tables[g][row.first // block_tokens])
        else:
            numbers = np.arange(row.first, row.end) // block_tokens
            blocks += row.kv.array(g)[numbers].tolist()
    return blocks


def _rows(
    packer: Packer,
    flat: _Flat,
    members: list[int],
    plan: GroupPlan,
    g: int,
    width: int,
    num_rows: int,
) -> RowFields:
    block_tokens = plan.block.block_tokens
    blocks = np.zeros((num_rows, width), dtype=np.int32)
    contexts = flat.first[members] + flat.lengths[members]
    last = -(-contexts // block_tokens)
    firsts = [plan.first_needed(first) for first in flat.first[members].tolist()]
    for place, (i, low, high) in enumerate(zip(members, firsts, last.tolist(), strict=True)):
        blocks[place, : high - low] = flat.rows[i].kv.array(g)[low:high]
    lengths = np.ones(num_rows, dtype=np.int32)
    lengths[: len(members)] = flat.lengths[members]
    q_start = np.zeros(num_rows, dtype=np.int32)
    q_start[: len(members)] = flat.starts[members]
    # Padding rows have tokens of their own, behind the others.
    q_start[len(members) :] = np.arange(len(members), num_rows)
    return RowFields(
        packer.add(blocks // plan.blocks_per_chunk),
        packer.add(blocks % plan.blocks_per_chunk),
        packer.add(_padded(contexts, num_rows, 0)),
        packer.add(_padded(np.asarray(firsts) * block_tokens, num_rows, 0)),
        packer.add(q_start),
        packer.add(lengths),
        tuple(lengths.tolist()),
        tuple(contexts.tolist()),
    )


def _most_blocks(rows: Sequence[ScheduledRow], plan: GroupPlan) -> int:
    """Of any row's table, from the first block needed on."""
    tokens = plan.block.block_tokens
    return max(-(-row.end // tokens) - plan.first_needed(row.first) for row in rows)


def _width(rows: Sequence[ScheduledRow], plan: GroupPlan) -> int:
    """Of a table that no graph knows.

    In whole steps all the same: a kernel is compiled anew for a stride that 16 does not divide, and
    a step that waits for a compiler takes a second.
    """
    return -(-_most_blocks(rows, plan) // FIRST_WIDTH) * FIRST_WIDTH


def _padded(values: Any, length: int, filler: int) -> Ints:
    out = np.full(length, filler, dtype=np.int32)
    out[: len(values)] = values
    return out
