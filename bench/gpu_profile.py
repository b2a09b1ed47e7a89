"""Where a step's time goes on a GPU: its kernels by name, gaps between them, the host by function.

Parts of bench/gpu.py: without them a goal that is missed cannot be explained. Kernels are what
torch's profiler is told by the driver, over a few steps, those of replayed graphs too; the profiler
slows the host down and not the kernels, so the wall's figure is of other steps, without it. The
host's functions are Python's own profiler's, which adds about as much as it finds: shares, not
seconds.

    step_ms         median step by the wall, nothing else watching
    busy_ms         of it, while at least one kernel or copy ran
    gap_ms          step_ms - busy_ms: the device waited
    kernels         per step: microseconds and launches of each, the dearest first
    host_us         per step: own time of each function, the dearest first
"""

import cProfile
import pstats
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench import gpu_models
from bench.gpu_rig import Figures, Rig, Settings, rig

STEPS = 20
HOST_STEPS = 60
MOST_KERNELS = 14
MOST_FUNCTIONS = 16
Span = tuple[str, float, float]
"""Name, begin and end of work of the device in microseconds."""


def profile_of(shape: str) -> Callable[[Settings], Figures]:
    """Decode at 1 and 256 rows, greedy and sampled; decodes beside a chunk; a prompt of 2,048."""

    def run(settings: Settings) -> Figures:
        pack_dir, index = gpu_models.make_pack(shape, settings.work_dir, settings.dry)
        vocab, found = index.vocab_size, Figures()
        scaled = settings.scaled
        many, context = scaled(256, 3), scaled(128, 10)
        length = scaled(2048, 24)
        with rig(settings, prefix_cache=False) as made:
            made.host({"m": pack_dir})
            made.load("m")
            for rows, sampled in ((1, False), (many, False), (1, True), (many, True)):
                name = f"{rows} rows{', sampled' if sampled else ''}"
                with made.decoding("m", rows, context, 10**6, vocab, sampled) as step:
                    found[name] = watched(settings, step)
            with made.decoding("m", scaled(200, 2), context, 10**6, vocab) as step:
                found["decodes beside a chunk"] = watched(
                    settings, lambda: _beside(made, step, vocab, context)
                )
            found[f"prompt of {length}"] = watched(
                settings, lambda: _prompt(made, vocab, length), num_steps=scaled(4, 1)
            )
        return found

    return run


def _beside(made: Rig, step: Callable[[], int], vocab: int, context: int) -> None:
    """One step that has a new prompt, which asks for one token."""
    made.submit("m", made.prompts(1, context, vocab)[0], 1)
    step()


def _prompt(made: Rig, vocab: int, length: int) -> None:
    made.run_out([made.submit("m", made.prompts(1, length, vocab)[0], 1)])


def watched(settings: Settings, step: Callable[[], Any], num_steps: int = STEPS) -> Figures:
    """The same steps by the wall, by the device's profiler and by Python's."""
    num_steps = settings.scaled(num_steps, 2)
    for _ in range(num_steps):
        step()  # compiled, recorded
    walls = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        step()
        walls.append(time.perf_counter() - begin)
    step_ms = statistics.median(walls) * 1e3
    found: Figures = {"step_ms": step_ms}
    if not settings.dry:
        found |= of_device(_device_spans(step, num_steps), num_steps, step_ms)
    return found | {"host_us": _host(step, settings.scaled(HOST_STEPS, 2))}


def of_device(spans: Iterable[Span], num_steps: int, step_ms: float) -> Figures:
    """What the device did in so many steps; spans of streams that overlap count once as busy."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    busy, reached = 0.0, float("-inf")
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        times[short(name)] += end - begin
        counts[short(name)] += 1
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    busy_ms = busy / num_steps / 1e3
    dearest = sorted(times, key=lambda name: -times[name])
    kernels = {
        name: f"{times[name] / num_steps:.1f} us, {counts[name] / num_steps:.4g} launches"
        for name in dearest[:MOST_KERNELS]
    }
    rest = sum(times[name] for name in dearest[MOST_KERNELS:]) / num_steps
    return {
        "busy_ms": busy_ms,
        "gap_ms": step_ms - busy_ms,
        "launches": sum(counts.values()) / num_steps,
        "kernels": kernels | {"others": f"{rest:.1f} us"},
    }


def short(name: str) -> str:
    """A kernel's name without what a compiler has added."""
    bare = re.sub(r"^void |<.*|\(.*", "", name)
    return (bare or name)[:60]


def _device_spans(step: Callable[[], Any], num_steps: int) -> list[Span]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def _host(step: Callable[[], Any], num_steps: int) -> dict[str, float]:
    """Own microseconds a step of each function, those of C under their callers' names for them."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        step()
    profiler.disable()
    found: dict[str, float] = defaultdict(float)
    stats: Any = pstats.Stats(profiler)
    for (file, _, function), (_, _, own_s, _, _) in stats.stats.items():
        where = function if file == "~" else f"{Path(file).stem}.{function}"
        found[where] += own_s / num_steps * 1e6
    dearest = sorted(found, key=lambda name: -found[name])[:MOST_FUNCTIONS]
    total = sum(found.values())
    return {"all": round(total, 1)} | {name: round(found[name], 1) for name in dearest}
