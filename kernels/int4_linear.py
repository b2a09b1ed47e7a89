"""y = x W^T + bias with 4-bit weights in groups (layout: kernels/int4_layouts.py).

    x       [..., k]  bfloat16, float16 or float32
    weight  Int4Weight of [n, k]: words, scales and zeros
    bias    [n]       or None
    y       [..., n]  the dtype of x

    y[n] = sum over groups g of scale[g, n] * sum over k in g of (q[n, k] - zero[g, n]) x[k]

Scales leave the inner sum, which is of small whole numbers times x, exact but for the sum's own
rounding in float32. Bytes moved at few rows: n k / 2 + 3 n k / group, in groups of 128 a quarter
of bfloat16's and 4.7 % on top.

One row: a program keeps the running products of a few channels, a word (eight k of eight planes)
a lane; sum (q - zero) x = sum q x - zero sum x, so a zero costs one operation a word and not
eight. More rows: tl.dot, a plane of 32 at a time, summed by group and scaled into the total.
"""

import torch

from kernels.int4_layouts import BLOCK, NIBBLES, PLANE, Int4Weight, dequantize
from kernels.triton_api import Declared, cdiv, check_out, check_rows, jit, tl

FEW_BLOCK_N = 8
FEW_WORDS = 128
# Rows up to which a tile (rows, channels, warps, stages) is used.
TILES = (
    (16, (16, 64, 4, 4)),
    (64, (64, 64, 4, 3)),
    # Taller ones spill: two sums are kept, one of a group and one of all.
    (1 << 62, (64, 128, 8, 2)),
)
# Groups of 32 have eight sums a block: more than the few rows above want a narrower tile.
FINE_TILE = (64, 32, 4, 2)


def int4_linear_ref(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float32, rounded once."""
    y = x.to(torch.float32) @ dequantize(weight).T
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


@jit
def _one_row_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    num_words: tl.tensor,
    group: tl.tensor,
    HAS_BIAS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = channel < n
    step = tl.arange(0, WORDS)
    row = words + channel.to(tl.int64)[:, None] * num_words
    total = tl.zeros((BLOCK_N, WORDS), tl.float32)
    for start in range(0, num_words, WORDS):
        word = start + step
        inside = word < num_words
        both = real[:, None] & inside[None, :]
        packed = tl.load(row + word[None, :], mask=both, other=0)
        first = (word // 32) * 256 + word % 32
        for part in tl.static_range(0, 8, PLANES):
            weighted = tl.zeros((BLOCK_N, WORDS), tl.float32)
            plain = tl.zeros((WORDS,), tl.float32)
            for plane in tl.static_range(part, part + PLANES):
                place = first + plane * 32
                value = tl.load(x + place, mask=inside & (place < k), other=0.0).to(tl.float32)
                q = (packed >> (4 * plane)) & 15
                weighted += q.to(tl.float32) * value[None, :]
                plain += value
            # Behind the last k there is no group; x is 0 there.
            start_k = (word // 32) * 256 + part * 32
            at = (start_k // group).to(tl.int64)[None, :] * n + channel[:, None]
            known = both & (start_k < k)[None, :]
            steps = tl.load(zero + at, mask=known, other=0).to(tl.float32)
            size = tl.load(scale + at, mask=known, other=0.0).to(tl.float32)
            total += size * (weighted - steps * plain[None, :])
    out = tl.sum(total, 1)
    if HAS_BIAS:
        out += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(y + channel, out.to(y.dtype.element_ty), mask=real)


@jit
def _rows_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    num_words: tl.tensor,
    group: tl.tensor,
    x_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, real = row < m, channel < n
    step = tl.arange(0, 32)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    column = words + channel.to(tl.int64)[None, :] * num_words
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_words, 32):
        packed = tl.load(column + (start + step)[:, None], mask=real[None, :], other=0)
        for part in tl.static_range(0, 8, PLANES):
            start_k = start * 8 + part * 32
            at = (start_k // group).to(tl.int64) * n + channel
            known = real & (start_k < k)
            steps = tl.load(zero + at, mask=known, other=0).to(tl.int32)
            inner = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for plane in tl.static_range(part, part + PLANES):
                place = start * 8 + plane * 32 + step
                inside = there[:, None] & (place < k)[None, :]
                left = tl.load(x_row + place[None, :], mask=inside, other=0.0)
                right = ((packed >> (4 * plane)) & 15) - steps[None, :]
                right = right.to(tl.float32).to(left.dtype)
                inner = tl.dot(left, right, inner, input_precision="ieee")
            size = tl.load(scale + at, mask=known, other=0.0).to(tl.float32)
            total += inner * size[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    target = y + row.to(tl.int64)[:, None] * n + channel[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=there[:, None] & real[None, :])


def int4_linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`int4_linear_ref` by the kernels."""
    rows = x.view(-1, weight.k)
    if out is None:
        out = torch.empty(*x.shape[:-1], weight.n, dtype=x.dtype, device=x.device)
    check_rows(rows)
    check_out(out)
    flags = {"HAS_BIAS": bias is not None, "PLANES": planes_for(weight)}
    tensors = (rows, weight.words, weight.scale, weight.zero, bias, out)
    sizes = (weight.n, weight.k, weight.words.shape[1], weight.group)
    if len(rows) == 1:
        _one_row_kernel[(cdiv(weight.n, FEW_BLOCK_N),)](
            *tensors, *sizes, **flags, BLOCK_N=FEW_BLOCK_N, WORDS=FEW_WORDS, num_warps=4
        )
    elif len(rows):
        block_m, block_n, warps, stages = tile_for(len(rows), flags["PLANES"])
        _rows_kernel[(cdiv(len(rows), block_m), cdiv(weight.n, block_n))](
            *tensors,
            len(rows),
            *sizes,
            rows.stride(0),
            **flags,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
        )
    return out


def planes_for(weight: Int4Weight) -> int:
    """Planes of a block that share a scale."""
    return weight.group // PLANE if weight.group < BLOCK and weight.group < weight.k else NIBBLES


def tile_for(num_rows: int, planes: int) -> tuple[int, int, int, int]:
    """Rows and channels of a tile, warps and stages."""
    if planes == 1 and num_rows > TILES[0][0]:
        return FINE_TILE
    return next(tile for limit, tile in TILES if num_rows <= limit)


def _declared() -> tuple[Declared, ...]:
    pointers = dict.fromkeys(("x", "scale", "bias", "y"), "*bf16:16")
    pointers |= {"words": "*i32:16", "zero": "*i8:16"}
    sizes = dict.fromkeys(("n", "k", "num_words", "group"), "i32:16")
    flags = {"HAS_BIAS": True, "PLANES": 4}
    few = {"BLOCK_N": FEW_BLOCK_N, "WORDS": FEW_WORDS}
    found = [Declared("int4_linear/one-row", _one_row_kernel, pointers | sizes, flags | few)]
    tiles = ((TILES[0][1], 4), (TILES[2][1], 4), (FINE_TILE, 1))
    for (block_m, block_n, warps, stages), planes in tiles:
        found.append(
            Declared(
                f"int4_linear/rows-{block_m}x{block_n}",
                _rows_kernel,
                pointers | sizes | {"m": "i32", "x_stride": "i32:16"},
                flags | {"PLANES": planes, "BLOCK_M": block_m, "BLOCK_N": block_n},
                num_warps=warps,
                num_stages=stages,
            )
        )
    return tuple(found)


DECLARED = _declared()
