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
are built as expected, whatever their classes are called; `absorb` and `project` are what attention
does before and behind.

Does not know pages, steps, or quantization, but for one thing: kv_b_proj is read as a tensor here
and never called, so it must stay as it is (`read_weights`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kernels.paged_attention import LayerGeometry

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


def absorb(module: Any, query: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, nope + rope] to [1, heads, T, rank + rope]; of other layers as it is."""
    if not is_latent(module):
        return query
    nope = module.qk_nope_head_dim
    latent = torch.matmul(query[..., :nope], _by_head(module)[:, :nope])
    return torch.cat((latent, query[..., nope:]), -1)


def project(module: Any, attended: torch.Tensor) -> torch.Tensor:
    """[1, T, heads, rank] to [1, T, heads, v_dim]; of other layers as it is."""
    if not is_latent(module):
        return attended
    up = _by_head(module)[:, module.qk_nope_head_dim :].transpose(1, 2)
    return torch.matmul(attended.transpose(1, 2), up).transpose(1, 2)


def _by_head(module: Any) -> torch.Tensor:
    """A view: [heads, nope + v_dim, rank]."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)
