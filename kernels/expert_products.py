"""A mixture's experts for many pairs: sorted by expert on the device, then one product a tile.

    1  order, tiles         of the pairs (expert_tiles.py)
    2  inner[place]         = act(gate) up of the pair there; a program has a tile of places and
                            some columns, and finds its expert in the table of tiles
    3  told[pair]           = down of inner
    4  y[token]             = weighted sum of its pairs

Shapes and roundings are those of expert_mlp.py, and `expert_mlp` is its definition by kernels:
these four launches, or the two of expert_rows.py for few pairs. Grids follow from shapes alone;
programs of tiles that no pair needs read one number and end.

Bytes moved: the weights of every expert that is hit once for each of its tiles (neighbours in the
grid, so mostly from the cache), P (h + i) elements into and out of memory between the launches.
With few rows an expert the weights are all that counts: tiles of 16 rows, multiplied as fast as W
comes. With some hundred rows an expert the products are as large as a dense layer's.
"""

from typing import NamedTuple

import torch

from kernels.expert_mlp import ExpertStack, check_experts, gated, weight_rows
from kernels.expert_rows import expert_rows, takes_pairs
from kernels.expert_tiles import expert_tiles
from kernels.gate_mul import ACTIVATION_CODES
from kernels.prefill_shape import HOPPER, capability
from kernels.triton_api import ARCHS, Declared, cdiv, jit, tl

JOIN_BLOCK = 1024
# Between the launches, at most; more tokens take turns, each with an expert's weights once more.
BETWEEN_BYTES = 256 << 20


class TileShape(NamedTuple):
    """Of a product's tile: rows, columns (of gate and up together), depth; warps, stages."""

    block_m: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int


# Up to so many pairs an expert, on average, a tile is cut like this.
TILE_SHAPES = (
    (16, TileShape(16, 128, 128, 4, 3)),
    (64, TileShape(64, 128, 64, 4, 4)),
    (1 << 62, TileShape(128, 256, 64, 8, 3)),
)
# In place of the largest, where a tile's sums lie in fewer registers, or a block has 99 KiB.
AMPERE_SHAPE = TileShape(128, 128, 64, 8, 3)
SMALL_BLACKWELL = 120  # and above: as little shared memory a block as Ada
# Products of float32 are done without tensor cores.
WIDE_SHAPE = TileShape(16, 64, 32, 4, 2)


def tile_shape(num_pairs: int, num_experts: int, x: torch.Tensor) -> TileShape:
    """By what is known on the host."""
    if x.dtype == torch.float32:
        return WIDE_SHAPE
    mean = num_pairs / min(num_pairs, num_experts)
    if mean > TILE_SHAPES[-2][0] and not HOPPER <= capability(x.device) < SMALL_BLACKWELL:
        return AMPERE_SHAPE
    return next(shape for limit, shape in TILE_SHAPES if mean <= limit)


@jit
def _expert_product_kernel(
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    place_stride: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    plus: tl.tensor,
    TOP_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Program (tile, block of columns). GATED: rows of x are tokens', those of y places'; else
    rows of x are places', those of y pairs'."""
    expert = tl.load(tiles + tl.program_id(0) * 3).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles + tl.program_id(0) * 3 + 1)
    place = first + tl.arange(0, BLOCK_M)
    there = place < tl.load(tiles + tl.program_id(0) * 3 + 2)
    pair = tl.load(order + place, mask=there, other=0)
    source, target = place, pair
    if GATED:
        source, target = pair // TOP_K, place
    row, real = weight_rows(tl.program_id(1), n, GATED, INTERLEAVED, COLUMNS)
    step = tl.arange(0, BLOCK_K)
    x_row = x + source.to(tl.int64)[:, None] * x_stride
    column = weight + expert * expert_stride + row.to(tl.int64)[None, :] * row_stride
    total = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for start in range(0, k, BLOCK_K):
        depth = start + step
        inside = depth < k
        left = tl.load(x_row + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        tile = column + depth[:, None] * place_stride
        right = tl.load(tile, mask=inside[:, None] & real[None, :], other=0)
        total = tl.dot(left, right.to(left.dtype), total, input_precision="ieee")
    rows = n * 2 if GATED else n
    if HAS_SCALE:
        factor = tl.load(scale + expert * rows + row, mask=real, other=0.0)
        total = total * factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        more = tl.load(bias + expert * rows + row, mask=real, other=0.0)
        total += more.to(tl.float32)[None, :]
    dtype = y.dtype.element_ty
    if GATED:
        halves = tl.reshape(total.to(dtype).to(tl.float32), (BLOCK_M, COLUMNS // 2, 2))
        gate, up = tl.split(halves)
        out = gated(gate, up, limit, alpha, plus, ACTIVATION, CLAMPED)
        channel = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        to = y + target.to(tl.int64)[:, None] * n + channel[None, :]
        tl.store(to, out.to(dtype), mask=there[:, None] & (channel < n)[None, :])
    else:
        to = y + target.to(tl.int64)[:, None] * n + row[None, :]
        tl.store(to, total.to(dtype), mask=there[:, None] & real[None, :])


@jit
def _join_kernel(
    told: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (token, block of columns). What no expert has told was never written."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids + pair)
        known = (expert >= 0) & (expert < num_experts)
        part = tl.load(told + pair * n + column, mask=(column < n) & known, other=0.0)
        factor = tl.load(weights + pair).to(tl.float32)
        total += tl.where(known, factor * part.to(tl.float32), 0.0)
    tl.store(y + token * n + column, total.to(y.dtype.element_ty), mask=column < n)


def expert_mlp(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: ExpertStack
) -> torch.Tensor:
    """`expert_mlp_ref` by kernels. Rows of x may lie a stride apart. Raises ValueError for shapes
    and types that do not fit together (`check_experts`)."""
    if takes_pairs(ids, stack):
        return expert_rows(x, ids, weights, stack)
    row_bytes = ids.shape[1] * (stack.inner + stack.size) * x.itemsize
    most = max(1, BETWEEN_BYTES // row_bytes)
    if len(x) <= most:
        return expert_products(x, ids, weights, stack)
    parts = (slice(start, start + most) for start in range(0, len(x), most))
    return torch.cat([expert_products(x[part], ids[part], weights[part], stack) for part in parts])


def expert_products(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: ExpertStack,
    shape: TileShape | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Any number of pairs. `shape`: to measure; `out`: y [T, h], and what is between the launches,
    inner [P, i] and told [P, h], all contiguous. Raises ValueError as `expert_mlp`."""
    check_experts(x, ids, weights, stack)
    num_pairs, top_k, size = ids.numel(), ids.shape[1], stack.size
    y, inner, told = out or (
        x.new_empty(len(x), size),
        x.new_empty(num_pairs, stack.inner),
        x.new_empty(num_pairs, size),
    )
    if not num_pairs:
        return y.zero_()
    cut = shape or tile_shape(num_pairs, stack.num_experts, x)
    order, tiles = expert_tiles(ids, stack.num_experts, cut.block_m)
    for is_gated, source, target in ((True, x, inner), (False, inner, told)):
        _product(source, order, tiles, target, stack, is_gated, top_k, cut)
    _join_kernel[(len(x), cdiv(size, JOIN_BLOCK))](
        told,
        ids,
        weights,
        y,
        size,
        stack.num_experts,
        TOP_K=top_k,
        BLOCK=JOIN_BLOCK,
        num_warps=4,
    )
    return y


def _product(
    x: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    y: torch.Tensor,
    stack: ExpertStack,
    is_gated: bool,
    top_k: int,
    cut: TileShape,
) -> None:
    weight, scale, bias = (
        (stack.gate_up, stack.gate_up_scale, stack.gate_up_bias)
        if is_gated
        else (stack.down, stack.down_scale, stack.down_bias)
    )
    n = y.shape[1]
    _expert_product_kernel[(len(tiles), cdiv(n * (2 if is_gated else 1), cut.columns))](
        x,
        order,
        tiles,
        weight,
        scale,
        bias,
        y,
        n,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        weight.stride(2 if stack.transposed else 1),
        weight.stride(1 if stack.transposed else 2),
        stack.limit or 0.0,
        stack.alpha,
        stack.plus,
        TOP_K=top_k,
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        GATED=is_gated,
        INTERLEAVED=stack.interleaved,
        ACTIVATION=ACTIVATION_CODES[stack.activation],
        CLAMPED=stack.limit is not None,
        BLOCK_M=cut.block_m,
        COLUMNS=cut.columns,
        BLOCK_K=cut.block_k,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )


def _declared(
    name: str, cut: TileShape, is_gated: bool, clamped: bool = False, int8: bool = False
) -> Declared:
    large = cut == TILE_SHAPES[-1][1]
    pointers = dict.fromkeys(("x", "weight", "scale", "bias", "y"), "*bf16:16")
    if int8:
        pointers["weight"] = "*i8:16"
    sizes = ("n", "k", "x_stride", "expert_stride", "place_stride" if clamped else "row_stride")
    flags = {"HAS_SCALE": int8, "HAS_BIAS": clamped, "INTERLEAVED": clamped, "CLAMPED": clamped}
    return Declared(
        f"expert_products/{name}",
        _expert_product_kernel,
        pointers
        | dict.fromkeys(("order", "tiles"), "*i32:16")
        | dict.fromkeys(sizes, "i32:16")
        | dict.fromkeys(("limit", "alpha", "plus"), "fp32"),
        {
            **flags,
            "row_stride" if clamped else "place_stride": 1,
            "TOP_K": 8,
            "GATED": is_gated,
            "ACTIVATION": 0,
            "BLOCK_M": cut.block_m,
            "COLUMNS": cut.columns,
            "BLOCK_K": cut.block_k,
        },
        cut.num_warps,
        cut.num_stages,
        tuple(arch for arch in ARCHS if arch >= HOPPER) if large else ARCHS,
    )


_SHAPES = tuple(shape for _, shape in TILE_SHAPES)

DECLARED = (
    *(_declared(f"gate {shape.block_m}", shape, True) for shape in _SHAPES),
    *(_declared(f"down {shape.block_m}", shape, False) for shape in (_SHAPES[0], _SHAPES[2])),
    _declared("gate 128 ampere", AMPERE_SHAPE, True),
    _declared("gate 16 int8", _SHAPES[0], True, int8=True),
    _declared("gate 128 clamped", _SHAPES[2], True, clamped=True),
    Declared(
        "expert_products/join",
        _join_kernel,
        {"told": "*bf16:16", "ids": "*i64:16", "weights": "*bf16:16", "y": "*bf16:16"}
        | {"n": "i32:16", "num_experts": "i32"},
        {"TOP_K": 8, "BLOCK": JOIN_BLOCK},
    ),
)
