"""Sampling on a device: the sampler's operations in its order, by a few launches a step.

What is computed is engine/sampling/sampler.py's, operation by operation; what differs is how: rows
with and without a temperature are drawn by the same two launches (kernels/sampling.py), and only
rows that cut a tail cost three more. Edits of logits, masks and logprobs are laid out by
engine/sampling/sampling_batch.py and brought to the device where a row asks for them.

`Packer` puts many small arrays into one run of bytes, so that one copy brings them to a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.request import SamplingState, uniforms
from engine.sampling import (
    Logprobs,
    SampleOutput,
    SamplingBatch,
    SparseEdits,
    bring_masks,
)
from kernels.logit_edits import edit_, edit_ref_, mask_, mask_ref_, penalize_, penalize_ref_
from kernels.sampling import Draw, draw, draw_ref
from kernels.top_logprobs import top_logprobs, top_logprobs_ref

ALIGN = 16
"""Bytes; what kernels are compiled for where they load several elements at a time."""

_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
COLDEST = 1e-33
"""Temperatures between 0 and this do as this does (kernels/sampling.py)."""
NO_LIMIT = (1 << 31) - 1
Bring = Callable[[torch.Tensor], torch.Tensor]
"""A tensor of the host to the device, or back, in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Field:
    """Where an array lies in the run."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """The array as a view of uint8 `run`."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return run[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class Packer:
    """Collects arrays, then writes them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: list[tuple[int, Any]] = []

    def add(self, array: Any) -> Field:
        """A numpy array; it must not change before `write`."""
        place = Field(self.num_bytes, array.shape, _TYPES[array.dtype])
        self._parts.append((self.num_bytes, np.ascontiguousarray(array)))
        self.num_bytes += -(-array.nbytes // ALIGN) * ALIGN
        return place

    def write(self, run: Any) -> None:
        """Into a numpy array of `num_bytes` bytes."""
        for offset, array in self._parts:
            run[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class SamplingOperations:
    """The launches, by one implementation."""

    draw: Callable[[torch.Tensor, Draw], tuple[torch.Tensor, torch.Tensor]]
    edit_: Callable[..., None]
    penalize_: Callable[..., None]
    mask_: Callable[[torch.Tensor, torch.Tensor], None]
    top_logprobs: Callable[
        [torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ]


SAMPLING_REFERENCE = SamplingOperations(
    draw_ref, edit_ref_, penalize_ref_, mask_ref_, top_logprobs_ref
)
SAMPLING_KERNELS = SamplingOperations(draw, edit_, penalize_, mask_, top_logprobs)


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """`Draw` of kernels/sampling.py, packed."""

    temperature: Field
    number: Field
    min_p: Field
    top_k: Field
    top_p: Field
    cut: Field


def pack_sampling(
    packer: Packer, states: Sequence[SamplingState], positions: Sequence[int]
) -> SamplingFields:
    """How rows are drawn. `positions`: of the tokens to come, by which their numbers are drawn."""
    numbers = np.array([state.numbers for state in states], dtype=np.float64).reshape(-1, 4)
    temperature, top_p, min_p, top_k = numbers.T
    hot = temperature > 0
    number = np.zeros(len(states))
    if hot.any():
        number = uniforms([state.params.seed for state in states], positions)
    cut = np.flatnonzero(hot & ((min_p > 0) | (top_k > 0) | (top_p < 1)))
    top_k = np.where(top_k > 0, np.minimum(top_k, NO_LIMIT), NO_LIMIT)
    return SamplingFields(
        packer.add(np.where(hot, np.maximum(temperature, COLDEST), 0).astype(np.float32)),
        packer.add(number),
        packer.add(min_p.astype(np.float32)),
        packer.add(top_k.astype(np.int32)),
        packer.add(np.ascontiguousarray(top_p)),
        packer.add(cut),
    )


def sample_rows(
    logits: torch.Tensor,
    fields: SamplingFields,
    run: torch.Tensor,
    batch: SamplingBatch,
    operations: SamplingOperations,
    bring: Bring,
    before: torch.Tensor | None = None,
) -> SampleOutput:
    """One token a row. logits float32 [R, V], overwritten; `run`: the step's inputs, on the device.

    `batch` has the edits, its tensors the host's; empty where no row has any. `before`: int64, the
    tokens that the step before has sampled, where a row's last one was on its way.
    """
    batch = bring_masks(batch, torch.device("cpu"))
    raw, wanted, broken = None, None, None
    if batch.logprob_rows is not None:
        wanted = bring(batch.logprob_rows)
        raw = logits.index_select(0, wanted)
    if batch.changes_logits:
        # Edits replace what they forbid: a NaN must not be hidden by them.
        broken = ~torch.isfinite(logits.amax(-1))
        _change(logits, batch, operations, bring, before)
    how = Draw(
        fields.temperature.of(run),
        fields.number.of(run),
        fields.min_p.of(run),
        fields.top_k.of(run),
        fields.top_p.of(run),
        fields.cut.of(run),
    )
    tokens, bad = operations.draw(logits, how)
    if broken is not None:
        bad = bad | broken
        tokens = tokens.masked_fill(bad, 0)
    if raw is None or wanted is None:
        return SampleOutput(tokens, bad)
    count = min(batch.num_logprobs, raw.shape[1])
    chosen, ids, values = operations.top_logprobs(raw, tokens.index_select(0, wanted), count)
    return SampleOutput(tokens, bad, Logprobs(chosen, ids, values))


def on_host(output: SampleOutput, bring_back: Bring) -> SampleOutput:
    """All of it by `bring_back`, which takes tensors to the host in the order of the steps."""

    def logprobs(found: Logprobs | None) -> Logprobs | None:
        if found is None:
            return None
        parts = (found.chosen, found.top_ids, found.top_values)
        return Logprobs(*(bring_back(part) for part in parts))

    others = output.unsampled_broken
    return SampleOutput(
        bring_back(output.token_ids),
        bring_back(output.broken),
        logprobs(output.logprobs),
        logprobs(output.prompt),
        None if others is None else bring_back(others),
    )


def _change(
    logits: torch.Tensor,
    batch: SamplingBatch,
    operations: SamplingOperations,
    bring: Bring,
    before: torch.Tensor | None,
) -> None:
    if batch.bias is not None:
        operations.edit_(logits, *_brought(batch.bias, bring))
    if batch.penalties is not None:
        entries = batch.penalties.brought(bring)
        if before is not None:
            entries.fill_in(before)
        operations.penalize_(logits, *entries.arrays)
    if batch.banned is not None:
        operations.edit_(logits, *_brought(batch.banned, bring), replace=True)
    for first, mask in batch.masks:
        operations.mask_(logits[first : first + len(mask)], bring(mask))


def _brought(edits: SparseEdits, bring: Bring) -> tuple[torch.Tensor, ...]:
    return bring(edits.rows), bring(edits.ids), bring(edits.values)
