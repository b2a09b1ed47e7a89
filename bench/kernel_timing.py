"""How long a call takes on a GPU, and what the GPU itself can do: the ceilings.

A call is captured in a CUDA graph and replayed, so that what is measured is the device and not the
launching of Python; a call that cannot be captured is launched, and its figure says so. Before each
repeat a buffer larger than the second-level cache is overwritten. Times are between CUDA events,
median and spread of many; nothing here knows a kernel. Without a device only `summary` is of use.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch

from bench.stats import percentile

FLUSH_BYTES = 256 << 20
WARM_UP = 5
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


class Timing(TypedDict):
    """Microseconds of one call; `captured`: as a CUDA graph."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    captured: bool


class Ceilings(TypedDict):
    """What a plain copy moves (read and written) and a large bf16 product computes."""

    copy_gb_s: float
    matmul_tflop_s: float


def summary(times_us: Sequence[float], captured: bool) -> Timing:
    """Median and spread."""
    return {
        "median_us": percentile(times_us, 0.5),
        "p10_us": percentile(times_us, 0.1),
        "p90_us": percentile(times_us, 0.9),
        "repeats": len(times_us),
        "captured": captured,
    }


def measure(call: Callable[[], object], repeats: int, capture: bool = True) -> Timing:
    """Needs a CUDA device. Compilation and allocation happen in the warm-up."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    replay, captured = _captured(call) if capture else (call, False)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return summary([begin.elapsed_time(end) * 1e3 for begin, end in pairs], captured)


def _captured(call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """The call as a graph's replay; the call itself where it waits for the device inside."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            call()
    except RuntimeError:
        # A capture that was broken off never ends to torch's allocator, which would ask the dead
        # graph about every allocation from then on.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        return call, False
    return graph.replay, True


def ceilings(repeats: int = 20) -> Ceilings:
    """Measured now, on an otherwise idle device."""
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: the driver's own copy reaches two thirds of it inside a graph.
    copied = measure(lambda: torch.mul(source, 1.0, out=target), repeats)
    left, right = torch.randn(
        2, MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda"
    ).unbind()
    multiplied = measure(lambda: left @ right, repeats)
    return {
        "copy_gb_s": 2 * COPY_BYTES / copied["median_us"] / 1e3,
        "matmul_tflop_s": 2 * MATMUL_SIZE**3 / multiplied["median_us"] / 1e6,
    }
