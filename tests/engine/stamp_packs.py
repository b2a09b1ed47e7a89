"""Packs of any geometry for `stamp_runner.py`: real files, random bytes for weights, no model.

What is drawn: 1 to 80 layers in one to three groups (interleaved as families do it, with windows or
without), 1 to 16 KV heads, K and V of unlike widths, fp32 or bf16. In a quarter some layers keep
keys of an indexer, in half some keep states, beside KV or instead of it. Rows are whole 8 bytes,
because stamps are.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.pack import (
    SEGMENT_ALIGN,
    KvGroup,
    StateGroup,
    indexer_layer,
    read_index,
    write_index,
)
from tests.engine.pack_rig import random_pack
from tests.engine.stamp_states import random_states

NUM_LAYERS = (1, 1, 2, 2, 3, 4, 6, 9, 12, 24, 40, 80)
KV_HEADS = (1, 1, 2, 2, 3, 4, 8, 16)
WIDTHS = (4, 4, 8, 12, 16, 20, 32)
WINDOWS = (0, 0, 0, 3, 7, 8, 13, 24, 33)
CONTEXTS = (40, 96, 160)
# So that a position costs little to write and read: small models have wide rows, deep ones thin.
MAX_BYTES_PER_TOKEN = 4096
SEGMENT_UNITS = (1, 1, 2, 3, 7)
LONG_SEGMENT_UNITS = (4, 9, 16, 24)


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry of a pack and the sizes of its weight segments."""

    groups: tuple[KvGroup, ...]
    kv_dtype: str
    max_context: int
    vocab_size: int
    segment_bytes: tuple[int, ...]
    states: tuple[StateGroup, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return len(self.segment_bytes) - 1

    def kv_pages(self, page_bytes: int) -> int:
        """Pages for one sequence as long as it may be, extents half used."""
        size = 4 if self.kv_dtype == "float32" else 2
        row = sum(group.values_per_token for group in self.groups)
        states = 0
        for group in self.states:
            num_bytes = math.prod(group.shape) * (4 if group.dtype == "float32" else 2)
            states += len(group.states) * (-(-num_bytes // page_bytes) + 1)
        kv = -(-row * size * self.max_context // page_bytes) + self.num_layers
        return kv + 2 * states  # a request whose tokens may be computed twice has two versions

    def weight_pages(self, page_bytes: int) -> int:
        """Pages its weights take."""
        return sum(-(-size // page_bytes) for size in self.segment_bytes)


def random_shape(
    rng: random.Random,
    page_bytes: int,
    block_tokens: int,
    heavy: bool = False,
    stateful: float = 0.0,
) -> Shape:
    """A shape whose blocks fit a page. `heavy`: few layers, each of long runs of weights;
    `stateful`: the chance that some layers keep states."""
    dtype, size = rng.choice((("float32", 4), ("bfloat16", 2)))
    num_layers = rng.choice((1, 2, 4)) if heavy else rng.choice(NUM_LAYERS)
    num_groups = min(num_layers, rng.choice((1, 1, 2, 3)))
    members: list[list[int]] = [[] for _ in range(num_groups)]
    for layer in range(num_layers):
        # The first layers fill each group once; then mostly in turn, as alternating families do.
        in_turn = layer < num_groups or rng.random() < 0.8
        members[layer % num_groups if in_turn else rng.randrange(num_groups)].append(layer)
    groups = []
    for layers in members:
        while True:
            heads, k_dim, v_dim = rng.choice(KV_HEADS), rng.choice(WIDTHS), rng.choice(WIDTHS)
            row = heads * (k_dim + v_dim) * size
            if row * num_layers <= MAX_BYTES_PER_TOKEN and row * block_tokens <= page_bytes:
                break
        is_latent = heads == 1 and v_dim < k_dim  # as layers that cache latents have it
        groups.append(KvGroup(tuple(layers), heads, k_dim, v_dim, rng.choice(WINDOWS), is_latent))
    groups += indexer_groups(groups, block_tokens * size, page_bytes)
    states: tuple[StateGroup, ...] = ()
    if stateful and rng.random() < stateful:
        states = random_states(rng, num_layers, page_bytes)
        if rng.random() < 0.3:
            groups = []
    units = LONG_SEGMENT_UNITS if heavy else SEGMENT_UNITS if num_layers <= 12 else (1,)
    return Shape(
        groups=tuple(groups),
        kv_dtype=dtype,
        max_context=rng.choice(CONTEXTS),
        vocab_size=rng.choice((17, 96, 1000)),
        segment_bytes=tuple(rng.choice(units) * SEGMENT_ALIGN for _ in range(num_layers + 1)),
        states=states,
    )


def indexer_groups(groups: Sequence[KvGroup], row_bytes: int, page_bytes: int) -> list[KvGroup]:
    """Of one shape in four: keys of some layers' indexers, K alone. By a generator of its own, so
    that shapes are otherwise those of their seed. `row_bytes`: of one value of a block."""
    rng = random.Random(repr(groups))
    width = rng.choice([width for width in WIDTHS if width * row_bytes <= page_bytes])
    layers = sorted(layer for group in groups for layer in group.layers if rng.random() < 0.5)
    if not layers or rng.random() < 0.75:
        return []
    return [KvGroup(tuple(map(indexer_layer, layers)), 1, width, width, v_in_k=True)]


def stamp_pack(folder: Path, shape: Shape, seed: int) -> Path:
    """The pack on disk; its revision depends on its name and `seed`, not on where it lies."""
    random_pack(folder, shape.segment_bytes, seed)
    index = msgspec.structs.replace(
        read_index(folder),
        revision=hashlib.blake2b(f"{folder.name}{seed}".encode(), digest_size=16).hexdigest(),
        vocab_size=shape.vocab_size,
        max_context=shape.max_context,
        kv_groups=shape.groups,
        kv_dtype=shape.kv_dtype,
        states=shape.states,
    )
    write_index(folder, index)
    return folder
