"""How a launch of prefill attention is cut: blocks by width and device, tiles by a step's rows.

Pure but for the question which device it is. What comes of it is in kernels/paged_prefill.py.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.paged_attention import LayerGeometry
from kernels.paged_rows import FlatRows

HOPPER = 90  # compute capability 9.0
WIDE, NARROW = 256, 128  # k_dim + v_dim
LATENT = 256  # v_dim, of V in K


class Shape(NamedTuple):
    """How a launch is cut: pairs of query and head a program, positions a tile, warps, stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# What fits into registers without spilling, and into shared memory: found by kernels.aot. An A100
# keeps queries and accumulators of both products in registers, a Hopper only the accumulators.
SHAPES = {
    "usual": Shape(128, 64, 8, 4),
    "narrow": Shape(128, 128, 8, 3),
    "wide": Shape(128, 32, 8, 3),
    "ampere": Shape(128, 32, 8, 4),
    "ampere wide": Shape(64, 32, 8, 3),
    "latent": Shape(32, 64, 8, 2),
}


def launch_shape(layer: LayerGeometry, capability: int) -> Shape:
    """By the heads' width and the device's compute capability (80, 90, 100)."""
    width = layer.k_dim + layer.v_dim
    if layer.v_in_k and layer.v_dim > LATENT:
        return SHAPES["latent"]
    if capability < HOPPER:
        return SHAPES["ampere wide" if width > WIDE else "ampere"]
    return SHAPES["wide" if width > WIDE else "narrow" if width <= NARROW else "usual"]


def tile_tokens(group: int, block_m: int) -> int:
    """Positions of a row that one program takes, for so many query heads a KV head."""
    return block_m // min(group, block_m)


def cut_rows(lengths: Sequence[int], contexts: Sequence[int], step: int) -> list[tuple[int, int]]:
    """Each program's row and its first query in the row, `step` queries each; longest first."""
    tiles = [
        (context - length + min(start + step, length), row, start)
        for row, (length, context) in enumerate(zip(lengths, contexts, strict=True))
        for start in range(0, length, step)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return [(row, start) for _, row, start in tiles]


def tiles_of(
    rows: FlatRows, group: int, block_m: int = 128, device: torch.device | None = None
) -> torch.Tensor:
    """int32 [tiles, 2]: `cut_rows` of rows whose lengths the host knows.

    On the rows' device unless another is named. Depends on the group and the shape alone, so one
    serves all layers of a step.
    """
    tiles = cut_rows(rows.q_lens, rows.contexts, tile_tokens(group, block_m))
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 2).to(device or rows.first.device)


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability times ten; interpreted, Hopper's shapes are as good as any."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
