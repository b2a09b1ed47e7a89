"""The journal: what the ledger promises is durable here, before any database has it (stage 10).

    append --group commit--> durable --ledger_writer.py--> in the database --release--> deleted

Records go to the end of a segment, all that came within the flush interval in one write and one
fdatasync, and then their callers are told: once a group, not once a record. A segment is deleted
when all of its records are in the database. The writing thread is the only one that touches the
newest segment; reading is for one other thread, and ends where data is durable.

Nothing that was asked for is dropped. What ends a request must always fit, so room comes first: a
segment's is allocated when it is made, and the next one (`spare`) is made ahead. Without a spare,
with less than `min_free_bytes` left on the disk, with more than `max_bytes` that the database has
not taken, or with so many open requests that their ends would not fit into the spare, nothing new
is opened: the caller gets a refusal, and what is open goes on.

A write or sync that fails is never tried again in place (what the kernel kept of it is unknown,
Rebello et al., "Can Applications Recover from fsync Failures?", ATC'20): the segment ends where it
was durable, and the group is written to the next one. Records that came twice this way, or are
read again after a kill, change nothing: see registry/ledger.py. A start reads old segments and
deletes them; it never goes on with one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.ledger.journal_files import DiskFiles, Files
from gateway.ledger.journal_format import (
    END_BYTES,
    SEGMENT_HEAD,
    Damage,
    Record,
    RecordCodec,
    UnknownRecord,
)
from gateway.ledger.journal_types import (
    JournalLimits,
    JournalRefused,
    JournalStopped,
    Position,
    Told,
)
from registry.ledger import Checkpoint, OpenRecord

logger = logging.getLogger(__name__)

SPARE = "spare"
SUFFIX = ".journal"
_WHOLE_FILE = 1 << 40
RETRY_S = 0.5  # how often a full disk is looked at again


@dataclass(slots=True)
class _Entry:
    record: Record
    tag: Any


class Journal:
    """`append` from any thread, `read` and `release` from one; `told` is called from the journal's
    own thread. Times are monotonic."""

    def __init__(
        self,
        folder: Path,
        limits: JournalLimits,
        told: Told,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_appended = self.num_failed = 0
        self.num_sync_errors = 0
        self.num_damaged = 0
        """Places where the disk lost what it had promised."""
        self._folder = folder
        self._limits = limits
        self._told = told
        self._files: Files = files or DiskFiles()
        self._clock = clock
        self._codec, self._read_codec = RecordCodec(), RecordCodec()
        self._queue: deque[_Entry] = deque()
        self._writing = self._num_taken = 0
        self._marks: deque[tuple[int, float]] = deque()
        """(records appended by then, when they were taken up)"""
        self._changed = threading.Condition()
        self._awake = True
        self._stopping = self._give_up = False
        self._ends: dict[int, int] = {}
        """Segments that are there -> where their durable part ends."""
        self._last_old = 0
        self._current = self._end = self._num_hints = 0
        self._descriptor = -1
        self._has_spare = False
        self._why_full = ""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> Position:
        """Begin to write. Returns where `read` begins: with what an earlier process left.

        Raises OSError where the folder cannot be made or read; a full disk is no error.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        left = [int(name.split(".")[0]) for name in self._files.names(self._folder) if _is(name)]
        self._ends = dict.fromkeys(left, _WHOLE_FILE)
        self._current = self._last_old = max(left, default=0)
        self._make_room()  # A spare that is there may be half made: it is made anew.
        self._thread.start()
        return Position(min(left, default=self._current))

    def is_old(self, at: Position) -> bool:
        """Whether what comes there was left by an earlier process."""
        return at.segment <= self._last_old

    def stop(self, timeout_s: float) -> bool:
        """Write what is queued, then end; blocks. False: given up, the rest is JournalStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        in_time = not self._thread.is_alive()
        with self._changed:
            self._give_up = True
            self._changed.notify_all()
        self._thread.join()
        self._close()
        return in_time

    def append(self, record: Record, tag: Any = None) -> None:
        """Queue a record; `tag` is what `told` gets, None for nothing. Raises JournalStopped."""
        if self._stopping:
            raise JournalStopped("the journal is closed")
        self.num_appended += 1
        self._queue.append(_Entry(record, tag))
        if not self._awake:
            with self._changed:
                self._awake = True
                self._changed.notify_all()

    def append_hint(self, record: Record) -> None:
        """As `append`, of what a power cut may take: not where room is short."""
        if not self._why_full:
            self.append(record)

    def refusal(self, num_open: int) -> str:
        """Why nothing new may be opened beside so many; empty: it may."""
        if self._why_full or not self._thread.is_alive():
            return self._why_full or "the journal has ended"
        if (num_open + 1) * END_BYTES > self._limits.segment_bytes:
            return f"{num_open} requests are open, and no more ends fit into a segment"
        if self.num_bytes > self._limits.max_bytes:
            return f"{self.num_bytes} bytes of the journal are not in the database yet"
        return ""

    @property
    def num_queued(self) -> int:
        """Records not durable yet."""
        return len(self._queue) + self._writing

    @property
    def age_s(self) -> float:
        """Age of the oldest record that `written` has not named, or 0."""
        oldest = next(iter(self._marks.copy()), None)
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest[1])

    def written(self, num_appended: int) -> None:
        """So many are in the database; what failed never will be. For the thread that reads."""
        while self._marks and self._marks[0][0] <= num_appended + self.num_failed:
            self._marks.popleft()

    @property
    def num_bytes(self) -> int:
        """Room that segments take, the spare one and the newest not counted."""
        return max(0, len(self._ends) - 1) * self._limits.segment_bytes

    @property
    def durable(self) -> Position:
        """The end of what is durable."""
        return Position(self._current, self._ends.get(self._current, 0))

    def read(self, at: Position, max_bytes: int) -> tuple[list[Record], Position]:
        """Records that are durable from there on, and where they end. What is damaged is told and
        passed over. Raises OSError."""
        whole = self.is_old(at) or at.segment < self._current  # First: then its end is final.
        end = self._ends.get(at.segment)
        if end is None:
            return [], self._after(at)
        data = self._files.read(self._path(at.segment), at.offset, end - at.offset)
        records: list[Record] = []
        offset = 0
        try:
            for found, offset in self._read_codec.read(data):
                if isinstance(found, Damage):
                    self._damaged(at, found)
                    continue
                records.append(found)
                if offset >= max_bytes:
                    return records, Position(at.segment, at.offset + offset)
        except UnknownRecord as error:
            raise OSError(f"{self._path(at.segment)}: {error}") from error
        return records, self._after(at) if whole else Position(at.segment, end)

    def release(self, before: Position) -> None:
        """All records before it are in the database. Raises OSError."""
        for number in sorted(self._ends):
            if number >= before.segment:
                return
            self._files.delete(self._path(number))
            del self._ends[number]

    def discard(self) -> None:
        """After `stop`: everything is in the database. Raises OSError."""
        for number in sorted(self._ends):
            self._files.delete(self._path(number))
        self._files.delete(self._folder / SPARE)

    def _after(self, at: Position) -> Position:
        """The beginning of the next segment there is."""
        later = [number for number in list(self._ends) if number > at.segment]
        return Position(min(later, default=max(at.segment, self._last_old + 1)))

    def _damaged(self, at: Position, damage: Damage) -> None:
        begin = at.offset + damage.offset
        where = f"{self._path(at.segment)} at {begin}: {damage.num_bytes} bytes"
        if damage.torn:
            logger.warning("journal %s of records that were never durable are cut", where)
            return
        self.num_damaged += 1
        logger.error("JOURNAL DAMAGED, records are lost: %s; the rest is read", where)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012}{SUFFIX}"

    # The writing thread.

    def _run(self) -> None:
        while True:
            entries = self._take()
            if entries:
                self._commit(entries)
            elif self._num_hints:  # Nothing else comes that would take them along.
                self._sync_hints()
            if entries is None:
                return
            self._make_room()

    def _take(self) -> list[_Entry] | None:
        """What has come within the interval; None when stopping and all is written."""
        with self._changed:
            self._awake = False
            if not self._queue and not self._stopping:
                self._changed.wait(RETRY_S)
            self._awake = True
            if not self._queue:
                return None if self._stopping else []
            if not self._stopping and self._limits.flush_interval_s:
                self._changed.wait(self._limits.flush_interval_s)
        entries = [self._queue.popleft() for _ in range(len(self._queue))]
        self._writing = len(entries)
        self._num_taken += len(entries)
        self._marks.append((self._num_taken, self._clock()))
        return entries

    def _commit(self, entries: Sequence[_Entry]) -> None:
        """Make them durable and tell. Where that cannot be, what would open something is refused
        and the rest is tried until it can."""
        framed = self._framed(entries)
        while framed:
            try:
                num_written = self._write([frame for _, frame in framed], _all_hints(entries))
            except OSError as error:
                self.num_sync_errors += 1
                logger.error("journal cannot write records=%d: %s", len(framed), error)
                self._why_full = f"the journal's disk fails: {error}"
                self._abandon()
                refused = [entry for entry, _ in framed if isinstance(entry.record, OpenRecord)]
                self._tell(refused, JournalRefused(self._why_full))
                framed = [pair for pair in framed if not isinstance(pair[0].record, OpenRecord)]
                if self._pause():
                    stopped = JournalStopped("the journal was closed before the write")
                    self._tell([entry for entry, _ in framed], stopped)
                    break
            else:
                self._tell([entry for entry, _ in framed[:num_written]], None)
                framed = framed[num_written:]
        self._writing = 0

    def _framed(self, entries: Sequence[_Entry]) -> list[tuple[_Entry, bytes]]:
        framed = []
        for entry in entries:
            try:
                framed.append((entry, self._codec.frame(entry.record)))
            except (ValueError, TypeError, OverflowError) as error:
                logger.error("journal refuses record=%r: %s", entry.record, error)
                self._tell([entry], error)
        return framed

    def _write(self, frames: Sequence[bytes], hints: bool) -> int:
        """As many as fit into one segment, durable; hints are with the next ones that must be, and
        survive a kill until then. Raises OSError."""
        if self._descriptor < 0 or self._end + len(frames[0]) > self._limits.segment_bytes:
            self._next_segment()
        begin = end = self._end
        num = 0
        while num < len(frames) and end + len(frames[num]) <= self._limits.segment_bytes:
            end += len(frames[num])
            num += 1
        self._files.write(self._descriptor, b"".join(frames[:num]), begin)
        self._end = end
        if hints:
            self._num_hints += num
        else:
            self._sync()
        return num

    def _sync(self) -> None:
        self._files.sync(self._descriptor)
        self._ends[self._current] = self._end
        self._num_hints = 0

    def _sync_hints(self) -> None:
        try:
            self._sync()
        except OSError as error:
            logger.error("journal cannot sync: %s", error)
            self._abandon()

    def _next_segment(self) -> None:
        if self._num_hints:
            self._sync()
        if not self._has_spare:
            self._allocate()
        number = self._current + 1
        self._has_spare = False  # Where the call fails, nobody knows which name it has.
        self._files.rename(self._folder / SPARE, self._path(number))
        self._close()
        self._descriptor = self._files.open(self._path(number))
        self._ends[number] = self._end = len(SEGMENT_HEAD)
        self._current = number

    def _allocate(self) -> None:
        self._files.allocate(self._folder / SPARE, self._limits.segment_bytes, SEGMENT_HEAD)
        self._has_spare = True

    def _make_room(self) -> None:
        """A segment and a spare one, where the disk has room for more than that."""
        why = ""
        try:
            free = self._files.free_bytes(self._folder)
            lacks = (self._descriptor < 0) + (not self._has_spare)
            if free < self._limits.min_free_bytes + lacks * self._limits.segment_bytes:
                why = f"the journal's disk is full: {free} bytes are free"
            else:
                if self._descriptor < 0:
                    self._next_segment()
                if not self._has_spare:
                    self._allocate()
        except OSError as error:
            why = f"the journal's disk fails: {error}"
        if why and not self._why_full:
            logger.error("ledger opens nothing new: %s", why)
        elif self._why_full and not why:
            logger.info("journal has room")
        self._why_full = why

    def _abandon(self) -> None:
        """It ends where it was durable."""
        self.num_failed += self._num_hints
        self._num_hints = 0
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._files.close(descriptor)

    def _pause(self) -> bool:
        """Wait before the next try; True if it is time to give up."""
        with self._changed:
            self._changed.wait_for(lambda: self._give_up, timeout=RETRY_S)
            return self._give_up

    def _tell(self, entries: Sequence[_Entry], error: BaseException | None) -> None:
        if error is not None:
            self.num_failed += len(entries)
        tags = [entry.tag for entry in entries if entry.tag is not None]
        if tags:
            self._told(tags, error)


def _is(name: str) -> bool:
    return name.endswith(SUFFIX) and name.split(".")[0].isdigit()


def _all_hints(entries: Sequence[_Entry]) -> bool:
    return all(isinstance(entry.record, Checkpoint) for entry in entries)
