"""The CPU device: copies land where they should, and committing memory changes no byte of it."""

import resource
import sys

import pytest
import torch

from engine.backend.cpu import CpuBackend

ARENA = 256 << 20


def test_copies_land_in_the_arena_and_views_see_them() -> None:
    backend = CpuBackend(1 << 16)
    backend.copy_in(4096, memoryview(bytes(range(256))))
    assert backend.arena[4096:4352].tolist() == list(range(256))
    backend.host_view(8192, 4)[:] = b"abcd"
    assert bytes(backend.arena[8192:8196].tolist()) == b"abcd"
    assert backend.arena.data_ptr() % 4096 == 0


def test_a_fence_passes_only_after_its_lag() -> None:
    backend = CpuBackend(4096, fence_lag=2)
    backend.launched(5)
    assert backend.last_done() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="memory is committed ahead on Linux only")
def test_commit_takes_the_memory_and_keeps_what_is_in_it() -> None:
    backend = CpuBackend(ARENA)
    backend.arena[12345] = 77
    thread = backend.commit()
    assert thread is not None
    thread.join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    backend.arena[::4096] += 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # At least one fault a huge page (2 MiB) otherwise.
    assert faults < ARENA / (2 << 20) / 2, "touching committed memory still faults"
    assert int(backend.arena[12345]) == 77
    assert torch.equal(backend.arena[:1], torch.tensor([1], dtype=torch.uint8))
