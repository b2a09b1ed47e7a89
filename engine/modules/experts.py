"""Stacked experts: all experts of a layer as two parameters, and how a step computes with them.

transformers chooses what its experts modules compute with by a name in the configuration, as for
attention. Ours is registered beside its own (`register_experts`), and every skeleton that steps run
is built with it. Four ways, in this order:

    kernels     plain or int8 weights on a device (kernels/expert_mlp.py), where the gate is of a
                kind that is known there: nothing waits for the choice, and a graph can record it
    C++         weights in bfloat16, int8 or int4 on a processor (kernels/native/experts.h), where
                the gate is of a kind that is known there
    torch       rounded weights: the experts that were hit, one after another
    grouped_mm  the library's own, for weights as they are

A pack keeps rounded experts as if each were a linear [n, k]: int8 [E, n, k] with scales [E, n], or
int4 blocks [E, ...], whichever way round the library has them (`linear_shape`). Weights that are
not rounded stay as the library has them. Which are rounded is `engine/registration/quantize.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from engine.pack import SCALE_SUFFIX
from kernels.expert_mlp import ExpertStack
from kernels.gate_mul import Activation
from kernels.int4_blocks import FORMS, INT4_BLOCKS, ROWS, block_shape, int4_blocks_linear
from kernels.int8_linear import int8_linear
from kernels.native_calls import (
    ACTIVATIONS,
    Experts,
    Gate,
    Linear,
    Mixture,
    NativeLibrary,
    Router,
    format_of,
)

EXPERTS_NAME = "polyhost"
# What the library's decorator leaves on a module of experts.
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_POST_NORM = "has_post_expert_norm"
"""Transformers 5.17 has it not yet."""
_LIBRARY = "polyhost_library"
_OPERATION = "polyhost_operation"
_SCHEME = "_polyhost_scheme"
"""Behind a weight's name: the form of its blocks."""
_KNOWN_ACTIVATIONS: Mapping[type, Activation] = {
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu"]): "gelu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}
# Blocks whose router takes a softmax of one product: is the sum of the chosen weights made one?
_ROUTERS: Mapping[str, Callable[[Any], bool]] = {
    "Qwen3MoeSparseMoeBlock": lambda router: bool(router.norm_topk_prob),
    "MixtralSparseMoeBlock": lambda router: True,
}
ExpertsCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertStack], torch.Tensor]
# Neighbours as gate and up, cut at a limit: (up + 1) gate sigmoid(alpha gate).
_CLAMPED_PAIRS = frozenset({"GptOssExperts"})


def register_experts() -> None:
    """Make `EXPERTS_NAME` known to transformers. Idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def is_experts(module: nn.Module) -> bool:
    """Whether it computes with what `config._experts_implementation` names."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def expert_weights(model: nn.Module) -> frozenset[str]:
    """The stacked weights of all experts modules, by their names in the model."""
    return frozenset(
        f"{prefix}.{leaf}"
        for prefix, module in model.named_modules()
        if is_experts(module)
        for leaf in _leaves(module)
        if module.get_parameter(leaf).dim() == 3
    )


def linear_shape(model: nn.Module, name: str) -> tuple[int, ...]:
    """Of a weight as a linear has it: [n, k], or [E, n, k] of stacked experts."""
    return tuple(as_linears(model, name, model.get_parameter(name)).shape)


def as_linears(model: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Such a weight, or some experts of it, turned from the library's way round to a linear's; or
    back, which is the same."""
    owner = model.get_submodule(name.rpartition(".")[0])
    turned = weight.dim() == 3 and is_experts(owner) and owner.is_transposed
    return weight.transpose(1, 2) if turned else weight


def keep_rounded(experts: nn.Module, leaf: str, scheme: str) -> None:
    """Make a stacked weight a parameter on meta of the shape and type that a pack keeps."""
    old = experts.get_parameter(leaf)
    num, n, k = linear_shape(experts, leaf)
    if scheme in FORMS:
        kept = torch.empty(num, *block_shape((n, k), scheme), dtype=torch.uint8, device="meta")
        setattr(experts, leaf + _SCHEME, scheme)
    else:
        kept = torch.empty(num, n, k, dtype=torch.int8, device="meta")
        scale = torch.empty(num, n, dtype=old.dtype, device="meta")
        experts.register_parameter(leaf + SCALE_SUFFIX, nn.Parameter(scale, requires_grad=False))
    experts.register_parameter(leaf, nn.Parameter(kept, requires_grad=False))


def use_library(model: nn.Module, library: NativeLibrary) -> None:
    """Experts on this processor run by C++ from now on, where that knows their form."""
    for module in model.modules():
        if is_experts(module):
            setattr(module, _LIBRARY, library)


def use_operation(model: nn.Module, operation: ExpertsCall) -> bool:
    """Experts run by this from now on, where it knows their form; whether that is so of all."""
    all_known = True
    for module in model.modules():
        if is_experts(module):
            if device_form(module) is None:
                all_known = False
            else:
                setattr(module, _OPERATION, operation)
    return all_known


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface: hidden [T, H], top_k_index and top_k_weights [T, K] to
    [T, H]. An index of num_experts or beyond is no expert's."""
    operation: ExpertsCall | None = getattr(module, _OPERATION, None)
    if operation is not None:
        stack = device_form(module)
        assert stack is not None
        if stack.gate_up_scale is not None or hidden.dtype == stack.gate_up.dtype:
            return operation(hidden, top_k_index.contiguous(), top_k_weights.contiguous(), stack)
    library: NativeLibrary | None = getattr(module, _LIBRARY, None)
    if library is not None and hidden.dtype == torch.bfloat16:
        native, _ = native_form(module, hidden.shape[-1])
        if native is not None:
            return library.experts(
                native, hidden.contiguous(), top_k_index.long(), top_k_weights.float()
            )
    if all(module.get_parameter(leaf).is_floating_point() for leaf in _leaves(module)):
        found: torch.Tensor = grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
        return found
    return _by_torch(module, hidden, top_k_index, top_k_weights)


def device_form(module: Any) -> ExpertStack | None:
    """By the weights of now; None where no kernel knows the gate, or the weights' type."""
    up, down = (module.get_parameter(leaf) for leaf in _leaves(module))
    is_plain = up.is_floating_point()
    if not (is_plain or up.dtype == torch.int8) or down.dtype != up.dtype:
        return None
    try:
        gate = _gate(module)
    except ValueError:
        return None
    clamped = gate.layout == 1
    values = {
        f"{ours}_{kind}": getattr(module, leaf + suffix, None)
        for ours, leaf in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
        for kind, suffix, there in (
            ("bias", "_bias", module.has_bias),
            ("scale", SCALE_SUFFIX, not is_plain),
        )
        if there
    }
    return ExpertStack(
        up,
        down,
        "silu" if clamped else _KNOWN_ACTIVATIONS[type(module.act_fn)],
        transposed=module.is_transposed and is_plain,
        interleaved=clamped,
        limit=gate.limit if clamped else None,
        alpha=gate.alpha,
        plus=gate.shift,
        **values,
    )


def native_form(module: Any, size: int) -> tuple[Experts | None, str]:
    """Of rows of `size` values: by the addresses of now, everything looked at, for C++ looks at
    nothing. Or None and why not."""
    try:
        gate = _gate(module)
        up = _stack(module, "gate_up_proj", size)
        if up.n % 2:
            raise ValueError("gate and up are of unlike sizes")
        down = _stack(module, "down_proj", up.n // 2)
        if down.n != size:
            raise ValueError(f"experts make {down.n} of {size} values")
    except ValueError as why:
        return None, str(why)
    strides = (
        module.get_parameter(leaf).stride(0) * module.get_parameter(leaf).element_size()
        for leaf in ("gate_up_proj", "down_proj")
    )
    return Experts(up, down, *strides, gate, module.num_experts), ""


def native_mixture(block: Any, size: int) -> Mixture | None:
    """A layer's router and experts, where the block is nothing more than these and both are known
    to C++: the router's products are float32 there, not rounded before the choice."""
    normalizes = _ROUTERS.get(type(block).__name__)
    if normalizes is None:
        return None
    experts, _ = native_form(block.experts, size)
    weight = block.gate.weight
    plain = weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if experts is None or not plain or weight.shape != (experts.num_experts, size):
        return None
    top_k = block.gate.top_k
    if not 0 < top_k <= experts.num_experts:
        return None
    plainly = format_of(torch.bfloat16)
    assert plainly is not None
    gate = plainly.linear(weight.data_ptr(), None, None, experts.num_experts, size)
    return Mixture(Router(gate, top_k, normalizes(block.gate)), experts)


def _gate(module: Any) -> Gate:
    if not module.has_gate or getattr(module, _POST_NORM, False):
        raise ValueError("experts have no gate, or a norm")
    if type(module).__name__ in _CLAMPED_PAIRS:
        return Gate(1, ACTIVATIONS["silu"], module.alpha, module.limit, 1.0)
    activation = _KNOWN_ACTIVATIONS.get(type(getattr(module, "act_fn", None)))
    if type(module)._apply_gate is not _default_apply_gate or activation is None:
        raise ValueError("the experts' gate is of a kind that C++ does not know")
    return Gate(0, ACTIVATIONS[activation], 1.0, float("inf"), 0.0)


def _stack(module: Any, leaf: str, k: int) -> Linear:
    """The first expert's. Raises ValueError."""
    weight = module.get_parameter(leaf)
    scale = getattr(module, leaf + SCALE_SUFFIX, None)
    bias = getattr(module, f"{leaf}_bias", None) if module.has_bias else None
    in_blocks, scheme = weight.dtype == torch.uint8, _scheme_of(module, leaf)
    rows = weight.shape[1] * (ROWS if in_blocks else 1)
    shape = block_shape((rows, k), scheme) if in_blocks else (rows, k)
    known = format_of(weight.dtype, scheme)
    if known is None or (module.is_transposed and weight.is_floating_point()):
        raise ValueError(f"experts are {weight.dtype}, transposed: {module.is_transposed}")
    if weight.device.type != "cpu" or not weight.is_contiguous():
        raise ValueError("experts are strided, or not in a processor's memory")
    if weight.shape != (module.num_experts, *shape) or (scale is None) == (
        weight.dtype == torch.int8
    ):
        raise ValueError(f"experts are {tuple(weight.shape)} for rows of {k}")
    for values in (bias, scale):
        if values is not None and (
            values.dtype != torch.bfloat16
            or values.shape != (module.num_experts, rows)
            or not values.is_contiguous()
        ):
            raise ValueError(f"values of experts are {values.dtype} {tuple(values.shape)}")
    where, factors = (None if values is None else values.data_ptr() for values in (bias, scale))
    return known.linear(weight.data_ptr(), where, factors, rows, k)


def _scheme_of(module: Any, leaf: str) -> str:
    found: str = getattr(module, leaf + _SCHEME, INT4_BLOCKS)
    return found


def _by_torch(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """A token's experts are added up in the order of their numbers, in float32."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for number in sorted(set(top_k_index.flatten().tolist())):
        if not 0 <= number < module.num_experts:
            continue
        token, place = torch.where(top_k_index == number)
        inner = _product(module, first, number, hidden[token])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        said = _product(module, "down_proj", number, inner)
        if getattr(module, _POST_NORM, False):
            said = module.post_expert_norm(said)
        out.index_add_(0, token, said.float() * top_k_weights[token, place, None].float())
    return out.to(hidden.dtype)


def _product(module: Any, leaf: str, number: int, rows: torch.Tensor) -> torch.Tensor:
    weight = module.get_parameter(leaf)[number]
    bias = getattr(module, f"{leaf}_bias")[number] if module.has_bias else None
    if weight.dtype == torch.uint8:
        return int4_blocks_linear(rows, weight, bias, _scheme_of(module, leaf))
    if weight.dtype == torch.int8:
        return int8_linear(rows, weight, getattr(module, leaf + SCALE_SUFFIX)[number], bias)
    return functional.linear(rows, weight.t() if module.is_transposed else weight, bias)


def _leaves(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
