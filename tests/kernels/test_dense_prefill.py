"""Prompts attended without the cache: the definition, and what is left to the paged kernel."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import dense_prefill as module
from kernels.dense_prefill import padded_length, takes
from kernels.paged_attention import LayerGeometry
from tests.kernels.guarded import Guards, planted

CPU = torch.device("cpu")
LAYER = LayerGeometry(2, 16, 16)
ROWS = ((3, 17), (21, 8), (29, 40))
TOKENS, HEADS, KV_HEADS, DIM = 70, 6, 2, 16


def wanted(heads: torch.Tensor, scale: float) -> torch.Tensor:
    """Pair by pair, in float64; NaN for tokens of no row."""
    out = torch.full((TOKENS, HEADS, DIM), float("nan"), dtype=torch.float64)
    for start, length in ROWS:
        query, key, value = torch.split(heads[start : start + length].double(), [HEADS, 2, 2], 1)
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        scores = scale * torch.einsum("ihd,jhd->hij", query, key)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        out[start : start + length] = torch.einsum("hij,jhd->ihd", weights, value)
    return out


def difference(kernel: ModuleType) -> float:
    """The largest error. Tokens of no row are NaN, and stay so in `out`."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.full((TOKENS, HEADS + 2 * KV_HEADS, DIM), float("nan"))
    for start, length in ROWS:
        size = (length, *heads.shape[1:])
        heads[start : start + length] = torch.randn(size, generator=generator)
    guards = Guards()
    out = guards.inout(torch.full((TOKENS, HEADS, DIM), float("nan")))
    kernel.dense_prefill(guards.input(heads), ROWS, KV_HEADS, out, 0.3)
    guards.check()
    exact = wanted(heads, 0.3)
    assert torch.equal(out.isnan(), exact.isnan())
    return float((out.double() - exact).nan_to_num().abs().max())


def test_is_the_definition() -> None:
    assert difference(module) < 1e-5


def test_few_lengths_have_plans() -> None:
    lengths = range(1, 5000)
    assert all(n <= padded_length(n) <= max(n + 1, 1.125 * n) for n in lengths)
    assert len({padded_length(n) for n in range(2048, 4096)}) == module.STEPS + 1
    assert padded_length(2048) == 2048
    assert padded_length(2049) == 2048 + 256


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ((0, 100), (100, 200))
    assert not takes(rows, LAYER, 0.0, False, CPU)  # not measured yet
    monkeypatch.setattr(module, "LEAST_LENGTH", 100)
    assert takes(rows, LAYER, 0.0, False, CPU)
    assert takes(rows, LayerGeometry(2, 16, 16, 200), 0.0, False, CPU)
    assert not takes((), LAYER, 0.0, False, CPU)
    assert not takes(((0, 99), (99, 500)), LAYER, 0.0, False, CPU)
    assert not takes(rows, LAYER, 30.0, False, CPU)
    assert not takes(rows, LAYER, 0.0, True, CPU)
    for other in ((2, 16, 16, 199), (2, 16, 24), (2, 256, 256), (2, 20, 20)):
        assert not takes(rows, LayerGeometry(*other), 0.0, False, CPU)
    monkeypatch.setattr(module, "capability", lambda device: 80)
    assert not takes(rows, LAYER, 0.0, False, CPU)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("one = heads.new_zeros(", "one = float('nan') * heads.new_zeros("),
        ("one[:length] = heads[start : start + length]", "one[:length] = heads[:length]"),
        ("keys = num_heads + num_kv_heads", "keys = num_heads + 1"),
        ("is_causal=True", "is_causal=False"),
        ("scale=scale, enable_gqa", "enable_gqa"),
        ("[0, :, :length]", "[0, :, -length:]"),
        ("out[start : start + length] = attended", "out[:length] = attended"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises((AssertionError, RuntimeError)):
        assert difference(bad) < 1e-2
