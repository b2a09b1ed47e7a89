"""Attention of whole sequences of unlike lengths, each over itself: the maths and the reference.

T tokens lie end to end, sequences of one length side by side: `groups` lists (how many, length) in
order. Every position sees all of its own sequence (j and i in the same sequence), or with a window
of w those at most w away:

    o_i = softmax_j( scale * q_i . k_j ) v_j        |i - j| <= w

Nothing is padded. A group is one product over [count, heads, length, dim]; where the window is
shorter than the sequence, queries are taken BAND at a time against the keys they can see, so that
neither the scores nor a mask of the whole square are ever there.

What is here is what every other implementation is held to, and the fallback.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.nn import functional

Groups: TypeAlias = Sequence[tuple[int, int]]
"""(how many sequences, tokens of each), in the order they lie in."""

BAND = 256


def ragged_attention_ref(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Groups,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """[heads, T, dim] each -> [T, heads, v_dim]. `window` None: none."""
    heads, num_tokens, _ = query.shape
    out = query.new_empty(num_tokens, heads, value.shape[-1])
    start = 0
    for count, length in groups:
        stop = start + count * length
        q, k, v = (
            whole[:, start:stop].reshape(heads, count, length, -1).transpose(0, 1)
            for whole in (query, key, value)
        )
        # [count, length, heads, dim] of the result, as the heads' transpose
        target = out[start:stop].view(count, length, heads, -1).transpose(1, 2)
        if window is None or length <= window + 1:
            target.copy_(functional.scaled_dot_product_attention(q, k, v, scale=scale))
        else:
            _banded(q, k, v, target, scale, window)
        start = stop
    if start != num_tokens:
        raise ValueError(f"sequences of {start} tokens in a batch of {num_tokens}")
    return out


def _banded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    target: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    length = query.shape[2]
    places = torch.arange(length, device=query.device)
    for first in range(0, length, BAND):
        last = min(length, first + BAND)
        low, high = max(0, first - window), min(length, last + window)
        distance = places[first:last, None] - places[None, low:high]
        target[:, :, first:last] = functional.scaled_dot_product_attention(
            query[:, :, first:last],
            key[:, :, low:high],
            value[:, :, low:high],
            attn_mask=distance.abs() <= window,
            scale=scale,
        )
