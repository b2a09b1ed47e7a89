"""The ledger's one writing thread: group commit (stage 10, below ledger.py).

Records are queued from the event loop and written in batches, one transaction each: whatever came
in within the flush interval shares one fsync. A batch that the database cannot take now (locked,
full, gone) is kept and tried again with growing pauses; nothing is dropped and nothing overtakes.
A batch that it will never take (a value it refuses) is split, so that one bad record fails alone.

Comes in: records with a callback. Goes out: the callback's call, from this thread, once the record
is durable (None) or can never be (the error).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from registry import ledger
from registry.ledger import OpenRecord, Posting
from registry.session import writing

logger = logging.getLogger(__name__)

ACTOR = "gateway"
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Void:
    """Close an open record without a posting."""

    request_id: str


Record: TypeAlias = OpenRecord | Posting | Void
Done: TypeAlias = Callable[[BaseException | None], None]


class LedgerStopped(Exception):
    """The writer ended before the record was durable; a restart's recovery closes it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record
    done: Done
    queued_s: float


@dataclass(slots=True)
class WriterCounts:
    """Running totals; written by the thread, read by anyone."""

    opened: int = 0
    posted: int = 0
    voided: int = 0
    write_errors: int = 0


class LedgerWriter:
    """`put` from any thread; everything else happens in the thread that `start` makes."""

    def __init__(
        self,
        engine: Engine,
        flush_interval_s: float,
        max_batch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = WriterCounts()
        self._engine = engine
        self._flush_interval_s = flush_interval_s
        self._max_batch = max_batch
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._writing: Sequence[_Entry] = ()
        self._stopping = False
        self._give_up = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what is queued, then end; blocks. False: given up, the rest is LedgerStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._changed:
            self._give_up = True
            self._changed.notify_all()
        self._thread.join()
        return False

    def put(self, record: Record, done: Done) -> None:
        """Queue a record. `done` is called from the thread. Raises LedgerStopped after stop."""
        with self._changed:
            if self._stopping:
                raise LedgerStopped("the ledger is closed")
            self._queue.append(_Entry(record, done, self._clock()))
            self._changed.notify_all()

    @property
    def num_pending(self) -> int:
        """Records that are not durable yet."""
        with self._changed:
            return len(self._queue) + len(self._writing)

    @property
    def lag_s(self) -> float:
        """Age of the oldest of them."""
        with self._changed:
            oldest = self._writing[0] if self._writing else next(iter(self._queue), None)
            return 0.0 if oldest is None else max(0.0, self._clock() - oldest.queued_s)

    def _run(self) -> None:
        while True:
            batch = self._take()
            if not batch:
                return
            self._write(batch)

    def _take(self) -> Sequence[_Entry]:
        """The next batch; empty when stopping and all is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if not self._stopping and self._flush_interval_s:
                self._changed.wait_for(
                    lambda: len(self._queue) >= self._max_batch or self._stopping,
                    timeout=self._flush_interval_s,
                )
            count = min(len(self._queue), self._max_batch)
            self._writing = [self._queue.popleft() for _ in range(count)]
            return self._writing

    def _write(self, batch: Sequence[_Entry]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._commit([entry.record for entry in batch])
            except SQLAlchemyError as error:
                self.counts.write_errors += 1
                if not _passes(error):
                    self._split(batch, error)
                    return
                logger.warning("ledger write failed records=%d: %s", len(batch), _cause(error))
                if self._pause(pause_s):
                    self._finish(batch, LedgerStopped("the ledger was closed before the write"))
                    return
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._finish(batch, None)
                return

    def _commit(self, records: Sequence[Record]) -> None:
        """One transaction. Opens come first: a request's open always precedes its end."""
        opens = [record for record in records if isinstance(record, OpenRecord)]
        postings = [record for record in records if isinstance(record, Posting)]
        voids = [record.request_id for record in records if isinstance(record, Void)]
        with writing(self._engine, ACTOR) as session:
            if opens:
                ledger.open_many(session, opens)
            posted = ledger.post_many(session, postings) if postings else set()
            if voids:
                ledger.void_many(session, voids)
        self.counts.opened += len(opens)
        self.counts.posted += len(posted)
        self.counts.voided += len(voids)

    def _split(self, batch: Sequence[_Entry], error: SQLAlchemyError) -> None:
        """One of them is at fault; each is written alone."""
        if len(batch) > 1:
            for entry in batch:
                self._write([entry])
            return
        logger.error("ledger refuses record=%r: %s", batch[0].record, _cause(error))
        self._finish(batch, error)

    def _pause(self, pause_s: float) -> bool:
        """Wait before the next try; True if it is time to give up."""
        with self._changed:
            self._changed.wait_for(lambda: self._give_up, timeout=pause_s)
            return self._give_up

    def _finish(self, batch: Sequence[_Entry], error: BaseException | None) -> None:
        """The first of those being written are through; nobody hears of it while they count."""
        with self._changed:
            self._writing = self._writing[len(batch) :]
        for entry in batch:
            entry.done(error)


def _passes(error: SQLAlchemyError) -> bool:
    """Whether the same write may succeed later: locked, full, unreachable."""
    if isinstance(error, IntegrityError):
        return False
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, OperationalError)


def _cause(error: SQLAlchemyError) -> object:
    return getattr(error, "orig", None) or error
