"""Sampling: the right distribution, and the same token whatever a row is batched with."""

import pytest
import torch

from engine.sampler import SampleRow, broken_rows, sample, uniform

# 99.9 % quantile of chi-square with 7 degrees of freedom.
CHI_SQUARE_7 = 24.32


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.8), (0.7, 0.5)]
)
def test_frequencies_follow_the_exact_distribution(temperature: float, top_p: float) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    exact = (logits / temperature).double().softmax(0)
    order = exact.argsort(descending=True)
    before = exact[order].cumsum(0) - exact[order]
    exact[order[before >= top_p]] = 0
    exact /= exact.sum()
    rows = [SampleRow(temperature, top_p, 99, position) for position in range(4000)]
    tokens = sample(logits.expand(len(rows), -1), rows)
    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    assert chi_square(counts, exact) < CHI_SQUARE_7


def test_seeds_give_independent_uniform_numbers() -> None:
    numbers = torch.tensor([uniform(seed, 0) for seed in range(4000)])
    counts = torch.histc(numbers, bins=8, min=0.0, max=1.0).double()
    assert chi_square(counts, torch.full((8,), 1 / 8, dtype=torch.float64)) < CHI_SQUARE_7
    pairs = torch.tensor([[uniform(s, 0), uniform(s, 1)] for s in range(4000)]) - 0.5
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean()) * 12) < 0.06


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 3000, generator=generator)
    rows = [
        SampleRow(0.0, 1.0, 1, 7),
        SampleRow(1.0, 1.0, 1, 7),
        SampleRow(1.0, 0.9, 1, 7),
        SampleRow(3.0, 0.999, 1, 8),  # its nucleus is wider than the short list
        SampleRow(0.7, 0.2, 2**63, 7),
        SampleRow(1.0, 0.0, 3, 7),
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[5] == int(logits[5].argmax())


@pytest.mark.parametrize("temperature", [1e-30, 1e-46, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_below_float32_is_greedy(temperature: float, top_p: float) -> None:
    assert sample(torch.tensor([[0.0, 5.0, 1.0]]), [SampleRow(temperature, top_p, 1, 2)]) == [1]


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, 9.9e3, 0.0]])
    assert sample(logits, [SampleRow(1e-6, 1.0, 0, 0)]) == [0]


def test_broken_rows_are_named() -> None:
    logits = torch.zeros(4, 5)
    logits[1, 2] = float("nan")
    logits[3, 0] = float("inf")
    logits[2, 1] = float("-inf")
    assert broken_rows(logits) == [1, 3]
