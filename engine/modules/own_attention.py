"""Families whose attention is code of its own: it computes over our pages all the same.

They know nothing of transformers' attention interface. What stands between their projections and
our attention is found by structure, in one of four forms, and replaced on the instance:

    _attn       the product of softmax and V is a method of that name (GPT-J, CodeGen, GPT-Neo,
                GPT-NeoX Japanese)
    alibi       forward(hidden, residual, alibi, ...): positions are slopes, the residual is added
                by the attention (BLOOM)
    bias        forward(hidden, position_bias, ...): positions are slopes (MPT)
    rotary      forward(hidden, alibi, ..., position_embeddings) without slopes: rotary, one K and V
                a group of queries, which the library repeats (Falcon)

Slopes (ALiBi): a score of query i and key j is increased by slope * (j - i), by head. They are
computed by the model's own method, and are the attention's beside its tensors.

Whether a family comes out right, the parity probe finds out. Falcon with ALiBi is not among them:
the library rounds slope * j to bfloat16, counted from the sequence's beginning.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

OwnForm: TypeAlias = Literal["_attn", "alibi", "bias", "rotary"]

MASKED_NAME = "polyhost_own"
"""An attention whose mask is nothing, for bodies that want one."""
SLOPES = "polyhost_slopes"


def takes_interface(config: Any) -> bool:
    """Whether the family's modules call attention by the name the configuration gives."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    says = getattr(model_class, "_can_set_attn_implementation", None)
    return bool(says()) if says is not None else True


def may_be_replaced(config: Any) -> bool:
    """Whether some class of the family's has attention of a form below; nothing is built."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return False
    names = vars(sys.modules[model_class.__module__]).values()
    kinds = (kind for kind in names if inspect.isclass(kind) and issubclass(kind, nn.Module))
    forms = {_form_of_class(kind) for kind in kinds} - {None}
    return bool(forms - {"rotary"} if getattr(config, "alibi", False) else forms)


def own_layers(model: nn.Module) -> Iterator[tuple[int, OwnForm, Any]]:
    """(layer, form, module) of the attention modules that can be replaced."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        form = _form_of(module)
        if form is not None and isinstance(layer, int):
            yield layer, form, module


def kv_heads_of(form: OwnForm, module: Any) -> int | None:
    """How many heads of K and V such a module keeps, where the configuration does not say."""
    return int(module.num_kv_heads) if form == "rotary" else None


def has_slopes(model: nn.Module) -> bool:
    """Whether positions are slopes that attention must know, in a model that `install` has seen."""
    return any(hasattr(module, SLOPES) for module in model.modules())


def install(model: Any, attention: str) -> None:
    """Let the model's attention call what is registered under that name.

    `model` was built with the library's eager attention.
    """
    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED_NAME, _no_mask)
    forms = set()
    for layer, form, module in list(own_layers(model)):
        forms.add(form)
        module.layer_idx = layer
        if form == "_attn":
            module._attn = partial(_attn, module, attention)
            _empty_masks(module)
        else:
            module.forward = partial(_FORWARDS[form], module, attention)
        if form in ("alibi", "bias"):
            module.register_buffer(SLOPES, _slopes(model.base_model), persistent=False)
    # No mask is built, but for a body that converts what it is given.
    model.config._attn_implementation_internal = MASKED_NAME if "bias" in forms else attention


def _form_of(module: Any) -> OwnForm | None:
    form = _form_of_class(type(module))
    return None if form == "rotary" and getattr(module.config, "alibi", False) else form


def _form_of_class(kind: Any) -> OwnForm | None:
    product = getattr(kind, "_attn", None)
    if product is not None and "query" in inspect.signature(product).parameters:
        return "_attn"
    known = inspect.signature(kind.forward).parameters
    if {"alibi", "residual"} <= set(known) and hasattr(kind, "_reshape"):
        return "alibi"
    if {"alibi", "position_embeddings"} <= set(known) and hasattr(kind, "_split_heads"):
        return "rotary"
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    is_bias = "position_bias" in known and code is not None and "Wqkv" in code.co_names
    return "bias" if is_bias else None


def _no_mask(*args: Any, device: torch.device, **kwargs: Any) -> torch.Tensor:
    return torch.zeros((), device=device)


def _empty_masks(module: nn.Module) -> None:
    """Square masks of all positions, which nothing reads any more: megabytes a layer."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dtype == torch.bool and buffer.dim() == 4:
            module._buffers[name] = buffer.new_empty(0)


def _slopes(body: Any) -> torch.Tensor:
    """float32 [heads]."""
    if hasattr(body, "build_alibi_tensor"):
        made = body.build_alibi_tensor(torch.ones(1, 2), body.num_heads, torch.float32)
    else:
        made = body.build_mpt_alibi_tensor(body.num_heads, 2)
    slopes: torch.Tensor = made[:, 0, 1] - made[:, 0, 0]
    return slopes.float()


def _attend(
    module: Any,
    attention: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[1, heads, T, dim] to [1, T, heads, dim]. Some rotate in float32: pages have V's type."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    more = {"slopes": getattr(module, SLOPES)} if hasattr(module, SLOPES) else {}
    function = ALL_ATTENTION_FUNCTIONS[attention]
    out: torch.Tensor = function(module, query, key, value, None, scaling=scale, **more)[0]
    return out


def _attn(
    module: Any,
    attention: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *masks: Any,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, dim] to the same."""
    divisor = getattr(module, "scale_attn", getattr(module, "norm_factor", 1.0))
    return _attend(module, attention, query, key, value, 1.0 / divisor).transpose(1, 2), None


def _alibi_forward(
    module: Any, attention: str, hidden: torch.Tensor, residual: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, None]:
    """hidden, residual [1, T, H] to [1, T, H]."""
    query, key, value = module._reshape(module.query_key_value(hidden))
    out = _attend(module, attention, query, key, value, module.inv_norm_factor)
    return module.dense(out.flatten(2)) + residual, None


def _bias_forward(
    module: Any, attention: str, hidden: torch.Tensor, *args: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """hidden [1, T, H] to [1, T, H]."""
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = mixed.view(*mixed.shape[:2], 3, module.n_heads, module.head_dim)
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
    out = _attend(module, attention, query, key, value, module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


def _rotary_forward(
    module: Any,
    attention: str,
    hidden: torch.Tensor,
    *args: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """hidden [1, T, H] to [1, T, H]."""
    parts = module._split_heads(module.query_key_value(hidden))
    query, key, value = (part.transpose(1, 2) for part in parts)
    repeats = key.shape[1] // module.num_kv_heads
    key, value = key[:, ::repeats], value[:, ::repeats]
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    out = _attend(module, attention, query, key, value, module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


_FORWARDS: Mapping[str, Callable[..., tuple[torch.Tensor, None]]] = {
    "alibi": _alibi_forward,
    "bias": _bias_forward,
    "rotary": _rotary_forward,
}
