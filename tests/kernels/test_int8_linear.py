"""int8 products are those of the weights they stand for, whichever way they are computed."""

import pytest
import torch

from kernels import int8_linear as kernel
from kernels.int8_linear import int8_linear, int8_linear_ref, widened

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the largest value of the result: the dtype's own rounding of it and, for half precision, of a
# product before its scale.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def case(
    rows: int, n: int, k: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    # All values, the extremes too; poison behind the weight, where kernels may read too far.
    memory = torch.randint(-127, 128, (n * k + 64,), dtype=torch.int8, generator=generator)
    memory[-64:] = -128
    scale = (torch.rand(n, generator=generator) / 100 + 1e-4).to(dtype)
    return x, memory[: n * k].view(n, k), scale, torch.randn(n, generator=generator).to(dtype)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    exact = wanted.to(torch.float32)
    return float((got.to(torch.float32) - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [32, 96, 896, 17, 40])
@pytest.mark.parametrize("n", [1, 5, 48, 257])
def test_all_ways_agree_with_the_definition(n: int, k: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, kernel.MAX_DIRECT_ROWS, kernel.MAX_DIRECT_ROWS + 1, 33):
        x, weight, scale, bias = case(rows, n, k, dtype)
        wanted = int8_linear_ref(x, weight, scale, bias)
        assert error(int8_linear(x, weight, scale, bias), wanted) <= TOLERANCE[dtype]
        plain = int8_linear_ref(x, weight, scale)
        assert error(int8_linear(x, weight, scale), plain) <= TOLERANCE[dtype]


@pytest.mark.parametrize("block_bytes", [1, 2048, 1 << 30])
def test_blocks_cover_every_channel_once(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK_BYTES", block_bytes)
    x, weight, scale, _ = case(20, 37, 64, torch.float32)
    assert error(widened(x, weight, scale), int8_linear_ref(x, weight, scale)) <= 2e-6


def test_shapes_and_no_rows() -> None:
    x, weight, scale, bias = case(6, 48, 64, torch.bfloat16)
    out = int8_linear(x.view(1, 2, 3, 64), weight, scale, bias)
    assert out.shape == (1, 2, 3, 48)
    assert out.dtype == torch.bfloat16
    assert int8_linear(x[:0], weight, scale, bias).shape == (0, 48)


def test_rows_that_do_not_lie_together() -> None:
    x, weight, scale, _ = case(8, 48, 64, torch.float32)
    assert error(int8_linear(x[::2], weight, scale), int8_linear_ref(x[::2], weight, scale)) < 2e-6


def test_a_broken_input_shows() -> None:
    x, weight, scale, _ = case(2, 48, 64, torch.float32)
    x[1, 3] = float("nan")
    out = int8_linear(x, weight, scale)
    assert bool(out[0].isfinite().all())
    assert bool(out[1].isnan().all())
