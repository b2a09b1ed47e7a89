"""The worker process: `python -m engine.worker.main --config '<json WorkerConfig>'`.

With `--config -` it reads the JSON from the first line of standard input, once everything is
imported: the imports take seconds, and a server has other things to do meanwhile.

Builds the device, the engine and the loop, and is the boundary where an unexpected exception ends:
it is logged with its traceback and the process exits with 1, for the supervisor to start anew.

    SIGTERM     drain: refuse Submits, let running requests end within shutdown_timeout_s, exit 0
    SIGINT      the same by hand; ignored under a supervisor, whose terminal sends it to all
    --devices   no worker: prints the names of this machine's GPUs

    exit codes  0 drained, 1 failed, 2 bad command line, 3 the supervisor is gone

The loop is `worker_loop.py`. Here is what surrounds it: log lines, thread counts, signals, and the
end of the parent process.

OpenMP reads its settings when torch is imported, so they cannot be set from here: whoever starts
the worker (the supervisor) puts them into its environment:

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

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import torch
import zmq

from engine.backend import gpu_names
from engine.config import WorkerConfig, decode_worker_config, read_config
from engine.dependencies import device_in_words
from engine.engine import Engine
from engine.errors import DeviceUnusable
from engine.worker.open_device import open_device
from engine.worker.step_limits import in_words
from engine.worker.worker_link import WorkerLink
from engine.worker.worker_loop import Worker

logger = logging.getLogger("engine.worker.main")  # __name__ is __main__ here

EXIT_FAILED = 1
EXIT_ORPHANED = 3

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


def available_cores(num_workers: int = 1, *, has_own: bool = True) -> int:
    """Cores for one of so many workers: of its affinity mask, which is its alone if it `has_own`,
    or of the cgroup's quota, which is everybody's, where that is less."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    cores = cores if has_own else cores // num_workers
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CGROUP_QUOTA.read_text().split()
        cores = cores if quota == "max" else min(cores, int(quota) // int(period) // num_workers)
    return max(1, cores)


def keep_to(cpus: Collection[int]) -> None:
    """Have every thread of this process, those to come too, run on these logical processors only.

    Those that are not there (any more) are left out; where none is, nothing is changed.
    """
    if sys.platform != "linux" or not (allowed := os.sched_getaffinity(0) & set(cpus)):
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), allowed)


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
        logger.warning("the parent process is gone pid=%d: stopping", parent_pid)
        stop()
        time.sleep(_ORPHAN_GRACE_S)
        logger.error("still running %.0f s after that: exiting at once", _ORPHAN_GRACE_S)
        os._exit(EXIT_ORPHANED)

    signal.signal(signal.SIGHUP, on_hangup)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. The named boundary: nothing above it sees an exception."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker.main")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a WorkerConfig as JSON; -: on standard input")
    what.add_argument(
        "--devices", action="store_true", help="print the names of the GPUs as a JSON list and exit"
    )
    arguments = parser.parse_args(argv)
    if arguments.devices:
        print(json.dumps(gpu_names()))
        return 0
    text = read_config(arguments.config, sys.stdin)
    if not text:
        return EXIT_ORPHANED
    try:
        config = decode_worker_config(text)
    except msgspec.DecodeError as error:
        parser.error(f"--config: {error}")
    set_up_logging(config.worker_id)
    try:
        return serve(config)
    except DeviceUnusable as error:
        logger.error("device %s cannot be used: %s", config.device, error)
        return EXIT_FAILED
    except Exception:
        logger.exception("the worker failed")
        return EXIT_FAILED


def settle() -> None:
    """Keep imports out of garbage collections; never in a process that tests share.

    Torch and transformers leave 400,000 objects, and a full collection walks over all of them: 0.1
    to 0.35 s in which no model takes a step.
    """
    gc.collect()
    gc.freeze()


def serve(config: WorkerConfig) -> int:
    """Run a worker to its end. Raises whatever breaks it."""
    os.umask(0o077)  # the socket and the host tier's files are this user's alone
    if config.cpus:
        keep_to(config.cpus)
    cores = available_cores(config.num_workers, has_own=bool(config.cpus))
    num_threads = config.engine.num_threads or auto_num_threads(cores)
    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
    if config.is_remote:  # Connections of anybody must not take the descriptors that loads need.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS has no number for "no limit"
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened = open_device(config)
    config, backend = msgspec.structs.replace(config, engine=opened.config), opened.backend
    engine = Engine(config.engine, backend, opened.dependencies)
    context = zmq.Context()
    link = WorkerLink(context, config)
    device = f"{device_in_words(backend, config.engine)}, {in_words(config.engine)}"
    worker = Worker(config, engine, link, epoch=secrets.token_hex(8), device=device)
    _listen_to_signals(worker, config.parent_pid)
    logger.info(
        "ready endpoint=%s device=%s pages=%d page_bytes=%d",
        config.endpoint,
        device,
        config.engine.num_pages,
        config.engine.resolved_page_bytes,
    )
    settle()
    worker.run()
    engine.close()
    backend.close()
    context.term()
    logger.info("the worker has stopped")
    return EXIT_ORPHANED if config.parent_pid not in (0, os.getppid()) else 0


def _listen_to_signals(worker: Worker, parent_pid: int) -> None:
    """Handlers only set a flag; an idle loop sees it within status_interval_s."""

    def on_terminate(signum: int, frame: object) -> None:
        worker.drain()

    signal.signal(signal.SIGTERM, on_terminate)
    if parent_pid:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent(parent_pid, worker.stop)
    else:
        signal.signal(signal.SIGINT, on_terminate)


if __name__ == "__main__":
    faulthandler.enable()
    exit_code = main()
    # Everything that must be closed is closed. Python's own teardown of torch takes another second,
    # and loader threads of a failed engine would keep its process alive.
    logging.shutdown()
    os._exit(exit_code)
