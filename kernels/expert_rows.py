"""A mixture's experts for few pairs: a product of one row each, as fast as its weights are read.

Shapes and roundings are those of expert_mlp.py. Two launches:

    1  inner[pair]  = act(gate) up   program (pair, block of channels)
    2  y[token]     = weighted sum   program (token, block of channels): its experts one after
                                     another, each result rounded, in the order of the choices

Bytes moved: 3 h i elements a pair. As in few_rows.py a program has a few channels, goes along all
of k, and asks for its next tile before it multiplies this one; in the second launch the next tile
may be the next expert's. Programs of the same channels are neighbours in the grid, so experts that
several tokens have chosen come from memory once.

Weights that lie transposed are read in wider blocks of channels, which are what is together there.

With dependent launches (dependent.py) the second kernel asks for its first weights before the first
has ended. Which experts those are was known before the first began: that one waits for all that is
before it, and lets the second start only then. None of this is measured yet.
"""

from typing import Any, NamedTuple

import torch

from kernels.dependent import dependent
from kernels.expert_mlp import ExpertStack, check_experts, gated, weight_rows
from kernels.few_rows import VECTOR
from kernels.gate_mul import ACTIVATION_CODES
from kernels.prefill_shape import HOPPER
from kernels.triton_api import ARCHS, Declared, cdiv, jit, next_power_of_2, tl

MAX_PAIRS = 32


class RowShape(NamedTuple):
    """Of a launch: rows of W a program (of gate and up together), places of k, warps."""

    columns: int
    block_k: int
    num_warps: int


def row_shape(n: int, k: int, stack: ExpertStack, is_gated: bool) -> RowShape:
    """Tiles of 8 KiB, or 16 where W lies transposed; some hundred programs a pair or token."""
    if stack.transposed:
        return RowShape(32, 256, 8)
    block_k = max(16, min(1024, next_power_of_2(k)))
    columns = max(1, min(4, next_power_of_2(n // 256 + 1) // 2))
    return RowShape(columns * 2 if is_gated else columns, block_k, 4)


def takes_pairs(ids: torch.Tensor, stack: ExpertStack) -> bool:
    """Whether there are so few that hardly two of them share an expert."""
    return 0 < ids.numel() <= min(MAX_PAIRS, stack.num_experts)


@jit
def _products(piece: tl.tensor, value: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """Of a tile and a piece of a row; neighbours, which a thread holds, are summed."""
    products = piece.to(tl.float32) * value[None, :]
    near = tl.reshape(products, (products.shape[0], products.shape[1] // VECTOR, VECTOR))
    return tl.sum(near, 2)


@jit
def _scaled(
    out: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    place: tl.tensor,
    real: tl.tensor,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    if HAS_SCALE:
        out = out * tl.load(scale + place, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias + place, mask=real, other=0.0).to(tl.float32)
    return out


@jit
def _gate_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    inner: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    num_experts: tl.tensor,
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
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (pair, block). What is not written of a pair without an expert is not read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    row, real = weight_rows(block, n, True, INTERLEAVED, COLUMNS)
    step = tl.arange(0, BLOCK_K)
    tile = weight + expert * expert_stride
    tile += row.to(tl.int64)[:, None] * row_stride + step[None, :] * place_stride
    piece = tl.load(tile, mask=real[:, None] & (step < k)[None, :], other=0)
    x_row = x + (pair // TOP_K).to(tl.int64) * x_stride
    total = tl.zeros((COLUMNS, BLOCK_K // VECTOR), tl.float32)
    for start in range(0, k, BLOCK_K):
        place = start + step
        ahead = tile + (start + BLOCK_K) * place_stride
        following = tl.load(ahead, mask=real[:, None] & (place + BLOCK_K < k)[None, :], other=0)
        value = tl.load(x_row + place, mask=place < k, other=0.0).to(tl.float32)
        total += _products(piece, value, VECTOR)
        piece = following
    dtype = inner.dtype.element_ty
    out = _scaled(tl.sum(total, 1), scale, bias, expert * 2 * n + row, real, HAS_SCALE, HAS_BIAS)
    gate, up = tl.split(tl.reshape(out.to(dtype).to(tl.float32), (COLUMNS // 2, 2)))
    out = gated(gate, up, limit, alpha, plus, ACTIVATION, CLAMPED)
    channel = block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    tl.store(inner + pair * n + channel, out.to(dtype), mask=channel < n)


@jit
def _down_kernel(
    inner: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    num_experts: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    place_stride: tl.tensor,
    TOP_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (token, block)."""
    token, block = tl.program_id(0), tl.program_id(1)
    row, real = weight_rows(block, n, False, False, COLUMNS)
    step = tl.arange(0, BLOCK_K)
    tile = weight + row.to(tl.int64)[:, None] * row_stride + step[None, :] * place_stride
    expert = tl.load(ids + token * TOP_K).to(tl.int64)
    known = (expert >= 0) & (expert < num_experts)
    first = tile + tl.where(known, expert, 0) * expert_stride
    piece = tl.load(first, mask=real[:, None] & (step < k)[None, :] & known, other=0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = y.dtype.element_ty
    depth = (k + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    out = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids + pair).to(tl.int64)
        known = (expert >= 0) & (expert < num_experts)
        total = tl.zeros((COLUMNS, BLOCK_K // VECTOR), tl.float32)
        for start in range(0, k, BLOCK_K):
            # A remainder would hide from the compiler that it is a multiple of 16 places.
            wraps = (start + BLOCK_K) // depth
            to = (start + BLOCK_K) * (1 - wraps)
            later = choice + wraps
            chosen = tl.load(ids + token * TOP_K + later, mask=later < TOP_K, other=-1)
            chosen = chosen.to(tl.int64)
            there = (chosen >= 0) & (chosen < num_experts)
            ahead = tile + tl.where(there, chosen, 0) * expert_stride
            ahead += to * place_stride
            wanted = real[:, None] & (to + step < k)[None, :] & there
            following = tl.load(ahead, mask=wanted, other=0)
            place = start + step
            value = tl.load(inner + pair * k + place, mask=(place < k) & known, other=0.0)
            total += _products(piece, value.to(tl.float32), VECTOR)
            piece = following
        at = tl.where(known, expert, 0) * n + row
        said = _scaled(tl.sum(total, 1), scale, bias, at, real, HAS_SCALE, HAS_BIAS)
        factor = tl.load(weights + pair).to(tl.float32)
        out += tl.where(known, factor * said.to(dtype).to(tl.float32), 0.0)
    tl.store(y + token * n + row, out.to(dtype), mask=real)


def expert_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: ExpertStack,
    shapes: tuple[RowShape, RowShape] | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`expert_mlp_ref` by the kernels, an expert's weights read for every pair that has chosen it.

    `shapes`: of both launches, to measure; `out`: y [T, h] and inner [P, i], contiguous. Raises
    ValueError for what does not fit together.
    """
    check_experts(x, ids, weights, stack)
    size, width = stack.size, stack.inner
    y, inner = out or (x.new_empty(len(x), size), x.new_empty(ids.numel(), width))
    if not ids.numel():
        return y.zero_()
    up, down = shapes or (
        row_shape(width, size, stack, is_gated=True),
        row_shape(size, width, stack, is_gated=False),
    )
    _launch_gate(x, ids, inner, stack, up)
    _down_kernel[(len(x), cdiv(size, down.columns))](
        inner,
        ids,
        weights,
        stack.down,
        stack.down_scale,
        stack.down_bias,
        y,
        size,
        width,
        stack.num_experts,
        *_strides(stack.down, stack),
        TOP_K=ids.shape[1],
        HAS_SCALE=stack.down_scale is not None,
        HAS_BIAS=stack.down_bias is not None,
        **_launch(x, stack, down),
    )
    return y


def _launch_gate(
    x: torch.Tensor, ids: torch.Tensor, inner: torch.Tensor, stack: ExpertStack, shape: RowShape
) -> None:
    _gate_kernel[(ids.numel(), cdiv(2 * stack.inner, shape.columns))](
        x,
        ids,
        stack.gate_up,
        stack.gate_up_scale,
        stack.gate_up_bias,
        inner,
        stack.inner,
        stack.size,
        stack.num_experts,
        x.stride(0),
        *_strides(stack.gate_up, stack),
        stack.limit or 0.0,
        stack.alpha,
        stack.plus,
        TOP_K=ids.shape[1],
        HAS_SCALE=stack.gate_up_scale is not None,
        HAS_BIAS=stack.gate_up_bias is not None,
        INTERLEAVED=stack.interleaved,
        ACTIVATION=ACTIVATION_CODES[stack.activation],
        CLAMPED=stack.limit is not None,
        **_launch(x, stack, shape),
    )


def _strides(weight: torch.Tensor, stack: ExpertStack) -> tuple[int, int, int]:
    """From expert to expert, row to row, place to place of a row."""
    row, place = (2, 1) if stack.transposed else (1, 2)
    return weight.stride(0), weight.stride(row), weight.stride(place)


def _launch(x: torch.Tensor, stack: ExpertStack, shape: RowShape) -> dict[str, Any]:
    return {
        "COLUMNS": shape.columns,
        "BLOCK_K": shape.block_k,
        "VECTOR": 1 if stack.transposed else VECTOR,
        "num_warps": shape.num_warps,
        **dependent(x.device),
    }


def _declared(
    name: str, shape: RowShape, is_gated: bool, clamped: bool = False, arch: int = HOPPER
) -> Declared:
    pointers = ("weight", "scale", "bias", "inner", *(("x",) if is_gated else ("weights", "y")))
    sizes = ("n", "k", "expert_stride", "place_stride" if clamped else "row_stride")
    flags: dict[str, object] = {"HAS_SCALE": False, "HAS_BIAS": clamped, "TOP_K": 8}
    extra: dict[str, str] = {}
    if is_gated:
        flags |= {"INTERLEAVED": clamped, "CLAMPED": clamped, "ACTIVATION": 0}
        extra = {"x_stride": "i32:16"} | dict.fromkeys(("limit", "alpha", "plus"), "fp32")
    return Declared(
        f"expert_rows/{name}",
        _gate_kernel if is_gated else _down_kernel,
        dict.fromkeys(pointers, "*bf16:16")
        | dict.fromkeys(sizes, "i32:16")
        | {"ids": "*i64:16", "num_experts": "i32"}
        | extra,
        {
            **flags,
            "row_stride" if clamped else "place_stride": 1,
            "DEPENDENT": arch >= HOPPER,
            "COLUMNS": shape.columns,
            "BLOCK_K": shape.block_k,
            "VECTOR": 1 if clamped else VECTOR,
        },
        shape.num_warps,
        archs=tuple(one for one in ARCHS if (one >= HOPPER) == (arch >= HOPPER)),
    )


_PLAIN, _TRANSPOSED = RowShape(8, 1024, 4), RowShape(32, 256, 8)

DECLARED = (
    _declared("gate", _PLAIN, True),
    _declared("gate ampere", _PLAIN, True, arch=80),
    _declared("gate clamped", _TRANSPOSED, True, clamped=True),
    _declared("down", RowShape(4, 1024, 4), False),
    _declared("down clamped", _TRANSPOSED, False, clamped=True),
)
