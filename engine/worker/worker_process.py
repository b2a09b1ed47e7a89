"""What surrounds a worker's loop in its process: log lines, the parent's death, thread counts.

Nothing here knows the engine or the protocol. Standard library only.

OpenMP reads its settings when torch is imported, so they cannot be set from here: whoever starts
the worker (the supervisor) puts them into the environment of `python -m engine.worker.main`:

    OMP_WAIT_POLICY=PASSIVE   a thread that waits at a barrier sleeps instead of spinning
    GOMP_SPINCOUNT=1000       libgomp, which torch's CPU wheels bring: spin for a moment only
    KMP_BLOCKTIME=1           the same for LLVM's and Intel's runtimes
    OMP_NUM_THREADS=<n>       as `num_threads`, for libraries that never ask torch

Why: with as many spinning threads as cores and one more process wanting a core (the gateway), a
barrier lasts until the scheduler takes the slice from the spinner. Measured on two busy cores, an
fp32 product [8, 512] x [512, 1536], mean: two threads as libgomp comes 10.5 ms, with
GOMP_SPINCOUNT=1000 0.7 ms, with 0 0.3 to 0.5 ms, one thread 0.2 to 0.35 ms. Where nothing else
wants the cores, not spinning at all costs a sixth of the tokens a second (docs/log.md), hence 1000.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_ORPHANED = 3

GIVEN_LATER = "-"
"""Instead of a configuration: it comes as the first line of standard input."""

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_S = 0.5
_ORPHAN_GRACE_S = 2.0
_CORES_PER_SPARE = 8
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class LineFormatter(logging.Formatter):
    """One JSON object a record, on one line, with the traceback inside it where there is one."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        """Fields: at (UTC epoch seconds), level, worker, logger, message, and maybe traceback."""
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "worker": self._worker_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(worker_id: str) -> None:
    """Every record of level INFO and above goes to stderr as one line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(worker_id))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def configuration(argument: str, given: TextIO) -> str:
    """A WorkerConfig as JSON; empty where whoever was to give it later is gone."""
    if argument != GIVEN_LATER:
        return argument
    line = given.readline()
    return line if line.endswith("\n") else ""


def available_cores() -> int:
    """Cores this process may use: its affinity mask, or its cgroup's quota where that is less."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def auto_num_threads(cores: int) -> int:
    """Threads of one operator: all of two cores, else a core, or one per eight, for the gateway.

    On two cores the second thread is worth 1.25x to 1.5x in tokens a second with the gateway
    beside it; it costs as much where another program wants that core all the time (docs/log.md).
    """
    return cores if cores <= 2 else cores - max(1, cores // _CORES_PER_SPARE)


def end_with_parent(parent_pid: int, stop: Callable[[], None]) -> None:
    """Call `stop` once the process `parent_pid`, our parent, is gone; exit hard if that hangs.

    Call it from the main thread. Linux sends SIGHUP at the parent's death; since it does so
    already when the parent's *thread* that started us ends, the handler looks whether the parent
    is really gone. The thread that polls is for other systems and for a loop stuck in an operator.
    """

    def is_gone() -> bool:
        return os.getppid() != parent_pid

    def on_hangup(signum: int, frame: object) -> None:
        if is_gone():
            stop()

    def watch() -> None:
        while not is_gone():
            time.sleep(_PARENT_POLL_S)
        logger.warning("parent is gone pid=%d", parent_pid)
        stop()
        time.sleep(_ORPHAN_GRACE_S)
        logger.error("still running %.0f s after that: exiting hard", _ORPHAN_GRACE_S)
        os._exit(EXIT_ORPHANED)

    signal.signal(signal.SIGHUP, on_hangup)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
