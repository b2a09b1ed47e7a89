"""Quantized weights: which ones, how they are rounded, and the modules that take their places.

    int8   linears of the decoder layers and the vocabulary, a byte a weight and one scale for each
           row, symmetric: w[n, k] ~ q[n, k] * scale[n], |q| <= 127
    fp8    the same weights in e4m3, the largest of a row 448; scales are float32. Not experts
    int4   linears of the layers in blocks of four bits with a scale for 32 weights, or, where a
           checkpoint has codes of four bits already, in the form that keeps them
           (kernels/int4_blocks.py); the vocabulary, and what cannot be cut into blocks, as in int8

Experts that are stacked in one parameter are linears here, each by itself (engine/modules/
experts.py). Their biases, where they have some, stay as they are.

The vocabulary is the head, where it has a weight of its own, or the embedding that it shares: one
matrix then serves both, a row a token, and a token's scale is its row's. At few sequences the head
is a third of a small model's bytes. Everything else stays as it is: embeddings of their own (a
lookup reads one row), norms, biases, routers, what is read as a tensor and not multiplied by
(engine/modules/latent.py), and whatever is no plain `nn.Linear` (GPT-2's Conv1D), which would need
rules of its own.

A scale is rounded to the dtype it is kept in before the weights are divided by it, so that what is
kept is exactly what is computed with.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from engine.errors import RegistrationRefused
from engine.modules.experts import as_linears, expert_weights, linear_shape
from engine.modules.indexers import indexer_linears
from engine.modules.latent import read_weights
from engine.modules.quantized import is_lookup, kept_shape, scale_dtype
from engine.modules.state_mixers import read_linears
from engine.pack import FP8_SCHEME, INT8_SCHEME, SCALE_SUFFIX, Schemes
from engine.registration.blueprint import REST, Blueprint, layer_of
from engine.registration.layout import neighbours
from kernels import int4_blocks
from kernels.int4_blocks import FORMS, INT4_BLOCKS, ZEROS, Steps
from kernels.scaled_linear import quantize_fp8

INT8 = "int8"
FP8 = "fp8"
INT4 = "int4"
QUANTIZATIONS = (INT8, FP8, INT4)
LIMIT = 127
# Of stacked experts' rows that are rounded to int8 together: their float32 copies stay small.
ROUNDED_AT_ONCE = 1 << 21
# Choices between experts and gates over whole branches: a step of rounding there is a wrong turn.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "classifier"})


def _nothing_known(name: str) -> str:
    return ""


def schemes_of(
    plan: Blueprint,
    names: Collection[str],
    quantization: str,
    known: Callable[[str], str] = _nothing_known,
) -> Schemes:
    """Those of `names` to quantize. Raises RegistrationRefused where no layer has any.

    `known`: the form that keeps the codes that a weight has already, "" for none.
    """
    chosen = _schemes(plan.skeleton, plan.tied, names, quantization)
    if quantization == INT4:
        chosen |= _forms(plan, chosen, known)
    chosen = {
        name: scheme
        for name, scheme in chosen.items()
        if plan.dtype_of(name, torch.bfloat16) == torch.bfloat16
    }
    if plan.encoder is not None or all(layer_of(name) == REST for name in chosen):
        raise RegistrationRefused(
            "cannot_quantize",
            f"{quantization} is not supported for the model type {plan.config.model_type!r}: it "
            "needs plain linear layers of decoders; register the model with another dtype",
        )
    return chosen


def _forms(
    plan: Blueprint, chosen: Mapping[str, str], known: Callable[[str], str]
) -> dict[str, str]:
    """The forms of int4 that keep the most. Projections that one product takes have one form: that
    of those that have codes, where these agree; else one that holds the codes of all, or none's.
    """
    own = {name: known(name) for name, scheme in chosen.items() if scheme in FORMS}
    own = {name: form if form in FORMS else "" for name, form in own.items()}
    found = {name: scheme or INT4_BLOCKS for name, scheme in own.items()}
    for group in neighbours(plan, frozenset(found)):
        wanted = {own[name] for name in group.members} - {""}
        if len(wanted) > 1:
            wanted = {ZEROS if wanted <= {INT4_BLOCKS, ZEROS} else INT4_BLOCKS}
        found |= dict.fromkeys(group.members, min(wanted, default=INT4_BLOCKS))
    return found


def kept_bytes(shape: tuple[int, ...], scheme: str) -> int:
    """Of a weight [n, k] or [E, n, k] in a pack, with its scales."""
    item = 0 if scheme in FORMS else scale_dtype(scheme, torch.bfloat16).itemsize
    return math.prod(kept_shape(shape, scheme)) + item * math.prod(shape[:-1])


def layer_linears(model: nn.Module) -> frozenset[str]:
    """Weights of the plain linears in the layers, but for routers and what is read as a tensor."""
    found = frozenset(
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if type(module) is nn.Linear
        and layer_of(f"{prefix}.weight") != REST
        and prefix.rpartition(".")[2] not in _ROUTERS
    )
    return found - read_weights(model) - read_linears(model) - indexer_linears(model)


def vocabulary(model: nn.Module, tied: Mapping[str, str], names: Collection[str]) -> str:
    """The weight among `names` that makes the logits, or "" where it is not to be rounded."""
    places = {id(module): prefix for prefix, module in model.named_modules()}
    head, embedding = (
        getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("output", "input")
    )
    # Mamba's classes give their states the type of the head's weight, which rounding would change.
    reads_weight = "weight" in inspect.unwrap(type(model).forward).__code__.co_names
    if type(head) is not nn.Linear or reads_weight:
        return ""
    name = f"{places[id(head)]}.weight"
    if name in names:
        return name
    shared = f"{places.get(id(embedding))}.weight"
    if tied.get(name) == shared and shared in names and is_lookup(embedding):
        return shared
    return ""


def _schemes(
    model: nn.Module, tied: Mapping[str, str], names: Collection[str], quantization: str
) -> dict[str, str]:
    linears = layer_linears(model) | expert_weights(model)
    by_rows = FP8_SCHEME if quantization == FP8 else INT8_SCHEME
    if quantization == FP8 and expert_weights(model).intersection(names):
        raise RegistrationRefused(
            "cannot_quantize",
            "fp8 is not supported for mixtures of experts; register the model with another dtype, "
            "int8 for example",
        )
    found = dict.fromkeys(linears.intersection(names), by_rows)
    if quantization == INT4:
        for name in found:
            if int4_blocks.fits(linear_shape(model, name)[-2:]):
                found[name] = INT4_BLOCKS
    head = vocabulary(model, tied, names)
    return found | ({head: by_rows} if head else {})


def quantize_rows(
    weight: torch.Tensor,
    dtype: torch.dtype,
    scheme: str = INT8_SCHEME,
    steps: Steps | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] of any float to int8 or e4m3 [n, k] and scales [n] of `dtype`. Raises ValueError on
    NaN.

    `steps`: of e4m3 that the weight was rounded to before, one a row.
    """
    if scheme == FP8_SCHEME:
        return quantize_fp8(weight, dtype, None if steps is None else steps.scale[:, 0])
    exact = weight.to(torch.float32)
    largest = exact.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("the weights contain values that are not finite and cannot be quantized")
    scale = (largest / LIMIT).to(dtype)
    # A channel of zeros, or one so small that its scale is nothing in this dtype.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    rounded = (exact / scale.to(torch.float32)[:, None]).round_().clamp_(-LIMIT, LIMIT)
    return rounded.to(torch.int8), scale


def quantize_stack(
    stack: torch.Tensor, scheme: str, dtype: torch.dtype, steps: Steps | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Experts [E, n, k], perhaps a view, as they are kept; int8: and their scales [E, n].

    `steps`: of these experts [E, n, groups], see `int4_blocks.quantize`. Raises ValueError on NaN.
    """
    if scheme in FORMS:
        made = [
            int4_blocks.quantize(weight, steps=steps and steps.of_expert(number), scheme=scheme)
            for number, weight in enumerate(stack)
        ]
        return torch.stack(made), None
    step = max(1, ROUNDED_AT_ONCE // stack.shape[2])
    rounded = [[quantize_rows(part, dtype) for part in weight.split(step)] for weight in stack]
    values, scales = (
        torch.stack([torch.cat([part[i] for part in parts]) for parts in rounded]) for i in (0, 1)
    )
    return values, scales


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What int8 and fp8 weights stand for, exactly: float32 [n, k]."""
    return weight.to(torch.float32) * scale.to(torch.float32)[:, None]


def dequantize_stack(
    stack: torch.Tensor, scale: torch.Tensor | None, shape: tuple[int, ...], scheme: str
) -> torch.Tensor:
    """What kept experts stand for: float32 of that shape [E, n, k]."""
    if scale is None:
        return torch.stack([int4_blocks.dequantize(blocks, shape[2], scheme) for blocks in stack])
    return torch.stack([dequantize(*pair) for pair in zip(stack, scale, strict=True)])


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
        if weight.dim() == 3:
            shape = linear_shape(model, name)
            stack = as_linears(model, name, weight)
            kept[name], scales = quantize_stack(stack, scheme, weight.dtype)
            if scales is not None:
                kept[name + SCALE_SUFFIX] = scales
            wide = dequantize_stack(kept[name], scales, shape, scheme).to(weight.dtype)
            exact[name] = as_linears(model, name, wide).contiguous()
        elif scheme in FORMS:
            kept[name] = int4_blocks.quantize(weight, scheme=scheme)
            wide = int4_blocks.dequantize(kept[name], weight.shape[1], scheme)
            exact[name] = wide.to(weight.dtype)
        else:
            kept[name], scale = quantize_rows(weight, scale_dtype(scheme, weight.dtype), scheme)
            kept[name + SCALE_SUFFIX] = scale
            exact[name] = dequantize(kept[name], scale).to(weight.dtype)
    for name, holder in shared.items():
        if holder in chosen:
            kept[name], exact[name] = kept[holder], exact[holder]
            kept[name + SCALE_SUFFIX] = kept[holder + SCALE_SUFFIX]
            chosen[name] = chosen[holder]
    return kept, exact, chosen
