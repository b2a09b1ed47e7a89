"""The ledger as the pipeline uses it: usage is posted exactly once (stage 10).

    open        durable before a request's first token leaves the gateway; the request is queued and
                computed meanwhile
    checkpoint  how much of a stream its client has been sent; nobody waits for it
    post        written before its answer ends, so that a kill takes nothing back; when it is
                durable too, and only then, the worker is told to forget the usage; with other
                servers at the database, when that has it
    void        its end where nothing is owed (refused or failed before any token)

Written and durable are the journal's words (journal.py); from there ledger_writer.py fills the
database, and the request path never waits for that. All are queued at the call and written even if
the caller is cancelled while waiting. The request's id is the key, so repeating any of them changes
nothing. What a power cut takes of postings (those of the last `ledger_sync_interval_s`, at most) is
closed like what a kill leaves open, for its open record is there: never to the client's cost.

Recovery. At a start the journal's rest goes into the database first; what is open there as this
gateway's (ledger_recovery.py) was left by a process that died (one process per journal holds its
lock). Workers that outlived it send their unacknowledged finishes again at Hello, within
ledger_recovery_wait_s. What is posted then is ledger_recovery.py's to say, by what has arrived when
that wait is over: choices of one request finish one by one, and so may attempts of one of them, of
which the last one counts (it goes on with the tokens of those before, as far as they were sent).
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack
from functools import partial

from sqlalchemy import Engine

from engine.protocol import Finish
from gateway.errors import UNAVAILABLE, ApiError
from gateway.ledger.journal import Journal
from gateway.ledger.journal_segments import (
    Files,
    JournalLimits,
    JournalRefused,
    JournalStopped,
    Position,
    Record,
    Void,
)
from gateway.ledger.ledger_recovery import LOCK_WAIT_S, closing, owner_of, together
from gateway.ledger.ledger_writer import ACTOR, LedgerWriter
from gateway.pricing.policy.pricing import Rates
from gateway.protocols import LedgerSnapshot
from gateway.settings.settings import JOURNAL_FOLDER, Settings
from gateway.workers.choices import base_id
from registry import locks
from registry.money import ledger as tables
from registry.money.ledger import OUTCOMES, Checkpoint, OpenRecord, Posting
from registry.session import appending, reading

BUSY_WAIT_S = 5.0
"""What a client is told to wait where nothing new is taken."""


class Tag:
    """Of a record: who waits until it is durable, and which request it ends."""

    __slots__ = ("ends", "waiter")

    def __init__(self, waiter: "asyncio.Future[None] | None", ends: str | None) -> None:
        self.waiter, self.ends = waiter, ends


class _Done:
    """Nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


DONE = _Done()


class PendingOpens:
    """Open records that somebody waits for. All have the same time, so one timer is enough.

    `on_late(request_id)` is called for each that was not opened within `timeout_s`, when whoever
    waits has been told.
    """

    def __init__(self, timeout_s: float, on_late: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._waiting: deque[tuple[float, str, asyncio.Future[None]]] = deque()
        """(until when, request, who waits), the earliest first."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, request_id: str, opening: "asyncio.Future[None]") -> None:
        """It has its time from now on."""
        while self._waiting and self._waiting[0][2].done():
            self._waiting.popleft()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._timeout_s
        self._waiting.append((until_s, request_id, opening))
        if self._timer is None:
            self._timer = loop.call_at(until_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._waiting and (self._waiting[0][2].done() or self._waiting[0][0] <= now_s):
            _, request_id, opening = self._waiting.popleft()
            if not opening.done():
                fail(opening, behind())
                self._on_late(request_id)
        self._timer = loop.call_at(self._waiting[0][0], self._look) if self._waiting else None


def fail(future: "asyncio.Future[None]", error: BaseException) -> None:
    """Whoever waits gets the error; nobody may."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # Logged already; a caller that was cancelled never asks for it.


def behind() -> ApiError:
    """The answer where nothing new is taken."""
    message = "usage accounting is behind, so new requests are refused: try again later"
    return ApiError(UNAVAILABLE, message, retry_after_s=BUSY_WAIT_S)


logger = logging.getLogger(__name__)

REPORT_S = 0.1
"""How often it is looked whether the database has ends that workers are to forget."""
LOOK_S = 0.01
"""How often it is looked whether the database has everything, where somebody waits for that."""
MAX_BIGINT = 2**63 - 1


class Ledger:
    """Implements services.UsageLedger.

    `find_rates(tenant_id, model, at)` gives the prices of recovered records;
    `on_durable(request_ids)` is called on the event loop after their postings or voids are durable
    (with other servers at the database: are there);
    `on_recovered(posting)` gets what an earlier process's requests used, when it is written.
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
        self._is_first = gateway_id == "gateway-0"
        self._folder = settings.data_path / JOURNAL_FOLDER / gateway_id
        self._journal = Journal(self._folder, JournalLimits.of(settings), self._journaled, files)
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
        self._parts: dict[str, dict[str, tuple[int, Finish]]] = {}
        """By request and name at the worker: the latest attempt that ended, and how."""
        self._reports_late = settings.is_clustered
        self._unreported: deque[tuple[Position, list[str]]] = deque()
        """Ends that are durable here, and from where on the database has them."""
        self._reporting: asyncio.TimerHandle | None = None
        self._openings = PendingOpens(settings.ledger_open_timeout_s, self._give_up_open)
        self._recoveries: set[asyncio.Task[None]] = set()
        self._num_recovered = 0

    async def start(self) -> None:
        """Begin to write. Returns once all that an earlier process had made durable is in the
        database. Raises LockBusy where another process has the journal, OSError."""
        self._loop = asyncio.get_running_loop()
        self._held.enter_context(locks.hold(self._folder / "lock", timeout_s=LOCK_WAIT_S))
        self._writer.start(await asyncio.to_thread(self._journal.start))
        await self._until(lambda: self._writer.replayed)

    async def recover(self) -> None:
        """Begin to close what an earlier process left open. Prices must be known by now."""
        left = await asyncio.to_thread(self._read_left)
        self._left = {record.request_id: record for record in left}
        self._open.update(self._left)
        if self._left:
            logger.warning(
                "ledger: recovering records=%d that an earlier run left open", len(self._left)
            )
            self._close_later(left)

    async def adopt(self, gateway_id: str) -> list[OpenRecord]:
        """Another gateway is gone with its server: what it left open is closed here, as what an
        earlier process left. Of several gateways that adopt it each record goes to one; these are
        returned. Should it come back, what it posts of them changes nothing. Raises
        SQLAlchemyError."""
        records = await asyncio.to_thread(self._adopt, gateway_id)
        self._left.update((record.request_id, record) for record in records)
        self._open.update(record.request_id for record in records)
        if records:
            about = (len(records), gateway_id)
            logger.warning("ledger: closing records=%d of gateway=%s, which is lost", *about)
            self._close_later(records)
        return records

    async def stop(self, timeout_s: float) -> bool:
        """Write what is queued. False where the database did not take all of it in time: the
        journal keeps it for the next start.

        Recovery that has not ended is left to the next start.
        """
        for recovery in self._recoveries:
            recovery.cancel()
        written = await asyncio.to_thread(self._stop, timeout_s)
        self._report()
        if self._reporting is not None:
            self._reporting.cancel()
        if not written:
            logger.warning(
                "ledger: closed before all records were in the database; the next start writes them"
            )
        return written

    def open(self, record: OpenRecord) -> "asyncio.Future[None]":
        """Done once it is durable. Fails with ApiError(UNAVAILABLE) where nothing new is taken (the
        journal is full or behind), or where the disk takes longer than `ledger_open_timeout_s`;
        then the record is voided.

        Whoever was cancelled here ends it by `post` or `void` all the same.
        """
        assert self._loop is not None, "not started"
        opening: asyncio.Future[None] = self._loop.create_future()
        try:
            self._check_room()
            self._journal.append(_owned(record, self._owner), Tag(opening, None))
        except (ApiError, JournalStopped) as error:
            fail(opening, error if isinstance(error, ApiError) else behind())
        else:
            self._open.add(record.request_id)
            self._openings.watch(record.request_id, opening)
        return opening

    def checkpoint(self, request_id: str, streamed_tokens: int) -> None:
        """The client of an open request has been sent so much. Written with the next records."""
        if request_id in self._open and self._loop is not None:
            with contextlib.suppress(JournalStopped):
                self._journal.append_hint(Checkpoint(request_id, streamed_tokens))

    def post(self, posting: Posting) -> Awaitable[None]:
        """Post once by request_id. To be awaited until it is written, or durable where there is no
        open record that would tell of it after a power cut.

        Raises ValueError on what the database would never take, and ApiError(UNAVAILABLE) where it
        was not opened before and nothing new is taken.
        """
        _check(posting)
        if posting.request_id not in self._open:
            self._check_room()
            return self._write(posting, posting.request_id)
        return self._end(posting, posting.request_id)

    def void(self, request_id: str) -> Awaitable[None]:
        """Close an open record for which nothing is owed. To be awaited as `post`."""
        if request_id in self._open:
            return self._end(Void(request_id), request_id)
        self._on_durable([request_id])
        return DONE

    def claim(self, request_id: str, finish: Finish, attempt: int = 1) -> bool:
        """A worker reported the end of a request that nobody here waits for.

        True if its record was left open: then it is posted when the wait is over, and `on_durable`
        will name it.
        """
        owner = base_id(request_id)
        if owner not in self._left:
            return False
        parts = self._parts.setdefault(owner, {})
        if attempt >= parts.get(request_id, (0, finish))[0]:
            parts[request_id] = attempt, finish
        return True

    async def recovered(self) -> None:
        """Returns once all that was left open has been handed to the journal."""
        if self._recoveries:
            await asyncio.wait(list(self._recoveries))

    async def written(self) -> None:
        """Returns once the database has all that was handed over so far. It may be away for long.

        Raises JournalStopped.
        """
        await self._write(Void(""))  # Of nobody: it comes behind the others.
        durable = self._journal.segments.durable
        await self._until(lambda: self._writer.is_at(durable))

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
            journal_bytes=journal.segments.num_bytes,
            refuses=not self._writer.is_alive or bool(journal.refusal(len(self._open))),
            num_sync_errors=journal.num_sync_errors,
            num_damaged=journal.segments.num_damaged,
            num_put_aside=counts.put_aside,
            num_differing=counts.differing,
            num_rolled=counts.rolled,
        )

    async def check_integrity(self) -> None:
        """Raises registry.errors.RegistryError if a request is both open and posted."""
        await self.written()
        await asyncio.to_thread(self._check_tables)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """For what the writer does, where nobody is in a hurry. Raises JournalStopped where it has
        ended without."""
        while not condition():
            if not self._writer.is_alive and not condition():
                raise JournalStopped("the ledger's writer has ended")
            await asyncio.sleep(LOOK_S)

    def _check_tables(self) -> None:
        with reading(self._engine) as session:
            tables.check_integrity(session)

    def _read_left(self) -> list[OpenRecord]:
        """Those without a gateway's id are of an earlier release: one of several takes them, or
        limits would hear of each as often as there are processes."""
        names = (self._owner, "") if self._is_first else (self._owner,)
        with reading(self._engine) as session:
            return [record for name in names for record in tables.open_left(session, name)]

    def _adopt(self, gateway_id: str) -> list[OpenRecord]:
        with appending(self._engine, ACTOR) as session:
            return tables.adopt(session, gateway_id, self._owner)

    def _stop(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        durable = self._journal.stop(timeout_s)
        written = self._writer.stop(max(0.0, deadline_s - time.monotonic()))
        if durable and written:
            self._journal.segments.discard()
        self._held.close()
        return durable and written

    def _check_room(self) -> None:
        journal = self._journal
        is_full = journal.num_queued >= self._settings.ledger_max_pending
        if is_full or not self._writer.is_alive or journal.refusal(len(self._open)):
            raise behind()

    def _write(self, record: Record, ends: str | None = None) -> asyncio.Future[None]:
        """Queue now; the future is done once the record is durable. `ends`: the request it ends."""
        assert self._loop is not None, "not started"
        future: asyncio.Future[None] = self._loop.create_future()
        try:
            self._journal.append(record, Tag(future, ends))
        except JournalStopped as error:
            fail(future, error)
        return future

    def _end(self, record: Record, request_id: str) -> Awaitable[None]:
        """Of what has been opened. Where it cannot be written at once, to be awaited until it is
        durable."""
        assert self._loop is not None, "not started"
        tag = Tag(None, request_id)
        try:
            if self._journal.append(record, tag, hurry=False):
                return DONE
        except JournalStopped as error:
            tag.waiter = self._loop.create_future()
            fail(tag.waiter, error)
            return tag.waiter
        tag.waiter = self._loop.create_future()  # Nothing is reported before this turn is over.
        return tag.waiter

    def _give_up_open(self, request_id: str) -> None:
        self._write(Void(request_id))

    def _journaled(self, tags: Sequence[Tag], error: BaseException | None) -> None:
        """In the journal's thread: once a group."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop ended first: nobody waits any more.
            self._loop.call_soon_threadsafe(partial(self._settle, tags, error))

    def _settle(self, tags: Sequence[Tag], error: BaseException | None) -> None:
        if error is not None:
            logger.error("ledger: could not write records=%d: %s", len(tags), error)
            refused = behind() if isinstance(error, JournalRefused) else error
            for tag in tags:
                if tag.waiter is not None:
                    fail(tag.waiter, refused)
            return
        ended = [tag.ends for tag in tags if tag.ends is not None]
        self._open.difference_update(ended)
        if ended and self._reports_late:
            self._unreported.append((self._journal.segments.durable, ended))
            self._report()
        elif ended:
            self._on_durable(ended)
        for tag in tags:
            if tag.waiter is not None and not tag.waiter.done():
                tag.waiter.set_result(None)

    def _report(self) -> None:
        """Those that the database has: this machine may never come back with its journal."""
        while self._unreported and self._writer.is_at(self._unreported[0][0]):
            self._on_durable(self._unreported.popleft()[1])
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if self._unreported:
            assert self._loop is not None
            self._reporting = self._loop.call_later(REPORT_S, self._report)

    def _close_later(self, records: Sequence[OpenRecord]) -> None:
        """When workers have had their time to say what they know of these."""
        recovery = asyncio.create_task(self._recover(records), name="ledger-recovery")
        self._recoveries.add(recovery)
        recovery.add_done_callback(self._recoveries.discard)

    async def _recover(self, records: Sequence[OpenRecord]) -> None:
        await asyncio.sleep(self._settings.ledger_recovery_wait_s)
        for record in records:
            if self._left.pop(record.request_id, None) is None:
                continue  # adopted twice, and closed already
            parts = self._parts.pop(record.request_id, {})
            self._close(record, together([finish for _, finish in parts.values()]))

    def _close(self, record: OpenRecord, finish: Finish | None) -> None:
        rates = self._find_rates(record.tenant_id, record.model, record.opened_at)
        posting = closing(record, finish, rates, self._wall_clock())
        self._num_recovered += 1
        self._on_recovered(posting)
        self._write(posting, posting.request_id)


def _owned(record: OpenRecord, gateway_id: str) -> OpenRecord:
    """The same of this gateway: once a request, and `dataclasses.replace` takes twice as long."""
    return OpenRecord(
        record.request_id,
        record.tenant_id,
        record.key_id,
        record.model,
        record.revision,
        record.prompt_tokens,
        record.opened_at,
        gateway_id,
        record.reserved_nanos,
    )


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
