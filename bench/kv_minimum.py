"""The fewest bytes a model's KV can take: what memory figures are compared with. Pure.

Lives here: KV geometry and weight bytes of a shape of `model_shapes.json`, and the bytes that its
architecture needs for so many tokens: for every layer K and V of the positions that a later token
may still attend to, packed without a gap. Does not: pages, blocks, caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from bench.shapes import config_kwargs
from engine.packs.blueprint import kv_groups
from engine.packs.pack import KvGroup
from kernels.paged_attention import LayerGeometry


@dataclass(frozen=True, slots=True)
class Model:
    """A model as memory sees it."""

    name: str
    family: str
    groups: tuple[KvGroup, ...]
    dtype: torch.dtype
    num_layers: int
    max_context: int
    weight_bytes: int

    @property
    def layers(self) -> list[LayerGeometry]:
        """One geometry a layer, in their order."""
        by_layer = {
            layer: LayerGeometry(group.num_kv_heads, group.k_dim, group.v_dim, group.window)
            for group in self.groups
            for layer in group.layers
        }
        return [by_layer[i] for i in range(self.num_layers)]

    def minimum_bytes(self, num_tokens: int) -> int:
        """KV of one sequence of `num_tokens` tokens; a layer with a window keeps only that."""
        return sum(
            group_bytes_per_token(group, self.dtype)
            * (min(num_tokens, group.window) if group.window else num_tokens)
            for group in self.groups
        )


def group_bytes_per_token(group: KvGroup, dtype: torch.dtype) -> int:
    """K and V of one position in all layers of the group."""
    row = group.num_kv_heads * (group.k_dim + group.v_dim) * dtype.itemsize
    return len(group.layers) * row


def model_of(name: str, shape: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> Model:
    """The model with this shape, its layer groups found as registration finds them."""
    config = AutoConfig.for_model(shape["model_type"], **config_kwargs(shape))
    return Model(
        name=name,
        family=shape["model_type"],
        groups=kv_groups(config),
        dtype=dtype,
        num_layers=shape["num_hidden_layers"],
        max_context=shape["max_position_embeddings"],
        weight_bytes=shape["params_matmul_approx"] * dtype.itemsize,
    )
