"""Products of one to four rows are the separate operations, and read nothing but their inputs."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import few_rows as module
from kernels.few_rows import InputNorm, LaunchShape, few_rows_ref, shape_for, takes
from tests.kernels.guarded import CAUGHT, Guards, planted

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
LLAMA: dict[str, Any] = {"norm": True, "has_residual": True}
SHAPE = LaunchShape(4, 32, 1)
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"has_bias": True},
    {"norm": True},
    LLAMA | {"multiplier": 0.22, "has_bias": True},
    LLAMA | {"unit_offset": True, "activation": "gelu_tanh"},
    LLAMA | {"center": True, "has_weight": False},
    LLAMA | {"activation": "silu", "has_bias": True},
    {"activation": "gelu"},
)


def difference(
    kernel: ModuleType,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    norm: bool = False,
    has_residual: bool = False,
    has_weight: bool = True,
    has_bias: bool = False,
    activation: Any = None,
    shape: LaunchShape = SHAPE,
    gap: int = 16,
    **variant: Any,
) -> float:
    """The largest error of y and h, relative to the largest value; no other memory changes."""
    generator = torch.Generator().manual_seed(rows * n + k)
    channels = n if activation is None else 2 * n

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    x, residual, weight = 3 * randn(rows, k) + 1, randn(rows, k), randn(channels, k) / k**0.5
    bias, scale = randn(channels) if has_bias else None, randn(k) if has_weight else None
    stream = residual if has_residual else None

    def normed(weight: torch.Tensor | None, of: ModuleType) -> Any:
        return of.InputNorm(weight, 1e-5, **variant) if norm else None

    wanted = few_rows_ref(x, weight, bias, normed(scale, module), stream, activation)
    guards = Guards()
    y = guards.output(rows, n, dtype=dtype)
    h = guards.output(rows, k, dtype=dtype) if has_residual else y
    found = kernel.few_rows(
        guards.input(x, row_gap=gap),
        guards.input(weight),
        None if bias is None else guards.input(bias),
        normed(None if scale is None else guards.input(scale), kernel),
        None if stream is None else guards.input(stream),
        activation,
        out=(y, h),
        shape=kernel.LaunchShape(*shape),
    )
    guards.check()
    pairs = list(zip(found, wanted, strict=True))[: 1 + has_residual]
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernel_is_the_separate_operations(dtype: torch.dtype, form: dict[str, Any]) -> None:
    for rows, n, k in ((1, 9, 80), (2, 4, 32), (3, 5, 48), (4, 2, 16)):
        assert difference(module, rows, n, k, dtype, **form) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "shape", [LaunchShape(1, 16, 1), LaunchShape(2, 128, 4), LaunchShape(16, 64, 2)]
)
def test_any_shape_of_launch(shape: LaunchShape) -> None:
    assert difference(module, 2, 19, 112, shape=shape, **LLAMA) <= 3e-6


def test_rows_do_not_depend_on_one_another() -> None:
    """A sequence's numbers are the same whether it is alone or beside three."""
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    for rows in (1, 2, 3):
        few = module.few_rows(x[:rows], weight, shape=SHAPE)[0]
        assert torch.equal(few, module.few_rows(x, weight, shape=SHAPE)[0][:rows])


def share_to_the_bit(kernel: ModuleType) -> float:
    """Of results in half precision; sums are exact, so that only the roundings are left."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-64, 65, size, generator=generator).half() / 64
        for size in ((4, 32), (80, 32))
    )
    shape = kernel.LaunchShape(8, 16, 1)
    found = kernel.few_rows(x, weight, activation="silu", shape=shape)[0]
    return float((found == few_rows_ref(x, weight, activation="silu")[0]).float().mean())


def test_half_precision_rounds_where_the_separate_operations_do(tmp_path: Path) -> None:
    assert share_to_the_bit(module) > 0.97
    rounded = "activated(out.to(dtype).to(tl.float32), "
    assert share_to_the_bit(planted(module, tmp_path, rounded, "activated(out, ")) < 0.9


def test_what_it_takes() -> None:
    x, weight = torch.ones(2, 32), torch.ones(6, 32)
    assert takes(x, weight)
    for other in (torch.ones(5, 32), torch.ones(0, 32), x.half(), torch.ones(2, 1, 32)):
        assert not takes(other, weight)
    for bad in (torch.ones(32, 6).T, torch.ones(6, 40)[:, :32], weight.to(torch.int8)):
        assert not takes(x, bad)
    assert not takes(torch.ones(2, 40), torch.ones(6, 40))
    with pytest.raises(ValueError, match="no product of few rows"):
        module.few_rows(torch.ones(5, 32), weight)
    with pytest.raises(ValueError, match="no product of few rows"):
        module.few_rows(x, torch.ones(5, 32), activation="silu")
    with pytest.raises(ValueError, match="wants a norm"):
        module.few_rows(x, weight, residual=x)
    wide = module.MAX_NORM_COLUMNS + 16
    with pytest.raises(ValueError, match="no product of few rows"):
        module.few_rows(torch.ones(1, wide), torch.ones(1, wide), norm=InputNorm(None, 1e-5))


def test_shapes_make_programs_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was measured."""
    monkeypatch.setattr(module, "TUNED", {})
    for n, k, gated in (
        (6144, 4096, False),
        (14336, 4096, True),
        (896, 4864, False),
        (3, 16, True),
    ):
        for rows in (1, 2, 4):
            shape = shape_for(rows, n, k, gated)
            assert n / shape.block_n >= min(n, 448)
            assert shape.block_k <= 1024
    monkeypatch.setitem(module.TUNED, (1, 64, 32, False), LaunchShape(2, 64, 8))
    assert shape_for(1, 64, 32, False) == LaunchShape(2, 64, 8)


@pytest.mark.parametrize(
    ("old", "new", "form"),
    [
        (
            "(channel + part * n).to(tl.int64)[:, None] * k",
            "(channel + part * n)[:, None] * 16",
            {},
        ),
        ("real = channel < n", "real = channel < n + 1", {}),
        ("(place + BLOCK_K < k)", "(place + BLOCK_K < k - 16)", {}),
        ("totals, pieces = sums, following", "totals = sums", {}),
        ("tl.minimum(r, num_rows - 1)", "r", {}),
        ("tl.store(h + column, value", "tl.store(h + column, 2 * value", LLAMA),
        ("(stream + multiplier * value)", "(stream + value)", LLAMA | {"multiplier": 0.5}),
        ("scale += 1.0", "scale += 0.0", LLAMA | {"unit_offset": True}),
        ("value - means[r], 0.0)", "value, 0.0)", LLAMA | {"center": True}),
        ("value = value * factors[r]", "value = value * factors[0]", LLAMA),
        ("bias + n + channel", "bias + channel", {"activation": "silu", "has_bias": True}),
        ("totals[r * PARTS + 1], 1)", "totals[r * PARTS], 1)", {"activation": "silu"}),
        ("activated(out.to(dtype).to(tl.float32), ACTIVATION)", "out", {"activation": "silu"}),
    ],
)
def test_planted_errors_are_caught(
    old: str, new: str, form: dict[str, Any], tmp_path: Path
) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(CAUGHT):
        assert difference(bad, 3, 9, 80, **form) < 1e-3
