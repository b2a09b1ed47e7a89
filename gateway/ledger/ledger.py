"""The ledger as the pipeline uses it: usage is posted exactly once (stage 10).

    open        awaited before a request's first token leaves the gateway
    checkpoint  how much of a stream its client has been sent; nobody waits for it
    post        awaited at its end; then, and only then, the worker is told to forget the usage
    void        its end where nothing is owed (refused or failed before any token)

They return once the gateway's own journal is durable (journal.py); from there ledger_writer.py
fills the database, and the request path never waits for that. All are queued at the call and
written even if the caller is cancelled while waiting. The request's id is the key, so repeating any
of them changes nothing.

Recovery. At a start the journal's rest goes into the database first; what is open there as this
gateway's (owners.py) was left by a process that died (one process per journal holds its lock).
Workers that outlived it send their unacknowledged finishes again at Hello, within
ledger_recovery_wait_s. What is posted then is ledger_recovery.py's to say. Choices of one request
finish one by one; what has arrived by the end of the wait is summed up.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from sqlalchemy import Engine

from engine.protocol import Finish
from gateway.dispatch.joint import base_id
from gateway.errors import UNAVAILABLE, ApiError
from gateway.ledger.journal import Journal
from gateway.ledger.journal_files import Files
from gateway.ledger.journal_format import Record, Void
from gateway.ledger.journal_types import JournalLimits, JournalRefused, JournalStopped
from gateway.ledger.ledger_recovery import closing, together
from gateway.ledger.ledger_writer import LedgerWriter
from gateway.ledger.owners import JOURNAL_FOLDER, owner_of
from gateway.policy.pricing import Rates
from gateway.services import LedgerSnapshot
from gateway.settings import Settings
from registry import ledger as tables
from registry import locks
from registry.ledger import OUTCOMES, Checkpoint, OpenRecord, Posting
from registry.session import reading

logger = logging.getLogger(__name__)

BUSY_WAIT_S = 5.0
"""What a client is told to wait where nothing new is taken."""
LOOK_S = 0.01
"""How often it is looked whether the database has everything, where somebody waits for that."""
LOCK_WAIT_S = 5.0
MAX_BIGINT = 2**63 - 1

_Tag: TypeAlias = tuple["asyncio.Future[None]", str | None]
"""(who waits, the request that it ends)"""


class Ledger:
    """Implements services.UsageLedger.

    `find_rates(tenant_id, model, at)` gives the prices of recovered records;
    `on_durable(request_ids)` is called on the event loop after their postings or voids are durable;
    `on_recovered(posting)` is told what an earlier process's requests used, when it is written.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        find_rates: Callable[[str, str, float], Rates],
        on_durable: Callable[[Sequence[str]], None],
        wall_clock: Callable[[], float] = time.time,
        on_recovered: Callable[[Posting], None] = lambda posting: None,
        gateway_id: str = "gateway-0",
        files: Files | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._find_rates = find_rates
        self._on_durable = on_durable
        self._wall_clock = wall_clock
        self._on_recovered = on_recovered
        self._owner = owner_of(settings.data_path, gateway_id)
        self._folder = settings.data_path / JOURNAL_FOLDER / gateway_id
        self._journal = Journal(self._folder, journal_limits(settings), self._told, files)
        self._writer = LedgerWriter(
            engine,
            self._journal,
            self._folder / "refused",
            max_batch=settings.ledger_max_batch,
            interval_s=settings.ledger_write_interval_s,
            rollup_interval_s=settings.ledger_rollup_interval_s,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held = ExitStack()
        self._open: set[str] = set()
        """Requests whose end must still fit into the journal."""
        self._left: dict[str, OpenRecord] = {}
        self._parts: dict[str, dict[str, Finish]] = {}
        self._recovery: asyncio.Task[None] | None = None
        self._num_recovered = 0

    async def start(self) -> None:
        """Begin to write. Returns once all that an earlier process had made durable is in the
        database. Raises LockBusy where another process has the journal, OSError."""
        self._loop = asyncio.get_running_loop()
        self._held.enter_context(locks.hold(self._folder / "lock", timeout_s=LOCK_WAIT_S))
        self._writer.start(await asyncio.to_thread(self._journal.start))
        await _until(lambda: self._writer.replayed)

    async def recover(self) -> None:
        """Begin to close what an earlier process left open. Prices must be known by now."""
        left = await asyncio.to_thread(self._read_left)
        self._left = {record.request_id: record for record in left}
        self._open.update(self._left)
        if self._left:
            logger.warning("ledger recovers records=%d left open by another run", len(self._left))
            self._recovery = asyncio.create_task(self._recover(), name="ledger-recovery")

    async def stop(self, timeout_s: float) -> bool:
        """Write what is queued. False where the database did not take all of it in time: the
        journal keeps it for the next start.

        Recovery that has not ended is left to the next start.
        """
        if self._recovery is not None:
            self._recovery.cancel()
        written = await asyncio.to_thread(self._stop, timeout_s)
        if not written:
            logger.warning("ledger closed before the database had everything; a restart goes on")
        return written

    async def open(self, record: OpenRecord) -> None:
        """Durable on return. Raises ApiError(UNAVAILABLE) where nothing new is taken (the journal
        is full or behind), or where the disk takes longer than `ledger_open_timeout_s`; then the
        record is voided.

        Whoever was cancelled here ends it by `post` or `void` all the same.
        """
        self._check_room()
        self._open.add(record.request_id)
        written = self._write(replace(record, gateway_id=self._owner))
        try:
            async with asyncio.timeout(self._settings.ledger_open_timeout_s):
                await asyncio.shield(written)
        except (TimeoutError, JournalRefused) as error:
            self._write(Void(record.request_id))
            raise _behind() from error
        except JournalStopped as error:
            raise _behind() from error

    def checkpoint(self, request_id: str, streamed_tokens: int) -> None:
        """The client of an open request has been sent so much. Written with the next records."""
        if request_id in self._open and self._loop is not None:
            with contextlib.suppress(JournalStopped):
                self._journal.append_hint(Checkpoint(request_id, streamed_tokens))

    async def post(self, posting: Posting) -> None:
        """Post once by request_id; durable on return, and only then the worker forgets it.

        Raises ValueError on what the database would never take, and ApiError(UNAVAILABLE) where it
        was not opened before and nothing new is taken.
        """
        _check(posting)
        if posting.request_id not in self._open:
            self._check_room()
        await self._write(posting, posting.request_id)

    async def void(self, request_id: str) -> None:
        """Close an open record for which nothing is owed; durable on return."""
        if request_id in self._open:
            await self._write(Void(request_id), request_id)
        else:
            self._on_durable([request_id])

    def claim(self, request_id: str, finish: Finish) -> bool:
        """A worker told the end of a request that nobody here waits for.

        True if its record was left open: then it is posted, and `on_durable` will name it.
        """
        owner = base_id(request_id)
        if owner not in self._left:
            return False
        if owner == request_id:
            self._close(self._left.pop(owner), finish)
        else:
            self._parts.setdefault(owner, {})[request_id] = finish
        return True

    async def recovered(self) -> None:
        """Returns once all that was left open has been handed to the journal."""
        if self._recovery is not None:
            await asyncio.wait([self._recovery])

    async def written(self) -> None:
        """Returns once the database has all that was handed over so far. It may be away for long.

        Raises JournalStopped.
        """
        await self._write(Void(""))  # Of nobody: it comes behind the others.
        durable = self._journal.durable
        await _until(lambda: self._writer.is_at(durable))

    def snapshot(self) -> LedgerSnapshot:
        """Figures for metrics."""
        counts = self._writer.counts
        journal = self._journal
        return LedgerSnapshot(
            num_pending=journal.num_appended - journal.num_failed - counts.written,
            lag_s=journal.age_s,
            num_opened=counts.opened,
            num_posted=counts.posted,
            num_voided=counts.voided,
            num_write_errors=counts.write_errors,
            num_recovered=self._num_recovered,
            num_unsynced=journal.num_queued,
            num_open=len(self._open),
            journal_bytes=journal.num_bytes,
            refuses=bool(journal.refusal(len(self._open))),
            num_sync_errors=journal.num_sync_errors,
            num_damaged=journal.num_damaged,
            num_put_aside=counts.put_aside,
            num_rolled=counts.rolled,
        )

    async def check_integrity(self) -> None:
        """Raises registry.errors.RegistryError if a request is both open and posted."""
        await self.written()
        await asyncio.to_thread(self._check_tables)

    def _check_tables(self) -> None:
        with reading(self._engine) as session:
            tables.check_integrity(session)

    def _read_left(self) -> list[OpenRecord]:
        """Those without a gateway's id are of an earlier release."""
        with reading(self._engine) as session:
            names = (self._owner, "")
            return [record for name in names for record in tables.open_left(session, name)]

    def _stop(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        durable = self._journal.stop(timeout_s)
        written = self._writer.stop(max(0.0, deadline_s - time.monotonic()))
        if durable and written:
            self._journal.discard()
        self._held.close()
        return durable and written

    def _check_room(self) -> None:
        journal = self._journal
        reason = journal.refusal(len(self._open))
        if reason or journal.num_queued >= self._settings.ledger_max_pending:
            raise _behind()

    def _write(self, record: Record, ends: str | None = None) -> asyncio.Future[None]:
        """Queue now; the future is done once the record is durable. `ends`: the request it ends."""
        assert self._loop is not None, "not started"
        future: asyncio.Future[None] = self._loop.create_future()
        try:
            self._journal.append(record, (future, ends))
        except JournalStopped as error:
            _fail(future, error)
        return future

    def _told(self, tags: Sequence[_Tag], error: BaseException | None) -> None:
        """In the journal's thread: once a group."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop ended first: nobody waits any more.
            self._loop.call_soon_threadsafe(partial(self._settle, tags, error))

    def _settle(self, tags: Sequence[_Tag], error: BaseException | None) -> None:
        if error is not None:
            logger.error("ledger records=%d were not written: %s", len(tags), error)
            for future, _ in tags:
                _fail(future, error)
            return
        ended = [ends for _, ends in tags if ends is not None]
        self._open.difference_update(ended)
        if ended:
            self._on_durable(ended)
        for future, _ in tags:
            if not future.done():
                future.set_result(None)

    async def _recover(self) -> None:
        await asyncio.sleep(self._settings.ledger_recovery_wait_s)
        for record in list(self._left.values()):
            del self._left[record.request_id]
            parts = self._parts.pop(record.request_id, {})
            self._close(record, together(list(parts.values())))

    def _close(self, record: OpenRecord, finish: Finish | None) -> None:
        rates = self._find_rates(record.tenant_id, record.model, record.opened_at)
        posting = closing(record, finish, rates, self._wall_clock())
        self._num_recovered += 1
        self._on_recovered(posting)
        self._write(posting, posting.request_id)


def journal_limits(settings: Settings) -> JournalLimits:
    """Of every journal in the data folder."""
    return JournalLimits(
        settings.journal_segment_bytes,
        settings.journal_max_bytes,
        settings.journal_min_free_bytes,
        settings.ledger_flush_interval_s,
    )


async def _until(condition: Callable[[], bool]) -> None:
    """For what threads do, where nobody is in a hurry."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


def _check(posting: Posting) -> None:
    """Raises ValueError on what the database would never take: no journal may hold it."""
    amounts = (
        *(posting.prompt_tokens, posting.cached_tokens, posting.completion_tokens),
        *(posting.cost_nanos, posting.list_nanos),
    )
    if posting.outcome not in OUTCOMES or posting.corrects:
        raise ValueError(f"no posting of a request: {posting!r}")
    if min(amounts) < 0 or max(amounts) > MAX_BIGINT:
        raise ValueError(f"amounts that cannot be: {posting!r}")
    if posting.outcome == "failed" and posting.cost_nanos:
        raise ValueError(f"what failed costs nothing: {posting!r}")


def _fail(future: "asyncio.Future[None]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # Logged already; a caller that was cancelled never asks for it.


def _behind() -> ApiError:
    message = "the usage ledger is behind and takes nothing new: try again later"
    return ApiError(UNAVAILABLE, message, retry_after_s=BUSY_WAIT_S)
