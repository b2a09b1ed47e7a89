"""How each row of a step is sampled, as tensors: what engine/sampling/sampler.py works on.

Comes in: for every sampling row its `SamplingState` (kept by the request between steps), its
output so far and perhaps a constraint's mask. Goes out: a `SamplingBatch`. Rows are grouped by
what they ask for, so that a row with default parameters costs nothing for what others want.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from engine.request import MAX_LOGPROBS, PenaltyState, SampleInput, uniforms
from engine.sampling.truncation import MAX_SHORT_LIST, NUCLEUS_SHORT_LIST
from kernels.logit_edits import penalize_ref_

# Logprobs are looked up for so many at a time: a row's list must not depend on its neighbours.
_LOGPROB_LISTS = (0, 1, 5, MAX_LOGPROBS)
# Rows of 152k that a CPU's caches, and memory that malloc keeps, hold: 10 MB a tensor. Twice as
# many and each temporary is mapped, faulted in and unmapped anew.
ROWS_AT_ONCE = 16
# Masks are written out as float32, too, and read once.
MASKS_AT_ONCE = 4
# After the model has run, a step waits so long for masks. They mostly come within its own time.
MASK_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Rows with penalties whose last token the step before still samples: m of them.

    source  int64 [N], by entry, the place of its row's token among those of the step before, or -1
    owner   int64 [N], by entry, which of the m rows it belongs to; m: none of them
    spare   int64 [m], the entry of each row that is kept free for the token
    """

    source: torch.Tensor
    owner: torch.Tensor
    spare: torch.Tensor


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """The used tokens of all rows with penalties, flat: six tensors [N].

    A negative count: the entry is left out.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    pending: PendingTokens | None = None

    def brought(self, bring: Callable[[torch.Tensor], torch.Tensor]) -> "PenaltyEntries":
        """The same with every tensor where `bring` brings it."""
        pending = self.pending
        if pending is not None:
            pending = PendingTokens(*map(bring, (pending.source, pending.owner, pending.spare)))
        rows, ids, counts, frequency, presence, repetition = map(bring, self.arrays)
        return PenaltyEntries(rows, ids, counts, frequency, presence, repetition, pending)

    @classmethod
    def of(
        cls,
        states: Sequence[PenaltyState],
        rows: Sequence[int],
        device: torch.device,
        sources: Sequence[int] = (),
    ) -> "PenaltyEntries":
        """rows[i] is the row of the logits of states[i], sources[i] its `SampleInput.pending`."""
        sources = sources or [-1] * len(states)
        spares = [source >= 0 for source in sources]
        sizes = torch.tensor([len(s.ids) + n for s, n in zip(states, spares, strict=True)])

        def flat(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(sizes).to(device)

        def joined(parts: Iterable[np.ndarray], spare: np.ndarray) -> torch.Tensor:
            each = [(part, spare[:n]) for part, n in zip(parts, spares, strict=True)]
            return torch.from_numpy(np.concatenate([*chain.from_iterable(each)])).to(device)

        pending = None
        if any(spares):
            order = np.cumsum(spares) - 1
            pending = PendingTokens(
                flat(sources, torch.int64),
                flat(np.where(spares, order, sum(spares)).tolist(), torch.int64),
                (sizes.cumsum(0) - 1)[torch.tensor(spares)].to(device),
            )
        params = [state.params for state in states]
        return cls(
            rows=flat(rows, torch.int64),
            ids=joined((state.ids for state in states), np.array([-1])),
            counts=joined((state.counts for state in states), np.array([-1], np.float32)),
            frequency=flat([p.frequency_penalty for p in params], torch.float32),
            presence=flat([p.presence_penalty for p in params], torch.float32),
            repetition=flat([p.repetition_penalty for p in params], torch.float32),
            pending=pending,
        )

    def fill_in(self, sampled: torch.Tensor) -> None:
        """Count the tokens on their way: sampled int64, of the step before. Nobody waits.

        A token that its row has used already is counted there, and the spare entry stays out: an
        entry of the logits is written once.
        """
        if self.pending is None:
            return
        source, spare = self.pending.source, self.pending.spare
        hit = (self.ids == sampled[source.clamp(min=0)]) & (source >= 0)
        self.counts.add_(hit)
        seen = source.new_zeros(len(spare) + 1).index_add_(0, self.pending.owner, hit.long())
        self.ids.index_copy_(0, spare, sampled[source[spare]])
        self.counts.index_copy_(0, spare, 1.0 - 2.0 * (seen[:-1] > 0))

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """In the order of `kernels.logit_edits.penalize_`."""
        edits = (self.rows, self.ids, self.counts)
        return (*edits, self.frequency, self.presence, self.repetition)

    def apply(self, logits: torch.Tensor) -> None:
        """Change logits [R, V] in place: repetition first, then frequency and presence."""
        penalize_ref_(logits, *self.arrays)


@dataclass(frozen=True, slots=True)
class SparseEdits:
    """Single entries of the logits, flat: rows, ids and values are [N]."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows with a temperature above 0 [n]; the truncating ones are places among these n."""

    index: torch.Tensor
    temperature: torch.Tensor | None
    number: torch.Tensor
    min_p_place: torch.Tensor | None
    min_p: torch.Tensor
    cut_place: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    short_list: int


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """A whole step. None where no row asks for it.

    greedy          int64 rows that take the largest logit
    random          the others, in groups that are worked on one after the other
    bias            added to single entries
    penalties       see PenaltyEntries
    banned          rows and ids set to -inf: stop ids before min_tokens
    masks           first row and int32 [m, W] of runs of m rows with a constraint
    late            rows whose masks `bring_masks` waits for
    logprob_rows    int64 [l]; num_logprobs is the longest list any of them wants
    """

    num_rows: int
    greedy: torch.Tensor | None
    random: tuple[RandomRows, ...]
    bias: SparseEdits | None
    penalties: PenaltyEntries | None
    banned: SparseEdits | None
    masks: tuple[tuple[int, torch.Tensor], ...]
    logprob_rows: torch.Tensor | None
    num_logprobs: int
    late: tuple[tuple[int, SampleInput], ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether any row's logits are edited before the choice."""
        edits = (self.bias, self.penalties, self.banned)
        return bool(self.masks) or any(edit is not None for edit in edits)


def build_sampling(rows: Sequence[SampleInput], device: torch.device) -> SamplingBatch:
    """Lay out how each row is sampled; row i belongs to row i of the logits."""
    greedy = [i for i, row in enumerate(rows) if row.state.params.temperature <= 0]
    wanted = [i for i, row in enumerate(rows) if row.state.logprobs >= 0]
    longest = max((rows[i].state.logprobs for i in wanted), default=0)
    return SamplingBatch(
        num_rows=len(rows),
        greedy=_index(greedy, device),
        random=_random(rows, device),
        bias=_sparse(
            ((i, row.state.bias_ids, row.state.bias_values) for i, row in enumerate(rows)), device
        ),
        penalties=_penalties(rows, device),
        banned=_sparse(
            (
                (i, row.state.stop_ids, np.full(len(row.state.stop_ids), -np.inf, np.float32))
                for i, row in enumerate(rows)
                if not row.is_masked and row.num_output < row.state.params.min_tokens
            ),
            device,
        ),
        masks=_masks([(i, row, row.mask) for i, row in enumerate(rows)], device),
        logprob_rows=_index(wanted, device),
        num_logprobs=list_size(longest),
        late=tuple((i, row) for i, row in enumerate(rows) if row.late_mask is not None),
    )


def bring_masks(batch: SamplingBatch, device: torch.device) -> SamplingBatch:
    """The same with the masks that come within MASK_WAIT_S, all rows together."""
    if not batch.late:
        return batch
    deadline_s = time.monotonic() + MASK_WAIT_S
    rows = [(i, row, row.late_mask.take(deadline_s)) for i, row in batch.late if row.late_mask]
    return replace(batch, masks=(*batch.masks, *_masks(rows, device)), late=())


def list_size(longest: int) -> int:
    """How many of the likeliest are looked up where `longest` is the most that a row wants."""
    return next((size for size in _LOGPROB_LISTS if size >= longest), longest)


def _index(rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
    return torch.tensor(rows, dtype=torch.int64).to(device) if rows else None


def _sparse(
    entries: Iterable[tuple[int, np.ndarray, np.ndarray]], device: torch.device
) -> SparseEdits | None:
    kept = [entry for entry in entries if len(entry[1])]
    if not kept:
        return None
    rows = np.repeat([i for i, _, _ in kept], [len(ids) for _, ids, _ in kept])
    return SparseEdits(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(np.concatenate([ids for _, ids, _ in kept])).to(device),
        torch.from_numpy(np.concatenate([values for _, _, values in kept])).to(device),
    )


def _penalties(rows: Sequence[SampleInput], device: torch.device) -> PenaltyEntries | None:
    places: list[int] = []
    states: list[PenaltyState] = []
    sources: list[int] = []
    for i, row in enumerate(rows):
        if row.state.penalties is not None:
            row.state.penalties.update(row.output_ids)
            places.append(i)
            states.append(row.state.penalties)
            sources.append(row.pending)
    return PenaltyEntries.of(states, places, device, sources) if states else None


def _masks(
    rows: Sequence[tuple[int, SampleInput, torch.Tensor | None]], device: torch.device
) -> tuple[tuple[int, torch.Tensor], ...]:
    """Runs of neighbouring rows that have masks, at most MASKS_AT_ONCE each."""
    runs: list[tuple[int, list[torch.Tensor]]] = []
    for i, row, mask in rows:
        if mask is None:
            continue
        if not runs or runs[-1][0] + len(runs[-1][1]) < i or len(runs[-1][1]) == MASKS_AT_ONCE:
            runs.append((i, []))
        runs[-1][1].append(_without_early_stops(row, mask))
    return tuple((first, torch.stack(masks).to(device)) for first, masks in runs)


def _without_early_stops(row: SampleInput, mask: torch.Tensor) -> torch.Tensor:
    """The mask without the stop ids that are too early, where anything else is left."""
    ids = row.state.stop_ids
    if row.num_output >= row.state.params.min_tokens or not len(ids):
        return mask
    early = mask.numpy().copy()
    np.bitwise_and.at(early, ids >> 5, ~(1 << (ids & 31)).astype(np.int32))
    return torch.from_numpy(early) if early.any() else mask


def _random(rows: Sequence[SampleInput], device: torch.device) -> tuple[RandomRows, ...]:
    index = [i for i, row in enumerate(rows) if row.state.params.temperature > 0]
    size = ROWS_AT_ONCE if device.type == "cpu" else max(1, len(index))
    groups = [index[first : first + size] for first in range(0, len(index), size)]
    return tuple(_group(rows, group, device) for group in groups)


def _group(rows: Sequence[SampleInput], index: Sequence[int], device: torch.device) -> RandomRows:
    params = [rows[i].state.params for i in index]
    cut = [j for j, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    floor = [j for j, p in enumerate(params) if p.min_p > 0]
    # No limit is a limit above any vocabulary.
    top_k = [params[j].top_k or 1 << 40 for j in cut]
    top_p = [params[j].top_p for j in cut]
    positions = [rows[i].state.num_prompt + rows[i].num_output for i in index]

    def tensor(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    hot = any(p.temperature != 1.0 for p in params)
    return RandomRows(
        index=tensor(index, torch.int64),
        temperature=tensor([_in_range(p.temperature) for p in params], torch.float32)
        if hot
        else None,
        number=torch.from_numpy(uniforms([p.seed for p in params], positions)).to(device),
        min_p_place=_index(floor, device),
        min_p=tensor([params[j].min_p for j in floor], torch.float32),
        cut_place=_index(cut, device),
        top_k=tensor(top_k, torch.int64),
        top_p=tensor(top_p, torch.float64),
        short_list=_short_list(top_k, top_p) if device.type == "cpu" else 0,
    )


def _in_range(temperature: float) -> float:
    """As float32 holds it: not as 0, which is greedy, nor as infinity (0 / 0 and inf / inf)."""
    kept = torch.finfo(torch.float32)
    return min(max(temperature, kept.tiny), kept.max)


def _short_list(top_k: Sequence[int], top_p: Sequence[float]) -> int:
    """Long enough for every row's top_k, within bounds, and one more to see ties."""
    ks = [k for k in top_k if k < MAX_SHORT_LIST]
    nucleus = any(k >= MAX_SHORT_LIST and p > 0 for k, p in zip(top_k, top_p, strict=True))
    return max([*ks, NUCLEUS_SHORT_LIST if nucleus else 0]) + 1
