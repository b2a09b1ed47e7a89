"""From logits to token ids, for all rows of a step at once.

The order of operations is vLLM's (its documentation of the V1 sampler); transformers' is the same
but for min_p, which it applies last:

    1  logprobs are taken of the logits as the model gave them
    2  logit_bias is added
    3  repetition, then frequency and presence penalties (engine/sampling/sampling_batch.py)
    4  a constraint's mask; stop ids before min_tokens (the mask wins where nothing else is left)
    5  temperature 0 takes the largest logit; otherwise logits are divided by the temperature
    6  min_p, then top_k, then top_p of what is left (engine/sampling/truncation.py)
    7  the distribution is inverted at the row's own random number (engine/request.py)

A row's token depends on its logits, parameters and position only: it is the same alone, batched
and after a preemption. What is laid out for a step is engine/sampling/sampling_batch.py.

Logprobs, of sampled tokens and of prompt tokens, are the log-softmax of the model's own logits
before penalties, bias, masks, temperature and truncation, as OpenAI's API means them and as vLLM
returns them by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from engine.protocol import TokenLogprobs
from engine.sampling.sampling_batch import RandomRows, SamplingBatch
from engine.sampling.truncation import argmax, cut_below_, invert, pad, top, truncate_
from kernels.sampling import NO_LIMIT, Draw

# Prompt positions whose float32 logits exist at once: 64 x 152k x 4 bytes are 39 MB.
PROMPT_SLICE = 64
Drawer: TypeAlias = Callable[[torch.Tensor, Draw], tuple[torch.Tensor, torch.Tensor]]
"""Tokens and broken rows of float32 logits, as kernels/sampling.py defines them."""


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


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """token_ids int64 [R], broken bool [R], on the device of the logits; nothing is waited for.

    broken: the model's logits hold a NaN or +inf, or leave no token to choose; the row's token
    means nothing. logprobs: of SamplingBatch.logprob_rows, in that order. prompt: of the positions
    in StepBatch.scoring. unsampled_broken: bool, of the rows that do not sample, in their order;
    None: nothing is wrong with them. on_host: all of it in the host's memory, good once the step
    has ended; None: the host reads it where it is.
    """

    token_ids: torch.Tensor
    broken: torch.Tensor
    logprobs: Logprobs | None = None
    prompt: Logprobs | None = None
    unsampled_broken: torch.Tensor | None = None
    on_host: "SampleOutput | None" = None


def not_finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [R]: whether a row holds a NaN or +inf.

    A maximum is NaN when any entry is, and +inf when any entry is: one pass, no temporary.
    """
    return ~torch.isfinite(logits.amax(-1))


def sample(
    logits: torch.Tensor, batch: SamplingBatch, drawer: Drawer | None = None
) -> SampleOutput:
    """One token a row. logits float32 [R, V], which biases, penalties and masks overwrite.

    `drawer`: a kernel that does steps 5 to 7; None: torch's operators. Tokens are the same but for
    numbers within rounding of a boundary between two tokens.
    """
    logs = None
    if batch.logprob_rows is not None:
        logs = _rows(logits, batch.logprob_rows).log_softmax(-1)
    broken = None
    if batch.changes_logits:
        # Edits replace what they forbid: a NaN must not be hidden by them.
        broken = not_finite(logits)
        _change(logits, batch)
    if drawer is None:
        tokens, bad = _by_operators(logits, batch)
    else:
        tokens, bad = drawer(logits, draw_of(batch))
    broken = bad if broken is None else broken | bad
    # NaNs may lead anywhere, even past the vocabulary.
    tokens.masked_fill_(broken, 0)
    picked = None
    if logs is not None and batch.logprob_rows is not None:
        picked = logprobs_of(logs, tokens[batch.logprob_rows], batch.num_logprobs)
    return SampleOutput(tokens, broken, picked)


def _by_operators(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    broken = not_finite(logits)
    tokens = torch.zeros(batch.num_rows, dtype=torch.int64, device=logits.device)
    if batch.greedy is not None:
        tokens[batch.greedy] = argmax(_rows(logits, batch.greedy))
    for group in batch.random:
        tokens[group.index] = _draw(logits, group)
    return tokens, broken


def draw_of(batch: SamplingBatch) -> Draw:
    """How each row is drawn, row by row, for a kernel."""
    rows = batch.num_rows
    temperature, min_p = torch.zeros(rows), torch.zeros(rows)
    number, top_p = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    top_k = torch.full((rows,), NO_LIMIT, dtype=torch.int32)
    cut = []
    for group in batch.random:
        index = group.index
        temperature[index] = torch.ones(()) if group.temperature is None else group.temperature
        number[index] = group.number
        if group.min_p_place is not None:
            min_p[index[group.min_p_place]] = group.min_p
            cut.append(index[group.min_p_place])
        if group.cut_place is not None:
            top_k[index[group.cut_place]] = group.top_k.clamp(max=NO_LIMIT).int()
            top_p[index[group.cut_place]] = group.top_p
            cut.append(index[group.cut_place])
    cutting = sorted({row for rows_of_group in cut for row in rows_of_group.tolist()})
    return Draw(temperature, number, min_p, top_k, top_p, torch.tensor(cutting, dtype=torch.int64))


def _rows(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of the logits; a view where it is all of them, since groups are in order."""
    return logits if len(index) == len(logits) else logits[index]


def _change(logits: torch.Tensor, batch: SamplingBatch) -> None:
    if batch.bias is not None:
        bias = batch.bias
        logits[bias.rows, bias.ids] += bias.values  # a row names a token once
    if batch.penalties is not None:
        batch.penalties.apply(logits)
    if batch.banned is not None:
        logits[batch.banned.rows, batch.banned.ids] = batch.banned.values
    for first, mask in batch.masks:
        # A slice: by index it would be copied there and back, at five times the cost.
        logits[first : first + len(mask)] += _addend(mask)[:, : logits.shape[-1]]


def _addend(mask: torch.Tensor) -> torch.Tensor:
    """Bits int32 [m, W] as float32 [m, 32 W]: 0 where set, -inf where not.

    Eight bits at a time through a table: a fifth of the time of shifting them on a CPU. The bytes
    of a word are in order of significance on every platform torch runs on.
    """
    bits = torch.arange(256, device=mask.device)[:, None] >> torch.arange(8, device=mask.device)
    table = torch.where((bits & 1).bool(), 0.0, float("-inf"))
    octets = mask.contiguous().view(torch.uint8).flatten().int()
    return table.index_select(0, octets).view(len(mask), -1)


def _draw(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    picked = _rows(logits, rows.index)
    if rows.temperature is not None:
        # The largest logit goes to 0 first: a tiny temperature must not overflow.
        picked = (picked - picked.amax(-1, keepdim=True)).div_(rows.temperature[:, None])
    weights = pad(picked.softmax(-1), 0.0)
    if rows.min_p_place is not None:
        chosen = _rows(weights, rows.min_p_place)
        cut_below_(chosen, rows.min_p)
        if chosen is not weights:
            weights[rows.min_p_place] = chosen
    if rows.cut_place is not None:
        chosen = _rows(weights, rows.cut_place)
        truncate_(chosen, rows.top_k, rows.top_p, rows.short_list)
        if chosen is not weights:
            weights[rows.cut_place] = chosen
    return invert(weights, rows.number)
