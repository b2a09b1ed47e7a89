"""The journal: what the ledger promises is here before any database has it (stage 10).

    append --pwrite--> written --fdatasync, in groups--> durable --ledger_writer.py--> in the
    database --release--> deleted

A record is written to the end of a segment by whoever appends it: a copy into the page cache of a
file whose room is allocated, some microseconds, and from there on it survives a kill. A thread
syncs: at once where somebody hurries and the last sync is `flush_interval_s` ago, else within
`sync_interval_s`; then it tells, once a group, whose records survive a power cut too. Reading is
for one other thread, and ends where data is durable.

What cannot be written at once goes through a queue, in its order, to the syncing thread: where a
segment is full, the disk fails, or the queue is not empty. The thread is `busy` then, and the only
one that touches the segment. A segment is deleted when all of its records are in the database.

Nothing that was asked for is dropped. What ends a request must always fit, so room comes first: a
segment's is allocated when it is made, and the next one (`spare`) is made ahead. Without a spare,
with less than `min_free_bytes` left on the disk, with more than `max_bytes` that the database has
not taken, or with so many open requests that their ends would not fit into the spare, nothing new
is opened: the caller gets a refusal, and what is open goes on.

A write or sync that fails is never tried again in place (what the kernel kept of it is unknown,
Rebello et al., "Can Applications Recover from fsync Failures?", ATC'20): the segment ends where it
was durable, and what came behind is written to the next one. Records that came twice this way, or
are read again after a kill, change nothing: see registry/money/ledger.py. A start reads old
segments and deletes them; it never goes on with one.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gateway.ledger.journal_segments import (
    END_BYTES,
    SEGMENT_HEAD,
    DiskFiles,
    Files,
    JournalLimits,
    JournalRefused,
    JournalStopped,
    OnDurable,
    Position,
    Record,
    RecordCodec,
    Segments,
)
from registry.money.ledger import OpenRecord

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # how often a full disk is looked at again


class _Entry(NamedTuple):
    record: Record
    tag: Any


class Journal:
    """`append` from any thread; `on_durable` is called from the syncing thread. Times are
    monotonic."""

    def __init__(
        self,
        folder: Path,
        limits: JournalLimits,
        on_durable: OnDurable,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_appended = self.num_failed = 0
        self.num_sync_errors = 0
        self._folder = folder
        self._limits = limits
        self._on_durable = on_durable
        self._files: Files = files or DiskFiles()
        self.segments = Segments(folder, limits.segment_bytes, self._files)
        """To be read from one thread; `discard` only after `stop`."""
        self._clock = clock
        self._codec, self._thread_codec = RecordCodec(), RecordCodec()
        self._unsynced: list[_Entry] = []
        """Written since the last group was taken up."""
        self._queue: list[_Entry] = []
        self._is_busy = False
        self._broken: OSError | None = None
        """A write that failed: the segment is not to be trusted behind what is durable."""
        self._syncing = self._num_taken = 0
        self._marks: deque[tuple[int, float]] = deque()
        """(records appended by then, when they were taken up)"""
        self._changed = threading.Condition()
        """Holds all of the above together, and what a segment's end is."""
        self._is_waiting = self._hurry = False
        self._synced_s = -math.inf
        self._stopping = self._give_up = False
        self._end = 0
        self._descriptor = -1
        self._why_full = ""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> Position:
        """Begin to write. Returns where `read` begins: with what an earlier process left.

        Raises OSError where the folder cannot be made or read; a full disk is no error.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        begin = self.segments.find()
        self._make_room()
        self._thread.start()
        return begin

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

    def append(self, record: Record, tag: Any = None, *, hurry: bool = True) -> bool:
        """Add a record; `tag` is what `on_durable` gets once it is durable, None for nothing. True:
        it is written already. `hurry`: somebody waits until it is durable. Raises
        JournalStopped."""
        entry = _Entry(record, tag)
        with self._changed:
            if self._stopping:
                raise JournalStopped("the journal is closed")
            self.num_appended += 1
            is_written = not self._is_busy and self._write_at_once(entry)
            if is_written:
                self._unsynced.append(entry)
            else:
                self._is_busy = True  # Nobody overtakes it.
                self._queue.append(entry)
            if hurry or not is_written or not self._limits.sync_interval_s:
                self._hurry = True
                if self._is_waiting:
                    self._is_waiting = False
                    self._changed.notify_all()
        return is_written

    def append_hint(self, record: Record) -> None:
        """As `append`, of what nobody waits for: not where room is short."""
        if not self._why_full:
            self.append(record, hurry=False)

    def refusal(self, num_open: int) -> str:
        """Why nothing new may be opened beside so many; empty: it may."""
        if self._why_full or not self._thread.is_alive():
            return self._why_full or "the journal has ended"
        if (num_open + 1) * END_BYTES > self._limits.segment_bytes:
            return f"{num_open} requests are open, and no more ends fit into a segment"
        if self.segments.num_bytes > self._limits.max_bytes:
            return f"{self.segments.num_bytes} bytes of the journal are not in the database yet"
        return ""

    @property
    def num_queued(self) -> int:
        """Records not durable yet."""
        return len(self._queue) + len(self._unsynced) + self._syncing

    @property
    def age_s(self) -> float:
        """Age of the oldest record that `written` has not named, or 0."""
        oldest = next(iter(self._marks.copy()), None)
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest[1])

    def written(self, num_appended: int) -> None:
        """So many are in the database; what failed never will be. For the thread that reads."""
        while self._marks and self._marks[0][0] <= num_appended + self.num_failed:
            self._marks.popleft()

    def _write_at_once(self, entry: _Entry) -> bool:
        """False: it is the thread's to see what is the matter with it, or with the disk."""
        try:
            frame = self._codec.frame(entry.record)
            if self._descriptor < 0 or self._end + len(frame) > self._limits.segment_bytes:
                return False
            self._files.write(self._descriptor, frame, self._end)
        except (ValueError, TypeError, OverflowError):
            return False
        except OSError as error:
            self._broken = error
            return False
        self._end += len(frame)
        return True

    # The syncing thread.

    def _run(self) -> None:
        while True:
            self._rest()
            written, queued = self._take()
            self._commit(written, queued)
            if self._stopping and not self.num_queued:
                return
            self._make_room()

    def _rest(self) -> None:
        """Until somebody hurries, or what is written has waited for long enough."""
        with self._changed:
            if not self._hurry and not self._stopping:
                self._is_waiting = True
                self._changed.wait(self._limits.sync_interval_s or RETRY_S)
                self._is_waiting = False
            soon_s = self._synced_s + self._limits.flush_interval_s - self._clock()
            if soon_s > 0 and self._hurry and not self._stopping:
                self._changed.wait(soon_s)  # In a crowd a sync is for all who come meanwhile.

    def _take(self) -> tuple[list[_Entry], list[_Entry]]:
        """(what is written and not synced, what is not written)."""
        with self._changed:
            written, self._unsynced = self._unsynced, []
            queued, self._queue = self._queue, []
            self._hurry = False
            self._is_busy = bool(queued)
            self._syncing = len(written) + len(queued)
        if self._syncing:
            self._num_taken += self._syncing
            self._marks.append((self._num_taken, self._clock()))
        return written, queued

    def _commit(self, written: Sequence[_Entry], queued: Sequence[_Entry]) -> None:
        """Make them durable and tell. Where that cannot be, what would open something is refused
        and the rest is tried until it can."""
        framed = self._framed(queued)
        while written or framed:
            try:
                if self._broken is not None:
                    raise self._broken
                num_fit = self._write([frame for _, frame in framed])
                if written or num_fit:
                    self._sync()
                else:
                    self._next_segment()
            except OSError as error:
                self.num_sync_errors += 1
                logger.error("cannot write the journal: %s", error)
                framed = self._framed([*written, *self._abandon(error)]) + framed
                written = ()
                refused = [entry for entry, _ in framed if isinstance(entry.record, OpenRecord)]
                self._report(refused, JournalRefused(self._why_full))
                framed = [pair for pair in framed if not isinstance(pair[0].record, OpenRecord)]
                if self._pause():
                    stopped = JournalStopped("the journal was closed before the write")
                    self._report([entry for entry, _ in framed], stopped)
                    break
            else:
                self._report([*written, *(entry for entry, _ in framed[:num_fit])], None)
                written, framed = (), framed[num_fit:]
        with self._changed:
            self._syncing = 0
            self._is_busy = bool(self._queue)

    def _framed(self, entries: Sequence[_Entry]) -> list[tuple[_Entry, bytes]]:
        framed = []
        for entry in entries:
            try:
                framed.append((entry, self._thread_codec.frame(entry.record)))
            except (ValueError, TypeError, OverflowError) as error:
                logger.error("the journal rejects record=%r: %s", entry.record, error)
                self._report([entry], error)
        return framed

    def _write(self, frames: Sequence[bytes]) -> int:
        """As many as fit into the segment. Raises OSError."""
        if self._descriptor < 0 or not frames:
            return 0
        end, num = self._end, 0
        while num < len(frames) and end + len(frames[num]) <= self._limits.segment_bytes:
            end += len(frames[num])
            num += 1
        self._files.write(self._descriptor, b"".join(frames[:num]), self._end)
        self._end = end
        return num

    def _sync(self) -> None:
        self._synced_s = self._clock()
        end = self._end  # What comes while it syncs may be in it or not.
        self._files.sync(self._descriptor)
        self.segments.synced(end)

    def _next_segment(self) -> None:
        self.segments.make_spare()
        self._close()
        descriptor = self.segments.begin_next()
        with self._changed:
            self._end, self._descriptor = len(SEGMENT_HEAD), descriptor

    def _make_room(self) -> None:
        """A segment and a spare one, where the disk has room for more than that."""
        why = ""
        try:
            free = self._files.free_bytes(self._folder)
            lacks = (self._descriptor < 0) + (not self.segments.has_spare)
            if free < self._limits.min_free_bytes + lacks * self._limits.segment_bytes:
                why = f"the journal's disk is full: {free} bytes are free"
            else:
                if self._descriptor < 0:
                    self._next_segment()
                self.segments.make_spare()
        except OSError as error:
            why = f"the journal's disk fails: {error}"
        if why and not self._why_full:
            logger.error("the ledger refuses new requests: %s", why)
        elif self._why_full and not why:
            logger.info("the journal has space again, new requests are accepted")
        self._why_full = why

    def _abandon(self, error: OSError) -> list[_Entry]:
        """The segment ends where it was durable. Returns what was written behind that meanwhile."""
        with self._changed:
            self._why_full = f"the journal's disk fails: {error}"
            self._is_busy, self._broken = True, None
            behind, self._unsynced = self._unsynced, []
            self._syncing += len(behind)
            self._num_taken += len(behind)
        self._close()
        return behind

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._files.close(descriptor)

    def _pause(self) -> bool:
        """Wait before the next try; True if it is time to give up."""
        with self._changed:
            self._changed.wait_for(lambda: self._give_up, timeout=RETRY_S)
            return self._give_up

    def _report(self, entries: Sequence[_Entry], error: BaseException | None) -> None:
        if error is not None:
            self.num_failed += len(entries)
        tags = [entry.tag for entry in entries if entry.tag is not None]
        if tags:
            self._on_durable(tags, error)
