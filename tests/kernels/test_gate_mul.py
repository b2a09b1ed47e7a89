"""act(gate) * up of a fused row."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from kernels import gate_mul as module
from kernels.gate_mul import Activation, gate_mul_ref
from tests.kernels.guarded import Guards, planted

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")


def difference(
    kernel: ModuleType,
    activation: Activation,
    rows: int = 3,
    columns: int = 1030,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest error, of values up to 1."""
    generator = torch.Generator().manual_seed(columns)
    x = (4 * torch.randn(rows, 2 * columns, generator=generator)).to(dtype)
    x[0, 0], x[-1, columns - 1] = 100.0, -100.0  # far out, nothing may overflow
    wanted = gate_mul_ref(x, activation).float()
    guards = Guards()
    out = guards.output(rows, columns, dtype=dtype)
    kernel.gate_mul(guards.input(x, row_gap=7), activation, out=out)
    guards.check()
    return float(((out.float() - wanted).abs() / (1 + wanted.abs())).max())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernel_is_the_definition(activation: Activation) -> None:
    for rows, columns in ((1, 1), (2, 37), (3, 1024), (2, 1030)):
        assert difference(module, activation, rows, columns) <= 5e-6
    assert difference(module, activation, dtype=torch.float16) <= 2e-3


def test_definition_is_what_modules_compute() -> None:
    gate, up = torch.randn(2, 4, 33, generator=torch.Generator().manual_seed(1))
    fused = torch.cat([gate, up], -1)
    torch.testing.assert_close(gate_mul_ref(fused, "silu"), functional.silu(gate) * up)
    torch.testing.assert_close(gate_mul_ref(fused, "gelu"), functional.gelu(gate) * up)
    wanted = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gate_mul_ref(fused, "gelu_tanh"), wanted)


def test_no_rows_and_odd_rows() -> None:
    assert module.gate_mul(torch.empty(0, 8), "silu").shape == (0, 4)
    with pytest.raises(ValueError, match="equal length"):
        module.gate_mul(torch.empty(2, 7), "silu")


@pytest.mark.parametrize(
    ("old", "new", "activation"),
    [
        ("x_stride + columns + column", "x_stride + columns + column - 1", "silu"),
        ("gate / (1.0 + tl.exp(tl.minimum(-gate,", "1.0 / (1.0 + tl.exp(tl.minimum(-gate,", "silu"),
        ("0.044715 * gate * gate * gate", "0.044715 * gate * gate", "gelu_tanh"),
        ("0.5 * gate * (1.0", "gate * (1.0", "gelu"),
        ("tl.program_id(1) * BLOCK + tl", "tl", "silu"),
    ],
)
def test_planted_errors_are_caught(
    old: str, new: str, activation: Activation, tmp_path: Path
) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(AssertionError):  # the result, or the guards
        assert difference(bad, activation) < 1e-3
