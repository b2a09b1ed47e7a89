"""The parts of bench/gpu.py: each answers one question in at most a few minutes, by itself.

A part gets `Settings` and gives back figures; those that are goals of the project stand under
`goals` as (reached, wanted, whether more is better). Shares of the roofline are of the copy
bandwidth measured in the same part, so that a part needs no other.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import gpu_checks, gpu_models, gpu_parity, gpu_peers, gpu_profile, gpu_swap
from bench.gpu_models import LARGE, MEDIUM, MIXTURE, SMALL
from bench.gpu_rig import Figures, Rig, Settings, Window, goal, rig
from bench.kernel_timing import Ceilings, ceilings, measure
from engine.memory.page_pool import Owner
from engine.pack import PackIndex
from engine.registration.convert import DtypeChoice

BATCHES = (1, 8, 64, 256)
DRY_BATCHES = (1, 3)
LINK_BYTES = 1 << 30
DRY_CEILINGS: Ceilings = {"copy_gb_s": 100.0, "matmul_tflop_s": 1.0}
# Tokens a second of the 8B: pure decode at batch 256, and end to end.
FP8_DECODE, FP8_SERVE, PLAIN_DECODE, PLAIN_SERVE = 27_000, 16_000, 23_000, 15_000


def limits_of(settings: Settings) -> Ceilings:
    """What the device itself can do, measured now."""
    if settings.dry:
        return DRY_CEILINGS
    found = ceilings()
    torch.cuda.empty_cache()  # the arena takes what is free
    return found


def device(settings: Settings) -> Figures:
    """Copy, product, and what memory of the host reaches the device with."""
    found: Figures = dict(limits_of(settings)) | link(settings)
    size = settings.scaled(1 << 30, 1 << 16)
    with rig(settings) as made:
        source = torch.zeros(size, dtype=torch.uint8)
        begin = time.perf_counter()
        made.opened.backend.copy_in(0, source.numpy().data)
        found["pageable_to_device_gb_s"] = size / (time.perf_counter() - begin) / 1e9
    return found


def link(settings: Settings) -> Figures:
    """Pinned memory to the device and back: what no swap can be faster than."""
    if settings.dry:
        return {}
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, target, source in (("pinned_to_device", there, here), ("back", here, there)):
        timing = measure(partial(target.copy_, source, non_blocking=True), 8, capture=False)
        rates[f"{name}_gb_s"] = LINK_BYTES / timing["median_us"] / 1e3
    return rates


def decode_of(shape: str, dtype: DtypeChoice = "auto") -> Callable[[Settings], Figures]:
    """Pure decode at several batches: tokens a second, share of the roofline of the weights."""

    def run(settings: Settings) -> Figures:
        pack_dir, index = gpu_models.make_pack(shape, settings.work_dir, settings.dry, 0, dtype)
        limits = limits_of(settings)
        found: Figures = {"shape": shape, "weight_bytes": gpu_models.step_weight_bytes(index)}
        with rig(settings) as made:
            made.host({"m": pack_dir})
            made.load("m")
            found |= limits
            for batch in DRY_BATCHES if settings.dry else BATCHES:
                window = made.steady_decode(batch, index.vocab_size)
                hit = gpu_models.share_of_experts(shape, batch, settings.dry)
                found[f"batch {batch}"] = decode_row(window, index, batch, 128, limits, hit)
                if batch in (1, 256):
                    drawn = made.steady_decode(batch, index.vocab_size, sampled=True)
                    row = decode_row(drawn, index, batch, 128, limits, hit)
                    row["of_greedy"] = row["step_ms"] / found[f"batch {batch}"]["step_ms"]
                    found[f"batch {batch}, sampled"] = row
            graphs = made.opened.graphs
            found["graphs"] = {} if graphs is None else dict(graphs.counters)
        if dtype == "fp8" and not settings.dry:
            reached = found["batch 256"]["tokens_per_s"]
            found["goals"] = {"batch 256, tokens a second": goal(reached, FP8_DECODE)}
        elif shape == LARGE and not settings.dry:
            found["goals"] = {
                "batch 1, share of the roofline": goal(found["batch 1"]["of_weights"], 0.80),
                "batch 256, tokens a second": goal(
                    found["batch 256"]["tokens_per_s"], PLAIN_DECODE
                ),
                "batch 256, sampled step over greedy": goal(
                    found["batch 256, sampled"]["of_greedy"], 1.1, more=False
                ),
            }
        return found

    return run


def decode_row(
    window: Window,
    index: PackIndex,
    batch: int,
    context: int,
    limits: Ceilings,
    of_experts: float = 1.0,
) -> Figures:
    """One batch's figures. of_weights: the weights' bytes alone, of experts' the share that is
    expected to be hit; of_bytes: with the KV read."""
    step_s = statistics.median(window.step_s)
    weights = gpu_models.step_weight_bytes(index, of_experts)
    kv = batch * context * gpu_models.kv_bytes_per_token(index)
    bandwidth = limits["copy_gb_s"] * 1e9
    return {
        "tokens_per_s": window.tokens_per_s,
        "step_ms": step_s * 1e3,
        "device_share": window.device_s / window.wall_s,
        "of_weights": weights / bandwidth / step_s,
        "of_bytes": (weights + kv) / bandwidth / step_s,
    }


def prefill_of(shape: str) -> Callable[[Settings], Figures]:
    """Prompts of 2,048 and of 16,384 tokens: tokens a second, share of the matmul rate."""

    def run(settings: Settings) -> Figures:
        pack_dir, index = gpu_models.make_pack(shape, settings.work_dir, settings.dry)
        limits = limits_of(settings)
        found: Figures = {"shape": shape, **limits}
        with rig(settings, prefix_cache=False) as made:
            made.host({"m": pack_dir})
            made.load("m")
            for length, count in ((2048, 16), (16_384, 3)):
                length, count = settings.scaled(length, 40), settings.scaled(count, 2)
                _ask(made, index, settings.scaled(2, 2), length, 1)
                begin = time.perf_counter()
                _ask(made, index, count, length, 1)
                wall_s = time.perf_counter() - begin
                flops = count * gpu_models.prompt_flops(shape, index, length, settings.dry)
                found[f"prompts of {length}"] = {
                    "tokens_per_s": count * length / wall_s,
                    "tflop_s": flops / wall_s / 1e12,
                    "of_matmul": flops / wall_s / (limits["matmul_tflop_s"] * 1e12),
                }
        if shape == LARGE and not settings.dry:
            share = found["prompts of 2048"]["of_matmul"]
            found["goals"] = {"prompts of 2,048, share of the matmul rate": goal(share, 0.65)}
        return found

    return run


def serve(settings: Settings, dtype: DtypeChoice = "auto") -> Figures:
    """256 requests at a time through the whole engine: in lockstep, then as clients come.

    Lockstep: 128 tokens in and 128 out, greedy. As they come: at random times, faster than they can
    be served, of lengths that differ (log-normal, medians of 200 in and 128 out), sampled.
    """
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry, 0, dtype)
    width, length = settings.scaled(256, 3), settings.scaled(128, 10)
    total = settings.scaled(768, 6)
    found: Figures = {"requests": total}
    with rig(settings, prefix_cache=False) as made:
        made.host({"m": pack_dir})
        made.load("m")
        for sampled in (False, True):
            name = "as clients come" if sampled else "lockstep"
            # Every form that will come is recorded before the clock runs, every kernel compiled.
            for count in (total // 2, total):
                asks = _asks(made, count, length, index.vocab_size, sampled)
                begin = time.perf_counter()
                tokens = closed_loop(made, asks, width, sampled)
                wall_s = time.perf_counter() - begin
            found[f"{name}, output tokens a second"] = tokens / wall_s
            found[f"{name}, prompt tokens a second"] = sum(len(a[0]) for a in asks) / wall_s
    if not settings.dry:
        found["goals"] = {
            "end to end, output tokens a second": goal(
                found["lockstep, output tokens a second"],
                FP8_SERVE if dtype == "fp8" else PLAIN_SERVE,
            )
        }
    return found


def _asks(
    made: Rig, count: int, length: int, vocab_size: int, vary: bool
) -> list[tuple[list[int], int]]:
    """(prompt, tokens wanted) of so many requests."""
    rng = random.Random(count)
    asks = []
    for prompt in made.prompts(count, 8 * length, vocab_size):
        size = new = length
        if vary:
            size, new = (
                min(8 * length, max(1, int(rng.lognormvariate(math.log(median * length), sigma))))
                for median, sigma in ((200 / 128, 0.8), (1.0, 0.6))
            )
        asks.append((prompt[:size], new))
    return asks


def closed_loop(
    made: Rig, asks: Sequence[tuple[list[int], int]], width: int, sampled: bool = False
) -> int:
    """All of them, so many at a time. Returns tokens."""
    waiting = iter(asks)
    open_: set[str] = set()
    tokens, ended, exhausted = 0, 0, False
    while ended < len(asks):
        while not exhausted and len(open_) < width:
            ask = next(waiting, None)
            if ask is None:
                exhausted = True
            else:
                open_.add(made.submit("m", *ask, sampled))
        for delta in made.engine.step(time.monotonic()):
            tokens += len(delta.token_ids)
            if delta.finish is not None:
                open_.discard(delta.request_id)
                ended += 1
    return tokens


def arena_against_static(settings: Settings) -> Figures:
    """Decode over a KV pool full of holes against the same over one that is fresh."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    batch, rates = settings.scaled(64, 3), []
    with rig(settings, prefix_cache=False) as made:
        made.host({"m": pack_dir})
        made.load("m")
        for scattered in (False, True, False, True):
            give_back = _scatter(made) if scattered else None
            window = made.steady_decode(batch, index.vocab_size, settings.scaled(1024, 24))
            rates.append(window.tokens_per_s)
            if give_back is not None:
                give_back()
    static, arena = statistics.mean(rates[::2]), statistics.mean(rates[1::2])
    found: Figures = {"static": static, "arena": arena, "share": arena / static, "all": rates}
    if not settings.dry:
        found["goals"] = {"arena against static allocation": goal(arena / static, 0.99)}
    return found


def chunks(settings: Settings) -> Figures:
    """Decode by the size of pages, and so of chunks."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    found: Figures = {}
    sizes = (1 << 14, 1 << 16) if settings.dry else (1 << 16, 1 << 18, 1 << 20, 1 << 21)
    for page_bytes in sizes:
        found[f"pages of {page_bytes >> 10} KiB"] = _with_pages(
            page_bytes, pack_dir, index, settings
        )
    return found


def _with_pages(page_bytes: int, pack_dir: Path, index: PackIndex, settings: Settings) -> Figures:
    """By itself, so that nothing here holds the arena when the next one wants the memory."""
    with rig(settings, page_bytes=page_bytes) as made:
        made.host({"m": pack_dir})
        made.load("m")
        runner: Any = made.engine.runner(_unit(made, "m"))
        plan = runner.cache.plan.groups[0]
        batch, context = settings.scaled(64, 2), settings.scaled(1024, 24)
        window = made.steady_decode(batch, index.vocab_size, context)
        return {
            "chunk_bytes": plan.chunk_bytes,
            "tokens_per_extent": plan.tokens_per_extent,
            "tokens_per_s": window.tokens_per_s,
        }


def _ask(made: Rig, index: PackIndex, count: int, length: int, new: int) -> None:
    prompts = made.prompts(count, length, index.vocab_size)
    made.run_out([made.submit("m", prompt, new) for prompt in prompts])


def _scatter(made: Rig) -> Callable[[], None]:
    """Every other page that KV could have is taken; what is returned gives them back."""
    pool, owner = made.engine.pool, Owner("holes", "kv")
    pages = pool.alloc_pages(owner, pool.num_free)
    pool.release(owner, [page for page in pages if page % 2])
    made.until(lambda: not pool.has_fences)
    return lambda: pool.release(owner, [page for page in pages if not page % 2])


def _unit(made: Rig, name: str) -> str:
    found: str = made.engine._manager.catalog.instance_of(name)
    return found


PARTS: dict[str, Callable[[Settings], Figures]] = {
    "device": device,
    "checks": gpu_checks.checks,
    "parity": gpu_parity.parity,
    "decode 0.5B": decode_of(SMALL),
    "decode 1.7B": decode_of(MEDIUM),
    "decode 8B": decode_of(LARGE),
    "decode 30B-A3B": decode_of(MIXTURE),
    "profile 30B-A3B": gpu_profile.profile_of(MIXTURE),
    "decode 8B fp8": decode_of(LARGE, "fp8"),
    "profile 0.5B": gpu_profile.profile_of(SMALL),
    "profile 8B": gpu_profile.profile_of(LARGE),
    "prefill 0.5B": prefill_of(SMALL),
    "prefill 1.7B": prefill_of(MEDIUM),
    "prefill 8B": prefill_of(LARGE),
    "serve 8B": serve,
    "serve 8B fp8": partial(serve, dtype="fp8"),
    "swap 8B": gpu_swap.swap,
    "swap under load": gpu_swap.swap_under_load,
    "arena against static": arena_against_static,
    "chunk sizes": chunks,
    "many models": gpu_swap.many,
    "peers": gpu_peers.peers,
}


def run_part(name: str, settings: Settings) -> Figures:
    """One part; its figures and how long it took. Raises KeyError for a name that is none."""
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    figures = PARTS[name](settings)
    return figures | {"wall_s": time.perf_counter() - begin}
