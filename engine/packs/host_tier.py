"""The warm tier: whole packs in shared memory, in files that outlive the worker. It is the
machine's: all of its workers of one prefix fill it, read it and keep within its bound.

    <shm_dir>/<prefix>-<revision>.pack               complete and verified
    <shm_dir>/<prefix>-<revision>.pack.tmp-<pid>     being written, as long as it will be
    <shm_dir>/<prefix>-<revision>.pack.old-<pid>-<n> dropped, on its way to be deleted
    <shm_dir>/<prefix>-worth-<pid>                   what packs are worth to that worker
    <shm_dir>/<prefix>-lock                          held by who decides what comes in

**The folder is the books.** Nobody owns the tier, so nobody's death loses it: what is there is what
the names say, and a worker reads them again when the folder has changed (`look`). Deciding which
packs make room for another one is the one thing that two must not do at once; that is done under
the lock, without waiting: where it is taken, the pack stays out. Everything else is a rename.

A file gets its final name only when every byte of it was verified, so a name that is there can be
trusted if the file is this user's: shared memory does not survive the machine, only the process,
but everybody may write to its folder. Capacity is in bytes; who goes is `policy/host_tier.py` (the
least recently used where nobody says what packs are worth), and never one that is being read. What
a pack is worth is the sum over the workers: each writes its own down once a second.

Mappings are kept for as long as the tier holds a pack: through a fresh mapping a copy runs at a
third of memcpy's speed, and preadv of shared memory at half (docs/log.md). A pack that another
worker has dropped is unmapped at the next look; a copy that reads it then ends undisturbed.

Giving memory back takes as long as a quarter of a second a GB, so a pack that is dropped only loses
its name at once; a thread unmaps and deletes it. Until that is done it still takes memory beside
`capacity_bytes`: who fills the tier should wait while `is_deleting`.

Only the step thread calls the tier; loader threads touch nothing but a slab's `view` and a fill's
descriptor.
"""

import contextlib
import fcntl
import math
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from engine.errors import IntegrityError
from engine.packs.policy.host_tier import HeldPack, choose_drops

# Linux 5.14; missing from Python's mmap module.
_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 8 << 20
_REVISION = "[0-9a-f]+"
_TICK_NS = 50_000_000
_WORTH_S = 1.0
"""Between two writings of what packs are worth here."""


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


class _Name(NamedTuple):
    """A file of the tier. `pid`: of who writes or deletes it; None: complete."""

    path: Path
    revision: str
    num_bytes: int
    used_at: float
    pid: int | None
    is_old: bool


class HostTier:
    """Bounded by `capacity_bytes`; 0: no tier. `num_changes` counts packs that came or went."""

    def __init__(
        self,
        directory: Path,
        prefix: str,
        capacity_bytes: int,
        pinning: Pinning | None = None,
        pid: int | None = None,
    ) -> None:
        """`pinning`: of the device that loads go to, where it reads pinned memory faster. `pid`: of
        the worker, by which files are named; None: this process."""
        self._pid = os.getpid() if pid is None else pid
        self._pinning = pinning
        # Drivers pin what may be written only.
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        self._protection = mmap.PROT_READ if pinning is None else writable
        self._directory = directory
        self._prefix = prefix
        self._capacity = capacity_bytes
        self._slabs: dict[str, Slab] = {}
        self._fills: dict[str, Fill] = {}
        self._theirs: dict[str, int] = {}  # revision -> bytes that another worker is filling
        self._others_delete = False
        self._seen_ns = -1
        self._clock = 0
        self._next_worth_s = -math.inf
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="host-tier")
        self._deletions: list[Future[None]] = []
        self._num_dropped = 0
        self.num_changes = 0
        self.worth: Callable[[str], float] = lambda revision: 0.0
        """Of keeping a pack, a byte, for this worker."""
        self._clear_up()
        self.look()
        self._make_room(0, math.inf)

    @property
    def used_bytes(self) -> int:
        """Bytes of packs held or being filled, whoever fills them."""
        held = sum(slab.num_bytes for slab in self._slabs.values())
        fills = sum(fill.num_bytes for fill in self._fills.values())
        return held + fills + sum(self._theirs.values())

    @property
    def is_deleting(self) -> bool:
        """Whether memory that was dropped, here or elsewhere, has not come back yet."""
        self._deletions = [deletion for deletion in self._deletions if not deletion.done()]
        return bool(self._deletions) or self._others_delete

    def look(self) -> None:
        """Take in what other workers have done; nothing to do where the folder is as it was."""
        try:
            seen_ns = self._directory.stat().st_mtime_ns
        except OSError:  # no such folder, and no tier
            return
        if seen_ns == self._seen_ns:
            return
        # What changes within the same tick of the clock leaves the folder's time as it is.
        self._seen_ns = seen_ns if time.time_ns() - seen_ns > _TICK_NS else -1
        complete, self._theirs, self._others_delete = {}, {}, False
        for name in self._names():
            if name.pid is None:
                complete[name.revision] = name
            elif name.pid != self._pid and _is_alive(name.pid):
                self._others_delete |= name.is_old
                if not name.is_old:
                    self._theirs[name.revision] = name.num_bytes
        for slab in [slab for slab in self._slabs.values() if slab.revision not in complete]:
            self._forget(slab)
        for name in sorted(complete.values(), key=lambda name: name.used_at):
            if name.revision not in self._slabs:
                about = (name.revision, name.path, name.num_bytes)
                self._slabs[name.revision] = Slab(*about, self._tick())
                self.num_changes += 1

    def tell_worth(self, now_s: float) -> None:
        """Write down what packs are worth here, for the other workers; once a second."""
        if now_s < self._next_worth_s or not self._slabs:
            return
        self._next_worth_s = now_s + _WORTH_S
        told = {
            s.revision: -1.0 if s.num_readers else self.worth(s.revision)
            for s in self._slabs.values()
        }
        path = self._directory / f"{self._prefix}-worth-{self._pid}"
        with contextlib.suppress(OSError):
            _write(path, msgspec.json.encode(told))

    def has(self, revision: str) -> bool:
        """Whether a load of `revision` would find it here, as of the last look."""
        return revision in self._slabs

    def is_filling(self, revision: str) -> bool:
        """Whether `revision` is on its way in, as of the last look."""
        return revision in self._fills or revision in self._theirs

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
        if self._slabs.get(slab.revision) is not slab and not slab.num_readers:
            self._unmap(slab)
            return
        with contextlib.suppress(OSError):
            os.utime(slab.path)  # the order of use for the next process

    def begin_fill(self, revision: str, num_bytes: int) -> Fill | None:
        """Room for one more pack, or None where it does not fit beside those that stay, or where
        another worker decides about its own just now."""
        if not 0 < num_bytes <= self._capacity:
            return None
        with self._deciding() as is_mine:
            if not is_mine:
                return None
            self.look()
            if revision in self._slabs or self.is_filling(revision):
                return None
            if not self._make_room(num_bytes, self.worth(revision)):
                return None
            return self._new_fill(revision, num_bytes)

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
        for name in (f"worth-{self._pid}", *(() if keep else ("lock",))):
            with contextlib.suppress(OSError):
                (self._directory / f"{self._prefix}-{name}").unlink()
        self._deleter.shutdown(wait=True)

    def check_integrity(self) -> None:
        """Raises IntegrityError where the books are wrong."""
        if self.used_bytes > self._capacity:
            raise IntegrityError(f"host tier holds {self.used_bytes} of {self._capacity} bytes")
        for slab in self._slabs.values():
            if slab.num_readers < 0:
                raise IntegrityError(f"host tier: {slab.revision} was released too often")

    def _names(self) -> Iterator[_Name]:
        """The tier's files that are this user's; those that go meanwhile are left out."""
        prefix = re.escape(self._prefix)
        form = re.compile(rf"{prefix}-({_REVISION})\.pack(?:\.tmp-(\d+)|\.old-(\d+)-\d+)?")
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            match = form.fullmatch(path.name)
            if match is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    revision, writer, deleter = match.groups()
                    pid = writer or deleter
                    about = (path, revision, status.st_size, status.st_mtime)
                    yield _Name(*about, None if pid is None else int(pid), deleter is not None)

    def _clear_up(self) -> None:
        """Remove what workers that are gone have left behind."""
        left = [(name.path, name.pid) for name in self._names() if name.pid is not None]
        if self._directory.is_dir():
            left += list(self._worth_files())
        for path, pid in left:
            if pid == self._pid or not _is_alive(pid):  # an earlier process had our number
                path.unlink(missing_ok=True)

    def _worth_files(self) -> Iterator[tuple[Path, int]]:
        head = f"{self._prefix}-worth-"
        for path in self._directory.glob(f"{head}*"):
            if path.name.removeprefix(head).isdigit():
                yield path, int(path.name.removeprefix(head))

    def _worth_elsewhere(self) -> dict[str, float]:
        """Of packs, to the other workers together; infinite where one reads it."""
        total: dict[str, float] = {}
        for path, pid in self._worth_files():
            if pid == self._pid or not _is_alive(pid):
                continue
            try:
                told = msgspec.json.decode(_read(path), type=dict[str, float])
            except (OSError, msgspec.DecodeError):  # gone, or just being written
                continue
            for revision, worth in told.items():
                total[revision] = total.get(revision, 0.0) + (math.inf if worth < 0 else worth)
        return total

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[bool]:
        """Whether nobody else decides meanwhile. Never waits: steps must go on."""
        try:
            lock = os.open(
                self._directory / f"{self._prefix}-lock",
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError:
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

    def _new_fill(self, revision: str, num_bytes: int) -> Fill | None:
        path = self._directory / f"{self._prefix}-{revision}.pack.tmp-{self._pid}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        os.ftruncate(descriptor, num_bytes)  # so others see what it will take
        fill = Fill(revision, path, num_bytes, descriptor, protection=self._protection)
        self._fills[revision] = fill
        return fill

    def _make_room(self, num_bytes: int, worth: float) -> bool:
        theirs = self._worth_elsewhere() if self._slabs else {}
        held = [
            HeldPack(
                slab.revision,
                slab.num_bytes,
                self.worth(slab.revision) + theirs.get(slab.revision, 0.0),
                slab.last_used,
            )
            for slab in self._slabs.values()
            if not slab.num_readers and theirs.get(slab.revision) != math.inf
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

    def _forget(self, slab: Slab) -> None:
        """Another worker has dropped it, or somebody by hand. Who reads it reads on."""
        self.num_changes += 1
        del self._slabs[slab.revision]
        if not slab.num_readers:
            self._unmap(slab)

    def _unmap(self, slab: Slab) -> None:
        dropped, slab.map = slab.map, None
        if dropped is not None:
            self._deletions.append(self._deleter.submit(_give_back, None, dropped, self._pinning))

    def _delete(self, path: Path, mapped: mmap.mmap | None) -> None:
        """Have a file's memory given back; its name is free for a new one at once."""
        self._num_dropped += 1
        name = f"{path.name.partition('.pack')[0]}.pack.old-{self._pid}-{self._num_dropped}"
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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
