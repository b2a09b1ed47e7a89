"""What a recurrent layer's kernels are given: one state in the arena and a step's rows in it.

Kernels work on the state where it lies (short_conv.py, delta_rule.py, ssd.py; in C++
native_recurrent.py). They never read what a fresh row would begin with, and they leave rows without
tokens alone. Here are what they have in common: how a kernel finds a row's slot, and `advance_ref`,
which steps copies of all rows through their tokens and is the frame of every reference.

What states, pieces and slots are is said in state_rows.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.state_rows import StateBatch, StateGeometry, read_states, write_states
from kernels.triton_api import jit, tl


@dataclass(frozen=True, slots=True)
class MixerState:
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


def state_arguments(state: MixerState) -> tuple[torch.Tensor | int, ...]:
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


def advance_ref(
    state: MixerState, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
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
