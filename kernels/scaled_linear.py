"""y = (x W^T) * scale + bias with one byte a weight, int8 or fp8, and a scale for each channel.

    x       [..., k]  bfloat16, float16 or float32
    weight  [n, k]    int8, or float8_e4m3fn without NaN; it stands for weight[n, k] * scale[n]
    scale   [n]       any float type
    bias    [n]       or None
    y       [..., n]  the dtype of x

What engine/registration/quantize.py makes, and kernels/int8_linear.py computes on processors. An
int8 and an e4m3 value are exact in float16 and in bfloat16, so the weight is widened in registers,
multiplied in the dtype of x, summed in float32 and scaled once, at the end.

Bytes moved at few rows: n k, half of what bfloat16 weights would need; a product is as fast as its
weight is read. One row is multiplied without tensor cores, each program holding the running
products of a few channels in registers, summed up at the end. More rows go through tl.dot, in
tiles of rows as tall as there are rows for.

fp8 is widened by its bits: an e4m3's exponent and mantissa, moved to a float16's place, are the
value / 2^8, subnormal ones too. Ampere has no instruction for it, and the interpreter none either.
"""

import torch

from kernels.triton_api import Declared, cdiv, check_out, check_rows, jit, tl

FEW_BLOCK_N = 8
FEW_BLOCK_K = 1024
# Rows up to which a tile (rows, channels, depth, warps, stages) is used.
TILES = (
    (16, (16, 32, 256, 4, 4)),
    (64, (64, 64, 128, 4, 3)),
    (1 << 62, (128, 128, 64, 8, 3)),
)


def scaled_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float32, rounded once."""
    wide = weight.to(torch.float32) * scale.to(torch.float32)[:, None]
    y = x.to(torch.float32) @ wide.T
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def quantize_fp8(
    weight: torch.Tensor, dtype: torch.dtype, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] to float8_e4m3fn and scales [n] of `dtype`. Raises ValueError on NaN.

    given: scales [n] by which somebody has rounded the weight already: its codes come out again.
    """
    exact = weight.to(torch.float32)
    largest = exact.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weights that are not finite cannot be quantized")
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = (largest / limit if given is None else given).to(dtype)
    scale = torch.where(scale != 0, scale, torch.ones_like(scale))
    # A scale that was rounded down must not push the largest over the edge: that would be a NaN.
    rounded = (exact / scale.to(torch.float32)[:, None]).clamp_(-limit, limit)
    return rounded.to(torch.float8_e4m3fn), scale


@jit
def _widen(value: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """int8, or the bits of e4m3, as a float that holds them exactly."""
    if FP8:
        bits = value.to(tl.int16)
        bits = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value.to(tl.float32)


@jit
def _one_row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = channel < n
    step = tl.arange(0, BLOCK_K)
    row = weight + channel.to(tl.int64)[:, None] * k
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, k, BLOCK_K):
        place = start + step
        inside = place < k
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        piece = tl.load(row + place[None, :], mask=real[:, None] & inside[None, :], other=0)
        total += _widen(piece, FP8) * value[None, :]
    out = tl.sum(total, 1) * tl.load(scale + channel, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(y + channel, out.to(y.dtype.element_ty), mask=real)


@jit
def _rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, real = row < m, channel < n
    step = tl.arange(0, BLOCK_K)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    column = weight + channel.to(tl.int64)[None, :] * k
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        place = start + step
        inside = place < k
        left = tl.load(x_row + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        right = tl.load(column + place[:, None], mask=inside[:, None] & real[None, :], other=0)
        right = _widen(right, FP8).to(left.dtype)
        total = tl.dot(left, right, total, input_precision="ieee")
    total = total * tl.load(scale + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    target = y + row.to(tl.int64)[:, None] * n + channel[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=there[:, None] & real[None, :])


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scaled_linear_ref` by the kernels. Rows of x may lie a stride apart."""
    n, k = weight.shape
    if weight.dtype not in (torch.int8, torch.float8_e4m3fn) or not weight.is_contiguous():
        raise ValueError("weights are int8 or float8_e4m3fn, and lie together")
    rows = x.view(-1, k)
    if out is None:
        out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    check_rows(rows)
    check_out(out)
    flags = {"HAS_BIAS": bias is not None, "FP8": weight.dtype == torch.float8_e4m3fn}
    raw = weight.view(torch.uint8) if flags["FP8"] else weight
    if len(rows) == 1:
        _one_row_kernel[(cdiv(n, FEW_BLOCK_N),)](
            rows,
            raw,
            scale,
            bias,
            out,
            n,
            k,
            **flags,
            BLOCK_N=FEW_BLOCK_N,
            BLOCK_K=FEW_BLOCK_K,
            num_warps=4,
        )
    elif len(rows):
        block_m, block_n, block_k, warps, stages = tile_for(len(rows))
        _rows_kernel[(cdiv(len(rows), block_m), cdiv(n, block_n))](
            rows,
            raw,
            scale,
            bias,
            out,
            len(rows),
            n,
            k,
            rows.stride(0),
            **flags,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
        )
    return out


def tile_for(num_rows: int) -> tuple[int, int, int, int, int]:
    """Rows, channels and depth of a tile, warps and stages."""
    return next(tile for limit, tile in TILES if num_rows <= limit)


def _declared() -> tuple[Declared, ...]:
    found = []
    few = {"BLOCK_N": FEW_BLOCK_N, "BLOCK_K": FEW_BLOCK_K}
    sizes = {"n": "i32:16", "k": "i32:16"}
    for name, fp8 in (("int8", False), ("fp8", True)):
        pointers = dict.fromkeys(("x", "scale", "bias", "y"), "*bf16:16")
        pointers["weight"] = "*u8:16" if fp8 else "*i8:16"
        # As packs have them.
        pointers["scale"] = "*fp32:16" if fp8 else "*bf16:16"
        flags = {"HAS_BIAS": True, "FP8": fp8}
        found.append(
            Declared(f"{name}_linear/one-row", _one_row_kernel, pointers | sizes, flags | few)
        )
        for _, (block_m, block_n, block_k, warps, stages) in TILES:
            if block_m == 64:  # between two that are compiled
                continue
            blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
            found.append(
                Declared(
                    f"{name}_linear/rows-{block_m}",
                    _rows_kernel,
                    pointers | sizes | {"m": "i32", "x_stride": "i32:16"},
                    flags | blocks,
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return tuple(found)


DECLARED = _declared()
