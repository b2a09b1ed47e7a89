"""4-bit weights: layouts to the bit, on examples made by hand; kernels to their definition."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import int4_layouts as layouts
from kernels import int4_linear as module
from kernels.int4_layouts import Int4Weight, dequantize, pack, quantize, unpack
from kernels.int4_linear import int4_linear_ref
from tests.kernels.guarded import Guards, planted

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}


def weight_of(n: int, k: int, group: int, dtype: torch.dtype = torch.float32) -> Int4Weight:
    """Every q and zero, scales of both sizes."""
    generator = torch.Generator().manual_seed(n + k)
    groups = -(-k // group)
    return Int4Weight(
        pack(torch.randint(0, 16, (n, k), generator=generator)),
        ((torch.rand(groups, n, generator=generator) + 0.2) / 10).to(dtype),
        torch.randint(0, 17, (groups, n), generator=generator).to(torch.int8),
        k,
        group,
    )


def difference(
    kernel: ModuleType,
    rows: int,
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
) -> float:
    """The largest error, relative to the largest value."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if has_bias else None
    weight = weight_of(n, k, group, dtype)
    wanted = int4_linear_ref(x, weight, bias).float()
    guards = Guards()
    out = guards.output(rows, n, dtype=dtype)
    held = Int4Weight(
        guards.input(weight.words), guards.input(weight.scale), guards.input(weight.zero), k, group
    )
    bias = None if bias is None else guards.input(bias)
    kernel.int4_linear(guards.input(x, row_gap=3), held, bias, out=out)
    guards.check()
    return float((out.float() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_are_the_definition(dtype: torch.dtype) -> None:
    cases = (
        (1, 9, 1200, 128),
        (1, 3, 64, 32),
        (1, 8, 256, 64),
        (1, 5, 600, 600),
        (3, 70, 300, 128),
        (17, 9, 64, 32),
        (65, 130, 100, 64),
        (2, 5, 520, 256),
    )
    for rows, n, k, group in cases:
        assert difference(module, rows, n, k, group, dtype) <= TOLERANCE[dtype]
    assert difference(module, 1, 5, 64, 64, dtype, has_bias=False) <= TOLERANCE[dtype]
    assert difference(module, 2, 5, 64, 64, dtype, has_bias=False) <= TOLERANCE[dtype]


def test_packing_by_hand() -> None:
    q = torch.zeros(1, 512, dtype=torch.int8)
    q[0, 0], q[0, 32], q[0, 7 * 32], q[0, 31], q[0, 256 + 2 * 32 + 5] = 1, 2, 15, 3, 4
    words = pack(q)
    assert words.shape == (1, 64)
    wanted = torch.zeros(64, dtype=torch.int64)
    wanted[0], wanted[31], wanted[32 + 5] = 0xF0000021 - (1 << 32), 3, 4 << 8
    assert words[0].tolist() == wanted.tolist()
    assert torch.equal(unpack(words, 512), q)


def test_packing_round_trips_with_a_ragged_end() -> None:
    q = torch.randint(0, 16, (3, 300), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(unpack(pack(q), 300), q)
    assert int(unpack(pack(q), 512)[:, 300:].abs().sum()) == 0


def test_rounding_is_within_half_a_step() -> None:
    weight = torch.randn(5, 150, generator=torch.Generator().manual_seed(1))
    weight[1], weight[2, 0:64] = 0.0, 3.0
    packed = quantize(weight, 64, torch.float32)
    step = packed.scale.T[:, torch.arange(150) // 64]
    assert bool(((dequantize(packed) - weight).abs() <= 0.51 * step).all())
    assert not dequantize(packed)[1].any()
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.full((1, 32), float("inf")), 32, torch.float32)


def test_shapes_and_refusals() -> None:
    weight = weight_of(6, 64, 32)
    assert module.int4_linear(torch.ones(2, 3, 64), weight).shape == (2, 3, 6)
    assert module.int4_linear(torch.ones(0, 64), weight).shape == (0, 6)
    for k, group in ((64, 16), (192, 96)):
        with pytest.raises(ValueError, match="groups of"):
            weight_of(4, k, group)
    with pytest.raises(ValueError, match="words for"):
        Int4Weight(weight.words, weight.scale, weight.zero, 300, 32)
    with pytest.raises(ValueError, match="scales"):
        Int4Weight(weight.words, weight.scale[:1], weight.zero, 64, 32)


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        ("(weighted - steps * plain[None, :])", "(weighted - plain[None, :])", 1),
        ("total += size * (weighted", "total += (weighted", 1),
        ("first = (word // 32) * 256 + word % 32", "first = word * 8", 1),
        ("(start_k // group).to(tl.int64)[None, :] * n", "(start_k * 0).to(tl.int64)[None, :]", 1),
        ("& 15) - steps[None, :]", "& 15) - 8", 4),
        ("total += inner * size[None, :]", "total += inner", 4),
        ("(start_k // group).to(tl.int64) * n + channel", "channel + start_k * 0", 4),
        ("place = start * 8 + plane * 32 + step", "place = start * 8 + plane + step * 8", 4),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, rows: int, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(AssertionError):  # the result, or the guards
        assert difference(bad, rows, 11, 300, 64) < 1e-3


def test_planted_errors_of_layouts_are_caught(tmp_path: Path) -> None:
    q = torch.randint(0, 16, (2, 256), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    for old, new in (("(planes << shifts).sum(2)", "(planes << shifts.flip(0)).sum(2)"),):
        bad = planted(layouts, tmp_path, old, new)
        assert not torch.equal(unpack(bad.pack(q), 256), q)
