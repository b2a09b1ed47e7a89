"""The norm kernel is its definition, for every variant, and touches nothing but its rows."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from kernels import rms_norm as module
from kernels.rms_norm import rms_norm_ref
from tests.kernels.guarded import Guards, planted

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"unit_offset": True},
    {"center": True},
    {"multiplier": 0.22},
)


def tensors(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (3 * torch.randn(2, rows, columns, generator=generator)).to(dtype)
    weight = torch.randn(columns, generator=generator).to(dtype)
    return x, residual, weight


def differences(
    kernel: ModuleType,
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    has_residual: bool = True,
    has_weight: bool = True,
    gap: int = 5,
    **variant: Any,
) -> float:
    """The largest error of y and h; the memory around is as it was."""
    x, residual, weight = tensors(rows, columns, dtype)
    chosen, kept = residual if has_residual else None, weight if has_weight else None
    wanted = rms_norm_ref(x, kept, 1e-5, chosen, **variant)
    guards = Guards()
    out = tuple(guards.output(rows, columns, dtype=dtype) for _ in range(1 + has_residual))
    y, h = kernel.rms_norm(
        guards.input(x, row_gap=gap),
        None if kept is None else guards.input(kept),
        1e-5,
        None if chosen is None else guards.input(chosen),
        **variant,
        out=out if has_residual else (out[0], out[0]),
    )
    guards.check()
    error = (y.float() - wanted[0].float()).abs().max()
    if has_residual:
        error = torch.maximum(error, (h.float() - wanted[1].float()).abs().max())
    return float(error / (1 + wanted[0].float().abs().max()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernel_is_the_definition(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    for rows, columns in ((1, 1), (3, 17), (2, 64), (5, 300)):
        for has_residual in (True, False):
            assert (
                differences(module, rows, columns, dtype, has_residual, **variant)
                <= TOLERANCE[dtype]
            )
    assert differences(module, 2, 48, dtype, has_weight=False, **variant) <= TOLERANCE[dtype]


def test_stream_may_be_written_over_itself() -> None:
    x, residual, weight = tensors(4, 40, torch.float32)
    wanted = rms_norm_ref(x, weight, 1e-6, residual)
    stream = residual.clone()
    y, h = module.rms_norm(x, weight, 1e-6, stream, out=(torch.empty_like(x), stream))
    assert h is stream
    torch.testing.assert_close((y, stream), wanted)


def test_no_rows_and_too_long_rows() -> None:
    assert module.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6)[0].shape == (0, 8)
    with pytest.raises(ValueError, match="rows of"):
        module.rms_norm(torch.empty(1, module.MAX_COLUMNS + 1), None, 1e-6)


def test_reference_is_what_the_modules_compute() -> None:
    x, _, weight = tensors(3, 48, torch.float32)
    llama, gemma, olmo = LlamaRMSNorm(48, 1e-5), GemmaRMSNorm(48, 1e-5), OlmoLayerNorm(48)
    for norm in (llama, gemma):
        torch.nn.Module.load_state_dict(norm, {"weight": weight})
    with torch.no_grad():
        torch.testing.assert_close(rms_norm_ref(x, weight, 1e-5)[0], llama(x))
        torch.testing.assert_close(rms_norm_ref(x, weight, 1e-5, unit_offset=True)[0], gemma(x))
        torch.testing.assert_close(rms_norm_ref(x, None, 1e-5, center=True)[0], olmo(x))


@pytest.mark.parametrize(
    ("old", "new", "variant"),
    [
        ("stream + multiplier * value", "stream + value", {"multiplier": 0.5}),
        ("tl.sum(value * value, 0) / columns", "tl.sum(value * value, 0) / BLOCK", {}),
        ("value = rounded.to(tl.float32)", "value = stream", {}),
        ("factor += 1.0", "factor += 0.0", {"unit_offset": True}),
        ("tl.where(inside, value - mean, 0.0)", "value - mean", {"center": True}),
        ("x + row * x_stride", "x + row * columns", {}),
    ],
)
def test_planted_errors_are_caught(
    old: str, new: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(AssertionError):  # the result, or the guards
        assert differences(bad, 3, 37, **variant) < 1e-3
