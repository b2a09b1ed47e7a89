"""Rotary position embedding: pairs of a head's first `2 * half` elements are rotated by an angle.

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin

    x, out     [T, heads, dim]  any strides, the last 1; `out` may be `x` itself
    cos, sin   [T, half]        any strides: what transformers hands out (each angle twice) is
                                given as cos[:, :half], or as cos[:, ::2] where pairs lie together

Layouts: x1 and x2 are the two halves of what is rotated (llama, qwen, gpt_neox), or its even and
odd elements (`interleaved`: cohere, glm, gptj). Elements behind are not rotated (partial rotary).

Bytes moved: each element once in, once out. Computed in float32 and rounded once; transformers
rounds cos, sin and both products to the model's dtype. Where K goes to the cache anyway,
kernels/kv_write.py does this on the way: one launch, and K is not written twice.
"""

import torch

from kernels.triton_api import Declared, cdiv, jit, next_power_of_2, tl

# Heads a program takes: at 8 x 128 bf16 it moves 4 KiB, and a few tokens still make many programs.
HEADS = 8
NUM_WARPS = 4


def rotary_ref(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """The definition, in float64, not rounded."""
    half = cos.shape[-1]
    wide, c, s = x.double(), cos.double()[:, None], sin.double()[:, None]
    rotated, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        x1, x2 = rotated[..., ::2], rotated[..., 1::2]
    else:
        x1, x2 = rotated[..., :half], rotated[..., half:]
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    pairs = torch.stack([y1, y2], -1).flatten(-2) if interleaved else torch.cat([y1, y2], -1)
    return torch.cat([pairs, rest], -1)


@jit
def turn(x1: tl.tensor, x2: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """One rotation of all pairs, float32."""
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@jit
def angles(
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    token: tl.tensor,
    stride_t: tl.tensor,
    stride_d: tl.tensor,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> tl.tensor:
    """cos and sin of one token, float32 [1, HALF_PAD]."""
    pair = tl.arange(0, HALF_PAD)
    at = token * stride_t + pair * stride_d
    cos = tl.load(cos_ptr + at, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=pair < HALF, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@jit
def _rotary_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    num_heads: tl.tensor,
    x_stride_t: tl.tensor,
    x_stride_h: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    angle_stride_t: tl.tensor,
    angle_stride_d: tl.tensor,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
) -> None:
    """Program (t, b): HEADS heads of one token. Loads all before it stores: `out` may be `x`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (head < num_heads)[:, None]
    pair = tl.arange(0, HALF_PAD)
    at1 = pair * 2 if INTERLEAVED else pair
    at2 = pair * 2 + 1 if INTERLEAVED else pair + HALF
    mask = is_head & (pair < HALF)[None, :]
    x_head = x_ptr + (token * x_stride_t + head * x_stride_h)[:, None]
    out_head = out_ptr + (token * out_stride_t + head * out_stride_h)[:, None]
    x1 = tl.load(x_head + at1[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_head + at2[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = angles(cos_ptr, sin_ptr, token, angle_stride_t, angle_stride_d, HALF, HALF_PAD)
    y1, y2 = turn(x1, x2, cos, sin)
    tl.store(out_head + at1[None, :], y1.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_head + at2[None, :], y2.to(out_ptr.dtype.element_ty), mask=mask)
    if REST_PAD > 0:
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        mask = is_head & (rest < DIM)[None, :]
        value = tl.load(x_head + rest[None, :], mask=mask, other=0.0)
        tl.store(out_head + rest[None, :], value, mask=mask)


def paddings(dim: int, half: int) -> dict[str, int]:
    """Sizes of the blocks for pairs and for what is not rotated."""
    rest = dim - 2 * half
    return {
        "HALF_PAD": next_power_of_2(max(1, half)),
        "REST_PAD": next_power_of_2(rest) if rest else 0,
    }


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Rotate into `out`, which may be `x`. Raises ValueError for shapes that do not fit."""
    num_tokens, num_heads, dim = x.shape
    half = cos.shape[1]
    if x.stride(2) != 1 or out.stride(2) != 1 or 2 * half > dim or cos.stride() != sin.stride():
        raise ValueError("last strides are 1, cos and sin alike, and no wider than the head")
    if not num_tokens:
        return
    _rotary_kernel[(num_tokens, cdiv(num_heads, HEADS))](
        x,
        out,
        cos,
        sin,
        num_heads,
        *x.stride()[:2],
        *out.stride()[:2],
        *cos.stride(),
        DIM=dim,
        HALF=half,
        INTERLEAVED=interleaved,
        HEADS=HEADS,
        **paddings(dim, half),
        num_warps=NUM_WARPS,
    )


_STRIDES = dict.fromkeys(("x_stride_t", "x_stride_h", "out_stride_t", "out_stride_h"), "i32:16")

DECLARED = (
    Declared(
        "rotary/128 interleaved half",
        _rotary_kernel,
        {f"{name}_ptr": "*bf16:16" for name in ("x", "out", "cos", "sin")}
        | {"num_heads": "i32", **_STRIDES, "angle_stride_t": "i32:16", "angle_stride_d": "i32"},
        {"DIM": 128, "HALF": 32, "INTERLEAVED": True, "HEADS": HEADS, **paddings(128, 32)},
        NUM_WARPS,
    ),
)
