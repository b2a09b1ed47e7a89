"""The files of a host tier (host_tier.py): who has written them, and what they say.

    <prefix>-<revision>.pack               complete and verified
    <prefix>-<revision>.pack.tmp-<pid>     being written, as long as it will be
    <prefix>-<revision>.pack.old-<pid>-<n> dropped, on its way to be deleted
    <prefix>-worth-<pid>                   what packs are worth to that worker
    <prefix>-lock                          held by who decides what comes in

Only files of this user count, for everybody may write to the folder. Files of a process that is
gone are removed by whoever sees them.
"""

import contextlib
import fcntl
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

logger = logging.getLogger(__name__)

_REVISION = "[0-9a-f]+"
_MOST_READS = 5


class TierFile(NamedTuple):
    """A file of a pack. `pid`: of who writes or deletes it; None: complete."""

    path: Path
    revision: str
    num_bytes: int
    used_at: float
    pid: int | None
    is_old: bool


class TierFolder:
    """The files of one prefix, as the worker `pid` sees and writes them."""

    def __init__(self, directory: Path, prefix: str, pid: int) -> None:
        self._directory = directory
        self._prefix = prefix
        self._pid = pid
        self._lock_failed = False

    def path(self, name: str) -> Path:
        """Of the file behind the prefix."""
        return self._directory / f"{self._prefix}-{name}"

    def names(self) -> list[TierFile]:
        """The tier's files that are this user's. Read anew where one went meanwhile: it may have
        got another name."""
        for _ in range(_MOST_READS):
            found = self._read_names()
            if found is not None:
                return found
        return self._read_names(whole=False) or []

    def _read_names(self, *, whole: bool = True) -> list[TierFile] | None:
        """None where a file went meanwhile, and the list is to be `whole`."""
        prefix = re.escape(self._prefix)
        form = re.compile(rf"{prefix}-({_REVISION})\.pack(?:\.tmp-(\d+)|\.old-(\d+)-\d+)?")
        found: list[TierFile] = []
        if not self._directory.is_dir():
            return found
        for path in self._directory.iterdir():
            match = form.fullmatch(path.name)
            if match is None:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:
                if whole:
                    return None
                continue
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                revision, writer, deleter = match.groups()
                pid = writer or deleter
                about = (path, revision, status.st_size, status.st_mtime)
                found.append(
                    TierFile(*about, None if pid is None else int(pid), deleter is not None)
                )
        return found

    def clear_up(self) -> None:
        """Remove what workers that are gone have left behind."""
        left = [(name.path, name.pid) for name in self.names() if name.pid is not None]
        if self._directory.is_dir():
            left += list(self._worth_files())
        for path, pid in left:
            if pid == self._pid or not is_alive(pid):  # an earlier process had our number
                path.unlink(missing_ok=True)

    def _worth_files(self) -> Iterator[tuple[Path, int]]:
        head = f"{self._prefix}-worth-"
        for path in self._directory.glob(f"{head}*"):
            if path.name.removeprefix(head).isdigit():
                yield path, int(path.name.removeprefix(head))

    def worth_elsewhere(self) -> dict[str, float]:
        """Of packs, to the other workers together; infinite where one reads it."""
        total: dict[str, float] = {}
        for path, pid in self._worth_files():
            if pid == self._pid or not is_alive(pid):
                continue
            try:
                worths = msgspec.json.decode(_read(path), type=dict[str, float])
            except (OSError, msgspec.DecodeError):  # gone, or just being written
                continue
            for revision, worth in worths.items():
                total[revision] = total.get(revision, 0.0) + (math.inf if worth < 0 else worth)
        return total

    def report_worth(self, worth: Mapping[str, float]) -> None:
        """For the other workers; negative: the pack is being read."""
        with contextlib.suppress(OSError):
            _write(self.path(f"worth-{self._pid}"), msgspec.json.encode(worth))

    @contextlib.contextmanager
    def deciding(self) -> Iterator[bool]:
        """Whether nobody else decides meanwhile. Never waits: steps must go on."""
        try:
            lock = os.open(
                self._directory / f"{self._prefix}-lock",
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError as error:
            if not self._lock_failed:
                logger.warning("host tier: no pack is kept, its lock cannot be opened: %s", error)
            self._lock_failed = True
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = True
        except OSError:
            is_mine = False
        try:
            yield is_mine
        finally:
            os.close(lock)


def _write(path: Path, data: bytes) -> None:
    """In place: a rename would have every worker look at the folder. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    """Raises OSError, also where it is not this user's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(path)
        return file.read()


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
