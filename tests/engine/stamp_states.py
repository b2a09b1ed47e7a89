"""Stamps of states: what a slot holds is the hash of all tokens that its sequence has had.

A row reads the slot where the row before it has written, so a slot shared wrongly, taken over
before its copy, written by a row that is computed twice, or found under a wrong name shows in the
step that would have computed nonsense. The addressing is written from the text in
`kernels/state_rows.py`, not with its code.

`LossyRow` stands for a constraint whose masks come late by chance: a token that it loses is
computed twice.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.kv_plan import StatePlan
from engine.pack import StateGroup
from kernels.state_rows import StateBatch

U64 = NDArray[np.uint64]
STATE_HEADS = (1, 2, 3, 8)
STATE_WIDTHS = (2, 4, 6, 16, 40)
LOSS = 0.2


def random_states(rng: random.Random, num_layers: int, page_bytes: int) -> tuple[StateGroup, ...]:
    """One or two states in some layers; a head of them fits into a page."""
    layers = sorted(rng.sample(range(num_layers), rng.randint(1, min(num_layers, 6))))
    groups = []
    for kind in rng.choice((("conv",), ("recurrent",), ("conv", "recurrent"))):
        dtype, size = rng.choice((("float32", 4), ("bfloat16", 2)))
        heads, width = rng.choice(STATE_HEADS), rng.choice(STATE_WIDTHS)
        shape: tuple[int, ...] = (heads, width, 4) if kind == "recurrent" else (heads * width, 4)
        assert math.prod(shape[1:]) * size <= page_bytes
        groups.append(StateGroup(tuple((layer, kind) for layer in layers), shape, dtype))
    return tuple(groups)


class StateStamps:
    """Stamps of one state group."""

    def __init__(self, plan: StatePlan, arena: torch.Tensor) -> None:
        self._plan = plan
        self._words = arena.numpy().view(np.uint64)
        geometry = plan.geometry
        num_bytes = math.prod(geometry.shape) * geometry.dtype.itemsize // geometry.num_pieces
        assert num_bytes % 8 == 0, "stamps need pieces of whole 8 bytes"
        self._piece_words = num_bytes // 8
        rows = len(plan.states) * geometry.num_pieces
        # Another number at each place, so that pieces that changed places show.
        numbers = np.arange(1, rows * self._piece_words + 1, dtype=np.uint64)
        self._salt: U64 = (numbers * np.uint64(0x9E3779B97F4A7C15)).reshape(rows, -1)

    def check(self, batch: StateBatch, row: int, chain: int) -> int:
        """How many words of the slot that a row reads are not those of this chain."""
        where = self._places(batch, int(batch.read_chunk[row]), int(batch.read_slot[row]))
        return int(np.count_nonzero(self._words[where] != (self._salt ^ np.uint64(chain))))

    def write(self, batch: StateBatch, row: int, chain: int) -> None:
        """Stamp the slot that a row writes."""
        where = self._places(batch, int(batch.write_chunk[row]), int(batch.write_slot[row]))
        self._words[where] = self._salt ^ np.uint64(chain)

    def slots(self, batch: StateBatch) -> Sequence[tuple[int, int]]:
        """Where each row writes."""
        pairs = zip(batch.write_chunk.tolist(), batch.write_slot.tolist(), strict=True)
        return [(int(chunk), int(slot)) for chunk, slot in pairs]

    def _places(self, batch: StateBatch, chunk: int, slot: int) -> NDArray[np.int64]:
        unit = self._plan.geometry.unit_bytes
        first = batch.table[:, chunk].numpy() * unit + slot * self._piece_words * 8
        assert not (first % 8).any(), "a piece begins between two words"
        return first[:, None] // 8 + np.arange(self._piece_words)


class LossyRow:
    """A request's constraint, as far as the engine looks at it."""

    may_sample = True
    is_complete = False
    missed = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.num_lost = 0

    def loses(self) -> bool:
        """Whether the mask of the token just sampled came too late."""
        lost = self._rng.random() < LOSS
        self.num_lost += lost
        return lost

    def take(self, deadline_s: float) -> torch.Tensor | None:
        """Nobody asks for a mask here."""
        del deadline_s
        return None
