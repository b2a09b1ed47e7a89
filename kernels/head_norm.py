"""RMSNorm of each query and key head by itself, in place, before the rotary embedding (Qwen3).

    qkv   [T, (heads + 2 kv_heads) * dim]  the fused product's row: query heads, key heads, values
    q_norm, k_norm  [dim]
    head <- head / sqrt(mean(head^2) + eps) * weight        (1 + weight where `unit_offset`)

Float32 inside, rounded once. Bytes moved: 2 T (heads + kv_heads) dim elements. One program a
token; values are left alone.
"""

import torch

from kernels.dependent import dependent, enter
from kernels.triton_api import Declared, check_rows, jit, next_power_of_2, tl


def head_norm_ref_(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """The definition."""
    dim = q_norm.shape[0]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, dim)
    for part, weight in (
        (heads[:, :num_heads], q_norm),
        (heads[:, num_heads : num_heads + num_kv_heads], k_norm),
    ):
        wide = part.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        part.copy_(wide * (weight.float() + 1.0 if unit_offset else weight.float()))


@jit
def _head_norm_kernel(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    place = tl.arange(0, DIM_BLOCK)
    inside = place < DIM
    both = (head < HEADS + KV_HEADS)[:, None] & inside[None, :]
    target = qkv + row * stride + head[:, None] * DIM + place[None, :]
    value = tl.load(target, mask=both, other=0.0).to(tl.float32)
    of_query = tl.load(q_norm + place, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where((head < HEADS)[:, None], of_query[None, :], of_key[None, :])
    if UNIT_OFFSET:
        factor += 1.0
    value = value * tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None] * factor
    tl.store(target, value.to(qkv.dtype.element_ty), mask=both)


def head_norm_(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """`head_norm_ref_` by the kernel. Rows of qkv may lie a stride apart."""
    dim = q_norm.shape[0]
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * dim:
        raise ValueError(f"rows of {qkv.shape[1]} for {num_heads} + 2 x {num_kv_heads} x {dim}")
    check_rows(qkv)
    if len(qkv):
        block = min(16, next_power_of_2(num_heads + num_kv_heads))
        _head_norm_kernel[(len(qkv), -(-(num_heads + num_kv_heads) // block))](
            qkv,
            q_norm,
            k_norm,
            qkv.stride(0),
            eps,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            DIM=dim,
            UNIT_OFFSET=unit_offset,
            HEAD_BLOCK=block,
            DIM_BLOCK=next_power_of_2(dim),
            num_warps=4,
            **dependent(qkv.device),
        )


DECLARED = (
    Declared(
        "head_norm/qwen3",
        _head_norm_kernel,
        dict.fromkeys(("qkv", "q_norm", "k_norm"), "*bf16:16")
        | {"stride": "i32:16", "eps": "fp32"},
        {
            "HEADS": 32,
            "KV_HEADS": 8,
            "DIM": 128,
            "UNIT_OFFSET": False,
            "HEAD_BLOCK": 16,
            "DIM_BLOCK": 128,
        },
    ),
)
