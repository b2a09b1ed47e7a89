"""A step on the device: its inputs where captured steps look for them, its layers' addresses.

One buffer takes the inputs of every step of every model, one after the other: a step's copy runs
behind the step before, which has read what was there. The tables of chunks lie in one place a model
and layer group and are written in the same order. Both grow by moving; then graphs that hold the
old address are found no more. What was outgrown is kept: a step in flight may read it, and nothing
else may ever lie at an address that graphs know. It is less than what took its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.backend import Device
from engine.gpu.device_batch import DeviceBatch, GroupFields, RowFields
from engine.memory import ChunkTable, GroupPlan, KvPlan
from kernels.decoder_layer import LayerForm, LayerStep
from kernels.paged_attention import PagedBatch
from kernels.paged_decode import choose_splits
from kernels.paged_rows import FlatRows
from kernels.prefill_shape import capability, cut_rows, launch_shape, tile_tokens

# Every growth costs all graphs that know the place: of all models the buffer's, of one a table's.
FIRST_INPUT_BYTES = 8 << 20
"""256 rows of 64,000 tokens, and more rows of shorter ones."""
FIRST_TABLE_BYTES = 2 << 20
"""8,192 columns of 32 layers: half a million tokens of an 8B model."""


class InputBuffer:
    """Where steps find their inputs."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = device.buffer(FIRST_INPUT_BYTES)
        self._outgrown: list[torch.Tensor] = []

    @property
    def address(self) -> int:
        """Where it lies now."""
        return self._buffer.data_ptr()

    def bring(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [n] of pinned memory to the device; in the order of the steps."""
        size = len(packed)
        if size > len(self._buffer):
            self._outgrown.append(self._buffer)
            self._buffer = self._device.buffer(max(size, 2 * len(self._buffer)))
        self._buffer[:size].copy_(packed, non_blocking=True)
        return self._buffer


class DeviceTable:
    """One layer group's table of chunks on the device: int64 [layers, columns]."""

    def __init__(self, device: Device, num_layers: int) -> None:
        self._device = device
        self._num_layers = num_layers
        # None before the first step: most of many hosted models wait, and take no memory.
        self._table: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []

    @property
    def table(self) -> torch.Tensor:
        """As of the last `update`, before which there is none."""
        assert self._table is not None
        return self._table

    @property
    def place(self) -> tuple[int, int]:
        """Its address, and how far apart its layers lie: what a graph knows of it."""
        return self.table.data_ptr(), self.table.stride(0)

    def update(self, chunks: ChunkTable, number: int) -> None:
        """Write what has changed up to that number; in the order of the steps."""
        if self._table is None:
            first = FIRST_TABLE_BYTES // (self._num_layers * torch.int64.itemsize)
            self._table = self._empty(max(first, chunks.num_columns))
        columns = self._table.shape[1]
        if chunks.num_columns > columns:
            wider = self._empty(max(chunks.num_columns, 2 * columns))
            wider[:, :columns].copy_(self._table)
            self._outgrown.append(self._table)
            self._table = wider
        chunks.apply_changes(self._table, number, self._bring)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return bring(self._device, tensor)

    def _empty(self, columns: int) -> torch.Tensor:
        raw = self._device.buffer(self._num_layers * columns * torch.int64.itemsize)
        return raw.view(torch.int64).view(self._num_layers, columns)


def bring(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host to the device without waiting, in the order of the steps."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    pinned = device.host_buffer(len(raw))
    pinned.copy_(raw)
    there = pinned.to(device.torch_device, non_blocking=True)
    return there.view(tensor.dtype).view(tensor.shape)


def bring_back(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device to the host's pinned memory, in the order of the steps.

    Nobody waits: the host may read it when the step has ended.
    """
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    pinned = device.host_buffer(len(raw))
    pinned.copy_(raw, non_blocking=True)
    return pinned.view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Group:
    """One layer group's part of a step."""

    plan: GroupPlan
    table: torch.Tensor
    batch: PagedBatch
    decode: FlatRows | None
    prefill: FlatRows | None
    num_splits: int


class DeviceStep:
    """All addresses of one step; made when it runs."""

    def __init__(
        self,
        device: Device,
        arena: torch.Tensor,
        batch: DeviceBatch,
        run: torch.Tensor,
        tables: Sequence[torch.Tensor],
    ) -> None:
        """`run`: the step's inputs on the device."""
        self._device = device
        self._arena = arena
        self.plan: KvPlan = batch.plan
        fields = batch.fields
        self.ids = fields.ids.of(run)
        self.positions = fields.positions.of(run)
        self.source = fields.source.of(run)
        self.logit_index = None if fields.logit_index is None else fields.logit_index.of(run)
        self._run = run
        self._tables = tables
        self._fields = fields.groups
        self._lengths = batch.lengths
        self._tiles: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def _groups(self) -> list[_Group]:
        """Made when a layer is launched: a step that is replayed needs none."""
        plans = self.plan.groups
        return [
            self._group(group, table, where, self._run)
            for group, table, where in zip(plans, self._tables, self._fields, strict=True)
        ]

    def _group(
        self, plan: GroupPlan, table: torch.Tensor, where: GroupFields, run: torch.Tensor
    ) -> _Group:
        decode = _flat(where.decode, run)
        splits = 1
        if decode is not None:
            programs = decode.num_rows * plan.block.layer.num_kv_heads
            splits = choose_splits(programs, where.longest, self._device.num_processors)
        chunk, slot, offset = where.token_chunk, where.token_slot, where.token_offset
        batch = PagedBatch(table, chunk.of(run), slot.of(run), offset.of(run), ())
        return _Group(plan, table, batch, decode, _flat(where.prefill, run), splits)

    def layer(
        self,
        layer: int,
        num_heads: int,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
    ) -> LayerStep:
        """Where the step's tokens are in that layer's cache."""
        g, place = self.plan.layer_group[layer]
        group = self._groups[g]
        return LayerStep(
            self._arena,
            group.plan.block,
            group.table[place],
            group.batch,
            cos,
            sin,
            rows=group.prefill,
            tiles=self._tiles_of(g, num_heads),
            num_splits=group.num_splits,
            decode=group.decode,
        )

    def attended(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> tuple[LayerForm, LayerStep]:
        """The same for modules that have rotated q and k themselves. query [T, heads, dim]."""
        geometry = self._groups[self.plan.layer_group[layer][0]].plan.block.layer
        form = LayerForm(
            num_heads=query.shape[1],
            num_kv_heads=geometry.num_kv_heads,
            head_dim=query.shape[2],
            eps=0.0,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        return form, self.layer(layer, query.shape[1])

    def _tiles_of(self, g: int, num_heads: int) -> torch.Tensor | None:
        """How chunks are cut for so many query heads: laid out with the step, but for layers whose
        heads are not as many as the model says; that cannot be recorded.
        """
        if self._groups[g].prefill is None:
            return None
        size = cut_of(self._groups[g].plan, num_heads, self._device.torch_device)
        found, where = self._tiles.get((g, size)), self._fields[g]
        if found is None and where.tiles is not None and size == where.tile_tokens:
            found = self._tiles[g, size] = where.tiles.of(self._run)
        if found is None:
            on_host = torch.tensor(cut_rows(*self._lengths, size), dtype=torch.int32)
            found = self._tiles[g, size] = bring(self._device, on_host)
        return found


def cut_of(plan: GroupPlan, num_heads: int, device: torch.device) -> int:
    """Positions of a chunk that one program of attention takes."""
    layer = plan.block.layer
    shape = launch_shape(layer, capability(device))
    return tile_tokens(max(1, num_heads // layer.num_kv_heads), shape.block_m)


def _flat(fields: RowFields | None, run: torch.Tensor) -> FlatRows | None:
    if fields is None:
        return None
    return FlatRows(
        fields.chunk.of(run),
        fields.slot.of(run),
        fields.context_len.of(run),
        fields.first.of(run),
        fields.q_start.of(run),
        fields.q_len.of(run),
    )
