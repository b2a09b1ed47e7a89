"""Depthwise causal convolution of a few taps over each row of a step (Mamba, Qwen3-Next, LFM2).

    x [T, C], rows a stride apart    weight [C, K]    bias [C] or none    out [T, C]
    state [C, K]  the last K inputs of a sequence, oldest first; zeros before its beginning

    y[t, c] = act(bias[c] + sum over j of weight[c, j] x[t - K + 1 + j, c])      act: SiLU or none

One entry more is kept than the next token needs, as transformers keeps it. Float32 inside, rounded
once (the library rounds before the SiLU too). Bytes moved: x and y once, weight once, and the state
once in and once out for each row.
"""

from typing import Any

import torch
from torch.nn import functional

from kernels.state_rows import LayerState, advance_ref
from kernels.triton_api import Declared, cdiv, check_rows, jit, next_power_of_2, tl

# Taps that the C++ kernel has code for.
MAX_TAPS = 8


def check_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerState
) -> None:
    """Raises ValueError for shapes and types that do not fit."""
    channels, taps = weight.shape
    state.check((channels, taps), x.dtype)
    if x.shape[1] != channels or not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{x.shape[1]} channels for a weight {channels} x {taps}")
    if not weight.is_contiguous() or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError("x, weight and bias have one type, and the weight has no gaps")
    check_rows(x)


def short_conv_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    state: LayerState,
) -> torch.Tensor:
    """The definition: out [T, C]; states are moved on in the arena."""
    check_conv(x, weight, bias, state)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def step(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        states = torch.cat([states[:, :, 1:], x[tokens, :, None]], -1)
        y = (states.float() * weight.float()).sum(-1)
        y = y if bias is None else y + bias.float()
        out[tokens] = (functional.silu(y) if silu else y).to(x.dtype)
        return states

    advance_ref(state, step)
    return out
