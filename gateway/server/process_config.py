"""What a server's processes are told when they are started: a file in the data folder.

    FOLDER/run/server.json    the settings and where the workers are; this user's alone
    hub, dispatcher           the two sockets that they meet at
    dispatcher.lock           whoever holds it is the dispatcher; in it the epoch of the last one

The lock is reached through the process that started the others, which holds it open: were the name
deleted, or made anew, two processes could each have a lock of their own.

Not on the command line, where every user of the machine could read it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.server import machine
from gateway.settings import Settings

NAME = "server.json"


class ProcessConfig(msgspec.Struct, frozen=True):
    """The same for all. `workers`: (id, endpoint). `port`: the one that is listened on. `lock`: the
    dispatcher's, as children open it."""

    settings: Settings
    workers: list[tuple[str, str]]
    port: int
    lock: str


def write(config: ProcessConfig) -> Path:
    """Where it is then."""
    path = _run_folder(config.settings) / NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(config))
    return path


def read(path: str) -> ProcessConfig:
    """Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(Path(path).read_bytes(), type=ProcessConfig)


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


def _run_folder(settings: Settings) -> Path:
    return hub_socket(settings).parent
