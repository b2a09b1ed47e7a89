"""Modules that compute with rounded weights, in the places of those that a model was built with.

Linears and embeddings whose weights a pack keeps rounded get other modules in their places
(`replace_modules`), with parameters on meta, of the shapes and types that the pack keeps. Stacked
experts stay the modules they are, with other parameters (`experts.py`). Which weights are rounded,
and how, is `engine/registration/quantize.py`.
"""

import torch
from torch import nn

from engine.modules.experts import keep_rounded
from engine.pack import FP8_SCHEME, ROW_DTYPES, Schemes
from kernels.fp8_linear import fp8_weight_linear
from kernels.int4_blocks import FORMS, block_shape, int4_blocks_linear
from kernels.int8_linear import int8_linear


def replace_modules(model: nn.Module, schemes: Schemes) -> None:
    """Put a module that takes what is kept wherever one of the named weights belongs."""
    for name, scheme in schemes.items():
        parent_name, _, leaf = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(parent_name)
        module = getattr(parent, leaf)
        if isinstance(module, nn.Parameter):
            keep_rounded(parent, leaf, scheme)
            continue
        if is_lookup(module):
            setattr(parent, leaf, RowsEmbedding(module, scheme))
            continue
        assert type(module) is nn.Linear
        made = Int4Linear(module, scheme) if scheme in FORMS else RowsLinear(module, scheme)
        setattr(parent, leaf, made)


class RowsLinear(nn.Module):
    """Stands where an `nn.Linear` stood: `weight` int8 or e4m3 [n, k], `weight_scale` [n], `bias`
    [n]."""

    def __init__(self, linear: nn.Linear, scheme: str) -> None:
        super().__init__()
        # Who wants to know a layer's widths asks its projections.
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.weight_scale = _row_parameters(linear.weight, scheme)
        self.bias = linear.bias
        self._multiply = fp8_weight_linear if scheme == FP8_SCHEME else int8_linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., k] to [..., n]."""
        return self._multiply(hidden, self.weight, self.weight_scale, self.bias)


class RowsEmbedding(nn.Module):
    """Stands where an `nn.Embedding` stood that the head shares: rows by their scales."""

    embed_scale: torch.Tensor | None

    def __init__(self, embedding: nn.Module, scheme: str) -> None:
        super().__init__()
        weight = embedding.get_parameter("weight")
        self._dtype = weight.dtype
        self.weight, self.weight_scale = _row_parameters(weight, scheme)
        factor = getattr(embedding, "embed_scale", None)
        self.register_buffer("embed_scale", factor, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids of any shape to [..., k] of the dtype that is computed in."""
        scale = self.weight_scale[ids][..., None]
        # Not every operator knows e4m3, and picking rows needs no more than bytes.
        picked = self.weight.view(torch.uint8)[ids].view(self.weight.dtype)
        rows = (picked.to(scale.dtype) * scale).to(self._dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


class Int4Linear(nn.Module):
    """Stands where an `nn.Linear` stood: `weight` in blocks of the form `scheme`, `bias` [n]."""

    def __init__(self, linear: nn.Linear, scheme: str) -> None:
        super().__init__()
        self.scheme = scheme
        self.in_features, self.out_features = linear.in_features, linear.out_features
        shape = block_shape(linear.weight.shape, scheme)
        blocks = torch.empty(shape, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(blocks, requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., k] to [..., n]."""
        return int4_blocks_linear(hidden, self.weight, self.bias, self.scheme)


def kept_shape(shape: tuple[int, ...], scheme: str) -> tuple[int, ...]:
    """Of the weight in a pack, scales apart. `shape`: [n, k], or of stacked experts [E, n, k]."""
    return (*shape[:-2], *block_shape(shape[-2:], scheme)) if scheme in FORMS else shape


def kept_dtype(scheme: str) -> torch.dtype:
    """Of the weight in a pack."""
    found = getattr(torch, ROW_DTYPES.get(scheme, "uint8"))
    assert isinstance(found, torch.dtype)
    return found


def scale_dtype(scheme: str, dtype: torch.dtype) -> torch.dtype:
    """Of the scales of rows in a pack that is computed with in `dtype`: fp8's are float32, which
    is what fp8's products take."""
    return torch.float32 if scheme == FP8_SCHEME else dtype


def is_lookup(module: object) -> bool:
    """Whether an embedding is rows of its weight, perhaps times one number."""
    scaled = type(module).__name__.endswith("ScaledWordEmbedding")
    factor = getattr(module, "embed_scale", None)
    return type(module) is nn.Embedding or (scaled and isinstance(factor, torch.Tensor))


def _row_parameters(weight: torch.Tensor, scheme: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Of that shape and dtype, without memory."""
    values = torch.empty(weight.shape, dtype=kept_dtype(scheme), device="meta")
    kind = scale_dtype(scheme, weight.dtype)
    scale = torch.empty(weight.shape[0], dtype=kind, device="meta")
    return nn.Parameter(values, requires_grad=False), nn.Parameter(scale, requires_grad=False)
