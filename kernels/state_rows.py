"""States of sequences in the arena: what recurrent and convolutional layers keep instead of KV.

A state is one tensor of fixed size for a sequence and a layer: the last inputs of a short
convolution [channels, kernel], the matrix of a linear attention [heads, k, v], the state of an SSM
[heads, p, n]. States of one shape and dtype are a *state group*; as KV they are kept in blocks, one
block for a sequence:

    slot    = the states of one sequence in all layers of a group
    piece   = `shape[0] / num_pieces` of the heads (or channels) of one state, at most a page
    address of piece p of state s of slot b = table[s * num_pieces + p, b // slots_per_chunk] units
                                              + (b % slots_per_chunk) * piece_units

A row of a step reads one slot and writes one. They are the same, but where a token may be computed
twice: then the version before it stays as it was. A row that begins at position 0 reads nothing;
its state is zero, whatever the memory holds (it may be NaN).

Bytes moved by one decode step of one layer: read and write of a state for each row.

`read_states` and `write_states` are the reference: plain copies out of the arena and back;
`advance_ref` steps copies of all rows through their tokens. Kernels work on the state where it lies
(short_conv.py, delta_rule.py, ssd.py). They never read what a fresh row would begin with, and they
leave rows without tokens alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.triton_api import jit, tl


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """One state and how it is cut: `num_pieces` equal parts along its first axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_pieces: int
    unit_bytes: int

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Of one piece."""
        return (self.shape[0] // self.num_pieces, *self.shape[1:])

    @property
    def piece_units(self) -> int:
        """Units of one piece."""
        elements = torch.Size(self.piece_shape).numel()
        return elements * self.dtype.itemsize // self.unit_bytes


@dataclass(frozen=True, slots=True)
class StateBatch:
    """One step's rows in one state group.

    table                    int64 [states of the group * num_pieces, chunks] in units, as it was
                             when the step was laid out
    read_chunk, read_slot    int64 [R], what a row begins with
    write_chunk, write_slot  int64 [R], where it ends
    starts                   int64 [R + 1]: row r has the tokens starts[r] to starts[r + 1]
    fresh                    bool [R]: rows that begin with a state of zeros
    """

    table: torch.Tensor
    read_chunk: torch.Tensor
    read_slot: torch.Tensor
    write_chunk: torch.Tensor
    write_slot: torch.Tensor
    starts: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """One state of a group and the step's rows in it: what a recurrent layer is given.

    `table` int64 [num_pieces, chunks]: the rows of `batch.table` for this state.
    """

    arena: torch.Tensor
    geometry: StateGeometry
    table: torch.Tensor
    batch: StateBatch

    @property
    def num_rows(self) -> int:
        """Of the step, those without tokens among them."""
        return len(self.batch.fresh)

    def check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises ValueError where the state is another one, or cut so that a part of a head is in
        each of two pieces."""
        kept = self.geometry
        if kept.shape != shape or kept.dtype != dtype:
            raise ValueError(f"a state {list(kept.shape)} {kept.dtype}, not {list(shape)} {dtype}")
        if shape[0] % kept.num_pieces or self.table.shape[0] != kept.num_pieces:
            raise ValueError(f"{shape[0]} heads in {kept.num_pieces} pieces")
        if self.table.stride(1) != 1 or not self.batch.starts.is_contiguous():
            raise ValueError("tables and indices have no gaps")


@jit
def state_at(
    table: tl.tensor,
    chunk: tl.tensor,
    slot: tl.tensor,
    row: tl.tensor,
    piece: tl.tensor,
    mask: tl.tensor,
    num_chunks: tl.tensor,
    PIECE_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """For kernels: where pieces of a row's slot begin, int64 elements. UNIT: elements of a unit."""
    at = table + piece * num_chunks + tl.load(chunk + row)
    return (tl.load(at, mask=mask, other=0) + tl.load(slot + row) * PIECE_UNITS) * UNIT


def state_arguments(state: LayerState) -> tuple[torch.Tensor | int, ...]:
    """What each kernel is given of a state: the arena of its dtype, the rows, the table's width."""
    batch = state.batch
    return (
        state.arena.view(state.geometry.dtype),
        state.table,
        batch.read_chunk,
        batch.read_slot,
        batch.write_chunk,
        batch.write_slot,
        batch.starts,
        batch.fresh.view(torch.uint8),
        state.table.stride(0),
    )


def state_constants(geometry: StateGeometry) -> dict[str, int]:
    """The constexprs beside them."""
    return {
        "PIECE_UNITS": geometry.piece_units,
        "UNIT": geometry.unit_bytes // geometry.dtype.itemsize,
    }


STATE_TYPES = dict.fromkeys(
    ("table", "read_chunk", "read_slot", "write_chunk", "write_slot", "starts"), "*i64:16"
) | {"fresh": "*u8", "num_chunks": "i32"}
"""Of the arguments in `Declared`, but the arena."""


def _units(
    geometry: StateGeometry, table: torch.Tensor, chunk: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """int64 [rows, pieces, units of a piece]."""
    first = table[:, chunk].T + slot[:, None] * geometry.piece_units
    return first[:, :, None] + torch.arange(geometry.piece_units, device=table.device)


def _memory(arena: torch.Tensor, geometry: StateGeometry) -> torch.Tensor:
    return arena.view(geometry.dtype).view(-1, geometry.unit_bytes // geometry.dtype.itemsize)


def read_states(
    arena: torch.Tensor,
    geometry: StateGeometry,
    table: torch.Tensor,
    batch: StateBatch,
    rows: torch.Tensor,
) -> torch.Tensor:
    """A copy [n, *shape] of what these rows, int64 [n], begin with; zeros for fresh ones.

    `table` int64 [num_pieces, chunks]: the rows of `batch.table` for one state.
    """
    units = _units(geometry, table, batch.read_chunk[rows], batch.read_slot[rows])
    states = _memory(arena, geometry)[units].reshape(len(rows), *geometry.shape)
    fresh = batch.fresh[rows].view(-1, *[1] * len(geometry.shape))
    return states.masked_fill_(fresh, 0)


def write_states(
    arena: torch.Tensor,
    geometry: StateGeometry,
    table: torch.Tensor,
    batch: StateBatch,
    rows: torch.Tensor,
    states: torch.Tensor,
) -> None:
    """Store [n, *shape] as what these rows end with; converted to the geometry's dtype."""
    units = _units(geometry, table, batch.write_chunk[rows], batch.write_slot[rows])
    memory = _memory(arena, geometry)
    memory[units] = states.to(geometry.dtype).reshape(*units.shape, memory.shape[1])


def advance_ref(
    state: LayerState, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """All rows token by token. `step` is given the states [n, *shape] of rows and the place of one
    token of each, int64 [n]; it returns the states behind these tokens."""
    batch = state.batch
    lengths = batch.starts.diff()
    rows = (lengths > 0).nonzero()[:, 0]
    if not len(rows):
        return
    states = read_states(state.arena, state.geometry, state.table, batch, rows)
    for passed in range(int(lengths.max())):
        going = (lengths[rows] > passed).nonzero()[:, 0]
        tokens = batch.starts[rows[going]] + passed
        states[going] = step(states[going], tokens).to(states.dtype)
    write_states(state.arena, state.geometry, state.table, batch, rows, states)
