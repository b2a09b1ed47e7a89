"""Captures by torch's rules: its allocator and its graphs as far as the rules go, scripted.

The rules are those of torch 2.11 to 2.13 (CUDAGraph.cpp, CUDACachingAllocator.cpp): a pool is
forgotten with its last graph and its handle is refused from then on; a capture that the driver
has broken off throws at its end and stays open to the allocator.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.backend import cuda_device
from engine.backend.cuda_device import MOST_BROKEN_OFF, CudaDevice
from engine.errors import CaptureFailed


class Allocator:
    """Pools by handle: how many graphs hold each. `underway`: the one that is captured into."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.underway: list[int] = []
        self.num_handles = 0
        self.free = 1 << 30

    def handle(self) -> int:
        self.num_handles += 1
        return self.num_handles

    def begin(self, pool: int) -> None:
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.held.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.held[pool] = self.held.get(pool, 0) + 1
        self.underway.append(pool)

    def end(self, device: int, pool: int) -> None:
        del device
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, pool: int) -> None:
        self.held[pool] -= 1


class Graphs:
    """Stands for torch.cuda.CUDAGraph. `broken`: what is captured now is broken off."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.broken = False
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.modes: list[str] = []

    def __call__(self) -> "Graph":
        graph = Graph(self)
        self.alive.add(graph)
        return graph


class Graph:
    def __init__(self, owner: Graphs) -> None:
        self.owner = owner
        self.pool = 0
        self.open = self.ended = False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.owner.modes.append(capture_error_mode)
        self.owner.allocator.begin(pool)
        self.pool, self.open = pool, True

    def capture_end(self) -> None:
        if not self.open:
            raise RuntimeError("CUDA error: the operation cannot be performed in the present state")
        self.open = False
        if self.owner.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")
        self.owner.allocator.end(0, self.pool)
        self.ended = True

    def __del__(self) -> None:
        if self.ended:
            self.owner.allocator.release(self.pool)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """torch.cuda, as far as a capture goes."""
    made = Graphs()
    monkeypatch.setattr(cuda_device, "check", lambda index: None)
    for name, value in {
        "CUDAGraph": made,
        "graph_pool_handle": made.allocator.handle,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: None,
        "mem_get_info": lambda device: (made.allocator.free, 1 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.allocator.end, raising=False)
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: real(*shape))
    return made


def device_of(graphs: Graphs) -> CudaDevice:
    device = CudaDevice(0)
    assert not graphs.alive
    return device


def work() -> torch.Tensor:
    return torch.ones(1)


def test_a_pool_outlives_its_graphs(graphs: Graphs) -> None:
    """All graphs of a device go when its only model is moved: the next is recorded all the same."""
    device = device_of(graphs)
    for _ in range(3):
        handle, result = device.capture(work)
        assert result.item() == 1.0
        del handle
        gc.collect()
        assert len(graphs.alive) == 1  # what keeps the pool
    assert graphs.allocator.num_handles == 1
    assert set(graphs.modes) == {"thread_local"}


def test_what_raises_is_no_graph_and_no_obstacle(graphs: Graphs) -> None:
    device = device_of(graphs)
    for _ in range(MOST_BROKEN_OFF + 1):
        with pytest.raises(CaptureFailed, match="ValueError: not that") as failed:
            device.capture(raising(ValueError("not that\nand more")))
        assert "\n" not in str(failed.value)
    assert not graphs.allocator.underway
    device.capture(work)


def test_a_capture_that_was_broken_off_holds_up_no_other(graphs: Graphs) -> None:
    """By what it did, or by what another thread did meanwhile."""
    device = device_of(graphs)
    kept = [device.capture(work)]
    graphs.broken = True
    for failing in (work, raising(RuntimeError("operation not permitted when capturing"))):
        with pytest.raises(CaptureFailed):
            device.capture(failing)
    graphs.broken = False
    assert not graphs.allocator.underway
    kept.append(device.capture(work))
    gc.collect()
    # The allocator still asks the dead ones, so they are kept.
    assert len([graph for graph in graphs.alive if not graph.ended]) == 2


def test_captures_that_never_come_to_anything_are_given_up(graphs: Graphs) -> None:
    device = device_of(graphs)
    graphs.broken = True
    for _ in range(MOST_BROKEN_OFF):
        with pytest.raises(CaptureFailed, match="previous error"):
            device.capture(work)
    before = len(graphs.modes)
    with pytest.raises(CaptureFailed, match="too many"):
        device.capture(work)
    assert len(graphs.modes) == before


def test_no_garbage_is_collected_meanwhile(graphs: Graphs) -> None:
    device = device_of(graphs)
    found: list[bool] = []

    def look() -> torch.Tensor:
        found.append(gc.isenabled())
        return work()

    device.capture(look)
    assert (found, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        device.capture(look)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_graph_costs_what_the_driver_has_less(graphs: Graphs) -> None:
    device = device_of(graphs)

    def take() -> torch.Tensor:
        graphs.allocator.free -= 1000
        return work()

    assert device.capture(take)[0].num_bytes == 1000


def raising(error: Exception) -> Callable[[], torch.Tensor]:
    def fail() -> torch.Tensor:
        raise error

    return fail
