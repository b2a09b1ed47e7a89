"""Products in fp8 on both sides: rows are rounded as the definition rounds them."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import fp8_linear as module
from kernels.decoder_layer import KERNELS, Product
from kernels.fp8_linear import fp8_linear_ref, round_rows_ref, takes
from kernels.scaled_linear import quantize_fp8, scaled_linear_ref
from tests.kernels.guarded import CAUGHT, Guards, planted

FP8 = torch.float8_e4m3fn


def rows(count: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(columns))
    x[:, :1] *= 30
    x[count // 2] = 0
    return x.to(dtype)


def share_alike(kernel: ModuleType, x: torch.Tensor) -> float:
    """Of values that are the definition's to the bit; scales have to be near. Guards hold."""
    wanted, of_rows = round_rows_ref(x)
    guards = Guards()
    empty = torch.full(x.shape, 0x7F, dtype=torch.uint8)  # NaN
    out = guards.inout(empty), guards.output(len(x), 1, dtype=torch.float32)
    kernel.round_rows(guards.input(x, row_gap=3), (out[0].view(FP8), out[1]))
    guards.check()
    torch.testing.assert_close(out[1], of_rows)
    return float((out[0] == wanted.view(torch.uint8)).float().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_rounded_by_their_own_scale(dtype: torch.dtype) -> None:
    for count, columns in ((1, 16), (3, 48), (5, 300)):
        assert share_alike(module, rows(count, columns, dtype)) > 0.99


def test_every_value_is_rounded_to_the_nearest() -> None:
    """All of e4m3, and what lies in the middle of two and beside it."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middle = (codes[1:] + codes[:-1]) / 2
    each = torch.cat([codes, middle, middle * (1 + 2**-20), middle * (1 - 2**-20)])
    x = torch.cat([each, -each])[None]  # the largest is 448: a scale of 1
    found, scale = module.round_rows(x)
    assert float(scale) == 1.0
    assert torch.equal(found.view(torch.uint8), x.to(FP8).view(torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_that_is_broken_stays_so_by_itself() -> None:
    for bad in (float("nan"), float("inf")):
        x = rows(3, 32)
        x[1, 5] = bad
        weight, scale = quantize_fp8(rows(4, 32), torch.float32)
        y = module.fp8_linear(x, weight, scale)
        assert y.isnan().any(1).tolist() == [False, True, False]


def test_products_are_the_definition_and_near_the_weight_only_ones() -> None:
    x = rows(20, 64)
    weight, scale = quantize_fp8(rows(48, 64).flip(0), torch.float32)
    for bias in (None, torch.randn(48)):
        y = module.fp8_linear(x[:, None], weight, scale, bias)[:, 0]
        near = scaled_linear_ref(x, weight, scale, bias)
        torch.testing.assert_close(y, fp8_linear_ref(x, weight, scale, bias), rtol=1e-2, atol=1e-2)
        assert float((y - near).norm() / near.norm()) < 0.04


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only; a layer's product goes where it says."""
    weight, scale = quantize_fp8(rows(32, 48), torch.bfloat16)
    x = rows(17, 48, torch.bfloat16)
    assert not takes(x, weight)
    calls: list[int] = []
    monkeypatch.setattr("kernels.decoder_layer.takes_fp8", lambda x, weight: len(x) > 16)
    monkeypatch.setattr("kernels.decoder_layer.fp8_linear", lambda x, *_: calls.append(len(x)))
    KERNELS.product(x, Product(weight, None, scale))
    assert calls == [17]


def test_too_long_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of"):
        module.round_rows(torch.empty(1, module.MAX_COLUMNS + 1))
    assert module.round_rows(torch.empty(0, 16))[0].shape == (0, 16)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + row * x_stride", "x + row * columns"),
        ("largest / LARGEST)", "largest / 240.0)"),
        ("tl.max(tl.abs(value), 0)", "tl.max(value, 0)"),
        ("tl.where(largest == 0.0, 1.0,", "tl.where(largest == 1.0, 1.0,"),
        ("tl.store(scale + row, factor)", "tl.store(scale, factor)"),
        ("+ ((bits >> 20) & 1)", "+ 0"),
        ("bits + 0x7FFFF", "bits"),
        ("size < 0.015625", "size < 0.0"),
        (">> 24) & 0x80", ">> 24) & 0x40"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    values = torch.cat([rows(4, 40), torch.arange(1, 29).view(4, 7) / 16 * 2.0**-6], 1)
    values[:, -1] = 448.0
    values[0, -2] = 17.0  # in the middle of two
    with pytest.raises(CAUGHT):
        assert share_alike(bad, values) == share_alike(bad, rows(4, 40)) == 1.0
