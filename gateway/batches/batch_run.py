"""One batch, from wherever the last process left it to its end.

    validate    read the file once: what is wrong with it, or which model and how many lines
    answer      lines that have no bit yet go through the pipeline, some at a time (batch_lines.py);
                what was answered is committed in segments
    finalize    the segments become files

Once. A line's request has an id made of batch and line, and the ledger posts an id once, however
often it is made. Its answer is in the output exactly if its bit is set, by the transaction that
sets it. So a line that was answered and not committed when its process died is made again: the
tenant has one answer and one posting, that of the first time, and the operator bears the second.
"""

import asyncio
import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gateway.auth.auth import find_model
from gateway.batches.batch_input import (
    CheckedInput,
    InputCheck,
    WrongLine,
    custom_id_of,
    error_line,
    lines_of,
    read_line,
)
from gateway.batches.batch_lines import BatchLines, BatchParts, KeyUnread, LineResult
from gateway.batches.batch_output import EXPIRED, OUTPUT_PURPOSE, line_id, unanswered_line
from gateway.batches.batch_store import BatchLost, file_id_of
from gateway.errors import ApiError
from gateway.state.state_threads import Damaged
from registry.errors import NotFound
from registry.state.batches import BatchRecord
from registry.state.files import FileRecord

log = logging.getLogger(__name__)

BEAT_S = 5.0
TICK_S = 1.0
SEGMENT_LINES = 200
SEGMENT_BYTES = 8 << 20
SEGMENT_S = 2.0
RETRY_S = 5.0


class _Stopped(Exception):
    """This process ends in the middle of finalizing."""


class BatchRun:
    """`run` it once. `batch` is as it was claimed with `token`."""

    def __init__(self, batch: BatchRecord, token: str, parts: BatchParts) -> None:
        self.batch = batch
        self._token = token
        self._parts = parts
        self._lines = BatchLines(batch, parts)
        self._answered = bytearray(batch.answered)
        self._outputs: list[bytes] = []
        self._errors: list[bytes] = []
        self._num_bytes = 0
        self._committed_s = parts.now_s()

    async def run(self) -> None:
        """Until it has ended, is another's, or `stop` was called."""
        beating = asyncio.create_task(self._beat())
        try:
            await self._go()
        except BatchLost:
            log.warning("batch %s is another process's now", self.batch.id)
        except KeyUnread:
            log.warning("batch %s waits: its key is not known here yet", self.batch.id)
            await asyncio.sleep(RETRY_S)
        except _Stopped:
            log.info("batch %s is left to be finalized by another process", self.batch.id)
        except (SQLAlchemyError, OSError, NotFound, Damaged) as error:
            log.error("batch %s stops for a while: %s", self.batch.id, error)
            await self._lines.pause(RETRY_S)
        except Exception:
            log.exception("batch %s stops for a while", self.batch.id)
            await self._lines.pause(RETRY_S)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await self._release()

    def stop(self) -> None:
        """Begin nothing more: this process ends. What runs may end."""
        self._lines.stop()

    def break_off(self) -> None:
        """After `stop`: the time of what runs is up."""
        self._lines.break_off()

    async def _go(self) -> None:
        if self.batch.state == "validating":
            await self._validate()
        if self.batch.state == "in_progress":
            await self._answer()
        if self._lines.is_stopping or self._lines.is_lost or self.batch.state == "failed":
            return
        await self._finalize()

    async def _write(self, work: Callable[[], Any]) -> Any:
        return await self._parts.threads.write(work)

    async def _move(self, *states: str, **values: Any) -> bool:
        """False where it was cancelled meanwhile. Raises BatchLost."""
        store, batch = self._parts.store, self.batch
        if await self._write(partial(store.change, batch.id, self._token, states, **values)):
            self.batch = replace(batch, **values)
            return True
        await self._look()
        if self._lines.is_lost:
            raise BatchLost(batch.id)
        return False

    # Validating.

    async def _validate(self) -> None:
        batch, parts = self.batch, self._parts
        check = InputCheck(parts.store.input_pieces(batch), parts.max_line_bytes, batch.endpoint)
        try:
            while await self._write(check.step):
                if self._lines.is_halted:
                    return
            found = check.found
            if not found.error_lines:
                principal = await self._lines.principal()
                find_model(principal, parts.directory, found.model)
        except (NotFound, Damaged):
            found = _faulty("invalid_file", "the input file is gone, or damaged: send it again")
        except ApiError as error:
            found = _faulty(error.kind.code, error.message)
        now_at = parts.now_at()
        if found.error_lines:
            errors = found.error_lines
            await self._move("validating", state="failed", error_lines=errors, ended_at=now_at)
            return
        self._answered = bytearray((found.num_lines + 7) // 8)
        await self._move(
            "validating",
            state="in_progress",
            in_progress_at=now_at,
            model=found.model,
            num_lines=found.num_lines,
            answered=bytes(self._answered),
        )

    # Answering.

    async def _answer(self) -> None:
        """Until all lines are answered, or nothing more is to be begun."""
        running: set[asyncio.Task[LineResult | None]] = set()
        left = self._unanswered()
        has_more = True
        try:
            while (
                not self._lines.is_cancelled and not self._lines.is_lost and not self._lines.is_late
            ):
                if self._lines.is_halted:
                    has_more = False
                while has_more and len(running) < self._parts.num_lines:
                    found = await self._write(lambda: next(left, None))
                    has_more = found is not None
                    if found is not None:
                        index, data = found
                        num_behind = self.batch.num_lines - index - 1
                        answer = self._lines.answer(index, data, num_behind)
                        running.add(asyncio.create_task(answer))
                if not running:
                    break
                running = await self._some(running)
                if self._is_due:
                    await self._commit()
        except (NotFound, Damaged):
            await self._move("in_progress", ends_as="failed", error_lines=_gone())
        finally:
            left.close()
            self._lines.break_off()
            if running:
                await asyncio.wait(running)
                self._take(running)
        if self._lines.is_lost:
            raise BatchLost(self.batch.id)
        await self._commit()
        if self._lines.is_unread:
            raise KeyUnread
        if self._lines.is_late and not self._lines.is_halted and not self.batch.ends_as:
            try:
                await self._expire()
            except (NotFound, Damaged):
                await self._move("in_progress", ends_as="failed", error_lines=_gone())

    def _unanswered(self) -> Generator[tuple[int, bytes], None, None]:
        """Indexes and lines without a bit. In a thread. Raises NotFound, Damaged."""
        pieces = self._parts.store.input_pieces(self.batch)
        for index, (_, data) in enumerate(lines_of(pieces, self._parts.max_line_bytes)):
            if not self._answered[index >> 3] & 1 << (index & 7):
                yield index, data

    async def _some(
        self, running: set[asyncio.Task[LineResult | None]]
    ) -> set[asyncio.Task[LineResult | None]]:
        """Wait for some. Returns the others."""
        done, others = await asyncio.wait(
            running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
        )
        self._take(done)
        return others

    def _take(self, done: set[asyncio.Task[LineResult | None]]) -> None:
        for task in done:
            result = task.result()
            if result is None:
                continue
            self._answered[result.index >> 3] |= 1 << (result.index & 7)
            (self._errors if result.is_error else self._outputs).append(result.line)
            self._num_bytes += len(result.line)

    @property
    def _is_due(self) -> bool:
        num_lines = len(self._outputs) + len(self._errors)
        is_late = num_lines and self._parts.now_s() - self._committed_s >= SEGMENT_S
        return bool(is_late or num_lines >= SEGMENT_LINES or self._num_bytes >= SEGMENT_BYTES)

    async def _commit(self) -> None:
        """What was answered is there for good. Raises BatchLost."""
        if self._outputs or self._errors:
            batch = replace(
                self.batch,
                answered=bytes(self._answered),
                num_completed=self.batch.num_completed + len(self._outputs),
                num_failed=self.batch.num_failed + len(self._errors),
            )
            about = batch, self._token, self._outputs, self._errors
            await self._write(partial(self._parts.store.commit, *about))
            self.batch = batch
        self._outputs, self._errors, self._num_bytes = [], [], 0
        self._committed_s = self._parts.now_s()

    async def _expire(self) -> None:
        """What is left is told to have expired. Raises BatchLost."""
        left = self._unanswered()
        while (found := await self._write(lambda: next(left, None))) is not None:
            index, data = found
            request_id = line_id(self.batch.id, index)
            try:
                custom_id = read_line(data).custom_id
            except WrongLine:
                custom_id = custom_id_of(data)
            line = unanswered_line(custom_id, request_id, *EXPIRED)
            self._answered[index >> 3] |= 1 << (index & 7)
            self._errors.append(line)
            self._num_bytes += len(line)
            if self._is_due:
                await self._commit()
        await self._commit()
        await self._move("in_progress", ends_as="expired")

    # Finalizing.

    async def _finalize(self) -> None:
        """Raises BatchLost."""
        parts, now_at = self._parts, self._parts.now_at()
        if self._lines.is_cancelled or self.batch.state == "cancelling":
            ends_as = "cancelled"
        else:
            ends_as = self.batch.ends_as or "completed"
            begun = {"state": "finalizing", "finalizing_at": now_at, "ends_as": ends_as}
            if self.batch.state == "in_progress" and not await self._move("in_progress", **begun):
                ends_as = "cancelled"
        segments = await self._write(partial(parts.store.segments, self.batch))
        made: list[tuple[Any, FileRecord]] = []
        ids: dict[str, str] = {}
        try:
            for has_errors, purpose in ((False, "output"), (True, "error")):
                own = [segment for segment in segments if segment.has_errors == has_errors]
                if own:
                    ids[f"{purpose}_file_id"] = file_id_of(self.batch, purpose)
                    writer = await self._write(partial(parts.store.file_writer, self.batch))
                    made.append((writer, self._file(purpose, now_at)))
                    pieces = parts.store.segment_pieces(own)
                    while await self._write(partial(_copy, pieces, writer)):
                        if self._lines.is_stopping:
                            raise _Stopped
            values: dict[str, Any] = {"state": ends_as, "ended_at": parts.now_at(), **ids}
            finish = partial(parts.store.finish, self.batch, self._token, made, **values)
            await self._write(finish)
        except BaseException:
            for writer, _ in made:
                await self._write(writer.abort)
            raise
        self.batch = replace(self.batch, **values)

    def _file(self, purpose: str, now_at: float) -> FileRecord:
        batch = self.batch
        return FileRecord(
            id=file_id_of(batch, purpose),
            tenant_id=batch.tenant_id,
            purpose=OUTPUT_PURPOSE,
            filename=f"{batch.id}_{purpose}.jsonl",
            size_bytes=0,
            sha256="",
            object_name="",
            created_at=now_at,
            expires_at=self._parts.expires_at(now_at, batch.output_expires_s),
        )

    # Holding it.

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self._look()
            except SQLAlchemyError as error:
                log.warning("batch %s: the database is away: %s", self.batch.id, error)

    async def _look(self) -> None:
        """Say that it is held, and hear whether it was cancelled."""
        beat = partial(self._parts.store.beat, self.batch.id, self._token, self._parts.now_at())
        state = await self._parts.beats.write(beat)
        self._lines.is_lost = self._lines.is_lost or state is None
        if state == "cancelling":
            self._lines.is_cancelled = True
            self.batch = replace(self.batch, state=state)
        if self._lines.is_lost or self._lines.is_cancelled:
            self._lines.break_off()

    async def _release(self) -> None:
        try:
            await self._write(partial(self._parts.store.release, self.batch.id, self._token))
        except SQLAlchemyError as error:
            log.warning("batch %s is not given up yet: %s", self.batch.id, error)


def _copy(pieces: Iterator[bytes], writer: Any) -> bool:
    piece = next(pieces, b"")
    writer.write(piece)
    return bool(piece)


def _faulty(code: str, message: str) -> CheckedInput:
    return CheckedInput(error_lines=[error_line(None, WrongLine(code, message))])


def _gone() -> list[dict[str, Any]]:
    message = "the input file was deleted, or damaged, before all of it was answered"
    return _faulty("invalid_file", message).error_lines
