"""Weight-only int8: which weights, how they are rounded, and the module that takes their place.

Linears of the decoder layers are kept as int8 with one scale for each output channel, symmetric:
w[n, k] ~ q[n, k] * scale[n], |q| <= 127. Everything else stays as it is: embeddings and the head
(a vocabulary's rows decide between tokens), norms, biases, routers, and whatever is no plain
`nn.Linear` (GPT-2's Conv1D, stacked experts), which would need rules of its own.

The scale is rounded to the dtype it is kept in before the weights are divided by it, so that what
is kept is exactly what is computed with.
"""

from collections.abc import Iterable

import torch
from torch import nn

from engine.errors import RegistrationRefused
from engine.packs.blueprint import REST, Blueprint, layer_of
from engine.packs.pack import SCALE_SUFFIX
from kernels.int8_linear import int8_linear

INT8 = "int8"
LIMIT = 127
# Choices between experts and gates over whole branches: a step of rounding there is a wrong turn.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "classifier"})


def int8_weights(plan: Blueprint, names: list[str]) -> frozenset[str]:
    """Those of `names` to keep as int8. Raises RegistrationRefused where there are none."""
    chosen = {
        name
        for name in layer_linears(plan.skeleton).intersection(names)
        if plan.dtype_of(name, torch.bfloat16) == torch.bfloat16
    }
    if plan.encoder is not None or not chosen:
        raise RegistrationRefused(
            "cannot_quantize",
            f"int8 is for plain linears of decoders, and a {plan.config.model_type!r} has none; "
            "register it with another dtype",
        )
    return frozenset(chosen)


def layer_linears(model: nn.Module) -> frozenset[str]:
    """Weights of the plain linears in the layers, but for routers."""
    return frozenset(
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if type(module) is nn.Linear
        and layer_of(f"{prefix}.weight") != REST
        and prefix.rpartition(".")[2] not in _ROUTERS
    )


def quantize_rows(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] of any float to int8 [n, k] and scales [n] of `dtype`. Raises ValueError on NaN."""
    exact = weight.to(torch.float32)
    largest = exact.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weights that are not finite cannot be quantized")
    scale = (largest / LIMIT).to(dtype)
    # A channel of zeros, or one so small that its scale is nothing in this dtype.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    rounded = (exact / scale.to(torch.float32)[:, None]).round_().clamp_(-LIMIT, LIMIT)
    return rounded.to(torch.int8), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What int8 weights stand for, exactly: float32 [n, k]."""
    return weight.to(torch.float32) * scale.to(torch.float32)[:, None]


def rounded_twins(
    model: nn.Module, weights: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All weights with the linears as int8 and scales, and with what these stand for.

    For comparing the two ways without the loss that rounding is.
    """
    kept, exact = dict(weights), dict(weights)
    for name in layer_linears(model):
        values, scale = quantize_rows(weights[name], weights[name].dtype)
        kept[name], kept[name + SCALE_SUFFIX] = values, scale
        exact[name] = dequantize(values, scale).to(weights[name].dtype)
    return kept, exact


def weights_of_scales(tensors: Iterable[str]) -> list[str]:
    """Of a model's tensors, the weights that have scales."""
    return [
        name.removesuffix(SCALE_SUFFIX)
        for name in tensors
        if name.endswith(f".weight{SCALE_SUFFIX}")
    ]


class Int8Linear(nn.Module):
    """Stands where an `nn.Linear` stood: `weight` int8 [n, k], `weight_scale` [n], `bias` [n]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        out_features, in_features = linear.weight.shape
        self.in_features, self.out_features = in_features, out_features
        meta = torch.device("meta")
        empty = torch.empty(out_features, in_features, dtype=torch.int8, device=meta)
        self.weight = nn.Parameter(empty, requires_grad=False)
        scale = torch.empty(out_features, dtype=linear.weight.dtype, device=meta)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., k] to [..., n]."""
        return int8_linear(hidden, self.weight, self.weight_scale, self.bias)


def replace_linears(model: nn.Module, weights: Iterable[str]) -> None:
    """Put an Int8Linear wherever one of the named weights belongs."""
    for name in weights:
        parent_name, _, leaf = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = getattr(parent, leaf)
        assert type(linear) is nn.Linear
        setattr(parent, leaf, Int8Linear(linear))
