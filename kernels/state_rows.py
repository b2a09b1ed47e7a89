"""States of sequences in the arena: what recurrent and convolutional layers keep instead of KV.

A state is one tensor of fixed size for a sequence and a layer: the last inputs of a short
convolution [channels, kernel], the matrix of a linear attention [heads, k, v], the state of an SSM
[heads, p, n]. States of one shape and dtype are a *state group*; as KV they are kept in blocks, one
block for a sequence:

    slot    = the states of one sequence in all layers of a group
    piece   = `shape[0] / num_pieces` heads (or channels) of one state, never larger than a page
    address of piece p of state s of slot b = table[s * num_pieces + p, b // slots_per_chunk] units
                                              + (b % slots_per_chunk) * piece_units

A row of a step reads one slot and writes one. They are the same, but where a token may be computed
twice: then the version before it stays as it was. A row that begins at position 0 reads nothing;
its state is zero, whatever the memory holds (it may be NaN).

Bytes moved by one decode step of one layer: read and write of a state for each row.

`read_states` and `write_states` are the reference: plain copies out of the arena and back.
"""

from dataclasses import dataclass

import torch


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


def _units(
    geometry: StateGeometry, table: torch.Tensor, chunk: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """int64 [rows, pieces, units of a piece]."""
    first = table[:, chunk].T.contiguous() + slot[:, None] * geometry.piece_units
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
    states = _memory(arena, geometry)[units].view(len(rows), *geometry.shape)
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
