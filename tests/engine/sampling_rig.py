"""The exact distribution of one sampling row, in float64 numpy, straight from the documentation.

Shares no code with the engine: what the tests of the sampler compare with.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.protocol import SamplingParams


def exact_distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> npt.NDArray[np.float64]:
    """Probabilities [V]; params.temperature must be above 0."""
    values = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in set(prompt_ids) | set(output_ids):
        if values[token] > 0:
            values[token] /= params.repetition_penalty
        else:
            values[token] *= params.repetition_penalty
    for token in output_ids:
        values[token] -= params.frequency_penalty
    for token in set(output_ids):
        values[token] -= params.presence_penalty
    possible = set(range(len(values))) if allowed is None else set(allowed)
    if len(output_ids) < params.min_tokens and possible - set(stop_ids):
        possible -= set(stop_ids)
    values[[token for token in range(len(values)) if token not in possible]] = -np.inf
    weights = np.exp((values - values.max()) / params.temperature)
    weights[weights < params.min_p * weights.max()] = 0.0
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        weights[ranked[params.top_k :]] = 0.0
    total, before = weights.sum(), 0.0
    for place, token in enumerate(ranked):
        share = float(weights[token])
        if place and before >= params.top_p * total:
            weights[token] = 0.0
        before += share
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def assert_follows(counts: npt.NDArray[np.int64], exact: npt.NDArray[np.float64]) -> None:
    """Chi-square at the 99.99 % quantile; rare tokens are counted together."""
    assert counts[exact == 0].sum() == 0, "a token that has no probability"
    expected = exact * counts.sum()
    rare = expected < 5
    pairs = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() > 1:
        pairs.append((counts[rare].sum(), expected[rare].sum()))
    if len(pairs) < 2:
        return
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    freedom = len(pairs) - 1
    # Wilson and Hilferty, 1931; 3.719 is the quantile of the normal distribution.
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} >= {limit:.1f} ({freedom} degrees)"
