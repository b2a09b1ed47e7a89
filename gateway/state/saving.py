"""One response on its way to being stored: its answer is told when that is done, and not before.

    whole answer   the body is stored, then sent
    stream         all but the last event goes straight to the client; that one is held back, its
                   response is stored, then it is sent

So whoever has seen the end of an answer can continue from it, at whichever gateway process. Where
storing fails or takes too long the answer is not lost: it says `store: false`, and so does the log.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.dialects.responses_answer import LastEvent, last_event
from gateway.metrics.metrics import Metrics
from gateway.state.conversation_store import ConversationRefused
from gateway.state.response_store import ResponseStore
from gateway.state.state_threads import Damaged, StateThreads
from gateway.types import Answer, EventAnswer, JsonAnswer, Sink
from registry.errors import NotFound, RegistryError
from registry.state.responses import ResponseRecord, ResponseState

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 10.0
"""How long an answer waits for being stored."""


class _Status(msgspec.Struct):
    status: str


_status_decoder = msgspec.json.Decoder(_Status)


class LastEventHeld:
    """A sink before another one: holds back what the stream ends with. Implements Sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.last: LastEvent | None = None

    @property
    def is_full(self) -> bool:
        """See Sink."""
        return self._sink.is_full

    def write(self, event: bytes) -> None:
        """See Sink."""
        self.last = last_event(event)
        if self.last is None:
            self._sink.write(event)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """See Sink."""
        self._sink.when_drained(callback)

    async def drained(self) -> None:
        """See Sink."""
        await self._sink.drained()


class Saving:
    """Of one request. Whatever becomes of it, its idempotency key is kept or given back."""

    def __init__(
        self,
        store: ResponseStore,
        threads: StateThreads,
        metrics: Metrics,
        record: ResponseRecord,
        items: Sequence[Any],
    ) -> None:
        """`record`: all of it but its state and object. `items`: of its own input."""
        self._store = store
        self._threads = threads
        self._metrics = metrics
        self._items = items
        self.record = record
        self.has_claim = False
        self._is_stored = False
        self._is_too_late = False

    async def answer(self, answer: Answer) -> Answer:
        """The same, stored before its end is told."""
        if isinstance(answer, EventAnswer):
            return EventAnswer(partial(self._events, answer), answer.close)
        try:
            return JsonAnswer([await self._told(b"".join(answer.parts))], answer.close)
        except BaseException:
            answer.close()
            raise
        finally:
            await self.give_up()

    async def _events(self, answer: EventAnswer, sink: Sink) -> None:
        held = LastEventHeld(sink)
        try:
            await answer.run(held)
            if held.last is not None:
                sink.write(held.last.told(await self._told(held.last.response)))
        finally:
            await self.give_up()

    async def begin(self, response: bytes) -> bool:
        """Store one that is to be made in the background: its record says so. False where its
        tenant has as many as it may. Raises ApiError where it cannot be stored."""
        stored = await self._threads.read(
            self.record.tenant_id, lambda: self._store.add(self.record, self._items, response)
        )
        self._count("quota" if stored is None else "stored")
        self._is_stored = stored is not None
        self.record = stored or self.record
        return self._is_stored

    async def keep(self) -> None:
        """What was begun runs: whoever sends its key again gets it. Where that cannot be stored,
        they are told that it runs until the claim is over."""
        if not self.has_claim:
            return
        try:
            await self._threads.write(lambda: self._store.keep_key(self.record))
        except SQLAlchemyError as error:
            log.warning("response %s: its key is not kept: %s", self.record.id, error)

    async def give_up(self) -> None:
        """Unless it is stored: its key is free for another try."""
        if self.has_claim and not self._is_stored:
            self.has_claim = False
            await self._release()

    async def forget(self) -> None:
        """It was begun and is not to be: nothing of it stays. Raises what the store raises."""
        await self._release()

    async def _told(self, response: bytes) -> bytes:
        """The response as it is to be told."""
        status = _status_decoder.decode(response).status
        if status not in ("completed", "incomplete"):
            return _unstored(response)
        self.record = replace(self.record, state=cast(ResponseState, status))
        saving = asyncio.ensure_future(self._threads.write(lambda: self._add(response)))
        done, _ = await asyncio.wait([saving], timeout=SAVE_TIMEOUT_S)
        result = "timeout"
        if done:
            error = saving.exception()
            result = "failed" if error is not None else "stored" if saving.result() else "quota"
            known = SQLAlchemyError, OSError, NotFound, ConversationRefused, Damaged
            if error is not None and not isinstance(error, known):
                raise error
        else:
            self._is_too_late = True
        self._count(result)
        self._is_stored = result == "stored"
        if result in ("failed", "timeout"):
            reason = saving.exception() if done else f"it took longer than {SAVE_TIMEOUT_S:g} s"
            log.error("response %s could not be stored: %s", self.record.id, reason)
        return response if self._is_stored else _unstored(response)

    def _add(self, response: bytes) -> bool:
        """In a thread."""
        stored = self._store.add(self.record, self._items, response)
        if stored is not None and self._is_too_late:
            self._store.withdraw(stored)
        return stored is not None

    async def _release(self) -> None:
        record = self.record
        try:
            await self._threads.write(lambda: self._store.withdraw(record))
        except (SQLAlchemyError, OSError, RegistryError) as error:
            log.warning("response %s could not be taken back: %s", record.id, error)

    def _count(self, result: str) -> None:
        self._metrics.responses_stored.labels(result).inc()


def _unstored(response: bytes) -> bytes:
    body = msgspec.json.decode(response)
    return msgspec.json.encode({**body, "store": False})
