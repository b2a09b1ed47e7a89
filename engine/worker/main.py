"""The worker process: `python -m engine.worker.main --config '<json WorkerConfig>'`.

With `--config -` it reads the JSON from the first line of standard input, once everything is
imported: the imports take seconds, and a server has other things to do meanwhile.

Builds the device, the engine and the loop, and is the boundary where an unexpected exception ends:
it is logged with its traceback and the process exits with 1, for the supervisor to start anew.

    SIGTERM     drain: refuse Submits, let running requests end within shutdown_timeout_s, exit 0
    SIGINT      the same by hand; ignored under a supervisor, whose terminal sends it to all
    exit codes  0 drained, 1 failed, 2 bad command line, 3 the supervisor is gone

The environment it wants (OpenMP) is listed in `worker_process.py`. The loop is `worker_loop.py`.
"""

import argparse
import faulthandler
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence

import msgspec
import torch
import zmq

from engine.backend.choose import open_device
from engine.config import WorkerConfig, decode_worker_config
from engine.engine import Engine
from engine.errors import DeviceUnusable
from engine.parts import device_in_words
from engine.worker.worker_link import WorkerLink
from engine.worker.worker_loop import Worker
from engine.worker.worker_process import (
    EXIT_FAILED,
    EXIT_ORPHANED,
    auto_num_threads,
    available_cores,
    configuration,
    end_with_parent,
    set_up_logging,
)

logger = logging.getLogger("engine.worker.main")  # __name__ is __main__ here


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. The named boundary: nothing above it sees an exception."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker.main")
    parser.add_argument(
        "--config", required=True, help="a WorkerConfig as JSON; -: on standard input"
    )
    arguments = parser.parse_args(argv)
    text = configuration(arguments.config, sys.stdin)
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


def serve(config: WorkerConfig) -> int:
    """Run a worker to its end. Raises whatever breaks it."""
    os.umask(0o077)  # the socket and the host tier's files are this user's alone
    num_threads = config.engine.num_threads or auto_num_threads(available_cores())
    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
    opened = open_device(config)
    config, backend = msgspec.structs.replace(config, engine=opened.config), opened.backend
    engine = Engine(config.engine, backend, opened.parts)
    context = zmq.Context()
    link = WorkerLink(context, config)
    device = device_in_words(backend, config.engine)
    worker = Worker(config, engine, link, epoch=secrets.token_hex(8), device=device)
    _listen_to_signals(worker, config.parent_pid)
    logger.info(
        "ready endpoint=%s device=%s pages=%d page_bytes=%d",
        config.endpoint,
        device,
        config.engine.num_pages,
        config.engine.resolved_page_bytes,
    )
    worker.run()
    engine.close()
    backend.close()
    context.term()
    logger.info("ended")
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
