"""Advisory file locks in the data folder: who may run a server, touch packs, change the schema.

    server.lock           exclusive, held by a running server for its whole life
    packs.lock            shared while a registration writes packs, exclusive to delete some
    <database>.upgrade.lock   exclusive while the schema is made or changed

flock(2): the kernel drops a lock when the last process holding the descriptor is gone, so nothing
is left behind by kill -9. A child that inherits the descriptor keeps the lock alive.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.errors import RegistryError

SERVER_LOCK = "server.lock"
PACKS_LOCK = "packs.lock"
_RETRY_S = 0.05


class LockBusy(RegistryError):
    """Somebody else holds the lock."""


@contextmanager
def hold(path: Path, *, shared: bool = False, timeout_s: float = 0.0) -> Iterator[int]:
    """Hold the lock file, made if absent; yields its descriptor. Raises LockBusy."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, timeout_s)
        yield descriptor
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Does any process hold the lock right now?"""
    if not path.exists():
        return False
    try:
        with hold(path, shared=True):
            return False
    except LockBusy:
        return True


def _acquire(descriptor: int, path: Path, kind: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise LockBusy(
                    f"{path} is locked: another Polyhost process uses this data folder; stop it or "
                    "use another --data-dir"
                ) from error
            time.sleep(_RETRY_S)
        else:
            return
