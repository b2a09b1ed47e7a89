"""Attention that caches latents (MLA): one row a token, and the heads never leave their weights.

Of a token such a layer keeps a latent c of `rank` values and a rotated key r that all heads share,
instead of K and V of each head:

    k_h = [ W_UK_h c | r ]        v_h = W_UV_h c        both matrices are rows of kv_b_proj.weight

Attention needs neither k_h nor v_h: both products can be moved past it (DeepSeek-V2, 2.1.2):

    q_h . k_h        = [ q_nope_h W_UK_h | q_rope_h ] . [ c | r ]
    sum_j w_j v_hj   = W_UV_h (sum_j w_j c_j)

So a layer has one KV head: K is [c | r], V is the first `rank` values of K (`v_in_k` in
kernels/paged_attention.py), and blocks hold K alone.

transformers' modules hand c and r to a method `expand_kv`, which makes K and V of all heads of
them, and these to attention. `keep_latents` puts another method in its place on the instances that
are built as expected, whatever their classes are called. `absorb` and `project` are what attention
does before and behind; long chunks are cheaper the other way, with K and V of all heads for the
moment (`attend_latents`).

Does not know steps or quantization, but for one thing: kv_b_proj is read as a tensor here
and never called, so it must stay as it is (`read_weights`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernels.paged_attention import (
    BlockGeometry,
    LayerGeometry,
    PagedBatch,
    attend_rows_ref,
    gather_kv_ref,
)

ALL = slice(None)
SLICE_BYTES = 64 << 20
"""Beside the gathered latents."""
EXPANSION_COST = 2
"""Of a product that expands, in those of attention; measured at 170 to 512 tokens of 4,096."""
_EXPAND = "expand_kv"
_WIDTHS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_heads")


def latent_layers(model: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """(name, layer, module) of those that cache latents in the way above."""
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and _has_its_parts(module):
            yield name, layer, module


def _has_its_parts(module: nn.Module) -> bool:
    widths = [getattr(module, name, None) for name in _WIDTHS]
    expand = getattr(module, "kv_b_proj", None)
    if not callable(getattr(module, _EXPAND, None)) or type(expand) is not nn.Linear:
        return False
    if not all(isinstance(width, int) for width in widths) or expand.bias is not None:
        return False
    rank, _, nope, v_dim, heads = (int(width) for width in widths if width is not None)
    return (expand.out_features, expand.in_features) == (heads * (nope + v_dim), rank)


def latent_geometry(rank: int, rope: int, window: int) -> LayerGeometry:
    """What such a layer keeps."""
    return LayerGeometry(1, rank + rope, rank, window, v_in_k=True)


def read_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights that are read as tensors."""
    return frozenset(f"{name}.kv_b_proj.weight" for name, _, _ in latent_layers(model))


def keep_latents(model: nn.Module) -> None:
    """These layers hand the latents to attention from now on."""
    for _, _, module in latent_layers(model):
        setattr(module, _EXPAND, _joined)


def _joined(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 1, T, rank] and [1, 1, T, rope] to K and V of the one head."""
    return torch.cat((latent, rotated), -1), latent


def is_latent(module: nn.Module) -> bool:
    """Whether `keep_latents` has been here."""
    return _EXPAND in vars(module)


def absorb(module: Any, query: torch.Tensor, heads: slice = ALL) -> torch.Tensor:
    """[heads, n, nope + rope] to [heads, n, rank + rope]. `heads`: which they are."""
    nope = module.qk_nope_head_dim
    latent = torch.bmm(query[..., :nope], _by_head(module)[heads, :nope])
    return torch.cat((latent, query[..., nope:]), -1)


def project(module: Any, attended: torch.Tensor, heads: slice = ALL) -> torch.Tensor:
    """[heads, n, rank] to [heads, n, v_dim]."""
    up = _by_head(module)[heads, module.qk_nope_head_dim :]
    return torch.bmm(attended, up.transpose(1, 2))


def attend_latents(
    module: Any,
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    query: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention_ref`, from the heads' own queries to their own values, by operators.

    query [heads, T, nope + rope] -> [T, heads, v_dim]. Each group of rows goes the way that takes
    fewer products, some heads at a time: between them lie SLICE_BYTES at most, or one head's.
    """
    out = query.new_empty(query.shape[1], module.num_heads, module.v_head_dim)
    for rows in batch.rows:
        key, _ = gather_kv_ref(arena, geometry, chunk_table, rows)
        num_rows, num_queries = rows.token_index.shape
        expands = expanding_is_cheaper(module, num_queries, int(rows.context_len.max()))
        step = max(1, SLICE_BYTES // _head_bytes(module, num_queries, key, expands))
        where = (rows.context_len, rows.first, scale, geometry.layer.window, softcap)
        for first in range(0, module.num_heads, step):
            heads = slice(first, first + step)
            own = query[heads, rows.token_index]  # [heads, R, n, width]
            logits = None if sinks is None else sinks[heads]
            keys, values, width = key, key, module.kv_lora_rank
            if expands:
                keys, values = _expand(module, key, heads)
                width = module.v_head_dim
            else:  # by heads alone: with a row more in front torch copies the weights for each
                own = absorb(module, own.flatten(1, 2), heads)
                own = own.view(len(own), num_rows, num_queries, -1)
            attended = attend_rows_ref(own.transpose(0, 1), keys, values, *where, logits)
            attended = attended[..., :width].transpose(0, 1).flatten(1, 2)
            if not expands:
                attended = project(module, attended, heads)
            out[rows.token_index.flatten(), heads] = attended.transpose(0, 1)
    return out


def expanding_is_cheaper(module: Any, num_queries: int, context: int) -> bool:
    """Whether K and V of all heads, made of the whole context, save more products than they take.

    A head's pair of query and key costs its own widths and not twice a latent's; instead all of the
    context is expanded, and not the new tokens alone absorbed. What is expanded is also copied:
    that is as much again. With heads as wide as DeepSeek-V3's it pays for whole prompts, and for
    chunks of 340 tokens and more.
    """
    rank, v_dim = module.kv_lora_rank, module.v_head_dim
    width = module.qk_nope_head_dim + module.qk_rope_head_dim
    expansion: int = rank * (module.qk_nope_head_dim + v_dim)
    saved: int = 2 * (rank + module.qk_rope_head_dim - max(width, v_dim))
    return EXPANSION_COST * (context - num_queries) * expansion < num_queries * context * saved


def _head_bytes(module: Any, num_queries: int, key: torch.Tensor, expands: bool) -> int:
    """What one head more takes between the products."""
    item, positions = key.element_size(), key.shape[0] * key.shape[2]
    if expands:
        width: int = module.qk_nope_head_dim + max(module.qk_rope_head_dim, module.v_head_dim)
        return 3 * positions * width * item
    # A mask of each head's own, also as numbers; or scores in float32, twice.
    return positions * (num_queries * (1 + item) if num_queries > 1 else 8)


def _expand(module: Any, key: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, 1, S, rank + rope] to K and V [R, heads, S, width], V with zeros behind its v_dim."""
    rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
    weight = _by_head(module)[heads]
    num_rows, _, context, _ = key.shape
    both = functional.linear(key[..., :rank], weight.reshape(-1, rank))
    both = both.view(num_rows, context, len(weight), -1).transpose(1, 2)
    rotated = key[..., rank:].expand(-1, len(weight), -1, -1)
    keys, values = torch.cat((both[..., :nope], rotated), -1), both[..., nope:]
    missing = keys.shape[3] - values.shape[3]
    return keys, functional.pad(values, (0, missing)) if missing > 0 else values


def _by_head(module: Any) -> torch.Tensor:
    """A view: [heads, nope + v_dim, rank]."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)
