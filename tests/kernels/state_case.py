"""A step's rows over states in an arena in which everything that no row may read is NaN.

Slots lie scattered over chunks and chunks over the arena, each piece of a state by itself. Rows may
begin anew, and may end in another slot than they began with.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.mixer_state import MixerState
from kernels.state_rows import StateBatch, StateGeometry, write_states
from tests.kernels.guarded import Guards, poisoned

# Tokens of each row: decodes, chunks, and rows without any; of each some stay where they are.
RAGGED = (1, 5, 4, 3, 0, 1, 2, 0, 1)
# The same in few tokens, for kernels that are interpreted.
SHORT = (1, 2, 2, 2, 0, 1, 1, 0)
SLOTS_PER_CHUNK = 3


@dataclass(frozen=True)
class StateRow:
    """`fresh`: begins with zeros; `moves`: ends in another slot."""

    num_tokens: int
    fresh: bool = False
    moves: bool = False


def ragged_rows(lengths: Sequence[int] = RAGGED) -> list[StateRow]:
    """Every other one fresh, two of three in a new slot."""
    return [StateRow(n, r % 2 == 1, r % 3 != 0) for r, n in enumerate(lengths)]


@dataclass(frozen=True)
class StateCase:
    """`state` over `arena`; `first` [R, *shape]: what each row begins with, zeros where fresh."""

    state: MixerState
    first: torch.Tensor

    def copy(self, guards: Guards | None = None) -> MixerState:
        """The same, to be written."""
        arena = self.state.arena
        return replace(self.state, arena=arena.clone() if guards is None else guards.inout(arena))

    def tokens(self, row: int) -> slice:
        """Of one row."""
        begin, end = self.state.batch.starts[row : row + 2].tolist()
        return slice(begin, end)

    def alone(self, row: int) -> MixerState:
        """One row as a step of its own."""
        batch = self.state.batch
        one = slice(row, row + 1)
        rows = StateBatch(
            batch.table,
            batch.read_chunk[one],
            batch.read_slot[one],
            batch.write_chunk[one],
            batch.write_slot[one],
            torch.tensor([0, self.tokens(row).stop - self.tokens(row).start]),
            batch.fresh[one],
        )
        return replace(self.state, batch=rows, arena=self.state.arena.clone())


def state_case(
    shape: tuple[int, ...],
    rows: Sequence[StateRow],
    num_pieces: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> StateCase:
    """Random states; each row has a slot of its own, or two."""
    generator = torch.Generator().manual_seed(seed)
    element = dtype.itemsize
    piece_bytes = torch.Size(shape).numel() // num_pieces * element
    geometry = StateGeometry(shape, dtype, num_pieces, _unit(piece_bytes))
    num_slots = 2 * len(rows)
    num_chunks = -(-num_slots // SLOTS_PER_CHUNK)
    extents = num_pieces * num_chunks
    chunk_units = SLOTS_PER_CHUNK * geometry.piece_units + 1
    places = torch.randperm(extents, generator=generator) * chunk_units
    arena = poisoned((extents + 2) * chunk_units * geometry.unit_bytes // element, dtype=dtype)
    slots = torch.randperm(num_slots, generator=generator)
    read, other = slots[: len(rows)], slots[len(rows) :]
    write = torch.where(torch.tensor([row.moves for row in rows]), other, read)
    lengths = torch.tensor([0, *(row.num_tokens for row in rows)])
    fresh = torch.tensor([row.fresh for row in rows])
    # A table wider than what it is for: entries outside name memory that is nobody's.
    table = (extents + torch.zeros(num_pieces + 1, num_chunks + 1, dtype=torch.int64)) * chunk_units
    table[:num_pieces, :num_chunks] = places.view(num_pieces, num_chunks)
    table = table[:num_pieces, :num_chunks]
    batch = StateBatch(
        table,
        *_apart(read),
        *_apart(write),
        lengths.cumsum(0),
        fresh,
    )
    first = torch.randn(len(rows), *shape, generator=generator).to(dtype)
    first[fresh] = 0
    arena = arena.view(torch.uint8)
    kept = (~fresh).nonzero()[:, 0]
    back = replace(batch, write_chunk=batch.read_chunk, write_slot=batch.read_slot)
    write_states(arena, geometry, table, back, kept, first[kept])
    return StateCase(MixerState(arena, geometry, table, batch), first)


def agree(
    case: StateCase,
    run: Callable[[MixerState, Guards], torch.Tensor],
    reference: Callable[[MixerState], torch.Tensor],
) -> float:
    """How far results and states are from the reference's, relative to the largest value.

    Raises AssertionError where guards, other slots or rows without tokens changed.
    """
    wanted, guards = case.copy(), Guards()
    got = case.copy(guards)
    exact = reference(wanted)
    with results_in(guards):
        out = run(got, guards)
    guards.check()
    before, old, new = (bits(state) for state in (case.state, wanted, got))
    changed = before != old
    assert torch.equal(new[~changed], before[~changed]), "memory of others changed"
    kept = case.state.geometry.dtype
    states = (tensor[changed].view(kept) for tensor in (new, old))
    return max(error(out, exact), error(*states))


@contextlib.contextmanager
def results_in(guards: Guards) -> Iterator[None]:
    """What `torch.empty` hands out lies between guards, and every element must be written."""

    def empty(shape: Sequence[int], *, dtype: torch.dtype, **_: object) -> torch.Tensor:
        return guards.output(*shape, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield


def bits(state: MixerState) -> torch.Tensor:
    """All of the arena."""
    size = state.geometry.dtype.itemsize
    return state.arena.view({2: torch.int16, 4: torch.int32}[size])


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; NaN is infinite."""
    if not wanted.numel():
        return 0.0
    difference = float((got.double() - wanted.double()).abs().max())
    return math.inf if math.isnan(difference) else difference / float(wanted.abs().max())


def _apart(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // SLOTS_PER_CHUNK, slots % SLOTS_PER_CHUNK


def _unit(piece_bytes: int) -> int:
    """The largest power of two of which a piece is a multiple, at most 256."""
    return min(256, piece_bytes & -piece_bytes)
