"""Bias, penalties, bans and masks: the kernels do what the definitions and the engine do."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.sampling.sampling_batch import PenaltyEntries
from kernels import logit_edits as module
from kernels.logit_edits import edit_ref_, mask_ref_, penalize_ref_
from tests.kernels.guarded import Guards, planted

ROWS, VOCAB = 3, 2100


def logits() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


def entries(count: int = 300) -> tuple[torch.Tensor, ...]:
    """Rows and ids, no pair twice, and values of both signs, some 0."""
    generator = torch.Generator().manual_seed(1)
    flat = torch.randperm(ROWS * VOCAB, generator=generator)[:count]
    flat = torch.tensor(sorted({*flat.tolist(), ROWS * VOCAB - 1}))
    values = torch.randint(-2, 5, (len(flat),), generator=generator).float()
    return flat // VOCAB, flat % VOCAB, values


def parameters(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.rand(count, generator=generator) + 0.5 for _ in range(3))


def changed(kernel: ModuleType, what: str) -> float:
    """The largest difference between a kernel's logits and the definition's."""
    wanted, guards = logits(), Guards()
    got = guards.inout(logits(), row_gap=5)
    rows, ids, values = entries()
    held = [guards.input(tensor) for tensor in (rows, ids, values)]
    if what == "penalize":
        counts, more = values.clamp(min=-1), parameters(len(rows))
        penalize_ref_(wanted, rows, ids, counts, *more)
        kernel.penalize_(got, *held[:2], guards.input(counts), *(guards.input(t) for t in more))
    elif what == "mask":
        bits = torch.randint(-(1 << 31), (1 << 31) - 1, (ROWS, -(-VOCAB // 32)))
        mask_ref_(wanted, bits.to(torch.int32))
        kernel.mask_(got, guards.input(bits.to(torch.int32), row_gap=1))
    else:
        edit_ref_(wanted, rows, ids, values, what == "ban")
        kernel.edit_(got, *held, what == "ban")
    guards.check()
    same = (got == wanted) | ((got - wanted).abs() < 1e-6)
    return float((~same).sum())


@pytest.mark.parametrize("what", ["bias", "ban", "penalize", "mask"])
def test_kernels_are_the_definitions(what: str) -> None:
    assert changed(module, what) == 0


def test_penalties_are_the_engines() -> None:
    rows, ids, values = entries()
    frequency, presence, repetition = parameters(len(rows))
    counts = values.clamp(min=0)
    ours, engines = logits(), logits()
    module.penalize_(ours, rows, ids, counts, frequency, presence, repetition)
    PenaltyEntries(rows, ids, counts, frequency, presence, repetition).apply(engines)
    torch.testing.assert_close(ours, engines, rtol=1e-6, atol=1e-6)


def test_nothing_to_do() -> None:
    same, none = logits(), torch.zeros(0, dtype=torch.int64)
    module.edit_(same, none, none, none.float())
    module.penalize_(same, none, none, *[none.float()] * 4)
    module.mask_(same, torch.zeros(0, 66, dtype=torch.int32))
    assert torch.equal(same, logits())


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("tl.where(old > 0, old / factor, old * factor)", "old / factor", "penalize"),
        ("tl.where(value > 0, extra, 0.0)", "extra", "penalize"),
        ("other=0.0) * value", "other=0.0)", "penalize"),
        ("there &= value >= 0", "there &= value >= -1", "penalize"),
        ("row * stride + tl.load(ids", "row * count + tl.load(ids", "bias"),
        ("(word >> (token % 32)) & 1", "(word >> (31 - token % 32)) & 1", "mask"),
        ("row * mask_stride + token // 32", "row * (vocab_size // 32) + token // 32", "mask"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, what: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(AssertionError):  # the result, or the guards
        assert changed(bad, what) == 0
