"""Files that are there whole or not at all, after a crash too: what several writers share.

A file that is written once has its first writer's bytes for all who come at the same time: keys of
a data folder, the name of whom a folder of objects belongs to.
"""

import contextlib
import os
import secrets
from pathlib import Path

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def write_once(path: Path, data: bytes) -> None:
    """Write the file with the rights 0600, unless it is there: of several processes that come first
    one's bytes stay. Its folder is there. Raises OSError."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_new(os.open(made, NEW_FILE, 0o600), data)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        made.unlink()
    sync_folder(path.parent)


def write_new(descriptor: int, data: bytes) -> None:
    """All of it, synced; closes the file. Raises OSError."""
    with open(descriptor, "wb", buffering=0) as file:
        write_all(file.fileno(), data)
        os.fsync(file.fileno())


def write_all(descriptor: int, data: bytes) -> None:
    """All of it. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """What was renamed, linked or made in it survives a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
