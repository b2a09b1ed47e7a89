"""Where a download lies, who may touch it, and which pack came of it.

    <downloads>/<org>--<name>@<commit>/     a folder a commit, whatever names it is registered under

One process works in a folder at a time (flock on the folder itself, dropped by the kernel when the
process is gone); others wait, and mostly find the pack made when it is their turn. The folder goes
when the pack is there or when trying again is of no use; after an interruption it stays, and the
gateway removes it in the end (`gateway/registration/registration_files.py`, which spells its name
too).

A pack that came from a hub carries one small file an origin (repository, commit, dtype as asked
for), so that the same commit is not fetched twice. It goes when the pack goes.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.packs.convert import whole_pack
from engine.packs.pack import PackIndex

POLL_S = 0.1


def folder_name(repo: str, commit: str) -> str:
    """One path component."""
    return f"{repo.replace('/', '--')}@{commit}"


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Make the folder and be alone in it. `waiting` is called while another process has it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            while not _lock(descriptor):
                waiting()
                time.sleep(POLL_S)
            if _is(folder, descriptor):
                yield
                return
            # Whoever had it removed it when done: the lock is on a folder that is no more.
        finally:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """The folder is of no more use. Call it with the lock held."""
    shutil.rmtree(folder, ignore_errors=True)


def note_origin(pack: Path, repo: str, commit: str, dtype: str) -> None:
    """The pack is what this commit becomes."""
    (pack / _origin_name(repo, commit, dtype)).touch()


def find_pack(dest: Path, repo: str, commit: str, dtype: str) -> tuple[Path, PackIndex] | None:
    """A whole pack of this origin, if there is one."""
    for mark in dest.glob(f"*/{_origin_name(repo, commit, dtype)}"):
        index = whole_pack(mark.parent)
        if index is not None:
            return mark.parent, index
    return None


def _origin_name(repo: str, commit: str, dtype: str) -> str:
    digest = hashlib.sha256(f"{repo}\0{commit}\0{dtype}".encode())
    return f"origin-{digest.hexdigest()[:32]}"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
