"""Which tokens a request has used, kept between steps, and what that does to its logits.

Only the entries of used tokens change, so a step costs the number of distinct tokens of the rows
that have a penalty, not their vocabulary and not their history. Knows ids and counts; when and in
which order penalties apply is engine/sampling/sampler.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.protocol import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty differs from its default."""
    return bool(
        params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    )


class PenaltyState:
    """The distinct tokens of one request: of its output, and of its prompt for repetition.

    `counts` are occurrences in the output alone. The arrays grow by doubling; a step adds a token
    in constant time. Preemption changes nothing here: ids stay with the request.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        repeats = params.repetition_penalty != 1.0
        self._prompt = np.unique(np.array(prompt_ids if repeats else [], dtype=np.int64))
        self._start()

    def _start(self) -> None:
        self._num_seen = 0
        self._size = len(self._prompt)
        self._ids = self._prompt.copy()
        self._counts = np.zeros(self._size, dtype=np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(self._prompt)}

    def update(self, output_ids: Sequence[int]) -> None:
        """Take in what was generated since the last call; a shorter output starts afresh."""
        if len(output_ids) < self._num_seen:
            self._start()
        for token in output_ids[self._num_seen :]:
            slot = self._slots.setdefault(token, self._size)
            if slot == self._size:
                self._grow()
                self._ids[slot] = token
                self._counts[slot] = 0.0
                self._size += 1
            self._counts[slot] += 1.0
        self._num_seen = len(output_ids)

    def _grow(self) -> None:
        if self._size == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Distinct token ids [N]; a view that the next update may outdate."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Occurrences in the output [N], beside `ids`."""
        return self._counts[: self._size]


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """The used tokens of all rows with penalties, flat: six tensors [N]."""

    rows: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    @classmethod
    def of(
        cls, states: Sequence[PenaltyState], rows: Sequence[int], device: torch.device
    ) -> "PenaltyEntries":
        """rows[i] is the row of the logits that states[i] belongs to."""
        sizes = [len(state.ids) for state in states]

        def flat(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            each = torch.tensor(values, dtype=dtype)
            return each.repeat_interleave(torch.tensor(sizes)).to(device)

        params = [state.params for state in states]
        return cls(
            rows=flat(rows, torch.int64),
            ids=torch.from_numpy(np.concatenate([state.ids for state in states])).to(device),
            counts=torch.from_numpy(np.concatenate([state.counts for state in states])).to(device),
            frequency=flat([p.frequency_penalty for p in params], torch.float32),
            presence=flat([p.presence_penalty for p in params], torch.float32),
            repetition=flat([p.repetition_penalty for p in params], torch.float32),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Change logits [R, V] in place: repetition first, then frequency and presence."""
        value = logits[self.rows, self.ids]
        value = torch.where(value > 0, value / self.repetition, value * self.repetition)
        value -= self.frequency * self.counts
        value -= self.presence * (self.counts > 0)
        logits[self.rows, self.ids] = value
