"""Logarithms of probabilities: of sampled tokens and of prompt tokens.

They are the model's own: the log-softmax of its logits before penalties, bias, masks, temperature
and truncation, as OpenAI's API means them and as vLLM returns them by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.protocol import TokenLogprobs
from engine.sampling.truncation import top

# Prompt positions whose float32 logits exist at once: 64 x 152k x 4 bytes are 39 MB.
PROMPT_SLICE = 64


@dataclass(frozen=True, slots=True)
class Logprobs:
    """chosen float32 [n]; top_ids int64 and top_values float32 [n, k], likeliest first."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def messages(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """For the wire; counts[i] <= k is how many of the top row i wants."""
        rows = zip(
            self.chosen.tolist(),
            self.top_ids.tolist(),
            self.top_values.tolist(),
            counts,
            strict=True,
        )
        return [
            TokenLogprobs(own, list(zip(ids[:count], values[:count], strict=True)))
            for own, ids, values, count in rows
        ]


def logprobs_of(logs: torch.Tensor, tokens: torch.Tensor, count: int) -> Logprobs:
    """Pick from logs = log_softmax(logits) float32 [n, V]; tokens int64 [n]."""
    chosen = logs.gather(-1, tokens[:, None]).squeeze(-1)
    if not count:
        none = logs[:, :0]
        return Logprobs(chosen, none.long(), none)
    values, ids = top(logs, count)
    # Equal values by id, so that a list reads the same every time.
    by_id = ids.argsort(-1)
    ids, values = ids.gather(-1, by_id), values.gather(-1, by_id)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return Logprobs(chosen, ids.gather(-1, order), values)


def prompt_logprobs(
    source: torch.Tensor,
    next_ids: torch.Tensor,
    count: int,
    project: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Logprobs:
    """What each position [T] said of the token that follows it: next_ids int64 [T].

    source is logits [T, V] of any float type, or, with `project` (the model's head), hidden states
    [T, H] whose logits then never exist for more than PROMPT_SLICE positions.
    """
    parts: list[Logprobs] = []
    for first in range(0, len(next_ids), PROMPT_SLICE):
        piece = source[first : first + PROMPT_SLICE]
        logits = piece if project is None else project(piece)
        tokens = next_ids[first : first + PROMPT_SLICE]
        parts.append(logprobs_of(logits.float().log_softmax(-1), tokens, count))
    if not parts:
        empty = torch.empty(0, count, device=source.device)
        return Logprobs(empty.sum(-1), empty.long(), empty)
    return Logprobs(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_values for part in parts]),
    )
