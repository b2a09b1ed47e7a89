"""One-byte weights: the kernels are the definition, and read nothing beside their matrix."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.registration.quantize import quantize_rows
from kernels import scaled_linear as module
from kernels.int8_linear import int8_linear_ref
from kernels.scaled_linear import quantize_fp8, scaled_linear_ref
from tests.kernels.guarded import Guards, planted

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def weights(n: int, k: int, kind: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n * k)
    if kind == INT8:
        return torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    bits = torch.randint(0, 256, (n, k), dtype=torch.int32, generator=generator)
    bits[(bits & 0x7F) == 0x7F] = 0x7E  # NaN
    return bits.to(torch.uint8).view(FP8)


def difference(
    kernel: ModuleType,
    rows: int,
    n: int,
    k: int,
    kind: torch.dtype,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
) -> float:
    """The largest error, relative to the largest value."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    # Half precision ends at 65,504.
    scale = ((torch.rand(n, generator=generator) + 0.5) / 1000).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if has_bias else None
    weight = weights(n, k, kind)
    wanted = scaled_linear_ref(x, weight, scale, bias).float()
    guards = Guards()
    out = guards.output(rows, n, dtype=dtype)
    kernel.scaled_linear(
        guards.input(x, row_gap=3),
        guards.input(weight.view(torch.int8)).view(kind),
        guards.input(scale),
        None if bias is None else guards.input(bias),
        out=out,
    )
    guards.check()
    return float((out.float() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_are_the_definition(kind: torch.dtype, dtype: torch.dtype) -> None:
    shapes = ((1, 1, 16), (1, 19, 1100), (2, 5, 33), (16, 40, 300), (17, 70, 150), (65, 130, 70))
    for rows, n, k in shapes:
        assert difference(module, rows, n, k, kind, dtype) <= TOLERANCE[dtype]
    assert difference(module, 1, 9, 64, kind, dtype, has_bias=False) <= TOLERANCE[dtype]
    assert difference(module, 3, 9, 64, kind, dtype, has_bias=False) <= TOLERANCE[dtype]


def test_every_fp8_value_is_widened_exactly() -> None:
    bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    weight = bits.view(FP8).view(-1, 1).repeat(1, 16)
    x = torch.zeros(1, 16)
    x[0, 3] = 1.0
    out = module.scaled_linear(x, weight, torch.ones(len(bits)))
    assert torch.equal(out[0], bits.view(FP8).float())


def test_int8_is_what_processors_compute() -> None:
    x, weight = torch.randn(2, 48), weights(20, 48, INT8)
    scale = torch.rand(20)
    assert torch.equal(scaled_linear_ref(x, weight, scale), int8_linear_ref(x, weight, scale))


def test_quantized_weights_are_near() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    for q, scale in (quantize_fp8(weight, torch.bfloat16), quantize_rows(weight, torch.bfloat16)):
        near = q.float() * scale.float()[:, None]
        limit = weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 100
        assert bool(((near - weight).abs() <= limit).all())
    with pytest.raises(ValueError, match="not finite"):
        quantize_fp8(torch.tensor([[float("nan")]]), torch.float32)


def test_shapes_and_refusals() -> None:
    weight, scale = weights(8, 32, INT8), torch.ones(8)
    assert module.scaled_linear(torch.ones(2, 3, 32), weight, scale).shape == (2, 3, 8)
    assert module.scaled_linear(torch.ones(0, 32), weight, scale).shape == (0, 8)
    with pytest.raises(ValueError, match="int8 or"):
        module.scaled_linear(torch.ones(1, 32), weight.float(), scale)


@pytest.mark.parametrize(
    ("old", "new", "rows", "kind"),
    [
        ("tl.sum(total, 1) * tl.load", "tl.sum(total, 1) + 0.0 * tl.load", 1, INT8),
        ("total = total * tl.load", "total = total + 0.0 * tl.load", 4, INT8),
        ("channel.to(tl.int64)[:, None] * k", "channel.to(tl.int64)[:, None] * BLOCK_K", 1, INT8),
        ("channel.to(tl.int64)[None, :] * k", "channel.to(tl.int64)[None, :] * (k - 1)", 4, INT8),
        ("(bits & 0x80) << 8", "(bits & 0x80) << 1", 1, FP8),
        ("* 256.0", "* 128.0", 4, FP8),
        ("row.to(tl.int64)[:, None] * x_stride", "row.to(tl.int64)[:, None] * k", 4, INT8),
    ],
)
def test_planted_errors_are_caught(
    old: str, new: str, rows: int, kind: torch.dtype, tmp_path: Path
) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(AssertionError):  # the result, or the guards
        assert difference(bad, rows, 19, 50, kind) < 1e-2
