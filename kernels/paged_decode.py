"""Decode attention over paged KV: one query a row.

For row r with its query at position p = context_len[r] - 1, head h of the group of KV head g:

    o = softmax_j( softcap(scale * q . k_j) ) v_j        max(0, p + 1 - window) <= j <= p
                                                         or p - p mod chunk <= j <= p

with an optional sink logit a head in the softmax's sum.

Where V lies in K (`v_in_k`) it is read once for both: q . k is the sum of two products, over V and
over what K has behind it.

    query   [T, heads, k_dim]  token q_start[r] of row r; any strides, the last 1
    out     [T, heads, v_dim]  contiguous, query's dtype; rows of other lengths are left alone
    arena   uint8; see kernels/paged_attention.py

Bytes moved: sum over rows of seen * kv_heads * (k_dim + v_dim) * itemsize; nothing else counts. So
everything is about reading each byte of KV once, and enough of them at a time:

- A program takes the query heads of one KV head together (padded to 16, what the tensor cores want
  at least), so KV is read once for its group. The padding costs arithmetic that memory hides: at
  16 x 128 bf16 about 70 TFLOP/s at the full speed of an H200's memory, a tenth of what it can do.
- Tiles of 64 positions, K and V of NUM_STAGES - 1 tiles under way: 64 KiB at 128 wide, and two
  such programs a multiprocessor. By Little's law about 33 KiB have to be under way in each for
  4.3 TB/s over 132 of them at 1 us.
- A block's rows of one head are contiguous (4 KiB at 16 x 128 bf16), so loads are 16 bytes a thread
  and whole lines. The compiler has to be told (`multiple_of`): without it loads go one element at
  a time through registers. The table is read once a page, a tile ahead: loads that wait for other
  loads of the same turn would take stages from K and V.
- Rows x KV heads seldom fill a GPU: a row's context is cut into `num_splits` parts, chosen by
  `choose_splits` to fill whole waves, and a second kernel joins them (float32, by their maxima).
  With one split it is one launch and nothing is written but the result.

On an H200 256 rows of 8B with contexts of 180 tokens read KV at some 3.1 TB/s, 73 % of a copy.
"""

import functools
from typing import Any

import torch

from kernels.dependent import dependent, enter
from kernels.paged_attention import BlockGeometry, LayerGeometry, largest_unit_bytes
from kernels.paged_join import join_splits
from kernels.paged_rows import (
    LOG2_E,
    MASKED,
    FlatRows,
    attention_constants,
    capped,
    check_geometry,
    page_bases,
)
from kernels.paged_rows import wide_attention_ref as paged_decode_ref
from kernels.triton_api import ARCHS, Declared, cdiv, check_out, jit, next_power_of_2, tl

__all__ = ["DECLARED", "choose_splits", "paged_decode", "paged_decode_ref"]

BLOCK_N = 64
NUM_WARPS = 4
NUM_STAGES = 3
# Programs that share a multiprocessor: one more than the bytes under way ask for, so that
# beginnings and ends are hidden. An H100 holds three of 72 KiB, an A100 two.
PROGRAMS_PER_SM = 2
MAX_SPLITS = 64
# A split shorter than this pays more for its beginning and end than it brings.
LEAST_SPLIT_TILES = 4
# What a split costs beside its tiles, and a join, in tiles' times: guesses until measured.
SPLIT_TILES = 1.0
JOIN_TILES = 2.0


@functools.lru_cache(maxsize=4096)
def choose_splits(num_programs: int, max_context: int, num_sms: int) -> int:
    """In how many parts each row is cut, for `num_programs` = rows x KV heads.

    The fewest that come within 2 % of the shortest time in a model of whole waves of programs.
    """
    slots = num_sms * PROGRAMS_PER_SM
    tiles = cdiv(max(1, max_context), BLOCK_N)

    def cost(splits: int) -> float:
        waves = cdiv(num_programs * splits, slots)
        join = JOIN_TILES if splits > 1 else 0.0
        return waves * (cdiv(tiles, splits) + SPLIT_TILES) + join

    most = max(1, min(MAX_SPLITS, tiles // LEAST_SPLIT_TILES))
    costs = {splits: cost(splits) for splits in range(1, most + 1)}
    best = min(costs.values())
    return next(splits for splits, value in costs.items() if value <= 1.02 * best)


@jit
def _decode_kernel(
    arena_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    context_ptr: tl.tensor,
    first_ptr: tl.tensor,
    token_ptr: tl.tensor,
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    table_stride: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    V_START: tl.constexpr,
    V_IN_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
) -> None:
    """Program (r, g * head blocks + b, s): split s of row r for heads of KV head g.

    Split: `out_ptr` float32 [rows, heads, splits, v_dim] not yet divided, `stat_ptr` float32
    [rows, heads, splits, 2] (maximum, sum) in powers of two. An empty split leaves sum 0.
    """
    enter(DEPENDENT)
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    PAGES: tl.constexpr = BLOCK_N // BLOCK_TOKENS
    ALIGN: tl.constexpr = UNIT if UNIT < 16 else 16
    V_ROW: tl.constexpr = K_DIM if V_IN_K else V_DIM
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(context_ptr + row)
    first = tl.load(first_ptr + row)
    token = tl.load(token_ptr + row).to(tl.int64)

    member = tl.program_id(1) % HEAD_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = member < GROUP
    head = kv_head * GROUP + member
    k_dim = (V_DIM if V_IN_K else 0) + tl.arange(0, K_PAD)
    v_dim = tl.arange(0, V_PAD)
    in_k = k_dim < K_DIM
    in_v = v_dim < V_DIM
    q_head = q_ptr + token * q_stride_t + head[:, None] * q_stride_h
    q = tl.load(q_head + k_dim[None, :], mask=is_head[:, None] & in_k[None, :], other=0.0)
    if V_IN_K:
        q_v = tl.load(q_head + v_dim[None, :], mask=is_head[:, None] & in_v[None, :], other=0.0)
    if SOFTCAP == 0.0:
        scale = scale * LOG2_E

    # What the row sees, counted from its table's first position.
    high = context - first
    low = 0
    if WINDOW > 0:
        low = tl.maximum(high - WINDOW, 0)
    if WINDOW < 0:  # positions of a chunk
        low = tl.maximum((context - 1) // -WINDOW * -WINDOW - first, 0)
    first_tile = low // BLOCK_N
    num_tiles = tl.cdiv(high, BLOCK_N) - first_tile
    per_split = tl.cdiv(num_tiles, num_splits)
    begin = first_tile + split * per_split
    end = tl.minimum(begin + per_split, first_tile + num_tiles)

    highest = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    table_row = row.to(tl.int64) * table_stride
    in_page = tl.arange(0, BLOCK_TOKENS)
    k_head = kv_head * (BLOCK_TOKENS * K_DIM)
    v_head = V_START * UNIT + kv_head * (BLOCK_TOKENS * V_ROW)
    chunk_ptr += table_row
    slot_ptr += table_row
    base = page_bases(
        table_ptr, chunk_ptr, slot_ptr, begin, low, high, PAGES, BLOCK_TOKENS, UNIT, BLOCK_UNITS
    )
    for tile in range(begin, end):
        k_row = tl.reshape(base[:, None] + (k_head + in_page * K_DIM)[None, :], [BLOCK_N])
        v_row = tl.reshape(base[:, None] + (v_head + in_page * V_ROW)[None, :], [BLOCK_N])
        k_row = tl.multiple_of(k_row, ALIGN)
        v_row = tl.multiple_of(v_row, ALIGN)
        base = page_bases(
            table_ptr, chunk_ptr, slot_ptr, tile + 1, low, high,
            PAGES, BLOCK_TOKENS, UNIT, BLOCK_UNITS,
        )  # fmt: skip
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = (place < high) & (place >= low)
        # Lanes that are not seen read nothing: freed memory may hold NaN, and 0 * NaN is NaN.
        k = tl.load(
            arena_ptr + k_row[:, None] + k_dim[None, :],
            mask=seen[:, None] & in_k[None, :],
            other=0.0,
        ).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v_at = arena_ptr + v_row[:, None] + v_dim[None, :]
        if V_IN_K:
            v = tl.load(v_at, mask=seen[:, None] & in_v[None, :], other=0.0).to(q.dtype)
            scores = tl.dot(q_v, tl.trans(v), scores, input_precision="ieee")
        scores = scores * scale
        if SOFTCAP != 0.0:
            scores = capped(scores, SOFTCAP) * LOG2_E
        scores = tl.where(seen[None, :], scores, MASKED)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
        if not V_IN_K:
            v = tl.load(v_at, mask=seen[:, None] & in_v[None, :], other=0.0).to(q.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")

    if IS_SPLIT:
        place = (row.to(tl.int64) * NUM_HEADS + head) * num_splits + split
        tl.store(stat_ptr + place * 2, highest, mask=is_head)
        tl.store(stat_ptr + place * 2 + 1, total, mask=is_head)
        part = out_ptr + place[:, None] * V_DIM + v_dim[None, :]
        tl.store(part, acc, mask=is_head[:, None] & in_v[None, :])
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
        factor = 1.0 / tl.where(total > 0, total, 1.0)
        place = (token * NUM_HEADS + head) * V_DIM
        tl.store(
            out_ptr + place[:, None] + v_dim[None, :],
            (acc * factor[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_head[:, None] & in_v[None, :],
        )


def _constants(
    geometry: BlockGeometry, num_heads: int, softcap: float, has_sinks: bool
) -> dict[str, Any]:
    """What the kernel is compiled for, but for IS_SPLIT."""
    constants = attention_constants(geometry, num_heads, softcap, has_sinks)
    # Wide heads bring the same bytes in shorter tiles; shared memory holds no more of them.
    block_n = BLOCK_N if constants["K_PAD"] + constants["V_PAD"] <= 256 else BLOCK_N // 2
    # 16 x 512 results are 64 registers a thread.
    block_m = 64 if constants["V_PAD"] <= 256 else 16
    return constants | {
        "BLOCK_M": min(block_m, max(16, next_power_of_2(constants["GROUP"]))),
        "BLOCK_N": max(block_n, geometry.block_tokens),
    }


def paged_decode(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    rows: FlatRows,
    query: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int = 1,
    partial: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attend rows of one token each into `out`; every row's KV is written already.

    `num_splits`: by `choose_splits`. `partial`: float32 [rows, heads, splits, v_dim] and
    [rows, heads, splits, 2] to work in, for captured graphs; otherwise they are allocated.
    Raises ValueError for shapes that do not fit.
    """
    check_geometry(geometry, chunk_table)
    layer, num_heads = geometry.layer, query.shape[1]
    if any(length != 1 for length in rows.q_lens) or num_heads % layer.num_kv_heads:
        raise ValueError("decode rows have one token each, and KV heads divide heads")
    if query.stride(2) != 1 or not out.is_contiguous():
        raise ValueError("query's last stride is 1, out contiguous")
    constants = _constants(geometry, num_heads, softcap, sinks is not None)
    parts, stats = out, out
    if num_splits > 1:
        shape = (rows.num_rows, num_heads, num_splits)
        parts, stats = partial or (
            query.new_empty(*shape, layer.v_dim, dtype=torch.float32),
            query.new_empty(*shape, 2, dtype=torch.float32),
        )
        if parts.shape != (*shape, layer.v_dim) or stats.shape != (*shape, 2):
            raise ValueError(f"parts of {list(parts.shape)} for {list(shape)}")
        check_out(parts, stats)
    # Where the constants say that there are none, any address will do.
    sinks = out if sinks is None else sinks
    head_blocks = cdiv(constants["GROUP"], constants["BLOCK_M"])
    _decode_kernel[(rows.num_rows, layer.num_kv_heads * head_blocks, num_splits)](
        arena.view(geometry.dtype),
        chunk_table,
        rows.chunk,
        rows.slot,
        rows.context_len,
        rows.first,
        rows.q_start,
        query,
        parts,
        stats,
        sinks,
        rows.chunk.stride(0),
        query.stride(0),
        query.stride(1),
        scale,
        IS_SPLIT=num_splits > 1,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **constants,
        **dependent(arena.device),
    )
    if num_splits > 1:
        join_splits(parts, stats, rows.q_start, out, sinks, constants)


def _signature(out: str) -> dict[str, str]:
    pointers = {
        "arena": "bf16",
        "table": "i64",
        "chunk": "i32",
        "slot": "i32",
        "context": "i32",
        "first": "i32",
        "token": "i32",
        "q": "bf16",
        "out": out,
        "stat": "fp32",
        "sinks": "bf16",
    }
    numbers = {"table_stride": "i32", "q_stride_t": "i32:16", "q_stride_h": "i32:16"}
    return {f"{k}_ptr": f"*{v}:16" for k, v in pointers.items()} | numbers | {"scale": "fp32"}


def _declare(
    name: str,
    heads: int,
    layer: LayerGeometry,
    softcap: float = 0.0,
    sinks: bool = False,
    split: bool = False,
) -> Declared:
    unit = largest_unit_bytes(layer, torch.bfloat16, 1 << 21)
    constants = _constants(BlockGeometry(layer, 16, torch.bfloat16, unit), heads, softcap, sinks)
    signature = _signature("fp32" if split else "bf16")
    constants["IS_SPLIT"] = split
    return Declared(
        f"decode/{name}", _decode_kernel, signature, constants, NUM_WARPS, NUM_STAGES, ARCHS
    )


DECLARED = (
    _declare("llama-8b", 32, LayerGeometry(8, 128, 128)),
    _declare("llama-8b split", 32, LayerGeometry(8, 128, 128), split=True),
    _declare("gpt-oss window sinks", 64, LayerGeometry(8, 64, 64, 128), sinks=True),
    _declare("gemma-2 softcap split", 8, LayerGeometry(4, 256, 256), softcap=50.0, split=True),
    _declare("deepseek latent split", 16, LayerGeometry(1, 576, 512, v_in_k=True), split=True),
)
