"""What the processes of a server get when they start, and what is set once in each.

    FOLDER/run/server.json    the settings and where the workers are; this user's alone
    hub, dispatcher           the two sockets that they meet at
    dispatcher.lock           whoever holds it is the dispatcher; in it the epoch of the last one

The lock is reached through the process that started the others, which holds it open: were the name
deleted, or made anew, two processes could each have a lock of their own. The configuration is not
on the command line, where every user of the machine could read it.

Set in each process: the garbage collector, the turns of threads, the form of log lines, and what
SIGTERM and SIGINT do.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.ipc import machine
from gateway.settings.config import decode_settings
from gateway.settings.settings import Settings
from gateway.workers.curve_keys import WorkerAddress

NAME = "server.json"


class ProcessConfig(msgspec.Struct, frozen=True):
    """The same for all. `port`: the one that is listened on. `lock`: the
    dispatcher's, as children open it."""

    settings: Settings
    workers: list[WorkerAddress]
    port: int
    lock: str


class _RawSettings(msgspec.Struct, frozen=True):
    """The settings of a ProcessConfig as they stand there, unchecked."""

    settings: msgspec.Raw


def write_config(config: ProcessConfig) -> Path:
    """Where it is then."""
    path = _run_folder(config.settings) / NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(config))
    return path


def read_config(path: str) -> ProcessConfig:
    """Raises OSError, msgspec.DecodeError, SettingsError."""
    data = Path(path).read_bytes()
    settings = msgspec.json.decode(data, type=_RawSettings).settings
    config = msgspec.json.decode(data, type=ProcessConfig)
    return msgspec.structs.replace(config, settings=decode_settings(bytes(settings)))


def hub_socket(settings: Settings) -> Path:
    """Of the process that started the others."""
    return machine.socket_path(settings.data_path, "hub")


def dispatcher_socket(settings: Settings) -> Path:
    """Of the active dispatcher."""
    return machine.socket_path(settings.data_path, "dispatcher")


@contextlib.contextmanager
def dispatcher_lock(settings: Settings) -> Iterator[str]:
    """Where children find the file that the active dispatcher locks, for as long as this lasts."""
    path = _run_folder(settings) / "dispatcher.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def take_epoch(descriptor: int) -> int:
    """The next dispatcher's, from the locked file `descriptor`. It never falls: the clock's seconds
    are the least that it may be, for workers of other machines remember it, and a data folder can
    be put back from a backup."""
    text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    epoch = max((int(text) if text.isdigit() else 0) + 1, int(time.time()))
    os.pwrite(descriptor, str(epoch).encode(), 0)
    return epoch


def note_epoch(lock: Path, epoch: int) -> None:
    """The holder of the lock has been elected with this one, or has seen it: the next that takes
    one from the file has a higher one."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        if not text.isdigit() or int(text) < epoch:
            os.pwrite(descriptor, str(epoch).encode(), 0)
    finally:
        os.close(descriptor)


def next_epoch(settings: Settings) -> int:
    """Of the dispatcher of a server that is one process."""
    with dispatcher_lock(settings) as path:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return take_epoch(descriptor)
        finally:
            os.close(descriptor)


def _run_folder(settings: Settings) -> Path:
    return hub_socket(settings).parent


GC_THRESHOLDS = (2_000, 10, 50)
"""So many containers are made and not gone: the young ones are looked at; so often: older ones."""
TURN_S = 0.0005


def settle() -> None:
    """For a process that serves until it ends; never in one that tests share."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(TURN_S)


class LineFormatter(logging.Formatter):
    """Fields: at (UTC epoch seconds), level, logger, message, and maybe traceback; `process` where
    a server has several."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(process: str = "") -> None:
    """Records of level INFO and above go to stderr. Of uvicorn's own only errors: it
    warns of each request that is no HTTP, and anybody could fill a disk with those."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Of each malformed form, which its sender is answered.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


@contextmanager
def on_stop_signals(call: Callable[[], None]) -> Iterator[None]:
    """Needs the running event loop, which makes the call."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
