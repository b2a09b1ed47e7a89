"""The parts of bench/gpu.py: each answers one question in at most a few minutes, by itself.

A part gets `Settings` and gives back figures; those that are goals of the project stand under
`goals` as (reached, wanted, whether more is better). Shares of the roofline are of the copy
bandwidth measured in the same part, so that a part needs no other.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import gpu_models, gpu_parity, gpu_peers
from bench.gpu_rig import Rig, Settings, Window, rig
from bench.kernel_timing import Ceilings, ceilings
from engine.memory.page_pool import Owner
from engine.packs.pack import PackIndex

SMALL = "Qwen/Qwen2.5-0.5B"
MEDIUM = "Qwen/Qwen3-1.7B"
LARGE = "meta-llama/Llama-3.1-8B"
BATCHES = (1, 8, 64, 256)
DRY_BATCHES = (1, 3)
DRY_CEILINGS: Ceilings = {"copy_gb_s": 100.0, "matmul_tflop_s": 1.0}
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One question. `minutes`: about, on an H200."""

    name: str
    minutes: float
    run: Callable[[Settings], Figures]


def limits_of(settings: Settings) -> Ceilings:
    """What the device itself can do, measured now."""
    if settings.dry:
        return DRY_CEILINGS
    found = ceilings()
    torch.cuda.empty_cache()  # the arena takes what is free
    return found


def goal(reached: float, wanted: float, more: bool = True) -> Figures:
    """A figure beside what the project wants."""
    met = reached >= wanted if more else reached <= wanted
    return {"reached": reached, "wanted": wanted, "met": met}


def device(settings: Settings) -> Figures:
    """Copy, product, and pinned memory to the device and back."""
    found: Figures = dict(limits_of(settings))
    size = settings.scaled(1 << 30, 1 << 16)
    with rig(settings) as made:
        source = torch.zeros(size, dtype=torch.uint8)
        begin = time.perf_counter()
        made.opened.backend.copy_in(0, source.numpy().data)
        found["pageable_to_device_gb_s"] = size / (time.perf_counter() - begin) / 1e9
    return found


def decode_of(shape: str) -> Callable[[Settings], Figures]:
    """Pure decode at several batches: tokens a second, share of the roofline of the weights."""

    def run(settings: Settings) -> Figures:
        pack_dir, index = gpu_models.make_pack(shape, settings.work_dir, settings.dry)
        limits = limits_of(settings)
        found: Figures = {"shape": shape, "weight_bytes": gpu_models.step_weight_bytes(index)}
        with rig(settings) as made:
            made.host({"m": pack_dir})
            made.load("m")
            found |= limits
            for batch in DRY_BATCHES if settings.dry else BATCHES:
                window = _decode(made, index, batch, settings)
                found[f"batch {batch}"] = decode_row(window, index, batch, 128, limits)
            graphs = made.opened.graphs
            found["graphs"] = {} if graphs is None else dict(graphs.counters)
        if shape == LARGE and not settings.dry:
            found["goals"] = {
                "batch 1, share of the roofline": goal(found["batch 1"]["of_weights"], 0.80),
                "batch 256, tokens a second": goal(found["batch 256"]["tokens_per_s"], 27_000),
            }
        return found

    return run


def decode_row(
    window: Window, index: PackIndex, batch: int, context: int, limits: Ceilings
) -> Figures:
    """One batch's figures. of_weights: the weights' bytes alone; of_bytes: with the KV read."""
    step_s = statistics.median(window.step_s)
    weights = gpu_models.step_weight_bytes(index)
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
    """Prompts of 2,048 tokens: tokens a second, share of the matmul rate."""

    def run(settings: Settings) -> Figures:
        pack_dir, index = gpu_models.make_pack(shape, settings.work_dir, settings.dry)
        limits = limits_of(settings)
        length, count = settings.scaled(2048, 40), settings.scaled(16, 2)
        with rig(settings, prefix_cache=False) as made:
            made.host({"m": pack_dir})
            made.load("m")
            _ask(made, index, 2, length, 1)
            begin = time.perf_counter()
            _ask(made, index, count, length, 1)
            wall_s = time.perf_counter() - begin
        rate = count * length / wall_s
        flops = 2 * gpu_models.step_weight_bytes(index) / 2 * rate
        share = flops / (limits["matmul_tflop_s"] * 1e12)
        return {"shape": shape, "tokens_per_s": rate, "of_matmul": share, **limits}

    return run


def serve(settings: Settings) -> Figures:
    """256 requests at a time, 128 in and 128 out, through the whole engine."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    width, length = settings.scaled(256, 3), settings.scaled(128, 10)
    total = settings.scaled(1024, 6)
    with rig(settings, prefix_cache=False) as made:
        made.host({"m": pack_dir})
        made.load("m")
        _ask(made, index, width, length, settings.scaled(32, 4))
        begin = time.perf_counter()
        tokens = closed_loop(made, made.prompts(total, length, index.vocab_size), width, length)
        wall_s = time.perf_counter() - begin
    found: Figures = {"requests": total, "output_tokens_per_s": tokens / wall_s}
    if not settings.dry:
        found["goals"] = {
            "end to end, output tokens a second": goal(found["output_tokens_per_s"], 16_000)
        }
    return found


def closed_loop(made: Rig, prompts: Sequence[list[int]], width: int, new: int) -> int:
    """All of them, so many at a time. Returns tokens."""
    waiting = iter(prompts)
    open_: set[str] = set()
    tokens, ended, exhausted = 0, 0, False
    while ended < len(prompts):
        while not exhausted and len(open_) < width:
            prompt = next(waiting, None)
            if prompt is None:
                exhausted = True
            else:
                open_.add(made.submit("m", prompt, new))
        for delta in made.engine.step(time.monotonic()):
            tokens += len(delta.token_ids)
            if delta.finish is not None:
                open_.discard(delta.request_id)
                ended += 1
    return tokens


def swap(settings: Settings) -> Figures:
    """Cold, warm, and to decode at graph speed: seconds and GB/s."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    size, found = index.total_bytes, Figures()
    room = _host_room(settings, index.total_bytes)
    with rig(settings, host_tier_bytes=room, load_threads=4) as made:
        made.host({"m": pack_dir})
        cold_s = made.load("m")
        found["cold"] = {"seconds": cold_s, "gb_s": size / cold_s / 1e9}
        _decode(made, index, 1, settings)
        warm, speed = [], []
        for _ in range(settings.scaled(5, 1)):
            made.until(lambda: _is_pinned(made, size))
            made.unload("m")
            begin = time.perf_counter()
            warm.append(made.load("m"))
            to_graph_s = _until_graph_speed(made, index, begin)
            speed.append(to_graph_s)
        seconds = statistics.median(warm)
        found["warm"] = {"seconds": seconds, "gb_s": size / seconds / 1e9, "all": warm}
        found["to_graph_speed_s"] = statistics.median(speed)
    if not settings.dry:
        found["goals"] = {
            "swap-in of 8B from the host arena, s": goal(seconds, 0.35, more=False),
            "the same, GB/s": goal(found["warm"]["gb_s"], 50.0),
            "to graph-speed decode, s": goal(found["to_graph_speed_s"], 0.6, more=False),
        }
    return found


def swap_under_load(settings: Settings) -> Figures:
    """What a load beside it takes from a model that decodes."""
    large, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    small, small_index = gpu_models.make_pack(SMALL, settings.work_dir, settings.dry)
    room = _host_room(settings, index.total_bytes)
    with rig(settings, host_tier_bytes=room, load_threads=4) as made:
        made.host({"runs": small, "swaps": large})
        made.load("runs")
        made.load("swaps")
        made.until(lambda: _is_pinned(made, index.total_bytes))
        alone = _steady(made, small_index, settings, None)
        beside = _steady(made, small_index, settings, "swaps")
    loss = 1 - beside / alone
    found: Figures = {"alone_tokens_per_s": alone, "beside_tokens_per_s": beside, "loss": loss}
    if not settings.dry:
        found["goals"] = {"loss of a model that runs meanwhile": goal(loss, 0.10, more=False)}
    return found


def arena_against_static(settings: Settings) -> Figures:
    """Decode over a KV pool full of holes against the same over one that is fresh."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    batch, rates = settings.scaled(64, 3), []
    with rig(settings, prefix_cache=False) as made:
        made.host({"m": pack_dir})
        made.load("m")
        for scattered in (False, True, False, True):
            give_back = _scatter(made) if scattered else None
            window = _decode(made, index, batch, settings, settings.scaled(1024, 24))
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
        with rig(settings, page_bytes=page_bytes) as made:
            made.host({"m": pack_dir})
            made.load("m")
            runner: Any = made.engine.runner(_unit(made, "m"))
            plan = runner.cache.plan.groups[0]
            window = _decode(
                made, index, settings.scaled(64, 2), settings, settings.scaled(1024, 24)
            )
            found[f"pages of {page_bytes >> 10} KiB"] = {
                "chunk_bytes": plan.chunk_bytes,
                "tokens_per_extent": plan.tokens_per_extent,
                "tokens_per_s": window.tokens_per_s,
            }
    return found


def many(settings: Settings) -> Figures:
    """Models of 8B, resident or warm, all of which answer."""
    pack_dir, index = gpu_models.make_pack(LARGE, settings.work_dir, settings.dry)
    count = settings.scaled(8, 3)
    names = {f"m{i}": path for i, path in enumerate(gpu_models.twins(pack_dir, count))}
    room = _host_room(settings, 3 * index.total_bytes)
    answered, switches = 0, []
    with rig(settings, host_tier_bytes=room, load_threads=4) as made:
        made.host(names)
        for _ in range(2):
            for name in names:
                switches.append(made.load(name))
                prompt = made.prompts(1, settings.scaled(64, 8), index.vocab_size)[0]
                said = made.run_out([made.submit(name, prompt, 8)])
                answered += all(len(tokens) == 8 for tokens in said.values())
        states = list(made.states().values())
    found: Figures = {
        "resident": states.count("resident"),
        "warm": states.count("warm"),
        "answered": answered,
        "switch_s": switches,
    }
    if not settings.dry:
        ready = found["resident"] + found["warm"]
        found["goals"] = {"8B models resident or warm": goal(ready, 7)}
    return found


def _ask(made: Rig, index: PackIndex, count: int, length: int, new: int) -> None:
    prompts = made.prompts(count, length, index.vocab_size)
    made.run_out([made.submit("m", prompt, new) for prompt in prompts])


def _decode(
    made: Rig, index: PackIndex, batch: int, settings: Settings, context: int = 0
) -> Window:
    context = context or settings.scaled(128, 10)
    steps, warm_up = settings.scaled(200, 4), settings.scaled(16, 4)
    return made.decode("m", batch, context, steps, warm_up, index.vocab_size)


def _until_graph_speed(made: Rig, index: PackIndex, begin: float) -> float:
    """Seconds until a decode step is a graph's replay."""
    graphs = made.opened.graphs
    assert graphs is not None
    before = graphs.counters["graph_replays"]
    name = made.submit("m", made.prompts(1, 8, index.vocab_size)[0], 32)
    made.until(lambda: graphs.counters["graph_replays"] > before)
    seconds = time.perf_counter() - begin
    made.engine.abort(name, 1)
    made.until(lambda: not any(True for _ in made.engine.unfinished()))
    return seconds


def _is_pinned(made: Rig, num_bytes: int) -> bool:
    """Whether the host tier's copy can be read directly."""
    pinner = getattr(made.opened.backend, "pinner", None)
    return pinner is None or pinner.pinned_bytes >= num_bytes


def _steady(made: Rig, index: PackIndex, settings: Settings, swapping: str | None) -> float:
    """Tokens a second of a model that decodes, while another goes out and in again and again."""
    batch, new = settings.scaled(32, 2), settings.scaled(2000, 60)
    prompts = made.prompts(batch, settings.scaled(128, 8), index.vocab_size)
    for prompt in prompts:
        made.submit("runs", prompt, new)
    for _ in range(settings.scaled(60, 6)):
        made.engine.step(time.monotonic())
    tokens, swaps, begin = 0, 0, time.perf_counter()
    seconds = settings.scaled(8, 0) or 0.2
    while time.perf_counter() - begin < seconds:
        if swapping is not None:
            state = made.states()[swapping]
            if state in ("cold", "warm"):
                made.engine.load(swapping, time.monotonic())
            elif state == "resident":
                made.engine.unload(swapping, time.monotonic())
                swaps += 1
        tokens += sum(len(delta.token_ids) for delta in made.engine.step(time.monotonic()))
    wall_s = time.perf_counter() - begin
    for request in list(made.engine.unfinished()):
        made.engine.abort(*request.key)
    made.until(lambda: not any(True for _ in made.engine.unfinished()))
    return tokens / wall_s


def _scatter(made: Rig) -> Callable[[], None]:
    """Every other page that KV could have is taken; what is returned gives them back."""
    pool, owner = made.engine.pool, Owner("holes", "kv")
    pages = pool.alloc_pages(owner, pool.num_free)
    pool.release(owner, [page for page in pages if page % 2])
    made.until(lambda: not pool.has_fences)
    return lambda: pool.release(owner, [page for page in pages if not page % 2])


def _host_room(settings: Settings, num_bytes: int) -> int:
    """Of the host tier. Raises RuntimeError where shared memory has no such room."""
    if settings.dry:
        return 1 << 24
    room, free = num_bytes + (1 << 30), shutil.disk_usage("/dev/shm").free
    if room > free:
        raise RuntimeError(f"/dev/shm has {free} bytes free, and the host tier needs {room}")
    return room


def _unit(made: Rig, name: str) -> str:
    found: str = made.engine._hosting.catalog.unit(name)
    return found


PARTS: tuple[Part, ...] = (
    Part("device", 0.5, device),
    Part("parity", 2, gpu_parity.parity),
    Part("decode 0.5B", 2, decode_of(SMALL)),
    Part("decode 1.7B", 2, decode_of(MEDIUM)),
    Part("decode 8B", 4, decode_of(LARGE)),
    Part("prefill 0.5B", 1, prefill_of(SMALL)),
    Part("prefill 1.7B", 1, prefill_of(MEDIUM)),
    Part("prefill 8B", 2, prefill_of(LARGE)),
    Part("serve 8B", 3, serve),
    Part("swap 8B", 4, swap),
    Part("swap under load", 4, swap_under_load),
    Part("arena against static", 4, arena_against_static),
    Part("chunk sizes", 5, chunks),
    Part("many models", 6, many),
    Part("peers", 3, gpu_peers.peers),
)


def run_part(name: str, settings: Settings) -> Figures:
    """One part; its figures and how long it took. Raises KeyError for a name that is none."""
    part = {part.name: part for part in PARTS}[name]
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    figures = part.run(settings)
    return figures | {"wall_s": time.perf_counter() - begin}
