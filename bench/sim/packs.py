"""Packs without files: indexes and costs of models made from shapes.

A shape is a row of `bench/model_shapes.json`. Its index has the segments and the KV groups that a
real pack of the model would have (sizes from the shape's products; norms and biases are left out),
and no tensors, for nothing is ever pointed at.
"""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.shapes import Shape, read_shapes
from bench.sim.device import AttentionCost, ModelCost
from bench.sim.types import SimModel
from engine.errors import PackError
from engine.pack import SEGMENT_ALIGN, KvGroup, PackIndex, Segment
from engine.protocol import PACK_VERSION

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Families whose MLP is one product up and one down; all others have a gate beside it.
_PLAIN_MLP = ("gpt2", "opt", "gpt_neox")


@dataclass(frozen=True, slots=True)
class SimPack:
    """A pack that could be loaded."""

    index: PackIndex
    cost: ModelCost


def pack_dir(number: int) -> str:
    """The folder that model `number` would have; its last part names the model."""
    return f"packs/m{number}"


class SimPacks:
    """Implements engine.pack_source.PackSource on shapes; the n-th model is `pack_dir(n)`."""

    def __init__(self, models: Iterable[SimModel]) -> None:
        self._packs = [_pack(model, number) for number, model in enumerate(models)]

    def pack(self, number: int) -> SimPack:
        """By the model's place in the world's list."""
        return self._packs[number]

    def of(self, folder: Path) -> SimPack:
        """By folder. Raises PackError."""
        try:
            return self._packs[int(folder.name[1:])]
        except (ValueError, IndexError) as error:
            raise PackError(f"{folder} holds no pack") from error

    def stamp(self, pack_dir: Path) -> tuple[int, ...]:
        """Packs never change."""
        return (0,)

    def read(self, pack_dir: Path) -> PackIndex:
        """The index."""
        return self.of(pack_dir).index


def _pack(model: SimModel, number: int) -> SimPack:
    segments, groups, cost, vocab_size, max_context = _layout(model.shape, model.dtype)
    revision = hashlib.blake2b(f"{number}/{model.name}".encode(), digest_size=8).hexdigest()
    index = PackIndex(
        version=PACK_VERSION,
        revision=revision,
        family="simulated",
        architecture=model.shape,
        dtype=model.dtype,
        vocab_size=vocab_size,
        max_context=max_context,
        total_bytes=sum(segment.num_bytes for segment in segments),
        segments=segments,
        tensors=(),
        tied={},
        chunks=(),
        kv_groups=groups,
        kv_dtype=model.dtype,
    )
    return SimPack(index, cost)


@functools.cache
def _shapes() -> dict[str, Shape]:
    return read_shapes()


@functools.cache
def _layout(
    name: str, dtype: str
) -> tuple[tuple[Segment, ...], tuple[KvGroup, ...], ModelCost, int, int]:
    """What all models of one shape share. Raises KeyError for an unknown shape."""
    shape, item = _shapes()[name], ITEM_BYTES[dtype]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    kv_heads = shape.get("num_key_value_heads") or heads
    products = 2 if shape["model_type"] in _PLAIN_MLP else 3
    layer_params = (
        hidden * head_dim * (2 * heads + 2 * kv_heads)
        + products * hidden * shape["intermediate_size"]
    )
    embedding = shape["vocab_size"] * hidden
    rest_params = embedding if shape["tie_word_embeddings"] else 2 * embedding
    sizes = [*[layer_params * item] * layers, rest_params * item]
    segments: list[Segment] = []
    offset = 0
    for number, size in enumerate(sizes):
        num_bytes = -(-size // SEGMENT_ALIGN) * SEGMENT_ALIGN
        segment_name = f"layer.{number}" if number < layers else "rest"
        segments.append(Segment(segment_name, offset, num_bytes))
        offset += num_bytes
    groups = tuple(
        KvGroup(tuple(members), kv_heads, head_dim, head_dim, window)
        for window, members in _windows(shape).items()
        if members
    )
    attention = tuple(
        AttentionCost(
            group.window,
            flops_per_pair=4.0 * heads * head_dim * len(group.layers),
            bytes_per_position=2.0 * kv_heads * head_dim * item * len(group.layers),
        )
        for group in groups
    )
    cost = ModelCost(
        flops_per_token=2.0 * layer_params * layers,
        flops_per_row=2.0 * embedding,
        weight_bytes=float((layer_params * layers + embedding) * item),
        attention=attention,
        num_layers=layers,
        dtype=dtype,
    )
    return tuple(segments), groups, cost, shape["vocab_size"], shape["max_position_embeddings"]


def _windows(shape: Shape) -> dict[int, list[int]]:
    """Layers by window; every `sliding_window_pattern`-th sees everything."""
    window = shape.get("sliding_window") or 0
    every = shape.get("sliding_window_pattern") or 0
    found: dict[int, list[int]] = {0: [], window: []}
    for layer in range(shape["num_hidden_layers"]):
        full = not window or (every and (layer + 1) % every == 0)
        found[0 if full else window].append(layer)
    return found
