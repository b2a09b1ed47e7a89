"""The gated half of an MLP: y = act(gate) up, of one fused row.

    x   [T, 2 d]  gate | up, as the fused product leaves it
    y   [T, d]

    silu       g / (1 + exp(-g))                                         llama and its kin
    gelu_tanh  g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))             gemma
    gelu       g/2 (1 + erf(g / sqrt(2)))

Computed in float32 and rounded once; transformers' modules round act(gate) too. Bytes moved: 3 T d
elements, against 6 T d for separate operators.
"""

from typing import Literal, TypeAlias

import torch
from torch.nn import functional

from kernels.triton_api import Declared, cdiv, check_out, check_rows, jit, tl

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]

BLOCK = 1024
ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def gate_mul_ref(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The definition: [..., 2 d] to [..., d]."""
    gate, up = x.float().chunk(2, -1)
    if activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gate * up).to(x.dtype)


@jit
def activated(gate: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation of a float32, by its code."""
    if ACTIVATION == 0:
        # Beyond 80 the result is 0 to float32, and the exponential would overflow.
        gate = gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(u)/2 + 1/2 is the logistic function of 2u.
        gate = gate / (1.0 + tl.exp(tl.minimum(-2.0 * inner, 80.0)))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return gate


@jit
def _gate_mul_kernel(
    x: tl.tensor,
    y: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    gate = activated(gate, ACTIVATION)
    tl.store(y + row * columns + column, (gate * up).to(y.dtype.element_ty), mask=inside)


def gate_mul(
    x: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`gate_mul_ref` by the kernel. Raises ValueError for an odd row."""
    if x.shape[-1] % 2:
        raise ValueError("a row holds a gate and an up of equal length")
    columns = x.shape[-1] // 2
    rows = x.view(-1, x.shape[-1])
    if out is None:
        out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    check_rows(rows)
    check_out(out)
    if len(rows):
        _gate_mul_kernel[(len(rows), cdiv(columns, BLOCK))](
            rows,
            out,
            columns,
            rows.stride(0),
            ACTIVATION=ACTIVATION_CODES[activation],
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


DECLARED = tuple(
    Declared(
        f"gate_mul/{activation}",
        _gate_mul_kernel,
        {"x": "*bf16:16", "y": "*bf16:16", "columns": "i32:16", "x_stride": "i32:16"},
        {"ACTIVATION": code, "BLOCK": BLOCK},
    )
    for activation, code in ACTIVATION_CODES.items()
)
