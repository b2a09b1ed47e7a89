"""Where a step's rows read and write their states, and which rows mixers compute together.

Comes in: rows whose slots `KvCache.begin_row` has settled. Goes out: what `StepStates` needs beside
the arena and the plan. Slots become chunks of the table as it is now; later moves go to a new one.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from engine.memory import KvCache, RequestKv
from kernels.state_rows import StateBatch, StateRows

Ints = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]


class StateRow(Protocol):
    """What is asked of a scheduled row."""

    num_scheduled_tokens: int
    first: int

    @property
    def kv(self) -> RequestKv:
        """What its request holds."""


def state_batches(
    rows: Sequence[StateRow], cache: KvCache, device: torch.device
) -> tuple[StateBatch, ...]:
    """By state group, where the rows read and write; `KvCache.begin_row` has been called."""

    def tensor(values: list[int] | list[bool]) -> torch.Tensor:
        return torch.tensor(values).to(device)

    starts = tensor([0, *accumulate(row.num_scheduled_tokens for row in rows)])
    fresh = tensor([row.first == 0 for row in rows])
    held = [row.kv.states for row in rows]
    found = []
    for g, group in enumerate(cache.states.groups):
        size = group.plan.blocks_per_chunk
        read = [divmod(states.slots[g][states.read], size) for states in held]
        write = [divmod(states.slots[g][states.write], size) for states in held]
        found.append(
            StateBatch(
                table=group.table,
                read_chunk=tensor([chunk for chunk, _ in read]),
                read_slot=tensor([slot for _, slot in read]),
                write_chunk=tensor([chunk for chunk, _ in write]),
                write_slot=tensor([slot for _, slot in write]),
                starts=starts,
                fresh=fresh,
            )
        )
    return tuple(found)


def grouped_state_rows(
    rows: Sequence[StateRow], starts: Ints, device: torch.device
) -> tuple[StateRows, ...]:
    """Those that mixers compute together. `starts`: where each row begins in the batch."""
    decodes = [i for i, row in enumerate(rows) if row.num_scheduled_tokens == 1 and row.first]
    alone = sorted(set(range(len(rows))) - set(decodes))
    together = [decodes] if decodes else []
    found = []
    for members in [*together, *([i] for i in alone)]:
        length = rows[members[0]].num_scheduled_tokens
        tokens = starts[members][:, None] + np.arange(length)
        found.append(
            StateRows(
                torch.tensor(members).to(device),
                torch.from_numpy(tokens).to(device),
                rows[members[0]].first == 0,
            )
        )
    return tuple(found)
