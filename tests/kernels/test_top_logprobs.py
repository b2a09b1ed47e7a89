"""Logprobs by kernels: the definition's and the engine's, with ties by id."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.sampling.sampler import logprobs_of
from kernels import top_logprobs as module
from kernels.top_logprobs import top_logprobs_ref
from tests.kernels.guarded import Guards, planted


def case(vocab_size: int, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(3, vocab_size, generator=generator)
    tokens = torch.randint(0, vocab_size, (3,), generator=generator)
    return (logits.round() if ties else logits), tokens


def guarded(
    kernel: ModuleType, logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    guards = Guards()
    held = guards.input(logits, row_gap=5), guards.input(tokens)
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernel.top_logprobs(*held, count)
    guards.check()
    return out


@pytest.mark.parametrize("ties", [False, True])
def test_kernels_are_the_definition_and_the_engine(ties: bool) -> None:
    for vocab_size, count in ((3, 3), (33, 1), (4100, 5), (9000, 20)):
        logits, tokens = case(vocab_size, ties)
        got = guarded(module, logits, tokens, count)
        wanted = top_logprobs_ref(logits, tokens, count)
        assert torch.equal(got[1], wanted[1])
        torch.testing.assert_close((got[0], got[2]), (wanted[0], wanted[2]), rtol=1e-5, atol=1e-5)
        engines = logprobs_of(logits.log_softmax(-1), tokens, count)
        torch.testing.assert_close((got[0], got[2]), (engines.chosen, engines.top_values))


def test_only_the_chosen_and_tokens_that_cannot_come() -> None:
    logits, tokens = case(50, ties=False)
    chosen, ids, values = module.top_logprobs(logits, tokens, 0)
    assert ids.shape == values.shape == (3, 0)
    torch.testing.assert_close(chosen, top_logprobs_ref(logits, tokens, 0)[0])
    logits[:, 2:] = float("-inf")
    _, ids, values = guarded(module, logits, torch.zeros_like(tokens), 4)
    assert sorted(ids[0, :2].tolist()) == [0, 1]
    assert ids[0, 2:].tolist() == [2, 3]
    assert bool(values[:, 2:].isinf().all())
    assert module.top_logprobs(logits[:0], tokens[:0], 4)[1].shape == (0, 4)
    with pytest.raises(ValueError, match="at most"):
        module.top_logprobs(logits, tokens, 33)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.sum(tl.exp(value - base), 0)", "tl.max(tl.exp(value - base), 0)"),
        ("sum_of * tl.exp(peak_of - peak)", "sum_of"),
        ("name = tl.where(token == who, _NOBODY, name)", "name = name"),
        ("name = tl.where(name == who, _NOBODY, name)", "name = name"),
        ("best - whole", "best"),
        ("first = row * num_splits * count", "first = row * num_splits"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    logits, tokens = case(4500, ties=True)
    got, wanted = guarded(bad, logits, tokens, 5), top_logprobs_ref(logits, tokens, 5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
