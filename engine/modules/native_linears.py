"""Linears of modules by the C++ kernels: for models whose layers nobody has fused.

torch multiplies bfloat16 on a processor at a fraction of the speed of kernels/native/linear.h, and
int8 and int4 only after it has widened them. So where there is a library, linears that a model's
own forward calls go there, one by one, whatever the model is. A row's result is the same to the bit
alone and in a batch.

What the kernels do not take (float32, strided inputs, other forms) goes the way it went before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.modules.quantized import Int4Linear, RowsLinear
from kernels.int4_blocks import INT4_BLOCKS
from kernels.native_calls import NativeLibrary, format_of


def use_linears(model: nn.Module, library: NativeLibrary) -> None:
    """Let the library multiply wherever it can."""
    for module in model.modules():
        if type(module) is nn.Linear or isinstance(module, RowsLinear | Int4Linear):
            module.forward = _NativeForward(module, library)  # type: ignore[method-assign]


class _NativeForward:
    """One linear's forward. Weights come and go: what they are is looked at in each call."""

    def __init__(self, module: Any, library: NativeLibrary) -> None:
        self._module = module
        self._library = library
        self._scheme: str = getattr(module, "scheme", INT4_BLOCKS)
        self._plain: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., k] to [..., n]."""
        module = self._module
        weight, bias = module.weight, module.bias
        scale = getattr(module, "weight_scale", None)
        if (
            hidden.dtype != torch.bfloat16
            or not hidden.is_contiguous()
            or not weight.is_contiguous()
            or format_of(weight.dtype, self._scheme) is None
            or (scale is None) != (weight.dtype != torch.int8)
            or (bias is not None and bias.dtype != torch.bfloat16)
        ):
            return self._plain(hidden)
        flat = hidden.view(-1, hidden.shape[-1])
        out = self._library.linear(flat, weight, bias, scale=scale, scheme=self._scheme)
        return out.view(*hidden.shape[:-1], -1)
