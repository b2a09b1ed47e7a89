"""One step's batch: scheduled rows of one model as flat tensors.

Comes in: rows (a request and how many of its uncomputed tokens run now), blocks already reserved.
Goes out: `StepBatch`, all a model runner needs; it holds nothing that changes later, so requests
and tables may go on while the step waits or runs. Mixed prefill chunks and decodes lie in one flat
sequence of T tokens, request after request.

A decode row may continue with a token that the step before it is still sampling: its id is filled
in on the device, by `resolve`.

`Runner` is what computes a batch. Siblings: `model_runner.py` for the host,
`engine/gpu/device_runner.py` for a device with streams, and the simulator's (`bench/sim/parts.py`).
All of them keep the model's KV in a `KvCache`, so that residency and scheduler need not know which
of them they have. Encoders have their own (`engine/encoders/encoder_model.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import torch

from engine.memory import GroupPlan, KvCache, KvPlan, RequestKv
from engine.pack import PackIndex
from engine.request import Request
from engine.running.state_batch import grouped_state_rows, state_batches
from engine.sampling import SampleOutput, SamplingBatch, build_sampling, list_size
from kernels.paged_attention import PagedBatch, Rows
from kernels.state_rows import StateBatch, StateRows

Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
# Decode rows whose tables differ by less than this many blocks share one padded table.
SMALL_TABLE_BLOCKS = 16


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """`num_scheduled_tokens` of the request's uncomputed tokens run in this step.

    Never changed, and yet not frozen: that would double the time it takes to make one, and there is
    one a row and step.

    source    row of the step before whose sampled token is this row's last; -1: all ids are known
    first     position of the row's first token
    samples   whether the row's last token is the request's last: then a new one is sampled
    """

    request: Request
    num_scheduled_tokens: int
    source: int = -1
    first: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        """Both as of now: the request counts the row as computed as soon as it is launched."""
        self.first = self.request.num_computed
        self.samples = self.num_scheduled_tokens == self.request.num_uncomputed

    @property
    def end(self) -> int:
        """The position after the row's last token."""
        return self.first + self.num_scheduled_tokens

    @property
    def kv(self) -> RequestKv:
        """What the request holds; a scheduled one holds at least the row's blocks."""
        assert self.request.kv is not None
        return self.request.kv


@dataclass(frozen=True, slots=True)
class Scoring:
    """Positions of prompts whose next token's logprobs were asked for.

    rows       the row, and its positions, in the order of the tensors
    index      int64 [P], places in the flat batch
    next_ids   int64 [P], the tokens that follow
    """

    rows: tuple[tuple[ScheduledRow, range], ...]
    index: torch.Tensor
    next_ids: torch.Tensor
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All of a step.

    input_ids, position_ids   int64 [1, T]
    logit_index               int64 [R], places of the last tokens: of the sampling rows, then of
                              the others, whose logits only tell whether their KV is sound
    groups                    by layer group, where K and V go and what is attended to
    pending_index             int64 [P], places in the flat batch of tokens not known yet
    pending_source            int64 [P], rows of the step before that sample them
    scoring                   prompts whose logprobs were asked for; None: none
    states                    by state group, where the rows' states are read and written
    state_rows                rows whose states are computed together; empty where there are none
    """

    rows: tuple[ScheduledRow, ...]
    sampling_rows: tuple[ScheduledRow, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_index: torch.Tensor
    plan: KvPlan
    groups: tuple[PagedBatch, ...]
    sampling: SamplingBatch
    pending_index: torch.Tensor
    pending_source: torch.Tensor
    scoring: Scoring | None = None
    states: tuple[StateBatch, ...] = ()
    state_rows: tuple[StateRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.input_ids.shape[1]

    @property
    def num_pending(self) -> int:
        """Tokens that `resolve` has to fill in."""
        return self.pending_index.shape[0]

    def resolve(self, previous_token_ids: torch.Tensor) -> None:
        """Fill in what the step before has sampled, int64 [its sampling rows], on the device."""
        if self.num_pending:
            self.input_ids[0, self.pending_index] = previous_token_ids[self.pending_source]
        if self.sampling.penalties is not None:
            self.sampling.penalties.fill_in(previous_token_ids)


LayOut: TypeAlias = Callable[[Sequence[ScheduledRow], KvCache, torch.device], StepBatch]
"""How scheduled rows become a step; `build_batch` but in the simulator."""


def build_batch(rows: Sequence[ScheduledRow], cache: KvCache, device: torch.device) -> StepBatch:
    """Lay the rows out. Every row's tables must already reach its last scheduled token."""
    ids: list[int] = []
    pending: list[int] = []
    sampling_index: list[int] = []
    other_index: list[int] = []
    for row in rows:
        ids += row.request.token_ids[row.first : row.end]
        if row.source >= 0:
            pending.append(len(ids))
            ids.append(0)
        (sampling_index if row.samples else other_index).append(len(ids) - 1)
    lengths = np.array([row.num_scheduled_tokens for row in rows])
    starts = np.cumsum(lengths) - lengths
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    first = np.array([row.first for row in rows])
    positions = first[row_of_token] + np.arange(len(row_of_token)) - starts[row_of_token]
    assert len(ids) == len(positions), "a row reaches beyond the tokens its request has"
    sampling_rows = tuple(row for row in rows if row.samples)

    def tensor(values: Ints | list[int]) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device)

    block_tokens = cache.plan.block_tokens
    offset = tensor(positions % block_tokens)
    groups: list[PagedBatch] = []
    for g, group in enumerate(cache.groups):
        tables = [row.kv.array(g) for row in rows]
        low, high = first // block_tokens, (first + lengths - 1) // block_tokens + 1
        written = np.concatenate([t[a:b] for t, a, b in zip(tables, low, high, strict=True)])
        start = np.cumsum(high - low) - (high - low)
        block = written[(start - low)[row_of_token] + positions // block_tokens]
        groups.append(
            PagedBatch(
                table=group.table,
                token_chunk=tensor(block // group.plan.blocks_per_chunk),
                token_slot=tensor(block % group.plan.blocks_per_chunk),
                token_offset=offset,
                rows=tuple(
                    _rows(members, rows, tables, starts, group.plan, device)
                    for members in _together(rows, group.plan)
                ),
            )
        )
    return StepBatch(
        rows=tuple(rows),
        sampling_rows=sampling_rows,
        input_ids=tensor(ids)[None],
        position_ids=tensor(positions)[None],
        logit_index=tensor(sampling_index + other_index),
        plan=cache.plan,
        groups=tuple(groups),
        sampling=build_sampling([row.request.sample_input for row in sampling_rows], device),
        pending_index=tensor(pending),
        pending_source=tensor([row.source for row in rows if row.source >= 0]),
        scoring=score_positions(rows, starts, device),
        states=state_batches(rows, cache, device),
        state_rows=grouped_state_rows(rows, starts, device) if cache.states.groups else (),
    )


def score_positions(
    rows: Sequence[ScheduledRow], starts: Ints, device: torch.device
) -> Scoring | None:
    """Whose logprobs were asked for in this step. `starts`: where each row begins in the batch."""
    scored: list[tuple[ScheduledRow, range]] = []
    index: list[int] = []
    next_ids: list[int] = []
    for i, row in enumerate(rows):
        request = row.request
        if request.submit.prompt_logprobs < 0 or not request.scores_prompt:
            continue
        start = int(starts[i])
        # After a preemption those that are known are not computed twice.
        low = max(row.first, len(request.prompt_scores))
        positions = range(low, min(row.end, request.num_prompt - 1))
        if positions:
            scored.append((row, positions))
            index += [start + position - row.first for position in positions]
            next_ids += request.token_ids[positions.start + 1 : positions.stop + 1]
    if not scored:
        return None
    return Scoring(
        tuple(scored),
        torch.tensor(index, dtype=torch.int64).to(device),
        torch.tensor(next_ids, dtype=torch.int64).to(device),
        list_size(max(row.request.submit.prompt_logprobs for row, _ in scored)),
    )


def _together(rows: Sequence[ScheduledRow], plan: GroupPlan) -> list[list[int]]:
    """Rows that attend together: each prefill chunk alone, decodes by size of their tables."""
    prefills: list[list[int]] = []
    decodes: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.num_scheduled_tokens > 1:
            prefills.append([i])
        else:
            num_blocks = row.first // plan.block.block_tokens + 1 - plan.first_needed(row.first)
            size = max(num_blocks, SMALL_TABLE_BLOCKS).bit_length()
            decodes.setdefault(size, []).append(i)
    return prefills + list(decodes.values())


def _rows(
    members: Sequence[int],
    rows: Sequence[ScheduledRow],
    tables: Sequence[Ints],
    starts: Ints,
    plan: GroupPlan,
    device: torch.device,
) -> Rows:
    block_tokens = plan.block.block_tokens
    picked = [rows[i] for i in members]
    contexts = np.array([row.end for row in picked])
    first = np.array([plan.first_needed(row.first) for row in picked])
    last = -(-contexts // block_tokens)
    blocks = np.empty((len(picked), int((last - first).max())), dtype=np.int64)
    for place, i in enumerate(members):
        needed = tables[i][first[place] : last[place]]
        blocks[place, : len(needed)] = needed
        # A short row is padded with a block of its own: always valid memory, always masked.
        blocks[place, len(needed) :] = needed[0]
    index = starts[list(members)][:, None] + np.arange(picked[0].num_scheduled_tokens)

    def tensor(values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Rows(
        token_index=tensor(index),
        chunk=tensor(blocks // plan.blocks_per_chunk),
        slot=tensor(blocks % plan.blocks_per_chunk),
        context_len=tensor(contexts),
        first=tensor(first * block_tokens),
    )


class Runner(Protocol):
    """What a step needs of a resident model; `model_runner.py` has the real one."""

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Forward and sample. Called inside a launched work: perhaps in another thread."""


class InstanceRunner(Runner, Protocol):
    """One model, resident or not; `ModelRunner` and `DeviceRunner` are the real ones."""

    @property
    def index(self) -> PackIndex:
        """The pack it was made for."""

    @property
    def cache(self) -> KvCache:
        """Its KV."""

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """Use these weight views; cheap when the generation is the one already bound."""

    def unbind(self) -> None:
        """Forget the weights and give all KV pages back."""
