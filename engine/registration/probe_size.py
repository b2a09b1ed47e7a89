"""The same model at probe size: a configuration with every kind of layer, everything narrow.

What is kept: class and options, the kinds of layers, head widths, query heads a KV head, more than
one expert chosen out of more. Of a multimodal wrapper the text part is cut, its towers are not
there. What is cut: layers, heads, widths of the residual stream and of
MLPs, experts, vocabulary; windows and whatever else acts only beyond a length, so that the probe's
short prompts pass it. A cut that a family cannot be built with is given up for a smaller one.
"""

import copy
import math
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PretrainedConfig

from engine.modules.text_part import from_config, is_wrapper
from engine.registration.blueprint import field_of
from engine.registration.kv_sharing import REUSE, shares_kv, sharing_modes
from engine.registration.wrapper import set_text_config

WINDOW = 8
VOCAB = 128
MAX_PARAMETERS = 128_000_000
MAX_GROUP = 8
KV_HEADS = (2, 4, 0)
"""To try, one after the other; 0: all, and full widths. CodeGen's heads come in fours."""
MAX_EXPERTS = 8
MAX_CHOSEN = 3
MLP_WIDTH = 64
CHOSEN_BLOCKS, CHOSEN_BLOCK = 2, 4
"""Of an indexer that chooses blocks: fewer positions than the prompts have."""
WIDTH_STEP = 64

_LENGTHS = re.compile(
    r"(?:^|_)(?:window|window_size|chunk_size|topk_blocks)$|^index_topk|^floor_scale$"
)
_MLP_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
    "dff",
)
_SSM_HEADS = ("mamba_n_heads", "n_mamba_heads", "num_heads")
_SSM_WIDTHS = ("mamba_headdim", "mamba_d_head", "mamba_head_dim", "head_dim")
_SSM_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_LAYER_NUMBERS = ("moe_layers",)
_KV_HEADS = ("num_key_value_heads", "kv_n_heads")
_BLOCK_HEADS = "index_n_heads"
"""Where blocks are chosen, as many as KV heads."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


def tensor_kinds(model: nn.Module) -> set[str]:
    """Names of all parameters and buffers with every number taken out."""
    return {re.sub(r"\d+", "#", name) for name in model.state_dict()}


def probe_configs(config: Any, skeleton: nn.Module | None = None) -> Iterator[Any]:
    """Truncated configurations that can be built, narrowest first.

    Each has every kind of tensor the whole model has (`skeleton`, on meta, else built here).
    """
    if skeleton is None:
        skeleton = _on_meta(config)
    wanted = tensor_kinds(skeleton)
    text = config.get_text_config()
    tried: list[dict[str, Any]] = []
    for kv_heads in KV_HEADS:
        for layers in _layer_choices(text):
            small = _truncated(text, layers, kv_heads)
            try:
                if is_wrapper(config):
                    small = set_text_config(config, small)
                built = _on_meta(small)
            except Exception:  # noqa: BLE001 - these cuts do not suit the family's other options
                continue
            size = sum(tensor.numel() for tensor in built.state_dict().values())
            if size <= MAX_PARAMETERS and tensor_kinds(built) == wanted:
                if small.to_dict() not in tried:
                    tried.append(small.to_dict())
                    yield small
                break


def _on_meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        return from_config(copy.deepcopy(config))


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """The options that are lists with an entry for each layer."""
    count = config.num_hidden_layers
    return {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and name not in _LAYER_NUMBERS
    }


def _layer_numbers(config: Any) -> dict[str, list[int]]:
    """The options that are lists of layers."""
    found = {name: getattr(config, name, None) for name in _LAYER_NUMBERS}
    return {name: list(value) for name, value in found.items() if value is not None}


def _layer_choices(config: Any) -> Iterator[list[int]]:
    """Layers to keep: one of each kind the lists tell, then ever longer beginnings."""
    count = config.num_hidden_layers
    modes = sharing_modes(config)
    lists = [modes, *_per_layer(config).values()]
    for numbers in _layer_numbers(config).values():
        lists.append([layer in numbers for layer in range(count)])
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([values[layer] for values in lists]), layer)
    chosen = sorted(kinds.values())
    if len(chosen) < 2:
        chosen = list(range(min(2, count)))
    yield chosen
    for length in (2, 4, 8, 16):
        # Layers that read KV of others come last: a beginning without any is another kind of model.
        if length < count and set(modes[:length]) == set(modes):
            yield list(range(length))
    yield list(range(count))


def _truncated(config: Any, layers: list[int], kv_heads: int) -> Any:
    """`kv_heads`: see KV_HEADS."""
    narrow = kv_heads > 0
    small = copy.deepcopy(config)
    per_layer = _per_layer(config)
    overrides = _overrides(small, layers)
    small.num_hidden_layers = len(layers)
    if shares_kv(config):
        modes = sharing_modes(config)
        small.num_kv_shared_layers = sum(modes[layer] == REUSE for layer in layers)
    for name, values in per_layer.items():
        _set(small, name, [values[layer] for layer in layers])
    for name, numbers in _layer_numbers(config).items():
        _set(small, name, [new for new, old in enumerate(layers) if old in numbers])
    for name, value in vars(config).items():
        if _is_count(value) and _LENGTHS.search(name) and value > WINDOW:
            _set(small, name, WINDOW)
    if _is_count(field_of(config, "index_block_size")):
        small.index_block_size, small.index_topk_blocks = CHOSEN_BLOCK, CHOSEN_BLOCKS
    rope = getattr(small, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope:  # scales queries from this position on
        rope["original_max_position_embeddings"] = WINDOW
    small.vocab_size = min(VOCAB, config.vocab_size)
    if _is_count(getattr(config, "vocab_size_per_layer_input", None)):
        small.vocab_size_per_layer_input = small.vocab_size
    pad = getattr(small, "pad_token_id", None)
    if _is_count(pad) and pad >= small.vocab_size:
        small.pad_token_id = 0
    for part in _parts(small):
        _cut_experts(part)
        for name in _MLP_WIDTHS if narrow else ():
            if _is_count(getattr(part, name, None)) and getattr(part, name) > MLP_WIDTH:
                _set(part, name, MLP_WIDTH)
    if narrow:
        _cut_heads(small, overrides, kv_heads)
    if overrides is not None:
        small.per_layer_config = overrides
    return small


def _parts(config: Any) -> list[Any]:
    """The configuration and those inside it: some keep attention's and the MLP's options apart."""
    inside = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *inside]


def _overrides(small: Any, layers: list[int]) -> dict[int, Any] | None:
    """What single layers say otherwise, renumbered; taken off `small`. None: nothing."""
    if not getattr(small, "is_heterogeneous", False):
        return None
    by_layer = {int(k): v for k, v in small.to_dict()["per_layer_config"].items()}
    small.per_layer_config = None
    return {new: by_layer[old] for new, old in enumerate(layers) if old in by_layer}


def _cut_heads(small: Any, overrides: dict[int, Any] | None, most: int) -> None:
    """So many KV heads, their query heads, and a residual stream in proportion."""
    heads = getattr(small, "num_attention_heads", None)
    kv_heads = field_of(small, "num_key_value_heads") or heads
    if getattr(small, "multi_query", False):
        kv_heads = 1
    if heads is None:
        _cut_stream(small, small.hidden_size // MAX_GROUP // WIDTH_STEP * WIDTH_STEP)
        return
    if not _is_count(heads) or not _is_count(kv_heads) or heads % kv_heads:
        return
    if overrides is None:
        new_kv = min(most, kv_heads)
        new_heads = new_kv * _group(heads // kv_heads)
    else:  # some layers have fewer: all in proportion
        counts = [o["num_key_value_heads"] for o in overrides.values() if _KV_HEADS[0] in o]
        divisor = math.gcd(kv_heads, *counts)
        if divisor == kv_heads:
            divisor = max(1, divisor // 2)
        if heads % divisor or any("num_attention_heads" in o for o in overrides.values()):
            return
        new_kv, new_heads = kv_heads // divisor, heads // divisor
        for override in overrides.values():
            if "num_key_value_heads" in override:
                override["num_key_value_heads"] //= divisor
    _set_heads(small, heads, new_heads, new_kv)


def _set_heads(small: Any, heads: int, new_heads: int, new_kv: int) -> None:
    hidden = small.hidden_size
    new_hidden = hidden * new_heads // heads
    if new_hidden * heads != hidden * new_heads:
        new_hidden = max(WIDTH_STEP, new_hidden // WIDTH_STEP * WIDTH_STEP)
    if new_heads == heads:
        return
    small.num_attention_heads = new_heads
    for part in _parts(small):
        for name in _KV_HEADS:
            if getattr(part, name, None):
                _set(part, name, new_kv)
        if getattr(part, "index_block_size", None):
            _set(part, _BLOCK_HEADS, new_kv)
        if getattr(part, "hidden_size", None) == hidden:
            _cut_stream(part, new_hidden)
    if getattr(small, "word_embed_proj_dim", None) == hidden:
        small.word_embed_proj_dim = new_hidden


def _cut_stream(part: Any, new_hidden: int) -> None:
    """A narrower residual stream, and what SSM mixers have in proportion to it."""
    hidden = part.hidden_size
    if not new_hidden:
        return
    name = next((n for n in _SSM_HEADS if _is_count(getattr(part, n, None))), None)
    # Some say the mixers' width beside the stream's.
    if name is not None and not hasattr(part, "mamba_d_ssm"):
        heads = getattr(part, name)
        groups = next((getattr(part, n) for n in _SSM_GROUPS if hasattr(part, n)), 1)
        fewer, rest = divmod(heads * new_hidden, hidden)
        if fewer and not rest and fewer % groups == 0:
            setattr(part, name, fewer)
        else:
            width = next((n for n in _SSM_WIDTHS if _is_count(getattr(part, n, None))), None)
            if width is not None:
                setattr(part, width, getattr(part, width) * new_hidden // hidden)
    part.hidden_size = new_hidden


def _group(queries: int) -> int:
    """Query heads a KV head, where there are so many: as many, or a part that divides them."""
    for size in range(min(queries, MAX_GROUP), 1, -1):
        if queries % size == 0:
            return size
    return min(queries, MAX_GROUP)


def _cut_experts(small: Any) -> None:
    """A few experts of which several, and not all, are chosen; groups of two."""
    for name in _EXPERTS:
        count = getattr(small, name, None)
        if _is_count(count) and count > MAX_EXPERTS:
            groups = getattr(small, "n_group", None) or 1
            _set(small, name, groups * max(2, MAX_EXPERTS // groups))
    for name in _CHOSEN:
        chosen = getattr(small, name, None)
        if _is_count(chosen) and chosen > MAX_CHOSEN:
            _set(small, name, MAX_CHOSEN)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _set(config: Any, name: str, value: Any) -> bool:
    """Whether the configuration takes it: some check the types of their fields."""
    try:
        setattr(config, name, value)
    except Exception:  # noqa: BLE001 - validators raise what they like
        return False
    return True
