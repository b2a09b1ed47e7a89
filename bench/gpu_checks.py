"""What no fake device can show, asked of a real one before minutes are spent on figures.

They are what the CUDA backend takes for granted (engine/backend/cuda_device.py): shared memory can
be registered and read where it lies, steps can be recorded while other threads copy and pin, a pool
of graphs outlives them, the last bytes of the arena are reached. A wrong answer is a goal missed
and no exception: one run should tell all of it.
"""

import itertools
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from bench.gpu import SHM, SHM_PREFIX
from bench.gpu_rig import Figures, Rig, Settings, goal, rig
from engine.errors import CaptureFailed

T = TypeVar("T")
CAPTURES = 50
PATIENCE_S = 60.0
ROW = 4096


def checks(settings: Settings) -> Figures:
    """All of them; seconds and rates beside."""
    found: Figures = {}
    size = settings.scaled(1 << 30, 1 << 20)
    with rig(settings) as made, _shared(settings, size) as mapping:
        found |= registered(made, mapping)
        found |= recorded(made, settings.scaled(CAPTURES, 3))
        found["wrong_at_end"] = far_end(made)
        found["wake_up_us"] = wake_up_us(made, settings.scaled(50, 3))
    found["goals"] = {
        "share of shared memory that is pinned": goal(found["pinned_share"], 1.0),
        "bytes that arrive wrong": goal(found["wrong_bytes"], 0, more=False),
        "captures refused beside copies": goal(found["refused_beside"], 0, more=False),
        "captures refused with nobody beside": goal(found["refused_alone"], 0, more=False),
        "replays that are wrong": goal(found["wrong_replays"], 0, more=False),
        "bytes that are wrong at the arena's end": goal(found["wrong_at_end"], 0, more=False),
    }
    return found


@contextmanager
def _shared(settings: Settings, size: int) -> Iterator[mmap.mmap]:
    """A file as the host tier has them, of bytes that differ."""
    path = (settings.work_dir if settings.dry else SHM) / f"{SHM_PREFIX}{os.getpid()}-check"
    block = torch.randint(256, (min(size, 1 << 24),), dtype=torch.uint8).numpy().tobytes()
    path.write_bytes(block * (size // len(block)))
    try:
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), size)
        yield mapping
    finally:
        path.unlink()


def registered(made: Rig, mapping: mmap.mmap) -> Figures:
    """Pin it as the host tier is pinned, copy it, compare."""
    backend: Any = made.opened.backend
    size = len(mapping)
    begin = time.perf_counter()
    backend.pinner.hold(mapping)
    while backend.pinner.pinned_bytes < size and time.perf_counter() - begin < PATIENCE_S:
        time.sleep(0.001)
    pinned_s, share = time.perf_counter() - begin, backend.pinner.pinned_bytes / size
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        backend.copy_in(0, memoryview(mapping))
        rates.append(size / (time.perf_counter() - begin) / 1e9)
    wrong = backend.arena[:size].cpu() != torch.frombuffer(mapping, dtype=torch.uint8)
    backend.pinner.let_go(mapping)
    return {
        "pinned_share": share,
        "pinned_s_per_gb": pinned_s / size * 1e9,
        "registered_to_device_gb_s": max(rates),
        "wrong_bytes": int(wrong.sum()),
    }


def recorded(made: Rig, count: int) -> Figures:
    """Capture and replay while another thread copies, then with nobody beside.

    Each graph goes before the next is recorded, so that none but the device's own is left.
    """
    device: Any = made.opened.graphs._device  # type: ignore[union-attr]  # a device has graphs
    refused, wrong, words = [0, 0], 0, ""

    def once() -> bool:
        value = torch.zeros(ROW, device=device.torch_device)
        value * 2 + 1  # kernels are loaded before they are recorded, as those of steps are
        graph, result = device.capture(lambda: value * 2 + 1)
        value.fill_(3.0)
        graph.replay()
        return bool((result == 7).all())

    for number, beside in enumerate((True, False)):
        with _others(made, device, beside):
            for _ in range(count):
                try:
                    wrong += not in_stream(made, once)
                except CaptureFailed as error:
                    refused[number] += 1
                    words = str(error)
    found: Figures = {"refused_beside": refused[0], "refused_alone": refused[1]}
    return found | {"wrong_replays": wrong} | ({"refused_with": words} if words else {})


@contextmanager
def _others(made: Rig, device: Any, beside: bool) -> Iterator[None]:
    """What goes on beside steps: copies through slots, pinned memory allotted, pages registered."""
    backend: Any = made.opened.backend
    stop = threading.Event()
    source, mapping = memoryview(bytearray(1 << 16)), mmap.mmap(-1, 1 << 20)

    def work() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            backend.copy_in(0, source)
            device.host_buffer(1 << (12 + number % 12))
            backend.pinner.hold(mapping)
            backend.pinner.let_go(mapping)

    thread = threading.Thread(target=work)
    if beside:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if beside:
            thread.join()


def far_end(made: Rig) -> int:
    """A move from the arena's first bytes to its last, by the kernel that moves weights."""
    backend: Any = made.opened.backend
    end = len(backend.arena) - ROW
    backend.copy_in(0, memoryview(bytearray(range(256)) * (ROW // 256)))
    backend.copy_within([(0, end, ROW)])

    def wrong() -> int:
        wanted = torch.arange(ROW, device=backend.device) % 256
        return int((backend.arena[end:] != wanted).sum())

    return in_stream(made, wrong)


def wake_up_us(made: Rig, count: int) -> float:
    """From an empty step's launch until the host that waits for it goes on; the median."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        in_stream(made, lambda: None)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6


def in_stream(made: Rig, work: Callable[[], T]) -> T:
    """A step of its own, waited for."""
    backend: Any = made.opened.backend
    found: T = backend.launch(backend._last_launched + 1, work).wait()
    return found
