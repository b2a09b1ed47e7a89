"""What bench/kernels.py measures of attention, the cache and the whole layer (see kernel_cases.py).

Peers read K and V that lie together: what a paged kernel is compared with has no table to follow.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from bench.kernel_cases import Call, Case, Prepared, Rig, Target
from kernels.decoder_layer import KERNELS, LayerStep, decoder_layer
from kernels.kv_write import rotary_write, rotary_write_ref
from kernels.page_copy import page_copy, page_copy_ref
from kernels.paged_attention import LayerGeometry, gather_kv_ref
from kernels.paged_decode import choose_splits, paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.paged_rows import wide_attention_ref
from kernels.rotary import rotary, rotary_ref
from tests.kernels.layer_weights import form_of, weights_of
from tests.kernels.paged_cache import Cache, CacheStep

HEADS, KV_HEADS, DIM = 32, 8, 128
TINY = (4, 2, 16)
FIXED_CACHE = "bench_fixed_cache"
PAGE = 2 << 20


def num_sms(device: torch.device) -> int:
    """Multiprocessors; 4 on a processor, so that splits are exercised there too."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def contiguous(cache: Cache, step: CacheStep) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V [rows, kv_heads, context, dim] of rows of one length."""
    context = step.rows.contexts[0]
    parts = [
        gather_kv_ref(cache.arena, cache.geometry, cache.table, rows) for rows in step.batch.rows
    ]
    key, value = (torch.cat(part)[:, :, :context].contiguous() for part in zip(*parts, strict=True))
    return key, value


def _filled(
    rig: Rig, rows: list[tuple[int, int]], sizes: tuple[int, int, int], window: int = 0
) -> tuple[Cache, CacheStep]:
    heads, kv_heads, dim = sizes
    longest = max(first + tokens for first, tokens in rows)
    layer = LayerGeometry(kv_heads, dim, dim, window)
    cache = Cache(layer, rig.dtype, len(rows), longest, device=rig.device)
    step = cache.step(rows, heads // kv_heads)
    cache.fill(step, rig.generator)
    return cache, step


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor]:
    """query [rows, heads, q_len, dim]."""
    return lambda: functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=True
    )


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> Mapping[str, Call]:
    """Compiled when it is first called."""
    if query.device.type != "cuda":
        return {}
    length, mask = query.shape[2], None
    if causal:
        mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, length, length, device=str(query.device)
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"flex": lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)}


def _decode(num_rows: int, context: int, window: int = 0) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        sizes = TINY if tiny else (HEADS, KV_HEADS, DIM)
        rows_, length = (2, 70) if tiny else (num_rows, context)
        heads, kv_heads, dim = sizes
        cache, step = _filled(rig, [(length - 1, 1)] * rows_, sizes, window)
        query = rig.randn(rows_, heads, dim)
        out = torch.empty_like(query)
        splits = choose_splits(rows_ * kv_heads, length, num_sms(rig.device))
        scale = dim**-0.5

        def run() -> torch.Tensor:
            where = (cache.arena, cache.geometry, cache.table, step.rows)
            paged_decode(*where, query, out, scale, num_splits=splits)
            return out

        def exact() -> tuple[torch.Tensor, ...]:
            where = (cache.arena, cache.geometry, cache.table, step.batch)
            return (wide_attention_ref(*where, query, scale),)

        key, value = contiguous(cache, step)
        wide = query[:, :, None]
        seen = min(window, length) if window else length
        return Prepared(
            run,
            lambda: (run(),),
            exact,
            rig.tolerance,
            rows_ * (seen * kv_heads + heads) * 2 * dim * rig.dtype.itemsize,
            peers={} if window else {"SDPA": _sdpa(wide, key, value, causal=False)},
            cuda_peers={} if window else _flex(wide, key, value, causal=False),
        )

    return build


def _prefill(length: int, prefix: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        heads, _, dim = sizes = TINY if tiny else (HEADS, KV_HEADS, DIM)
        tokens, before = (9, 8 if prefix else 0) if tiny else (length, prefix)
        cache, step = _filled(rig, [(before, tokens)], sizes)
        query = rig.randn(tokens, heads, dim)
        out = torch.empty_like(query)
        scale = dim**-0.5

        def run() -> torch.Tensor:
            where = (cache.arena, cache.geometry, cache.table, step.rows, step.tiles)
            paged_prefill(*where, query, out, scale)
            return out

        def exact() -> tuple[torch.Tensor, ...]:
            where = (cache.arena, cache.geometry, cache.table, step.batch)
            return (wide_attention_ref(*where, query, scale),)

        peers: Mapping[str, Call] = {}
        cuda_peers: dict[str, Call] = {}
        if not before:
            key, value = contiguous(cache, step)
            wide = query.transpose(0, 1)[None]
            peers = {"SDPA": _sdpa(wide, key, value, True)}
            cuda_peers = {**_libraries(wide, key, value), **_flex(wide, key, value, True)}
        pairs = tokens * before + tokens * (tokens + 1) // 2
        return Prepared(
            run,
            lambda: (run(),),
            exact,
            rig.tolerance,
            num_flops=4 * heads * dim * pairs,
            peers=peers,
            cuda_peers=cuda_peers,
        )

    return build


def _libraries(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Call]:
    """cuDNN and flash attention, whichever of them SDPA would choose."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return {
        "cuDNN": lambda: cudnn(query, key, value, None, False, 0.0, True),
        "flash": lambda: flash(query, key, value, 0.0, True),
    }


def _write(num_rows: int, tokens: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        heads, kv_heads, dim = sizes = TINY if tiny else (HEADS, KV_HEADS, DIM)
        rows, length = (2, 3) if tiny else (num_rows, tokens)
        cache, step = _filled(rig, [(0, length)] * rows, sizes)
        qkv = rig.randn(rows * length, heads + 2 * kv_heads, dim)
        q, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        angle = 6 * rig.rand(rows * length, dim // 2)
        cos, sin, rotated = angle.cos(), angle.sin(), torch.empty_like(q)

        def run() -> torch.Tensor:
            where = (cache.arena, cache.geometry, cache.table, step.batch)
            rotary_write(*where, q, rotated, key, value, cos, sin)
            return rotated

        def result() -> tuple[torch.Tensor, ...]:
            return (run(), *contiguous(cache, step))

        def exact() -> tuple[torch.Tensor, ...]:
            other = torch.zeros_like(cache.arena)
            wide = rotary_ref(q, cos, sin)
            where = (other, cache.geometry, cache.table, step.batch)
            rotary_write_ref(*where, q, key, value, cos, sin)
            parts = [
                gather_kv_ref(other, cache.geometry, cache.table, part) for part in step.batch.rows
            ]
            return wide, *(torch.cat(part)[:, :, :length] for part in zip(*parts, strict=True))

        size = 2 * qkv.numel() * rig.dtype.itemsize
        return Prepared(run, result, exact, rig.tolerance, size)

    return build


def _rotary(rig: Rig, tiny: bool) -> Prepared:
    tokens, heads, dim = (3, 4, 16) if tiny else (4096, HEADS, DIM)
    x, angle = rig.randn(tokens, heads, dim), 6 * rig.rand(tokens, dim // 2)
    cos, sin, out = angle.cos(), angle.sin(), torch.empty_like(x)

    def run() -> torch.Tensor:
        rotary(x, cos, sin, out)
        return out

    size = 2 * x.numel() * rig.dtype.itemsize
    return Prepared(run, lambda: (run(),), lambda: (rotary_ref(x, cos, sin),), rig.tolerance, size)


def _pages(rig: Rig, tiny: bool) -> Prepared:
    count, size = (2, 64) if tiny else (64, PAGE)
    arena = torch.randint(
        0, 255, (2 * count * size,), dtype=torch.uint8, device=rig.device, generator=rig.generator
    )
    moves = [(i * size, (2 * count - 1 - i) * size, size) for i in range(count)]

    def run() -> torch.Tensor:
        page_copy(arena, moves)
        return arena

    def exact() -> tuple[torch.Tensor, ...]:
        other = arena.clone()
        other[count * size :] = 0
        page_copy_ref(other, moves)
        return (other.double(),)

    result = lambda: (run().double(),)  # noqa: E731
    return Prepared(run, result, exact, 0.0, 2 * count * size, can_capture=False)


def _slide(rig: Rig, tiny: bool) -> Prepared:
    """Weights that move down by a page: as a launch for each page this would be 128."""
    count, size = (3, 64) if tiny else (128, PAGE)
    arena = torch.randint(
        0, 255, ((count + 1) * size,), dtype=torch.uint8, device=rig.device, generator=rig.generator
    )
    spoiled, moves = arena.clone(), [(size, 0, count * size)]

    def by(copy: Callable[..., None]) -> tuple[torch.Tensor, ...]:
        other = arena.clone()
        copy(other, moves)
        return (other.double(),)

    return Prepared(
        lambda: page_copy(spoiled, moves),
        lambda: by(page_copy),
        lambda: by(page_copy_ref),
        0.0,
        2 * count * size,
        can_capture=False,
    )


def _layer(num_rows: int, context: int) -> Callable[[Rig, bool], Prepared]:
    """A decode step of one llama-8B layer beside transformers' modules over a ready cache."""

    def build(rig: Rig, tiny: bool) -> Prepared:
        heads, kv_heads, dim = sizes = TINY if tiny else (HEADS, KV_HEADS, DIM)
        rows, length = (2, 6) if tiny else (num_rows, context)
        config = LlamaConfig(
            hidden_size=heads * dim,
            intermediate_size=40 if tiny else 14336,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=2 * length,
        )
        config._attn_implementation = FIXED_CACHE
        layer = LlamaDecoderLayer(config, 0).requires_grad_(False).to(rig.device)
        for parameter in layer.parameters():
            nn.init.normal_(
                parameter, parameter.dim() == 1, parameter.shape[-1] ** -0.5, rig.generator
            )
        layer = layer.to(rig.dtype)
        cache, step = _filled(rig, [(length - 1, 1)] * rows, sizes)
        hidden = rig.randn(rows, heads * dim)
        place = torch.full((rows, 1), length - 1, device=rig.device)
        cos, sin = LlamaRotaryEmbedding(config).to(rig.device)(hidden[:, None].float(), place)
        half = cos.shape[-1] // 2
        weights, form = weights_of(layer), form_of(layer, config)
        splits = choose_splits(rows * kv_heads, length, num_sms(rig.device))
        where = LayerStep(
            cache.arena,
            cache.geometry,
            cache.table,
            step.batch,
            cos[:, 0, :half],
            sin[:, 0, :half],
            step.rows,
            num_splits=splits,
        )
        fixed = contiguous(cache, step)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return decoder_layer(hidden, None, weights, form, where, KERNELS)

        def result() -> tuple[torch.Tensor, ...]:
            x, residual = run()
            return (x.double() + residual.double(),)

        def exact() -> tuple[torch.Tensor, ...]:
            return (_modules(layer, hidden, (cos, sin), fixed, torch.float64)()[:, 0],)

        sizes_ = (weights.qkv, weights.out, weights.gate_up, weights.down)
        moved = sum(one.weight.numel() for one in sizes_ if isinstance(one.weight, torch.Tensor))
        moved += 2 * fixed[0].numel()
        return Prepared(
            run,
            result,
            exact,
            3 * rig.tolerance,
            moved * rig.dtype.itemsize,
            peers={"modules": _modules(layer, hidden, (cos, sin), fixed, rig.dtype)},
        )

    return build


def _modules(
    layer: nn.Module,
    hidden: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    fixed: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> Callable[[], torch.Tensor]:
    """transformers' layer for the last position of each row; writes it into `fixed`'s copy."""
    other = copy.deepcopy(layer).to(dtype)
    key, value = (part.to(dtype, copy=True) for part in fixed)
    cos, sin = (part.to(dtype) for part in angles)

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        new_key: torch.Tensor,
        new_value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        key[:, :, -1:], value[:, :, -1:] = new_key, new_value
        out = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(1, 2), None

    def call() -> torch.Tensor:
        ALL_ATTENTION_FUNCTIONS.register(FIXED_CACHE, attend)
        out = other(hidden[:, None].to(dtype), position_embeddings=(cos, sin))
        return out if isinstance(out, torch.Tensor) else out[0]

    return call


CASES = (
    Case("paged_decode rows=32 context=8k", "bytes", _decode(32, 8192), Target(0.85)),
    Case("paged_decode rows=1 context=8k", "bytes", _decode(1, 8192)),
    Case("paged_decode rows=128 context=1k", "bytes", _decode(128, 1024)),
    Case("paged_decode rows=32 context=8k window=1k", "bytes", _decode(32, 8192, 1024)),
    Case("paged_prefill 4k", "flops", _prefill(4096, 0), Target(0.60)),
    Case("paged_prefill 1k", "flops", _prefill(1024, 0)),
    Case("paged_prefill 2k", "flops", _prefill(2048, 0)),
    Case("paged_prefill 512 over 8k", "flops", _prefill(512, 8192)),
    Case("kv_write rows=32", "bytes", _write(32, 1)),
    Case("kv_write 4k tokens", "bytes", _write(1, 4096)),
    Case("rotary 4k tokens", "bytes", _rotary),
    Case("page_copy 64 x 2 MiB", "bytes", _pages),
    Case("page_copy slide of 256 MiB by 2 MiB", "bytes", _slide),
    Case("layer rows=1 context=1k", "bytes", _layer(1, 1024)),
    Case("layer rows=32 context=1k", "bytes", _layer(32, 1024)),
)
