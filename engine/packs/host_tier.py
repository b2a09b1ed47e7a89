"""The warm tier: whole packs in shared memory, in files that outlive the worker. It is the
machine's: all of its workers of one prefix fill it, read it and keep within its bound.

**The folder is the books.** Nobody owns the tier, so nobody's death loses it: what is there is what
the names of the files say (tier_folder.py), and a worker reads them again when the folder has
changed (`look`). Deciding which packs make room for another one is the one thing that two must not
do at once; that is done under the lock, without waiting: where it is taken, the pack stays out.
Everything else is a rename.

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
import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import IntegrityError
from engine.packs.policy.host_tier import HeldPack, choose_drops
from engine.packs.tier_folder import TierFolder, is_alive

# Linux 5.14; missing from Python's mmap module.
_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 8 << 20
_TICK_NS = 50_000_000
_LOOK_S = 0.2
"""While another worker writes or deletes, whether it still lives is looked at so often."""
_MOST_REFUSED = 64
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
        self._folder = TierFolder(directory, prefix, self._pid)
        self._capacity = capacity_bytes
        self._slabs: dict[str, Slab] = {}
        self._fills: dict[str, Fill] = {}
        self._theirs: dict[str, int] = {}  # revision -> bytes that another worker is filling
        self._others_delete = False
        self._seen_ns = -1
        self._clock = 0
        self._next_worth_s = self._next_look_s = -math.inf
        self._refused: dict[str, None] = {}  # that were not worth their room, the latest last
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="host-tier")
        self._deletions: list[Future[None]] = []
        self._num_dropped = 0
        self.num_changes = 0
        self.worth: Callable[[str], float] = lambda revision: 0.0
        """Of keeping a pack, a byte, for this worker."""
        self._folder.clear_up()
        self.look()
        self._make_room(0, math.inf, self._folder.worth_elsewhere())

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
        now_s = time.monotonic()
        # A worker that dies changes nothing in the folder.
        is_due = (self._theirs or self._others_delete) and now_s >= self._next_look_s
        if seen_ns == self._seen_ns and not is_due:
            return
        self._next_look_s = now_s + _LOOK_S
        # What changes within the same tick of the clock leaves the folder's time as it is.
        self._seen_ns = seen_ns if time.time_ns() - seen_ns > _TICK_NS else -1
        complete, self._theirs, self._others_delete = {}, {}, False
        for name in self._folder.names():
            if name.pid is None:
                complete[name.revision] = name
            elif name.pid == self._pid:
                continue
            elif not is_alive(name.pid):
                name.path.unlink(missing_ok=True)
            elif name.is_old:
                self._others_delete = True
            else:
                self._theirs[name.revision] = name.num_bytes
        for slab in [slab for slab in self._slabs.values() if slab.revision not in complete]:
            self._forget(slab)
        for name in sorted(complete.values(), key=lambda name: name.used_at):
            if name.revision not in self._slabs:
                about = (name.revision, name.path, name.num_bytes)
                self._slabs[name.revision] = Slab(*about, self._tick())
                self.num_changes += 1

    def report_worth(self, now_s: float) -> None:
        """Write down what packs are worth here, for the other workers: those held, and the latest
        that were refused, which others may want too. Once a second."""
        if now_s < self._next_worth_s or not (self._slabs or self._refused):
            return
        self._next_worth_s = now_s + _WORTH_S
        worth = {revision: self.worth(revision) for revision in {*self._refused, *self._slabs}}
        read = {slab.revision: -1.0 for slab in self._slabs.values() if slab.num_readers}
        known = {revision: value for revision, value in worth.items() if value > 0} | read
        self._folder.report_worth(known)

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
            except (FileNotFoundError, ValueError):  # removed by hand, or of another size
                self._drop(slab)
                return None
            except OSError:  # nothing is wrong with the pack
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
        with self._folder.deciding() as is_mine:
            if not is_mine:
                return None
            self._seen_ns = -1  # sizes change without the folder's time
            self.look()
            if revision in self._slabs or self.is_filling(revision):
                return None
            theirs = self._folder.worth_elsewhere()
            worth = self.worth(revision) + theirs.get(revision, 0.0)
            self._refused.pop(revision, None)
            if not self._make_room(num_bytes, worth, theirs):
                self._refused[revision] = None
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
                return None
            return self._new_fill(revision, num_bytes)

    def commit(self, fill: Fill) -> None:
        """Every byte is written and verified. Raises OSError where the file has gone.

        The fill must then be abandoned.
        """
        final = self._folder.path(f"{fill.revision}.pack")
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
        self._refused = {name: None for name in self._refused if name in revisions}
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
                self._folder.path(name).unlink()
        self._deleter.shutdown(wait=True)

    def check_integrity(self) -> None:
        """Raises IntegrityError where this worker's books are wrong. What all workers hold together
        is for the next of them that fills to bring within the bound."""
        own = sum(fill.num_bytes for fill in self._fills.values())
        if own > self._capacity:
            raise IntegrityError(f"host tier fills {own} of {self._capacity} bytes")
        for slab in self._slabs.values():
            if slab.num_readers < 0:
                raise IntegrityError(f"host tier: {slab.revision} was released too often")

    def _new_fill(self, revision: str, num_bytes: int) -> Fill | None:
        path = self._folder.path(f"{revision}.pack.tmp-{self._pid}")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, num_bytes)  # so others see what it will take
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return None
        fill = Fill(revision, path, num_bytes, descriptor, protection=self._protection)
        self._fills[revision] = fill
        return fill

    def _make_room(self, num_bytes: int, worth: float, theirs: Mapping[str, float]) -> bool:
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
