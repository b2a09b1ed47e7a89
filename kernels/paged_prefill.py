"""Attention of whole chunks over paged KV: rows of any length, causal, over a cached prefix.

A row's q_len queries are the last q_len of its context; the query at position p sees

    o = softmax_j( softcap(scale * q . k_j) ) v_j        max(0, p + 1 - window) <= j <= p
                                                         or p - p mod chunk <= j <= p

with an optional sink logit a head. K and V of the chunk itself are written to the cache before, so
prefix and chunk are read the same way, and so are rows of one token (a decode beside chunks).

Where V lies in K (`v_in_k`) it is read once for both: q . k is the sum of two products, over V and
over what K has behind it.

    query   [T, heads, k_dim]  the row's tokens from q_start on; any strides, the last 1
    out     [T, heads, v_dim]  contiguous, query's dtype; tokens of no row are left alone
    arena   uint8; see kernels/paged_attention.py

Work: 2 * (k_dim + v_dim) * heads * (pairs of query and seen position) operations; bytes do not
count beyond a few hundred queries. So everything is about keeping the tensor cores busy:

- A program takes 128 pairs of query and head of one KV head: 128 // group positions times
  the group (a group of 7 leaves 2 of 128 rows idle, not an eighth as padding it to 8 would). All
  of them read the same K and V: once from the cache for the group, and a chunk shorter than 128
  tokens still fills a tile.
- Where every query of the tile sees every key there is neither a mask nor a predicate on loads;
  only the tiles at the diagonal and at the window's edge have them.
- Tiles of 64 keys, more of them under way. 8 warps: two warp groups of 64 rows on Hopper.
- `tiles_of` lays the grid out on the host, longest first, so that no long tile ends a wave.

On an H200 a prompt of 2,048 tokens of 8B is attended at 190 TFLOP/s (bench/results/gpu): less than
was expected, and no other shape of launch has been tried yet.
"""

from typing import Any

import torch

from kernels.paged_attention import BlockGeometry, LayerGeometry, largest_unit_bytes
from kernels.paged_rows import (
    LOG2_E,
    MASKED,
    FlatRows,
    attention_constants,
    capped,
    check_geometry,
    page_bases,
)
from kernels.paged_rows import wide_attention_ref as paged_prefill_ref
from kernels.prefill_shape import Shape, capability, launch_shape, tile_tokens, tiles_of
from kernels.triton_api import ARCHS, Declared, cdiv, jit, tl

__all__ = ["DECLARED", "launch_shape", "paged_prefill", "paged_prefill_ref", "tiles_of"]


@jit
def _v_tile(
    v_at: tl.tensor,
    inside: tl.tensor,
    v_dim: tl.tensor,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_EDGE: tl.constexpr,
) -> tl.tensor:
    """V of a tile's positions, with no more of a mask than it needs."""
    if IS_EDGE:
        v = tl.load(v_at, mask=inside[:, None] & (v_dim < V_DIM)[None, :], other=0.0)
    elif V_PAD != V_DIM:
        v = tl.load(v_at, mask=(v_dim < V_DIM)[None, :], other=0.0)
    else:
        v = tl.load(v_at)
    return v


@jit
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    q: tl.tensor,
    q_v: tl.tensor,
    q_place: tl.tensor,
    q_low: tl.tensor,
    arena_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    kv_head: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    V_START: tl.constexpr,
    V_IN_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_EDGE: tl.constexpr,
) -> tl.tensor:
    """Tiles `begin` to `end`. Unless IS_EDGE, every query sees all of them.

    `q_v`: what of the queries meets V, where V lies in K; `q` is then what meets the rest of K.
    `low`, `high`: the places that any query of the tile sees; what lies outside is never read.
    `q_low`: the first place that each of them sees, where WINDOW is not 0.
    """
    PAGES: tl.constexpr = BLOCK_N // BLOCK_TOKENS
    ALIGN: tl.constexpr = UNIT if UNIT < 16 else 16
    V_ROW: tl.constexpr = K_DIM if V_IN_K else V_DIM
    # Where V lies in K, k is what is behind it.
    K_FIRST: tl.constexpr = V_DIM if V_IN_K else 0
    k_dim = K_FIRST + tl.arange(0, K_PAD)
    v_dim = tl.arange(0, V_PAD)
    in_page = tl.arange(0, BLOCK_TOKENS)
    k_head = kv_head * (BLOCK_TOKENS * K_DIM)
    v_head = V_START * UNIT + kv_head * (BLOCK_TOKENS * V_ROW)
    base = page_bases(
        table_ptr, chunk_ptr, slot_ptr, begin, low, high, PAGES, BLOCK_TOKENS, UNIT, BLOCK_UNITS
    )
    for tile in range(begin, end):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (place < high) & (place >= low)
        k_row = tl.reshape(base[:, None] + (k_head + in_page * K_DIM)[None, :], [BLOCK_N])
        v_row = tl.reshape(base[:, None] + (v_head + in_page * V_ROW)[None, :], [BLOCK_N])
        k_row = tl.multiple_of(k_row, ALIGN)
        v_row = tl.multiple_of(v_row, ALIGN)
        base = page_bases(
            table_ptr, chunk_ptr, slot_ptr, tile + 1, low, high,
            PAGES, BLOCK_TOKENS, UNIT, BLOCK_UNITS,
        )  # fmt: skip
        k_at = arena_ptr + k_row[:, None] + k_dim[None, :]
        v_at = arena_ptr + v_row[:, None] + v_dim[None, :]
        if IS_EDGE:
            k = tl.load(k_at, mask=inside[:, None] & (k_dim < K_DIM)[None, :], other=0.0)
        elif K_FIRST + K_PAD != K_DIM:
            k = tl.load(k_at, mask=(k_dim < K_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if V_IN_K:
            v = _v_tile(v_at, inside, v_dim, V_DIM, V_PAD, IS_EDGE).to(q.dtype)
            scores = tl.dot(q_v, tl.trans(v), scores, input_precision="ieee")
        scores = scores * scale
        if SOFTCAP != 0.0:
            scores = capped(scores, SOFTCAP) * LOG2_E
        if IS_EDGE:
            seen = (place[None, :] <= q_place[:, None]) & inside[None, :]
            if WINDOW != 0:
                seen = seen & (place[None, :] >= q_low[:, None])
            scores = tl.where(seen, scores, MASKED)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
        if not V_IN_K:
            v = _v_tile(v_at, inside, v_dim, V_DIM, V_PAD, IS_EDGE).to(q.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
    return acc, total, highest


@jit
def _prefill_kernel(
    arena_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    context_ptr: tl.tensor,
    first_ptr: tl.tensor,
    token_ptr: tl.tensor,
    q_len_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
) -> None:
    """Program (t, g): tile t of the list for the heads of KV head g (or a part of a wide group)."""
    PACK: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    HEAD_BLOCKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    row = tl.load(tiles_ptr + tl.program_id(0) * 2)
    start = tl.load(tiles_ptr + tl.program_id(0) * 2 + 1)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    q_len = tl.load(q_len_ptr + row)
    first = tl.load(first_ptr + row)
    high = tl.load(context_ptr + row) - first
    token = tl.load(token_ptr + row).to(tl.int64)

    lane = tl.arange(0, BLOCK_M)
    query = start + lane // PACK
    member = tl.program_id(1) % HEAD_BLOCKS * PACK + lane % PACK
    is_query = (query < q_len) & (lane < BLOCK_Q * PACK) & (member < GROUP)
    head = kv_head * GROUP + member
    k_dim = (V_DIM if V_IN_K else 0) + tl.arange(0, K_PAD)
    v_dim = tl.arange(0, V_PAD)
    q_head = q_ptr + ((token + query) * q_stride_t + head * q_stride_h)[:, None]
    in_k = is_query[:, None] & (k_dim < K_DIM)[None, :]
    q = tl.load(q_head + k_dim[None, :], mask=in_k, other=0.0)
    q_v = q
    if V_IN_K:
        in_v = is_query[:, None] & (v_dim < V_DIM)[None, :]
        q_v = tl.load(q_head + v_dim[None, :], mask=in_v, other=0.0)
    if SOFTCAP == 0.0:
        scale = scale * LOG2_E

    # Places are counted from the table's first position. The tile's queries are at q_first..q_last.
    q_place = high - q_len + query
    q_first = high - q_len + start
    q_last = tl.minimum(q_first + BLOCK_Q, high) - 1
    table_row = row.to(tl.int64) * table_stride
    end = tl.cdiv(q_last + 1, BLOCK_N)  # 0 where the row is padding, which has no query
    low = 0
    full_begin = 0
    q_low = q_place
    if WINDOW > 0:
        q_low = q_place - WINDOW + 1
        low = tl.maximum(q_first - WINDOW + 1, 0)
        full_begin = tl.minimum(tl.cdiv(tl.maximum(q_last - WINDOW + 1, 0), BLOCK_N), end)
    if WINDOW < 0:  # positions of a chunk
        q_low = (q_place + first) // -WINDOW * -WINDOW - first
        low = tl.maximum((q_first + first) // -WINDOW * -WINDOW - first, 0)
        last_low = (q_last + first) // -WINDOW * -WINDOW - first
        full_begin = tl.minimum(tl.cdiv(tl.maximum(last_low, 0), BLOCK_N), end)
    full_end = tl.maximum((q_first + 1) // BLOCK_N, full_begin)

    highest = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    if WINDOW != 0:
        acc, total, highest = _attend(
            acc, total, highest, q, q_v, q_place, q_low, arena_ptr, table_ptr,
            chunk_ptr + table_row, slot_ptr + table_row, kv_head, low, q_last + 1,
            low // BLOCK_N, full_begin, scale, K_DIM, V_DIM, BLOCK_TOKENS, UNIT, BLOCK_UNITS,
            V_START, V_IN_K, WINDOW, SOFTCAP, BLOCK_N, K_PAD, V_PAD, True,
        )  # fmt: skip
    acc, total, highest = _attend(
        acc, total, highest, q, q_v, q_place, q_low, arena_ptr, table_ptr, chunk_ptr + table_row,
        slot_ptr + table_row, kv_head, low, q_last + 1, full_begin, full_end, scale,
        K_DIM, V_DIM, BLOCK_TOKENS, UNIT, BLOCK_UNITS, V_START, V_IN_K, WINDOW, SOFTCAP,
        BLOCK_N, K_PAD, V_PAD, False,
    )  # fmt: skip
    acc, total, highest = _attend(
        acc, total, highest, q, q_v, q_place, q_low, arena_ptr, table_ptr, chunk_ptr + table_row,
        slot_ptr + table_row, kv_head, low, q_last + 1, full_end, end, scale,
        K_DIM, V_DIM, BLOCK_TOKENS, UNIT, BLOCK_UNITS, V_START, V_IN_K, WINDOW, SOFTCAP,
        BLOCK_N, K_PAD, V_PAD, True,
    )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    # Nothing is summed up in a padding row; 0 / 0 would be NaN.
    factor = 1.0 / tl.where(is_query & (total > 0), total, 1.0)
    place = ((token + query) * NUM_HEADS + head) * V_DIM
    tl.store(
        out_ptr + place[:, None] + v_dim[None, :],
        (acc * factor[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & (v_dim < V_DIM)[None, :],
    )


def _constants(
    geometry: BlockGeometry,
    num_heads: int,
    softcap: float,
    has_sinks: bool,
    shape: Shape,
) -> dict[str, Any]:
    constants = attention_constants(geometry, num_heads, softcap, has_sinks)
    block_n = max(shape.block_n, geometry.block_tokens)
    return constants | {"BLOCK_M": shape.block_m, "BLOCK_N": block_n}


def paged_prefill(
    arena: torch.Tensor,
    geometry: BlockGeometry,
    chunk_table: torch.Tensor,
    rows: FlatRows,
    tiles: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend all rows into `out`, one launch. `tiles` by `tiles_of`, for `launch_shape`'s block_m.

    A tile of a row without queries (q_len and context 0) reads and writes nothing: so a list may be
    padded, for captured graphs. Where the host knows the rows' lengths, the tiles must be theirs.
    Raises ValueError for shapes that do not fit.
    """
    check_geometry(geometry, chunk_table)
    layer, num_heads = geometry.layer, query.shape[1]
    if num_heads % layer.num_kv_heads:
        raise ValueError(f"{layer.num_kv_heads} KV heads do not divide {num_heads} heads")
    if query.stride(2) != 1 or not out.is_contiguous():
        raise ValueError("query's last stride is 1, out contiguous")
    shape = launch_shape(layer, capability(arena.device))
    group = num_heads // layer.num_kv_heads
    pack = min(group, shape.block_m)
    step = tile_tokens(group, shape.block_m)
    if rows.q_lens and len(tiles) != sum(cdiv(length, step) for length in rows.q_lens):
        raise ValueError(f"the tiles are not laid out for {shape.block_m} rows and this group")
    constants = _constants(geometry, num_heads, softcap, sinks is not None, shape)
    # Where the constants say that there are none, any address will do.
    sinks = out if sinks is None else sinks
    _prefill_kernel[(len(tiles), layer.num_kv_heads * cdiv(group, pack))](
        arena.view(geometry.dtype),
        chunk_table,
        rows.chunk,
        rows.slot,
        rows.context_len,
        rows.first,
        rows.q_start,
        rows.q_len,
        tiles,
        query,
        out,
        sinks,
        rows.chunk.stride(0),
        query.stride(0),
        query.stride(1),
        scale,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **constants,
    )


def _declare(
    name: str,
    archs: tuple[int, ...],
    heads: int,
    layer: LayerGeometry,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Declared:
    unit = largest_unit_bytes(layer, torch.bfloat16, 1 << 21)
    shape = launch_shape(layer, archs[0])
    pointers = dict.fromkeys(
        ("chunk", "slot", "context", "first", "token", "q_len", "tiles"), "i32"
    )
    pointers |= dict.fromkeys(("arena", "q", "out", "sinks"), "bf16") | {"table": "i64"}
    return Declared(
        f"prefill/{name}",
        _prefill_kernel,
        {f"{key}_ptr": f"*{kind}:16" for key, kind in pointers.items()}
        | {"table_stride": "i32", "q_stride_t": "i32:16", "q_stride_h": "i32:16", "scale": "fp32"},
        _constants(BlockGeometry(layer, 16, torch.bfloat16, unit), heads, softcap, sinks, shape),
        shape.num_warps,
        shape.num_stages,
        archs,
    )


_HOPPER_ON, _AMPERE = (90, 100), (80,)
_LLAMA, _GPT_OSS = LayerGeometry(8, 128, 128), LayerGeometry(8, 64, 64, 128)
_GEMMA = LayerGeometry(4, 256, 256)
_DEEPSEEK = LayerGeometry(1, 576, 512, v_in_k=True)

DECLARED = (
    _declare("llama-8b", _HOPPER_ON, 32, _LLAMA),
    _declare("gpt-oss window sinks", _HOPPER_ON, 64, _GPT_OSS, sinks=True),
    _declare("gemma-2 softcap", _HOPPER_ON, 8, _GEMMA, softcap=50.0),
    _declare("llama-8b ampere", _AMPERE, 32, _LLAMA),
    _declare("gpt-oss window sinks ampere", _AMPERE, 64, _GPT_OSS, sinks=True),
    _declare("gemma-2 softcap ampere", _AMPERE, 8, _GEMMA, softcap=50.0),
    _declare("deepseek latent", ARCHS, 16, _DEEPSEEK),
)
