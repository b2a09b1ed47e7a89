"""From the journal into the database: one thread, batches, in order (stage 10, below ledger.py).

Reads what is durable in the journal and writes it in transactions of many records. What was opened
and ended within one batch leaves no open record behind. When all of a segment is in the database
the journal may delete it. First comes what an earlier process left: some of that is in the database
already, and writing it again changes nothing.

A batch that the database cannot take now (locked, full, gone) is kept and tried again with growing
pauses, for ever: nothing is dropped and nothing overtakes. Of a batch that it will never take (a
value it refuses) the records are written one by one, and what is at fault is put aside, in a file
beside the journal: an operator decides.

The thread outlives whatever is raised in it: that is logged and counted, and the batch written once
more. Should it end all the same, nothing new is opened (ledger.py) and the server is not ready.

Between batches, roll-ups are kept up (registry/money/rollups.py).
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway.ledger.journal import Journal
from gateway.ledger.journal_segments import Position, Record, RecordCodec
from registry.money import ledger, rollups
from registry.money.ledger import Checkpoint, OpenRecord, Posting
from registry.session import appending

logger = logging.getLogger(__name__)

ACTOR = "gateway"
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
RECORD_BYTES = 500
"""A record's usual size: how much is read at once for a batch."""


@dataclass(slots=True)
class WriterCounts:
    """Running totals; written by the thread, read by anyone."""

    opened: int = 0
    posted: int = 0
    voided: int = 0
    write_errors: int = 0
    put_aside: int = 0
    differing: int = 0
    rolled: int = 0
    written: int = 0
    """Records of this process that the writer is through with."""


@dataclass(slots=True)
class Batch:
    """What records come to. `again`: some of them may have been written before."""

    opens: dict[str, OpenRecord]
    checkpoints: dict[str, Checkpoint]
    postings: list[Posting]
    ended: list[str]
    num_voids: int = 0

    @classmethod
    def of(cls, records: Sequence[Record], again: bool) -> "Batch":
        """In their order."""
        batch = cls({}, {}, [], [])
        for record in records:
            name = record.request_id
            if isinstance(record, OpenRecord):
                batch.opens.setdefault(name, record)
            elif isinstance(record, Checkpoint):
                if name in batch.opens:
                    tokens = record.streamed_tokens
                    batch.opens[name] = replace(batch.opens[name], streamed_tokens=tokens)
                if name not in batch.opens or again:
                    batch.checkpoints[name] = record
            else:
                if isinstance(record, Posting):
                    batch.postings.append(record)
                else:
                    batch.num_voids += 1
                batch.checkpoints.pop(name, None)
                if batch.opens.pop(name, None) is None or again:
                    batch.ended.append(name)
        return batch


class LedgerWriter:
    """`start`, then everything happens in its thread. `append` records to the journal to be
    written."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        aside: Path,
        *,
        max_batch: int,
        interval_s: float,
        rollup_interval_s: float,
    ) -> None:
        """`aside`: the file for records that the database will never take."""
        self.counts = WriterCounts()
        self.replayed = False
        """Whether all that an earlier process left is in the database."""
        self._engine = engine
        self._journal = journal
        self._aside = aside
        self._max_batch = max_batch
        self._interval_s = interval_s
        self._rollup_interval_s = rollup_interval_s
        self._rolled_s = time.monotonic()
        self._at = Position(0)
        self._is_unsure = False
        self._stop = threading.Event()
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self, at: Position) -> None:
        """Begin to write what comes from there on."""
        self._at = at
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what the journal has, then end; blocks. False: given up, the journal keeps it."""
        self._stop.set()
        self._thread.join(timeout_s)
        in_time = not self._thread.is_alive()
        self._give_up.set()
        self._thread.join()
        return in_time and self.is_at(self._journal.segments.durable)

    def is_at(self, position: Position) -> bool:
        """Whether all that is before it is in the database."""
        return self._at >= position

    @property
    def is_alive(self) -> bool:
        """Whether its thread has begun and not ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while not self._give_up.is_set():
                try:
                    if not self._step():
                        return
                    pause_s = FIRST_PAUSE_S
                except Exception:  # Nobody else writes what comes.
                    self.counts.write_errors += 1
                    self._is_unsure = True
                    logger.exception("LEDGER WRITER FAILED: trying again in %.2f s", pause_s)
                    self._give_up.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except BaseException:
            logger.critical("LEDGER WRITER ENDED: the server takes nothing new; start it again")
            raise

    def _step(self) -> bool:
        """One batch. False: it was the last one."""
        stopping = self._stop.is_set()  # Before reading: then nothing comes behind it.
        try:
            records, after = self._journal.segments.read(self._at, self._max_batch * RECORD_BYTES)
        except OSError as error:
            self.counts.write_errors += 1
            logger.error("ledger: cannot read the journal: %s", error)
            self._give_up.wait(LONGEST_PAUSE_S)
            return True
        is_old = self._journal.segments.is_old(self._at)
        if not self._write(records, is_old or self._is_unsure):
            return False
        moved = after != self._at
        has_more = self._is_cut(after)
        self._at, self._is_unsure = after, False
        if not is_old:
            self.counts.written += len(records)
            self._journal.written(self.counts.written)
        if moved:
            self._release()
        self.replayed = self.replayed or not self._journal.segments.is_old(after)
        self._roll()
        if not moved and stopping:
            return False
        if self.replayed and not has_more:
            self._stop.wait(self._interval_s)
        return True

    def _is_cut(self, after: Position) -> bool:
        """Whether a read that ended there took as much as it might, or the rest of a segment."""
        if after.segment != self._at.segment:
            return True
        return after.offset - self._at.offset >= self._max_batch * RECORD_BYTES

    def _write(self, records: Sequence[Record], again: bool) -> bool:
        """False: it is time to give up, and they are not in the database."""
        pause_s = FIRST_PAUSE_S
        while records:
            try:
                self._commit(Batch.of(records, again))
            except (SQLAlchemyError, ValueError, OverflowError) as error:
                self.counts.write_errors += 1
                if not _passes(error):
                    return self._split(records, again, error)
                logger.warning(
                    "ledger: write failed, trying again records=%d: %s", len(records), _cause(error)
                )
                if self._give_up.wait(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                return True
        return True

    def _commit(self, batch: Batch) -> None:
        with appending(self._engine, ACTOR) as session:
            ledger.open_many(session, list(batch.opens.values()))
            ledger.checkpoint_many(session, batch.checkpoints)
            num_posted = ledger.insert_postings(session, batch.postings)
            differing: list[tuple[Posting, int]] = []
            if num_posted < len(batch.postings):  # another process has posted some of them before
                differing = ledger.find_differing(session, batch.postings)
            ledger.void_many(session, batch.ended)
        self.counts.opened += len(batch.opens)
        self.counts.posted += num_posted
        self.counts.differing += len(differing)
        for posting, there in differing:
            logger.error(
                "LEDGER DIFFERS request=%s: it is posted with %d nanos, and not again with %d",
                *(posting.request_id, there, posting.cost_nanos),
            )
        self.counts.voided += batch.num_voids

    def _split(self, records: Sequence[Record], again: bool, error: BaseException) -> bool:
        """One of them is at fault; each is written alone."""
        if len(records) > 1:
            return all(self._write([record], again) for record in records)
        logger.error("LEDGER REFUSES record=%r: %s; it is set aside", records[0], _cause(error))
        while True:
            try:
                with self._aside.open("ab") as stream:
                    stream.write(RecordCodec().frame(records[0]))
            except OSError as problem:
                logger.error("ledger: cannot set the record aside: %s", problem)
                if self._give_up.wait(LONGEST_PAUSE_S):
                    return False
            else:
                self.counts.put_aside += 1
                return True

    def _release(self) -> None:
        try:
            self._journal.segments.release(self._at)
        except OSError as error:
            logger.error("cannot delete a journal segment: %s", error)

    def _roll(self) -> None:
        """A slice of the roll-ups, where it is time."""
        now_s = time.monotonic()
        if not self._rollup_interval_s or now_s - self._rolled_s < self._rollup_interval_s:
            return
        try:
            with appending(self._engine, ACTOR) as session:
                upto = rollups.newest_seq(session)
            with appending(self._engine, ACTOR) as session:
                num = rollups.roll(session, upto)
        except SQLAlchemyError as error:
            logger.warning("cannot update the roll-ups, trying again: %s", _cause(error))
            num = 0
        self.counts.rolled += num
        if num < rollups.SLICE_ROWS:
            self._rolled_s = now_s


def _passes(error: Exception) -> bool:
    """Whether the same write may succeed later: locked, full, unreachable, not yet migrated, or no
    connection was free."""
    return isinstance(error, DBAPIError | PoolTimeout) and not isinstance(
        error, IntegrityError | DataError
    )


def _cause(error: BaseException) -> object:
    return getattr(error, "orig", None) or error
