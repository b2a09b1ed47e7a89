"""From logits to token ids, for all rows of a step at once.

`build_sampling` runs while the step is prepared and puts all parameters on the device; `sample` is
part of the step and hands over tensors, so that the next step can take the tokens from there.

Randomness is counter-based: the uniform number of a row depends on its seed and its position only,
never on what it is batched with or how often it was preempted, so a seeded request repeats exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.protocol import SamplingParams

_MASK = (1 << 64) - 1
# Nucleus rows look at this many candidates before they pay for sorting the whole vocabulary.
TOP_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class SampleInput:
    """How one row is sampled; `position` is the absolute position of the token to come."""

    params: SamplingParams
    position: int


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of a step, R of them. Greedy ones are in neither index.

    temperature, top_p float32 [R]; number float64 [R] in (0, 1); plain, nucleus int64: rows that
    sample from the whole distribution, and those with top_p < 1.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    number: torch.Tensor
    plain: torch.Tensor
    nucleus: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """token_ids int64 [R]; broken bool [R]: logits with a NaN or +inf, whose token means nothing.

    A broken row's token is a valid id all the same: the step after this one may have read it.
    """

    token_ids: torch.Tensor
    broken: torch.Tensor


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) from (seed, position): two rounds of splitmix64 (Steele et al., 2014)."""
    state = _mix(((seed & _MASK) + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK)
    return ((_mix(state ^ (seed & _MASK)) >> 11) + 0.5) / (1 << 53)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def build_sampling(rows: Sequence[SampleInput], device: torch.device) -> SamplingBatch:
    """The parameters of a step's sampling rows, on the device."""
    params = [row.params for row in rows]
    plain = [i for i, row in enumerate(params) if row.temperature > 0 and row.top_p >= 1]
    nucleus = [i for i, row in enumerate(params) if row.temperature > 0 and row.top_p < 1]
    numbers = [uniform(row.params.seed, row.position) for row in rows]

    def tensor(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingBatch(
        temperature=tensor([row.temperature for row in params], torch.float32),
        top_p=tensor([row.top_p for row in params], torch.float32),
        number=tensor(numbers, torch.float64),
        plain=tensor(plain, torch.int64),
        nucleus=tensor(nucleus, torch.int64),
    )


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """One token id a row. logits float32 [R, vocab]; temperature 0 takes the largest.

    Sampling inverts the cumulative distribution at the row's uniform number. With top_p < 1 only
    the smallest set of most likely tokens whose probability reaches top_p takes part.
    """
    if not logits.shape[0]:
        none = torch.empty(0, dtype=torch.int64, device=logits.device)
        return SampleOutput(none, none.bool())
    # A maximum is NaN when any entry is, and +inf when any entry is: one pass, no temporary.
    broken = ~torch.isfinite(logits.amax(-1))
    chosen = logits.argmax(-1)
    if batch.plain.numel():
        chosen[batch.plain] = _invert(
            _probabilities(logits, batch, batch.plain), batch.number[batch.plain, None]
        )
    if batch.nucleus.numel():
        chosen[batch.nucleus] = _sample_nucleus(logits, batch)
    return SampleOutput(chosen.masked_fill_(broken, 0), broken)


def _probabilities(
    logits: torch.Tensor, batch: SamplingBatch, picked: torch.Tensor
) -> torch.Tensor:
    # Below float32's range the temperature would be 0, and 0 / 0 is NaN.
    temperature = batch.temperature[picked].clamp(min=torch.finfo(torch.float32).tiny)
    # The largest logit goes to 0 first: a tiny temperature must not overflow.
    shifted = logits[picked] - logits[picked].amax(-1, keepdim=True)
    return (shifted / temperature[:, None]).softmax(-1)


def _invert(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Index where the running sum of `weights` passes number x total. float64 sums."""
    running = weights.double().cumsum(-1)
    target = number * running[:, -1:]
    found = torch.searchsorted(running, target, right=True).squeeze(-1)
    return found.clamp_(max=weights.shape[-1] - 1)


def _sample_nucleus(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    probabilities = _probabilities(logits, batch, batch.nucleus)
    top_p = batch.top_p[batch.nucleus, None]
    count = min(TOP_CANDIDATES, probabilities.shape[-1])
    weights, order = probabilities.topk(count, dim=-1)
    if bool((weights.sum(-1, keepdim=True) < top_p).any()):
        weights, order = probabilities.sort(dim=-1, descending=True)
    before = weights.cumsum(-1) - weights
    kept = weights.masked_fill(before >= top_p, 0.0)
    kept[:, 0] = weights[:, 0]  # top_p 0 keeps the most likely token
    place = _invert(kept, batch.number[batch.nucleus, None])
    return order.gather(-1, place[:, None]).squeeze(-1)
