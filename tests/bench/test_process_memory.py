"""Memory of a tree of processes: what is shared counts once, parts add up, the peak stays."""

import os
import subprocess
import sys

import pytest

from bench import process_memory, processes
from bench.process_memory import Memory, Sampler

SHARED = 96 << 20
PARENT = f"""
import mmap, os, sys, time
held = mmap.mmap(-1, {SHARED})  # shared with the child
held.write(bytes({SHARED}))
child = os.fork()
if child == 0:
    os.setsid()
    seen = sum(held[::4096])
    print("there", flush=True)
    sys.stdin.read()
    os._exit(0)
os.waitpid(child, 0)
"""

ROLLUP = """\
562d8ab10000-7ffe83013000 ---p 00000000 00:00 0                          [rollup]
Rss:                1784 kB
Pss:                 348 kB
Pss_Anon:            112 kB
Pss_File:            236 kB
Pss_Shmem:             4 kB
Shared_Clean:       1632 kB
"""


def test_kinds_of_one_process() -> None:
    assert process_memory.parse_rollup(ROLLUP) == {
        "anonymous": 112 << 10,
        "files": 236 << 10,
        "shared": 4 << 10,
    }
    assert process_memory.parse_rollup("Rss: 12 kB\n") == {"anonymous": 0, "files": 0, "shared": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_what_two_processes_share_counts_once_in_sessions_of_their_own_too() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        assert len(processes.below(server.pid)) == 1
        found = process_memory.memory_of(server.pid)
        assert SHARED <= found.shared < SHARED * 1.2
        assert found.total == found.anonymous + found.files + found.shared
        assert found.workers == 0
        assert process_memory.memory_of(os.getpid()).total > found.total
        server.communicate(b"")
    assert process_memory.memory_of(server.pid).total == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_workers_are_told_from_the_gateway() -> None:
    command = [sys.executable, "-c", "print('there', flush=True)\ninput()", "engine.worker.main"]
    with subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        found = process_memory.memory_of(worker.pid)
        assert found.workers == found.total > 0
        worker.communicate(b"\n")


def test_the_peak_keeps_the_parts_of_its_moment() -> None:
    seen = iter([Memory(anonymous=5, workers=4, others=1), Memory(shared=3, workers=3)])
    sampler = Sampler(lambda: next(seen))
    assert sampler.peak()["total"] == 5
    assert sampler.peak() == {
        "total": 5,
        "anonymous": 5,
        "files": 0,
        "shared": 0,
        "workers": 4,
        "others": 1,
    }


def test_samples_are_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "SAMPLE_S", 0.001)
    sizes = [1, 9, *[2] * 1_000_000]
    with Sampler(lambda: Memory(files=sizes[0], others=sizes.pop(0))) as sampler:
        while len(sizes) > 1_000_000 - 5:
            pass
        assert sampler.peak()["total"] == 9
