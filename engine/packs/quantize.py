"""Quantized weights: which ones, how they are rounded, and the modules that take their places.

    int8   linears of the decoder layers and the vocabulary, a byte a weight and one scale for each
           row, symmetric: w[n, k] ~ q[n, k] * scale[n], |q| <= 127
    int4   linears of the layers in blocks of four bits with a scale for 32 weights
           (kernels/int4_blocks.py); the vocabulary, and what cannot be cut into blocks, as in int8

The vocabulary is the head, where it has a weight of its own, or the embedding that it shares: one
matrix then serves both, a row a token, and a token's scale is its row's. At few sequences the head
is a third of a small model's bytes. Everything else stays as it is: embeddings of their own (a
lookup reads one row), norms, biases, routers, and whatever is no plain `nn.Linear` (GPT-2's Conv1D,
stacked experts), which would need rules of its own.

A scale is rounded to the dtype it is kept in before the weights are divided by it, so that what is
kept is exactly what is computed with.
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from engine.errors import RegistrationRefused
from engine.packs.blueprint import REST, Blueprint, layer_of
from engine.packs.pack import INT4_SCHEME, INT8_SCHEME, SCALE_SUFFIX, PackIndex
from kernels import int4_blocks
from kernels.int8_linear import int8_linear

INT8 = "int8"
INT4 = "int4"
QUANTIZATIONS = (INT8, INT4)
LIMIT = 127
# Choices between experts and gates over whole branches: a step of rounding there is a wrong turn.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "classifier"})

Schemes = Mapping[str, str]
"""Name of a weight -> how it is kept (`TensorEntry.scheme`)."""


def schemes_of(plan: Blueprint, names: Collection[str], quantization: str) -> Schemes:
    """Those of `names` to quantize. Raises RegistrationRefused where no layer has any."""
    chosen = _schemes(plan.skeleton, plan.tied, names, quantization)
    chosen = {
        name: scheme
        for name, scheme in chosen.items()
        if plan.dtype_of(name, torch.bfloat16) == torch.bfloat16
    }
    if plan.encoder is not None or all(layer_of(name) == REST for name in chosen):
        raise RegistrationRefused(
            "cannot_quantize",
            f"{quantization} is for plain linears of decoders, and a {plan.config.model_type!r} "
            "has none; register it with another dtype",
        )
    return chosen


def schemes_in(index: PackIndex) -> Schemes:
    """Of a pack's weights, by all their names."""
    found = {entry.name: entry.scheme for entry in index.tensors if entry.scheme}
    shared = {name: found[holder] for name, holder in index.tied.items() if holder in found}
    return found | shared


def kept_bytes(shape: torch.Size, scheme: str) -> int:
    """Of a weight in a pack, with its bfloat16 scales."""
    if scheme == INT4_SCHEME:
        return torch.Size(int4_blocks.block_shape(shape)).numel()
    return shape.numel() + 2 * shape[0]


def layer_linears(model: nn.Module) -> frozenset[str]:
    """Weights of the plain linears in the layers, but for routers."""
    return frozenset(
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if type(module) is nn.Linear
        and layer_of(f"{prefix}.weight") != REST
        and prefix.rpartition(".")[2] not in _ROUTERS
    )


def vocabulary(model: nn.Module, tied: Mapping[str, str], names: Collection[str]) -> str:
    """The weight among `names` that makes the logits, or "" where it is not to be rounded."""
    places = {id(module): prefix for prefix, module in model.named_modules()}
    head, embedding = (
        getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("output", "input")
    )
    if type(head) is not nn.Linear:
        return ""
    name = f"{places[id(head)]}.weight"
    if name in names:
        return name
    shared = f"{places.get(id(embedding))}.weight"
    if tied.get(name) == shared and shared in names and is_lookup(embedding):
        return shared
    return ""


def is_lookup(module: object) -> bool:
    """Whether an embedding is rows of its weight, perhaps times one number."""
    scaled = type(module).__name__.endswith("ScaledWordEmbedding")
    factor = getattr(module, "embed_scale", None)
    return type(module) is nn.Embedding or (scaled and isinstance(factor, torch.Tensor))


def _schemes(
    model: nn.Module, tied: Mapping[str, str], names: Collection[str], quantization: str
) -> dict[str, str]:
    found = dict.fromkeys(layer_linears(model).intersection(names), INT8_SCHEME)
    if quantization == INT4:
        for name in found:
            if int4_blocks.fits(model.get_parameter(name).shape):
                found[name] = INT4_SCHEME
    head = vocabulary(model, tied, names)
    return found | ({head: INT8_SCHEME} if head else {})


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
    model: nn.Module,
    tied: Mapping[str, str],
    weights: Mapping[str, torch.Tensor],
    quantization: str,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Schemes]:
    """All weights as they would be kept, those that these stand for, and which are rounded how.

    For comparing the two ways without the loss that rounding is.
    """
    kept, exact = dict(weights), dict(weights)
    shared = {name: holder for name, holder in tied.items() if name in weights}
    names = [name for name in weights if name not in shared]
    chosen = _schemes(model, shared, names, quantization)
    for name, scheme in chosen.items():
        weight = weights[name]
        if scheme == INT4_SCHEME:
            kept[name] = int4_blocks.quantize(weight)
            exact[name] = int4_blocks.dequantize(kept[name], weight.shape[1]).to(weight.dtype)
        else:
            kept[name], scale = quantize_rows(weight, weight.dtype)
            kept[name + SCALE_SUFFIX] = scale
            exact[name] = dequantize(kept[name], scale).to(weight.dtype)
    for name, holder in shared.items():
        if holder in chosen:
            kept[name], exact[name] = kept[holder], exact[holder]
            kept[name + SCALE_SUFFIX] = kept[holder + SCALE_SUFFIX]
            chosen[name] = chosen[holder]
    return kept, exact, chosen


class Int8Linear(nn.Module):
    """Stands where an `nn.Linear` stood: `weight` int8 [n, k], `weight_scale` [n], `bias` [n]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Who wants to know a layer's widths asks its projections.
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.weight_scale = _int8_parameters(linear.weight)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., k] to [..., n]."""
        return int8_linear(hidden, self.weight, self.weight_scale, self.bias)


class Int8Embedding(nn.Module):
    """Stands where an `nn.Embedding` stood that the head shares: rows by their scales."""

    embed_scale: torch.Tensor | None

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.weight, self.weight_scale = _int8_parameters(embedding.get_parameter("weight"))
        factor = getattr(embedding, "embed_scale", None)
        self.register_buffer("embed_scale", factor, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids of any shape to [..., k] of the scales' dtype."""
        scale = self.weight_scale[ids][..., None]
        rows = self.weight[ids].to(scale.dtype) * scale
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


class Int4Linear(nn.Module):
    """Stands where an `nn.Linear` stood: `weight` in blocks, `bias` [n]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        shape = int4_blocks.block_shape(linear.weight.shape)
        blocks = torch.empty(shape, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(blocks, requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., k] to [..., n]."""
        return int4_blocks.int4_blocks_linear(hidden, self.weight, self.bias)


def _int8_parameters(weight: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """Of that shape and dtype, without memory."""
    values = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    scale = torch.empty(weight.shape[0], dtype=weight.dtype, device="meta")
    return nn.Parameter(values, requires_grad=False), nn.Parameter(scale, requires_grad=False)


def replace_modules(model: nn.Module, schemes: Schemes) -> None:
    """Put a module that takes what is kept wherever one of the named weights belongs."""
    for name, scheme in schemes.items():
        parent_name, _, leaf = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(parent_name)
        module = getattr(parent, leaf)
        if is_lookup(module):
            setattr(parent, leaf, Int8Embedding(module))
            continue
        assert type(module) is nn.Linear
        setattr(parent, leaf, (Int4Linear if scheme == INT4_SCHEME else Int8Linear)(module))
