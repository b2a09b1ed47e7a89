"""From logits to token ids, for all rows of a step at once.

Randomness is counter-based: the uniform number of a row depends on its seed and its position only,
never on what it is batched with or how often it was preempted, so a seeded request repeats exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
# Nucleus rows look at this many candidates before they pay for sorting the whole vocabulary.
TOP_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row is sampled; `position` is the absolute position of the token to come."""

    temperature: float
    top_p: float
    seed: int
    position: int


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) from (seed, position): two rounds of splitmix64 (Steele et al., 2014)."""
    state = _mix(((seed & _MASK) + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK)
    return ((_mix(state ^ (seed & _MASK)) >> 11) + 0.5) / (1 << 53)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def broken_rows(logits: torch.Tensor) -> list[int]:
    """Rows of [rows, vocab] with a NaN or +inf: their model is broken, they must not be sampled."""
    # A maximum is NaN when any entry is, and +inf when any entry is: one pass, no temporary.
    finite = torch.isfinite(logits.amax(-1))
    return torch.nonzero(~finite).flatten().tolist()


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token id a row. logits float32 [rows, vocab], finite; temperature 0 takes the largest.

    Sampling inverts the cumulative distribution at the row's uniform number. With top_p < 1 only
    the smallest set of most likely tokens whose probability reaches top_p takes part.
    """
    chosen = logits.argmax(-1)
    plain = [i for i, row in enumerate(rows) if row.temperature > 0 and row.top_p >= 1]
    nucleus = [i for i, row in enumerate(rows) if row.temperature > 0 and row.top_p < 1]
    if plain:
        index = torch.tensor(plain, device=logits.device)
        probabilities = _probabilities(logits, rows, plain)
        chosen[index] = _invert(probabilities, _column(rows, plain, logits))
    if nucleus:
        index = torch.tensor(nucleus, device=logits.device)
        chosen[index] = _sample_nucleus(logits, rows, nucleus)
    return [int(token) for token in chosen.tolist()]


def _probabilities(
    logits: torch.Tensor, rows: Sequence[SampleRow], picked: list[int]
) -> torch.Tensor:
    temperature = torch.tensor([rows[i].temperature for i in picked], device=logits.device)
    # Below float32's range it would be 0, and 0 / 0 is NaN.
    temperature.clamp_(min=torch.finfo(torch.float32).tiny)
    # The largest logit goes to 0 first: a tiny temperature must not overflow.
    shifted = logits[picked] - logits[picked].amax(-1, keepdim=True)
    return (shifted / temperature[:, None]).softmax(-1)


def _column(rows: Sequence[SampleRow], picked: list[int], like: torch.Tensor) -> torch.Tensor:
    numbers = [uniform(rows[i].seed, rows[i].position) for i in picked]
    return torch.tensor(numbers, dtype=torch.float64, device=like.device)[:, None]


def _invert(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Index where the running sum of `weights` passes number x total. float64 sums."""
    running = weights.double().cumsum(-1)
    target = number * running[:, -1:]
    found = torch.searchsorted(running, target, right=True).squeeze(-1)
    return found.clamp_(max=weights.shape[-1] - 1)


def _sample_nucleus(
    logits: torch.Tensor, rows: Sequence[SampleRow], picked: list[int]
) -> torch.Tensor:
    probabilities = _probabilities(logits, rows, picked)
    top_p = torch.tensor([rows[i].top_p for i in picked], device=logits.device)[:, None]
    count = min(TOP_CANDIDATES, probabilities.shape[-1])
    weights, order = probabilities.topk(count, dim=-1)
    if bool((weights.sum(-1, keepdim=True) < top_p).any()):
        weights, order = probabilities.sort(dim=-1, descending=True)
    before = weights.cumsum(-1) - weights
    kept = weights.masked_fill(before >= top_p, 0.0)
    kept[:, 0] = weights[:, 0]  # top_p 0 keeps the most likely token
    place = _invert(kept, _column(rows, picked, logits))
    return order.gather(-1, place[:, None]).squeeze(-1)
