"""A disk in memory that can fail, fill up or lose power at any call, for the journal's tests."""

import errno
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path


class PowerCut(BaseException):
    """The process is gone: nothing of it runs any further."""


@dataclass
class _Inode:
    synced: bytes = b""
    data: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    """Since the last sync."""


class MemoryDisk:
    """Implements journal_files.Files. Names are durable at once, as these calls promise; data is
    once synced. `fail(call, number)` is asked before each call and may raise."""

    def __init__(self, room_bytes: int = 1 << 30) -> None:
        self.room_bytes = room_bytes
        self.num_calls = 0
        self.cut_at = -1
        """Power goes at this call; `torn`: of what was not synced, some stays."""
        self.errors: dict[str, int] = {}
        """Call -> how often it fails with EIO from now on."""
        self.is_dead = False
        self.paths: dict[Path, _Inode] = {}
        self.descriptors: dict[int, _Inode] = {}
        self.lock = threading.RLock()

    def _call(self, name: str) -> None:
        if self.is_dead:
            raise PowerCut
        self.num_calls += 1
        if self.num_calls == self.cut_at:
            self.is_dead = True
            raise PowerCut
        if self.errors.get(name, 0) > 0:
            self.errors[name] -= 1
            raise OSError(errno.EIO, "the disk failed")

    def after_power_cut(self, random_: random.Random) -> "MemoryDisk":
        """What is found afterwards: of writes that were not synced, some, and some in part."""
        found = MemoryDisk(self.room_bytes)
        for path, inode in self.paths.items():
            data = bytearray(inode.synced)
            for offset, written in inode.writes:
                kept = random_.choice((0, len(written), random_.randrange(len(written) + 1)))
                data[offset : offset + kept] = written[:kept]
            found.paths[path] = _Inode(bytes(data), data)
        return found

    def allocate(self, path: Path, num_bytes: int, head: bytes) -> None:
        with self.lock:
            self._call("allocate")
            self.paths.pop(path, None)
            if self.free_bytes(path.parent) < num_bytes:
                raise OSError(errno.ENOSPC, "the disk is full")
            data = bytearray(num_bytes)
            data[: len(head)] = head
            self.paths[path] = _Inode(bytes(data), data)

    def open(self, path: Path) -> int:
        with self.lock:
            self._call("open")
            number = max(self.descriptors, default=0) + 1
            self.descriptors[number] = self.paths[path]
            return number

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        with self.lock:
            inode = self.descriptors[descriptor]
            assert offset + len(data) <= len(inode.data), "beyond what was allocated"
            inode.data[offset : offset + len(data)] = data
            inode.writes.append((offset, data))
            self._call("write")

    def sync(self, descriptor: int) -> None:
        with self.lock:
            self._call("sync")
            inode = self.descriptors[descriptor]
            inode.synced, inode.writes = bytes(inode.data), []

    def close(self, descriptor: int) -> None:
        with self.lock:
            del self.descriptors[descriptor]

    def rename(self, path: Path, to: Path) -> None:
        with self.lock:
            self._call("rename")
            self.paths[to] = self.paths.pop(path)

    def delete(self, path: Path) -> None:
        with self.lock:
            self._call("delete")
            self.paths.pop(path, None)

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        with self.lock:
            return bytes(self.paths[path].data[offset : offset + num_bytes])

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in self.paths if path.parent == folder)

    def free_bytes(self, folder: Path) -> int:
        return self.room_bytes - sum(len(inode.data) for inode in self.paths.values())
