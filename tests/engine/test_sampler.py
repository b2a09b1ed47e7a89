"""Sampling: the right distribution, and the same token whatever a row is batched with."""

from collections.abc import Sequence

import pytest
import torch

from engine.protocol import SamplingParams
from engine.sampler import SampleInput, build_sampling, sample, uniform

# 99.9 % quantile of chi-square with 7 degrees of freedom.
CHI_SQUARE_7 = 24.32


def row(temperature: float, top_p: float, seed: int, position: int) -> SampleInput:
    return SampleInput(SamplingParams(temperature, top_p, seed), position)


def draw(logits: torch.Tensor, rows: Sequence[SampleInput]) -> list[int]:
    output = sample(logits, build_sampling(rows, logits.device))
    assert not bool(output.broken.any())
    return [int(token) for token in output.token_ids]


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
    rows = [row(temperature, top_p, 99, position) for position in range(4000)]
    tokens = draw(logits.expand(len(rows), -1), rows)
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
        row(0.0, 1.0, 1, 7),
        row(1.0, 1.0, 1, 7),
        row(1.0, 0.9, 1, 7),
        row(3.0, 0.999, 1, 8),  # its nucleus is wider than the short list
        row(0.7, 0.2, 2**63, 7),
        row(1.0, 0.0, 3, 7),
    ]
    together = draw(logits, rows)
    alone = [draw(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[5] == int(logits[5].argmax())


@pytest.mark.parametrize("temperature", [1e-30, 1e-46, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_below_float32_is_greedy(temperature: float, top_p: float) -> None:
    assert draw(torch.tensor([[0.0, 5.0, 1.0]]), [row(temperature, top_p, 1, 2)]) == [1]


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, 9.9e3, 0.0]])
    assert draw(logits, [row(1e-6, 1.0, 0, 0)]) == [0]


def test_broken_rows_are_named_and_leave_their_neighbours_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logits[1, 2] = float("nan")
    logits[3, 0] = float("inf")
    logits[2, 1] = float("-inf")
    logits[5] = float("nan")
    kinds = [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)]
    rows = [row(*kinds[i % 3], 7, i) for i in range(6)]
    output = sample(logits, build_sampling(rows, logits.device))
    assert output.broken.tolist() == [False, True, False, True, False, True]
    for i in (0, 2, 4):
        assert int(output.token_ids[i]) == draw(logits[i : i + 1], [rows[i]])[0]
    assert all(0 <= token < 50 for token in output.token_ids.tolist())


def test_a_step_without_sampling_rows_gives_no_token() -> None:
    output = sample(torch.empty(0, 50), build_sampling([], torch.device("cpu")))
    assert output.token_ids.shape == output.broken.shape == (0,)
