"""The lines of one batch as requests: a line of its file comes in, one of its output goes out.

A line is a `Call` through the pipeline, with the principal of the key that made the batch. The key
is looked up for each line. One that cannot be used any more cancels the batch; of one that this
process has not read yet the database is asked, and then the batch is given up for a while.

Refusals that pass (limits, full queues, no worker) are waited for until the batch's time is up;
every other one is the line's answer, and so is a limit that the line alone exceeds. A budget that
does not cover the line is asked again when another line has ended, until no other runs.
Lines are of class batch, with the time that the batch may take as their window (docs/fairness.md).

A line is posted when it is answered, or broken off because its batch was cancelled. What else does
not come to its end is not posted, since the same id is made again. Which lines run when, and what
is written, is batch_run.py's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from gateway.auth.auth import principal_of_key
from gateway.auth.directory import Directory
from gateway.batches.batch_input import ENDPOINTS, WrongLine, custom_id_of, read_line
from gateway.batches.batch_output import answered_line, line_id, refused_line, unanswered_line
from gateway.batches.batch_store import BatchStore
from gateway.dialects.by_route import DIALECTS
from gateway.dialects.dialect import CHAT
from gateway.errors import (
    DEADLINE_EXCEEDED,
    INSUFFICIENT_QUOTA,
    QUEUE_FULL,
    RATE_LIMITED,
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
    ClientGone,
)
from gateway.state.state_threads import StateThreads
from gateway.types import Answer, BatchWindow, Call, JsonAnswer, Principal
from registry.state.batches import BatchRecord

log = logging.getLogger(__name__)

MOST_PAUSE_S = 60.0
PASSING = (RATE_LIMITED, QUEUE_FULL, UNAVAILABLE, DEADLINE_EXCEEDED)
"""An encoder's line that waited for `request_timeout_s` behind other requests has the last one."""
MOST_BEHIND = 0.5
"""Of a window: what is behind a line is not expected to take more; lines would begin as pressed."""
_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What runs of a process share. `beats`: threads of heartbeats alone, which wait for nobody's
    files. `run`: the pipeline. `num_lines`: of one batch at a time. `expires_at(now_at, own_s)`: of
    a file that is made now."""

    store: BatchStore
    threads: StateThreads
    beats: StateThreads
    run: Callable[[Call], Awaitable[Answer]]
    directory: Directory
    max_line_bytes: int
    num_lines: int
    expires_at: Callable[[float, float | None], float]
    now_s: Callable[[], float]
    now_at: Callable[[], float]


@dataclass(frozen=True, slots=True)
class LineResult:
    """What is told of the line `index`, in the error file or in the output file."""

    index: int
    is_error: bool
    line: bytes


class KeyUnread(Exception):
    """The key can be used, and this process has not read it yet: its view of the registry is young,
    or old."""


class BatchLines:
    """Of one run of a batch. `is_stopping`: this process ends; `is_lost`: another holds the batch;
    `is_unread`: its key is not known here yet. After one of these, and when it is cancelled,
    nothing more is begun."""

    def __init__(self, batch: BatchRecord, parts: BatchParts) -> None:
        self.is_stopping = self.is_cancelled = self.is_lost = self.is_unread = False
        self._batch = batch
        self._parts = parts
        self._is_broken_off = False
        self._halted = asyncio.Event()
        self._ended = asyncio.Event()
        self._calls: dict[int, Call] = {}
        self._num_ended = 0
        self._began_s = parts.now_s()
        self._aborts: dict[int, list[Callable[[], None]]] = {}

    @property
    def is_halted(self) -> bool:
        """Nothing more is to be begun."""
        return self.is_stopping or self.is_cancelled or self.is_lost or self.is_unread

    @property
    def is_late(self) -> bool:
        """The batch's time is up."""
        return self._parts.now_at() >= self._batch.expires_at

    def stop(self) -> None:
        """This process ends: begin nothing more, and let what runs end."""
        self.is_stopping = True
        self._halted.set()

    def break_off(self) -> None:
        """End what runs within a step. It is billed where the batch was cancelled; else it is made
        again, or told to have expired: nothing is owed for it."""
        self._halted.set()
        self._is_broken_off = True
        for call in self._calls.values():
            call.is_repeated = not self.is_cancelled
        aborts, self._aborts = self._aborts, {}
        for several in aborts.values():
            for abort in several:
                abort()

    async def pause(self, most_s: float) -> None:
        """Shorter where nothing more is to be begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._halted.wait()

    async def principal(self) -> Principal:
        """Raises ApiError where the key cannot be used any more; KeyUnread where it is not known
        here, and then nothing more is begun."""
        parts, batch, now_at = self._parts, self._batch, self._parts.now_at()
        found = principal_of_key(parts.directory, batch.key_id, now_at)
        if found is not None and found.tenant_id == batch.tenant_id:
            return found
        is_read = parts.directory.find_key_by_id(batch.key_id) is not None
        if not is_read and await parts.threads.write(
            partial(parts.store.is_key_usable, batch, now_at)
        ):
            self.is_unread = True
            self._halted.set()
            raise KeyUnread
        raise ApiError(SERVER_ERROR, "the API key of the batch cannot be used any more")

    async def answer(self, index: int, data: bytes, num_behind: int = 0) -> LineResult | None:
        """None where it was broken off. `num_behind`: lines of its batch that come after it."""
        request_id, pause_s = line_id(self._batch.id, index), 1.0
        try:
            line = read_line(data)
        except WrongLine as wrong:  # It was right: a line may not be as long any more.
            about = custom_id_of(data), request_id, wrong.code, wrong.message
            return LineResult(index, True, unanswered_line(*about))
        while not self.is_halted and not self.is_late:
            was_alone = not self._calls
            try:
                body = await self._ask(index, request_id, bytes(line.body), num_behind)
            except ClientGone:
                return None
            except ApiError as error:
                is_held = error.kind == INSUFFICIENT_QUOTA and not was_alone
                if is_held and not error.is_final:
                    await self._another_ends()
                    continue
                if error.is_final or error.kind not in PASSING:
                    self._num_ended += 1
                    refused = refused_line(line.custom_id, request_id, error)
                    return LineResult(index, True, refused)
                await self.pause(min(max(pause_s, error.retry_after_s or 0.0), MOST_PAUSE_S))
                pause_s *= 2
            else:
                if body is None:
                    return None
                self._num_ended += 1
                return LineResult(index, False, answered_line(line.custom_id, request_id, body))
        return None

    async def _ask(self, index: int, request_id: str, body: bytes, num_behind: int) -> bytes | None:
        """The answer. None where the batch is cancelled. Raises ApiError, ClientGone."""
        try:
            principal = await self.principal()
        except KeyUnread:
            return None
        except ApiError:
            self._cancel("its key cannot be used")
            return None
        if principal.response_retention_days == 0:
            self._cancel("nothing is stored for its tenant any more")
            return None
        window = self._window(num_behind)
        principal = msgspec.structs.replace(principal, is_batch=True, window=window)
        kind, dialect = ENDPOINTS[self._batch.endpoint]
        call = self._calls[index] = self._call(index, request_id, body, principal)
        try:
            answer = await self._parts.run(call)
            assert isinstance(answer, JsonAnswer)
            try:
                return b"".join(answer.parts)
            finally:
                answer.close()
        except ClientGone:
            raise
        except ApiError as error:
            raise DIALECTS.get(dialect or kind, CHAT).renamed(error) from error
        except Exception as error:
            log.exception("line %d of batch %s failed", index + 1, self._batch.id)
            message = f"internal server error: report it with the request id {request_id}"
            raise ApiError(SERVER_ERROR, message) from error
        finally:
            self._aborts.pop(index, None)
            self._calls.pop(index, None)
            self._ended.set()
            self._ended = asyncio.Event()

    async def _another_ends(self) -> None:
        """Budgets hold the most that a request may cost, and the rest is free when it ends."""
        if self._calls:
            await self._ended.wait()

    def _call(self, index: int, request_id: str, body: bytes, principal: Principal) -> Call:
        async def receive_body() -> bytes:
            return body

        def when_gone(abort: Callable[[], None]) -> None:
            if self._is_broken_off:
                abort()
            else:
                self._aborts.setdefault(index, []).append(abort)

        kind, dialect = ENDPOINTS[self._batch.endpoint]
        return Call(
            kind=kind,
            headers=_NO_HEADERS,
            client="",
            receive_body=receive_body,
            http_id=request_id,
            arrived_s=self._parts.now_s(),
            when_gone=when_gone,
            principal=principal,
            dialect=dialect,
            is_repeated=True,
        )

    def _window(self, num_behind: int) -> BatchWindow:
        """How long the lines behind this one take is guessed by those that have ended."""
        batch, now_s, now_at = self._batch, self._parts.now_s(), self._parts.now_at()
        began_s, ends_s = (now_s + at - now_at for at in (batch.created_at, batch.expires_at))
        line_s = (now_s - self._began_s) / self._num_ended if self._num_ended else 0.0
        behind_s = num_behind * line_s
        return BatchWindow(began_s, ends_s, min(behind_s, MOST_BEHIND * (ends_s - began_s)))

    def _cancel(self, why: str) -> None:
        log.warning("batch %s is cancelled, %s", self._batch.id, why)
        self.is_cancelled = True
        self.break_off()
