"""Responses that are made in the background: `background: true`, without a connection.

    start   the row says queued, the request goes through the pipeline as a stream into a log
            (event_log.py), and is answered once it has its limits and its place in the queue
    first   event: the row says in_progress
    end     the answer is stored in place of the empty one; or the row says failed
    stop    the request is aborted, as for a client that goes away

A row names the process that runs it (`owner`), which says every BEAT_S that it lives and hears what
was cancelled or deleted at another process. A process that dies leaves rows that its next life
fails at its start, and others once they were silent for LOST_S (sweeper.py). Ending a response is
one statement that finds it active, so it ends once; what it used is the ledger's, as ever.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, cast

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.api.wire import WireRequest
from gateway.dialects.responses_answer import Cut, LastEvent, empty_response, queued_events
from gateway.dialects.responses_wire import AskedResponse
from gateway.errors import INSUFFICIENT_QUOTA, SERVER_ERROR, ApiError, ClientGone
from gateway.state.conversation_store import ConversationRefused
from gateway.state.event_log import EventLog
from gateway.state.response_store import ResponseStore
from gateway.state.saving import LastEventHeld, Saving
from gateway.state.state_threads import StateThreads
from gateway.types import Answer, AnswerNote, Call, EventAnswer
from registry.errors import NotFound
from registry.state.responses import ResponseRecord, ResponseState

log = logging.getLogger(__name__)

BEAT_S = 1.0
LOST_S = 30.0
LOST = "the server stopped while this response was being made: ask again"
FINISH_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries to store an end, while the database is away."""
Run: TypeAlias = Callable[[Call, WireRequest], Awaitable[Answer]]


@dataclass(eq=False)
class _Running:
    """One response that this process makes."""

    record: ResponseRecord
    admitted: "asyncio.Future[None]"
    log: EventLog
    note: AnswerNote
    """Of the request that asked for it, which may have been answered long before."""
    is_stopped: bool = False
    aborts: list[Callable[[], None]] = field(default_factory=list)

    def when_gone(self, abort: Callable[[], None]) -> None:
        """See Call. The pipeline asks once the request has its limits and is queued."""
        if not self.admitted.done():
            self.admitted.set_result(None)
        if self.is_stopped:
            abort()
        else:
            self.aborts.append(abort)

    def stop(self) -> None:
        """Nobody wants it any more."""
        self.is_stopped = True
        aborts, self.aborts = self.aborts, []
        for abort in aborts:
            abort()


class BackgroundRuns:
    """Of one gateway process, which rows name as `owner`."""

    def __init__(
        self,
        store: ResponseStore,
        threads: StateThreads,
        run: Run,
        owner: str,
        wall_clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._threads = threads
        self._run = run
        self._owner = owner
        self._wall_clock = wall_clock
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Responses that are being made."""
        return len(self._running)

    async def recover(self) -> None:
        """At the start: what an earlier life of this process left has failed."""
        if not self._owner:
            return
        try:
            num = await self._threads.write(lambda: self._store.fail_lost(LOST, self._owner))
        except SQLAlchemyError as error:
            log.warning("background responses of before cannot be looked at: %s", error)
            return
        if num:
            log.warning("%d background responses failed, the process had stopped", num)

    async def start(self, call: Call, asked: AskedResponse, saving: Saving) -> bytes:
        """Returns the queued response. Raises ApiError where it is refused; then nothing stays."""
        now_at = self._wall_clock()
        record = replace(saving.record, owner=self._owner, heartbeat_at=now_at)
        saving.record = record
        response = msgspec.json.encode(
            empty_response(record.id, int(record.created_at), asked.wire, "queued")
        )
        if not await saving.begin(response):
            message = (
                "this tenant stores as many responses as it may: delete some, or leave background "
                "out"
            )
            raise ApiError(INSUFFICIENT_QUOTA, message)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        events = EventLog(lambda: self._begun(running))
        events.begin(b"".join(queued_events(response)))
        running = self._running[record.id] = _Running(saving.record, admitted, events, call.note)
        own = replace(call, when_gone=running.when_gone, note=AnswerNote())
        task = asyncio.create_task(
            self._make(own, msgspec.structs.replace(asked.wire, stream=True), running)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        await asyncio.wait([task, running.admitted], return_when=asyncio.FIRST_COMPLETED)
        call.note.model = own.note.model
        if task.done() and not running.admitted.done() and task.exception() is not None:
            await saving.forget()
            task.result()  # raises
        await saving.keep()
        return response

    def log_of(self, response_id: str) -> EventLog | None:
        """The events of one that this process makes."""
        running = self._running.get(response_id)
        return None if running is None else running.log

    def stop(self, response_id: str) -> None:
        """It was cancelled or deleted."""
        running = self._running.get(response_id)
        if running is not None:
            running.stop()

    async def close(self, timeout_s: float) -> None:
        """At shutdown: what runs may end within the time; the rest has failed."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for running in list(self._running.values()):
            running.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    async def _make(self, call: Call, wire: WireRequest, running: _Running) -> None:
        """Raises what refuses the request before it has its place in the queue."""
        told = b""
        try:
            last = await self._answer(call, wire, running)
            if last is None:
                await self._fail(running, ApiError(SERVER_ERROR, LOST))
            else:
                # A kept answer comes in one piece: its deltas are part of what is stored.
                running.log.write(last.before)
                state = cast(ResponseState, last.status)
                about = replace(running.record, state=state), last.response, running.log.cuts
                if await self._finish(*about):
                    told = replace(last, before=b"").told(last.response)
        except ClientGone:
            await self._fail(running, ApiError(SERVER_ERROR, LOST))
        except ApiError as error:
            if not running.admitted.done():
                raise
            await self._fail(running, error)
        except Exception:
            log.exception("background response %s failed", running.record.id)
            message = f"internal server error: report it with the id {running.record.id}"
            await self._fail(running, ApiError(SERVER_ERROR, message))
        finally:
            del self._running[running.record.id]
            if call.note.code != "client_gone":  # that is whoever cancelled it
                running.note.code, running.note.fault = call.note.code, call.note.fault
            running.log.end(told)

    async def _answer(self, call: Call, wire: WireRequest, running: _Running) -> LastEvent | None:
        """What its stream ends with; None where it was stopped."""
        answer = await self._run(call, wire)
        assert isinstance(answer, EventAnswer)
        held = LastEventHeld(running.log)
        try:
            await answer.run(held)
        finally:
            answer.close()
        return held.last

    def _begun(self, running: _Running) -> None:
        record = running.record

        async def begin() -> None:
            try:
                await self._threads.write(lambda: self._store.begin(record.id, record.owner))
            except SQLAlchemyError as error:
                log.warning("response %s: its progress is not stored: %s", record.id, error)

        task = asyncio.create_task(begin())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fail(self, running: _Running, error: ApiError) -> None:
        """Where it was cancelled or deleted, it has ended already."""
        failed = replace(
            running.record,
            state="failed",
            error_code=error.kind.code,
            error_message=error.message,
        )
        await self._finish(failed, None)

    async def _finish(
        self, record: ResponseRecord, response: bytes | None, cuts: Sequence[Sequence[Cut]] = ()
    ) -> bool:
        """Whether it has ended so, with this response."""
        for pause_s in (*FINISH_PAUSES_S, 0.0):
            try:
                finish = partial(self._store.finish, record, response, cuts)
                return await self._threads.write(finish) and response is not None
            except (NotFound, ConversationRefused) as error:
                log.warning("response %s has no place to end: %s", record.id, error)
                if response is None:
                    return False
                # The conversation is gone or full: it has failed, which needs no place there.
                message = f"it could not be added to its conversation: {error}"
                record = replace(
                    record, state="failed", error_code="server_error", error_message=message
                )
                response = None
            except (SQLAlchemyError, OSError) as error:
                log.error("the end of response %s could not be stored: %s", record.id, error)
                await asyncio.sleep(pause_s)
        return False

    async def _beat(self) -> None:
        """While anything runs. What is not this process' any more was cancelled elsewhere."""
        while self._running:
            await asyncio.sleep(BEAT_S)
            known = list(self._running)
            try:
                alive = await self._threads.write(partial(self._store.beat, self._owner, known))
            except SQLAlchemyError as error:
                log.warning("background responses: the database is away: %s", error)
                continue
            for response_id in known:
                if response_id not in alive:
                    self.stop(response_id)
