"""Ragged attention against the plain formula on each sequence alone."""

import math

import pytest
import torch

from kernels.ragged_attention import BAND, ragged_attention_ref

GROUPS = [[(1, 1)], [(3, 1), (2, 5), (1, 9)], [(1, 40), (4, 2)], [(2, 2 * BAND + 3)]]


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """[heads, L, dim] each, written out."""
    scores = query @ key.transpose(-1, -2) * scale
    places = torch.arange(query.shape[1])
    if window is not None:
        hidden = (places[:, None] - places[None]).abs() > window
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("window", [None, 0, 1, 4, 300])
def test_each_sequence_sees_itself_only(groups: list[tuple[int, int]], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(count * length for count, length in groups)
    # As modules hand them on: heads are a transpose of what the projection put out.
    query, key, value = (
        torch.randn(num_tokens, 3, dim, generator=generator, dtype=torch.float64).transpose(0, 1)
        for dim in (8, 8, 6)
    )
    got = ragged_attention_ref(query, key, value, groups, 0.3, window)
    assert got.shape == (num_tokens, 3, 6)
    start = 0
    for count, length in groups:
        for _ in range(count):
            part = slice(start, start + length)
            expected = plain(query[:, part], key[:, part], value[:, part], 0.3, window)
            torch.testing.assert_close(got[part], expected)
            start += length


def test_sequences_that_do_not_make_the_batch_are_refused() -> None:
    tokens = torch.zeros(2, 7, 4)
    with pytest.raises(ValueError, match="6 tokens in a batch of 7"):
        ragged_attention_ref(tokens, tokens, tokens, [(2, 3)], 1.0)
