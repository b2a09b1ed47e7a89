"""The CPU device: steps and copies in their order, committing memory changes no byte of it."""

import resource
import sys
import threading

import pytest
import torch

from engine.backend import cpu
from engine.backend.cpu import CpuBackend, Execution

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


def test_a_step_in_a_thread_runs_behind_the_one_before_it() -> None:
    backend = CpuBackend(4096, execution="thread")
    go = threading.Event()

    def first() -> int:
        go.wait()
        return 7

    one = backend.launch(1, first)
    two = backend.launch(2, lambda: one.value() + 1)
    backend.launched(3)
    assert not two.done()
    assert backend.last_done() == 0
    go.set()
    assert two.wait() == 8
    assert (one.done(), two.done()) == (True, True)
    assert backend.last_done() == 3
    assert one.device_s > 0
    backend.close()
    backend.close()


@pytest.mark.parametrize("execution", ["inline", "thread"])
def test_what_a_step_raises_comes_to_whoever_waits(execution: Execution) -> None:
    backend = CpuBackend(4096, execution=execution)

    def fail() -> int:
        raise ValueError("shape")

    failed = backend.launch(1, fail)
    after = backend.launch(2, lambda: failed.value() + 1)
    for pending in (failed, after):
        with pytest.raises(ValueError, match="shape"):
            pending.wait()
    assert backend.launch(3, lambda: 5).wait() == 5
    assert backend.last_done() == 3
    backend.close()


@pytest.mark.parametrize("execution", ["inline", "thread"])
def test_copies_run_between_the_steps_around_them(execution: Execution) -> None:
    backend = CpuBackend(1 << 16, execution=execution)
    arena = backend.arena
    go = threading.Event()
    if execution == "inline":
        go.set()

    def write() -> None:
        go.wait()
        arena[:100] = torch.arange(100)

    backend.launch(1, write)
    # The second move writes what the first has read.
    backend.copy_within([(0, 1000, 100), (50, 0, 50)])
    read = backend.launch(2, lambda: (arena[1000:1100].clone(), arena[:100].clone()))
    if execution == "thread":
        assert backend.last_done() == 0
    go.set()
    copied, moved = read.wait()
    assert torch.equal(copied, torch.arange(100, dtype=torch.uint8))
    assert moved.tolist() == [*range(50, 100), *range(50, 100)]
    assert backend.last_done() == 2
    backend.close()


def test_the_next_step_has_not_ended_before_the_copies_have() -> None:
    backend = CpuBackend(1 << 16, execution="thread")
    go = threading.Event()
    backend.launch(1, lambda: None).wait()
    assert backend.last_done() == 1
    backend.launch(2, go.wait)
    backend.copy_within([(0, 4096, 4096)])
    backend.launched(3)  # sources released now carry this step
    assert backend.last_done() == 1
    go.set()
    backend.launch(4, lambda: None).wait()
    assert backend.last_done() == 4
    backend.close()


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


@pytest.mark.skipif(sys.platform != "linux", reason="memory is committed ahead on Linux only")
@pytest.mark.parametrize("use", ["load", "copy", "step", "nothing"])
def test_commit_makes_way_for_whoever_uses_the_device(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(cpu, "COMMIT_PIECE_BYTES", ARENA // 4)
    monkeypatch.setattr(cpu, "COMMIT_QUIET_S", 1e9)
    monkeypatch.setattr(cpu, "COMMIT_PAUSE_S", 0.0)
    monkeypatch.setattr("engine.backend.cpu.time.sleep", pauses.append)
    backend = CpuBackend(ARENA)
    if use == "load":
        backend.host_view(0, 4096)
    elif use == "copy":
        backend.copy_in(0, memoryview(b"abc"))
    elif use == "step":
        backend.launch(1, lambda: None)
    thread = backend.commit()
    assert thread is not None
    thread.join()
    assert pauses == ([] if use == "nothing" else [0.0] * 4)
