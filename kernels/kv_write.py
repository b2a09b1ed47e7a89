"""K and V of new tokens into the paged cache, with rotary on the way: q and k rotated, one launch.

    q          [T, heads, k_dim]     rotated into q_out, which may be q itself
    key        [T, kv_heads, k_dim]  rotated into the cache; not changed
    value      [T, kv_heads, v_dim]  copied into the cache; not read where V lies in K
    cos, sin   [T, half], or None: keys are rotated already (or never), and q is left alone
    token_chunk, token_slot, token_offset   int [T], where each token goes; see PagedBatch. A chunk
               of -1 writes nothing: tokens that only fill a captured graph

Any strides but the last, which is 1: the three are views of one fused projection.

Bytes moved: q, k and v once in, once out. What counts is the launches saved, two rotations and a
scatter, and that K is not written and read once more between them.

The rotation is rotary.py's, computed in float32 and rounded once.
"""

from typing import Any

import torch

from kernels.dependent import dependent, enter
from kernels.paged_attention import (
    BlockGeometry,
    LayerGeometry,
    PagedBatch,
    largest_unit_bytes,
    write_kv_ref,
)
from kernels.paged_rows import check_geometry
from kernels.rotary import HEADS, NUM_WARPS, angles, paddings, rotary_ref, turn
from kernels.triton_api import Declared, cdiv, jit, next_power_of_2, tl


def rotary_write_ref(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool = False,
) -> torch.Tensor:
    """The definition, step by step; returns q, rotated. Every token is written."""
    if cos is not None and sin is not None:
        q, key = (rotary_ref(x, cos, sin, interleaved).to(x.dtype) for x in (q, key.double()))
    key, value = (x.float().to(geometry.dtype) for x in (key, value))
    write_kv_ref(arena, geometry, chunk_table, batch, key, value)
    return q


@jit
def _write_kernel(
    arena_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    q_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_out_stride_t: tl.tensor,
    q_out_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_h: tl.tensor,
    angle_stride_t: tl.tensor,
    angle_stride_d: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    V_START: tl.constexpr,
    V_IN_K: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
) -> None:
    """Program (t, b): HEADS heads of q, or HEADS KV heads of key and value, of one token."""
    enter(DEPENDENT)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS if HALF > 0 else 0
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    at1 = pair * 2 if INTERLEAVED else pair
    at2 = pair * 2 + 1 if INTERLEAVED else pair + HALF
    rest = 2 * HALF + tl.arange(0, REST_PAD if REST_PAD > 0 else 1)
    cos, sin = angles(cos_ptr, sin_ptr, token, angle_stride_t, angle_stride_d, HALF, HALF_PAD)
    if part < Q_BLOCKS:
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
        q_head = q_ptr + (token * q_stride_t + head * q_stride_h)[:, None]
        out_head = q_out_ptr + (token * q_out_stride_t + head * q_out_stride_h)[:, None]
        x1 = tl.load(q_head + at1[None, :], mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(q_head + at2[None, :], mask=mask, other=0.0).to(tl.float32)
        y1, y2 = turn(x1, x2, cos, sin)
        tl.store(out_head + at1[None, :], y1.to(q_out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_head + at2[None, :], y2.to(q_out_ptr.dtype.element_ty), mask=mask)
        if REST_PAD > 0:
            mask = (head < NUM_HEADS)[:, None] & (rest < K_DIM)[None, :]
            tail = tl.load(q_head + rest[None, :], mask=mask, other=0.0)
            tl.store(out_head + rest[None, :], tail, mask=mask)
    else:
        chunk = tl.load(chunk_ptr + token)
        if chunk >= 0:
            slot = tl.load(slot_ptr + token).to(tl.int64)
            offset = tl.load(offset_ptr + token)
            base = (tl.load(table_ptr + chunk) + slot * BLOCK_UNITS) * UNIT
            kv_head = (part - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
            is_head = kv_head < NUM_KV_HEADS
            k_head = k_ptr + (token * k_stride_t + kv_head * k_stride_h)[:, None]
            k_row = arena_ptr + (base + (kv_head * BLOCK_TOKENS + offset) * K_DIM)[:, None]
            if HALF > 0:
                in_pair = is_head[:, None] & (pair < HALF)[None, :]
                k1 = tl.load(k_head + at1[None, :], mask=in_pair, other=0.0).to(tl.float32)
                k2 = tl.load(k_head + at2[None, :], mask=in_pair, other=0.0).to(tl.float32)
                r1, r2 = turn(k1, k2, cos, sin)
                tl.store(k_row + at1[None, :], r1.to(arena_ptr.dtype.element_ty), mask=in_pair)
                tl.store(k_row + at2[None, :], r2.to(arena_ptr.dtype.element_ty), mask=in_pair)
            if REST_PAD > 0:
                in_rest = is_head[:, None] & (rest < K_DIM)[None, :]
                k = tl.load(k_head + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
                k = k.to(arena_ptr.dtype.element_ty)
                tl.store(k_row + rest[None, :], k, mask=in_rest)
            if not V_IN_K:
                v_dim = tl.arange(0, V_PAD)
                in_v = is_head[:, None] & (v_dim < V_DIM)[None, :]
                v_head = v_ptr + (token * v_stride_t + kv_head * v_stride_h)[:, None]
                v_row = V_START * UNIT + (kv_head * BLOCK_TOKENS + offset) * V_DIM
                v = tl.load(v_head + v_dim[None, :], mask=in_v, other=0.0).to(tl.float32)
                v = v.to(arena_ptr.dtype.element_ty)
                tl.store(arena_ptr + (base + v_row)[:, None] + v_dim[None, :], v, mask=in_v)


def _constants(
    geometry: BlockGeometry, num_heads: int, half: int, interleaved: bool
) -> dict[str, Any]:
    layer = geometry.layer
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": layer.num_kv_heads,
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "BLOCK_TOKENS": geometry.block_tokens,
        "UNIT": geometry.unit_elements,
        "BLOCK_UNITS": geometry.block_units,
        "V_START": geometry.v_start_units,
        "V_IN_K": layer.v_in_k,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "HEADS": HEADS,
        **paddings(layer.k_dim, half),
        "V_PAD": next_power_of_2(layer.v_dim),
    }


def rotary_write(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    batch: PagedBatch,
    q: torch.Tensor,
    q_out: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate q into `q_out` and k into the cache, and v beside it; chunk_table as in write_kv_ref.

    Raises ValueError for shapes that do not fit.
    """
    check_geometry(geometry, chunk_table)
    angle = q[:, 0, :0] if cos is None or sin is None else cos
    half = angle.shape[1]
    if any(tensor.stride(2) != 1 for tensor in (q, q_out, key, value)):
        raise ValueError("the last stride of q, key and value is 1")
    if 2 * half > geometry.layer.k_dim or (sin is not None and sin.stride() != angle.stride()):
        raise ValueError("cos is no wider than half a key; cos and sin lie alike")
    if not len(key):
        return
    constants = _constants(geometry, q.shape[1], half, interleaved)
    blocks = cdiv(geometry.layer.num_kv_heads, HEADS) + (cdiv(q.shape[1], HEADS) if half else 0)
    _write_kernel[(len(key), blocks)](
        arena.view(geometry.dtype),
        chunk_table,
        batch.token_chunk,
        batch.token_slot,
        batch.token_offset,
        q,
        q_out,
        key,
        value,
        angle,
        angle if sin is None else sin,
        *(stride for tensor in (q, q_out, key, value) for stride in tensor.stride()[:2]),
        *angle.stride(),
        **constants,
        **dependent(arena.device),
        num_warps=NUM_WARPS,
    )


def _declare(name: str, heads: int, layer: LayerGeometry) -> Declared:
    unit = largest_unit_bytes(layer, torch.bfloat16, 1 << 21)
    names = ("q", "q_out", "k", "v", "cos", "sin")
    pointers = dict.fromkeys((*names, "arena"), "bf16")
    pointers |= dict.fromkeys(("table", "chunk", "slot", "offset"), "i64")
    strides = [f"{name}_stride_{axis}" for name in names[:4] for axis in "th"]
    return Declared(
        f"kv_write/{name}",
        _write_kernel,
        {f"{key}_ptr": f"*{kind}:16" for key, kind in pointers.items()}
        | dict.fromkeys([*strides, "angle_stride_t"], "i32:16")
        | {"angle_stride_d": "i32"},
        _constants(BlockGeometry(layer, 16, torch.bfloat16, unit), heads, layer.k_dim // 2, False),
        NUM_WARPS,
        archs=(80, 90, 100),
    )


DECLARED = (_declare("llama-8b", 32, LayerGeometry(8, 128, 128)),)
