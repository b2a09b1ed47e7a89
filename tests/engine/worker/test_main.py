"""What surrounds the loop: log lines, thread counts, and the end with the parent."""

import json
import logging
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from engine.worker.main import LineFormatter, auto_num_threads, available_cores

CHILD = textwrap.dedent(
    """
    import sys, threading
    from engine.worker.main import end_with_parent

    stopped = threading.Event()
    end_with_parent(int(sys.argv[1]), stopped.set)
    print("up", flush=True)
    if sys.argv[2] == "stuck":
        threading.Event().wait()
    while not stopped.wait(0.05):
        pass
    print("stopped", flush=True)
    """
)
PARENT = textwrap.dedent(
    """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
    time.sleep(60)
    """
)


def test_a_record_is_one_line_with_its_traceback() -> None:
    formatter = LineFormatter("w0")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info()
        )
    text = formatter.format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it broke"
    assert line["worker"] == "w0"
    assert line["level"] == "error"
    assert "ValueError: two\nlines" in line["traceback"]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 3), (8, 7), (16, 14), (64, 56)])
def test_threads_leave_the_gateway_room(cores: int, threads: int) -> None:
    assert auto_num_threads(cores) == threads


def test_available_cores_is_positive() -> None:
    assert available_cores() >= 1
    assert available_cores(1000, has_own=False) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="keeps to cores by a call of Linux")
def test_all_threads_keep_to_the_cores_they_are_told() -> None:
    """In a process of its own: it would slow down all tests after it."""
    program = """
import os, threading
from engine.worker.main import keep_to
event = threading.Event()
threading.Thread(target=event.wait, daemon=True).start()
allowed = os.sched_getaffinity(0)
keep_to([10**6])
print(os.sched_getaffinity(0) == allowed)
keep_to([min(allowed), 10**6])
tasks = [int(name) for name in os.listdir("/proc/self/task")]
print(len(tasks) > 1, {tuple(os.sched_getaffinity(task)) for task in tasks} == {(min(allowed),)})
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="waits on the parent's death by Linux's signal")
@pytest.mark.parametrize("manner", ["listening", "stuck"])
def test_the_parents_death_ends_the_child(manner: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as stream:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, CHILD, manner], stdout=stream, stderr=stream
        )
    try:
        wait_for(out, "up")
        time.sleep(0.1)
        assert "stopped" not in out.read_text()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(out, "stopped" if manner == "listening" else "exiting at once")


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


SETTLED = """
import gc
from engine.worker.main import settle
settle()
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert len(gc.get_objects()) < 1_000, len(gc.get_objects())
"""


def test_imports_are_never_collected() -> None:
    """In a process of its own: it stays so."""
    subprocess.run([sys.executable, "-c", SETTLED], check=True)
