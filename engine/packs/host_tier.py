"""The warm tier: whole packs in shared memory, in files that outlive the worker.

    <shm_dir>/<prefix>-<revision>.pack               complete and verified
    <shm_dir>/<prefix>-<revision>.pack.tmp-<pid>     being written
    <shm_dir>/<prefix>-<revision>.pack.old-<pid>-<n> dropped, on its way to be deleted

A file gets its final name only when every byte of it was verified, so a name that is there can be
trusted if the file is this user's: shared memory does not survive the machine, only the process,
but everybody may write to its folder. Capacity is in bytes; who goes is `policy/host_tier.py` (the
least recently used where nobody says what packs are worth), and never one that is being read.

Mappings are kept for as long as the tier holds a pack: through a fresh mapping a copy runs at a
third of memcpy's speed, and preadv of shared memory at half (docs/log.md).

Giving memory back takes as long as a quarter of a second a GB, so a pack that is dropped only loses
its name at once; a thread unmaps and deletes it. Until that is done it still takes memory beside
`capacity_bytes`: who fills the tier should wait while `is_deleting`.

Only the step thread calls the tier; loader threads touch nothing but a slab's `view` and a fill's
descriptor.
"""

import contextlib
import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import IntegrityError
from engine.packs.policy.host_tier import HeldPack, choose_drops

# Linux 5.14; missing from Python's mmap module.
_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 8 << 20
_REVISION = "[0-9a-f]+"


class Pinning(Protocol):
    """A device that reads mappings directly (backend/pinning.py)."""

    def hold(self, mapping: mmap.mmap) -> None:
        """From now on it may; returns at once."""

    def let_go(self, mapping: mmap.mmap) -> None:
        """It is about to be unmapped; nobody reads it."""


@dataclass(slots=True, eq=False)
class Slab:
    """One pack in the tier. `view` has its bytes, in the blob's layout."""

    revision: str
    path: Path
    num_bytes: int
    last_used: int
    num_readers: int = 0
    map: mmap.mmap | None = None

    @property
    def view(self) -> memoryview:
        """Read-only bytes of the pack; slices of it must not outlive the reader's release."""
        if self.map is None:
            raise IntegrityError(f"{self.path} is read without having been acquired")
        return memoryview(self.map)


@dataclass(slots=True, eq=False)
class Fill:
    """A pack on its way into the tier. Loader threads write it through `descriptor`."""

    revision: str
    path: Path
    num_bytes: int
    descriptor: int
    map: mmap.mmap | None = None
    protection: int = mmap.PROT_READ

    def populate(self) -> None:
        """Map what was written, pages and all. The last thing a loader thread does.

        In pieces: madvise holds the GIL (0.14 s a GB), and the steps must go on.
        """
        filled = mmap.mmap(self.descriptor, self.num_bytes, prot=self.protection)
        with contextlib.suppress(OSError):  # older kernels: the first load takes the faults
            for start in range(0, self.num_bytes, _POPULATE_BYTES):
                piece = min(_POPULATE_BYTES, self.num_bytes - start)
                filled.madvise(_MADV_POPULATE_READ, start, piece)
        self.map = filled


class HostTier:
    """Bounded by `capacity_bytes`; 0: no tier. `num_changes` counts packs that came or went."""

    def __init__(
        self,
        directory: Path,
        prefix: str,
        capacity_bytes: int,
        pinning: Pinning | None = None,
    ) -> None:
        """`pinning`: of the device that loads go to, where it reads pinned memory faster."""
        self._pinning = pinning
        # Drivers pin what may be written only.
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        self._protection = mmap.PROT_READ if pinning is None else writable
        self._directory = directory
        self._prefix = prefix
        self._capacity = capacity_bytes
        self._slabs: dict[str, Slab] = {}
        self._fills: dict[str, Fill] = {}
        self._clock = 0
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="host-tier")
        self._deletions: list[Future[None]] = []
        self._num_dropped = 0
        self.num_changes = 0
        self.worth: Callable[[str], float] = lambda revision: 0.0
        """Of keeping a pack, a byte."""
        self._adopt()

    @property
    def used_bytes(self) -> int:
        """Bytes of packs held or being filled."""
        held = sum(slab.num_bytes for slab in self._slabs.values())
        return held + sum(fill.num_bytes for fill in self._fills.values())

    @property
    def is_deleting(self) -> bool:
        """Whether memory that was dropped has not come back yet."""
        self._deletions = [deletion for deletion in self._deletions if not deletion.done()]
        return bool(self._deletions)

    def has(self, revision: str) -> bool:
        """Whether a load of `revision` would find it here."""
        return revision in self._slabs

    def is_filling(self, revision: str) -> bool:
        """Whether `revision` is on its way in."""
        return revision in self._fills

    def acquire(self, revision: str, num_bytes: int) -> Slab | None:
        """A slab to read from, or None if it is not here; give it back with `release`."""
        slab = self._slabs.get(revision)
        if slab is None:
            return None
        if slab.map is None:
            try:
                slab.map = _map(slab.path, num_bytes, self._protection)
                self._hold(slab.map)
            except (OSError, ValueError):  # removed by hand, or of another size
                self._drop(slab)
                return None
        slab.num_readers += 1
        slab.last_used = self._tick()
        return slab

    def release(self, slab: Slab) -> None:
        """The reader is done."""
        slab.num_readers -= 1
        with contextlib.suppress(OSError):
            os.utime(slab.path)  # the order of use for the next process

    def begin_fill(self, revision: str, num_bytes: int) -> Fill | None:
        """Room for one more pack, or None where it does not fit beside those that stay."""
        if revision in self._slabs or revision in self._fills or num_bytes < 1:
            return None
        if not self._make_room(num_bytes, self.worth(revision)):
            return None
        path = self._directory / f"{self._prefix}-{revision}.pack.tmp-{os.getpid()}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        fill = Fill(revision, path, num_bytes, descriptor, protection=self._protection)
        self._fills[revision] = fill
        return fill

    def commit(self, fill: Fill) -> None:
        """Every byte is written and verified. Raises OSError where the file has gone.

        The fill must then be abandoned.
        """
        final = self._directory / f"{self._prefix}-{fill.revision}.pack"
        fill.path.rename(final)
        del self._fills[fill.revision]
        os.close(fill.descriptor)
        self.num_changes += 1
        self._slabs[fill.revision] = Slab(
            fill.revision, final, fill.num_bytes, self._tick(), map=fill.map
        )
        if fill.map is not None:
            self._hold(fill.map)

    def abandon(self, fill: Fill) -> None:
        """Forget a fill that failed or was cancelled."""
        del self._fills[fill.revision]
        os.close(fill.descriptor)
        filled, fill.map = fill.map, None
        self._delete(fill.path, filled)

    def keep_only(self, revisions: Collection[str]) -> None:
        """Drop packs no hosted model has (those being read go later)."""
        for slab in list(self._slabs.values()):
            if slab.revision not in revisions and not slab.num_readers:
                self._drop(slab)

    def close(self, keep: bool) -> None:
        """End of the worker; with `keep`, its successor finds the packs. Waits for deletions."""
        for fill in list(self._fills.values()):
            self.abandon(fill)
        for slab in list(self._slabs.values()):
            if keep:
                kept, slab.map = slab.map, None
                if kept is not None and self._pinning is not None:
                    self._deletions.append(self._deleter.submit(self._pinning.let_go, kept))
            else:
                self._drop(slab)
        self._deleter.shutdown(wait=True)

    def check_integrity(self) -> None:
        """Raises IntegrityError where the books are wrong."""
        if self.used_bytes > self._capacity:
            raise IntegrityError(f"host tier holds {self.used_bytes} of {self._capacity} bytes")
        for slab in self._slabs.values():
            if slab.num_readers < 0:
                raise IntegrityError(f"host tier: {slab.revision} was released too often")

    def _adopt(self) -> None:
        """Take over what an earlier worker left, and remove what it left half-written."""
        prefix = re.escape(self._prefix)
        name = re.compile(rf"{prefix}-({_REVISION})\.pack(?:\.tmp-(\d+)|\.old-(\d+)-\d+)?")
        found: list[tuple[float, str, Path, int]] = []
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            match = name.fullmatch(path.name)
            if match is None:
                continue
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    continue
                pid = match.group(2) or match.group(3)
                if pid is None:
                    found.append((status.st_mtime, match.group(1), path, status.st_size))
                elif not _is_alive(int(pid)):
                    path.unlink()
            except FileNotFoundError:
                continue  # another worker of this prefix was quicker
        for _, revision, path, size in sorted(found):
            self._slabs[revision] = Slab(revision, path, size, self._tick())
        self._make_room(0, math.inf)

    def _make_room(self, num_bytes: int, worth: float) -> bool:
        held = [
            HeldPack(slab.revision, slab.num_bytes, self.worth(slab.revision), slab.last_used)
            for slab in self._slabs.values()
            if not slab.num_readers
        ]
        drops = choose_drops(num_bytes, worth, held, self._capacity - self.used_bytes)
        for revision in drops or ():
            self._drop(self._slabs[revision])
        return drops is not None

    def _drop(self, slab: Slab) -> None:
        self.num_changes += 1
        del self._slabs[slab.revision]
        dropped, slab.map = slab.map, None
        self._delete(slab.path, dropped)

    def _delete(self, path: Path, mapped: mmap.mmap | None) -> None:
        """Have a file's memory given back; its name is free for a new one at once."""
        self._num_dropped += 1
        name = f"{path.name.partition('.pack')[0]}.pack.old-{os.getpid()}-{self._num_dropped}"
        try:
            nameless = path.rename(path.with_name(name))
        except OSError:  # removed by hand
            nameless = None
        if nameless is not None or mapped is not None:
            give_back = self._deleter.submit(_give_back, nameless, mapped, self._pinning)
            self._deletions.append(give_back)

    def _hold(self, mapping: mmap.mmap) -> None:
        if self._pinning is not None:
            self._pinning.hold(mapping)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _give_back(path: Path | None, mapped: mmap.mmap | None, pinning: Pinning | None) -> None:
    """All of it releases the GIL."""
    if mapped is not None:
        if pinning is not None:
            pinning.let_go(mapped)
        with contextlib.suppress(BufferError):  # somebody has a view: it goes with that
            mapped.close()
    if path is not None:
        with contextlib.suppress(OSError):  # a successor adopts or removes what is left
            path.unlink()


def _map(path: Path, num_bytes: int, protection: int) -> mmap.mmap:
    with path.open("r+b" if protection & mmap.PROT_WRITE else "rb") as file:
        if os.fstat(file.fileno()).st_size != num_bytes:
            raise ValueError(f"{path} is not of {num_bytes} bytes")
        return mmap.mmap(file.fileno(), num_bytes, prot=protection)


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier process had our number
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
