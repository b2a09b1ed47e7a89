"""One admitted request to an encoder, from the fair queue to its posting: the holding half of
stages 9 and 10, as exchange.py is for generated text.

Comes in: a request in pieces, the first of them queued. Goes out: all rows in the order of the
inputs, and exactly one closing. A few pieces are queued at a time, so that a large request waits
its turn among others again and again, and a piece whose worker dies is sent again by the dispatcher
like any request: nothing of it has left the gateway.

    outcome        when                                       tokens billed
    finished       all rows are there                         all of its inputs'
    (none: void)   it ended before that, whoever's doing      none: part of an answer is of no use
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.protocol import Finish, Usage
from gateway.answer.choice import check_end, worker_was_lost
from gateway.dispatch.joint import joint_usage
from gateway.errors import DEADLINE_EXCEEDED, SERVER_ERROR, ApiError, ClientGone, WorkerLost
from gateway.ledger.settlement import CLOSE_WAIT_S, Ending, Settlement, TaskSet, wait_for
from gateway.types import PreparedRequest, RunningRequest

log = logging.getLogger(__name__)

PIECES_AT_ONCE = 2
"""The next one should be there when the worker is done with one."""


class EncodeExchange:
    """Made by `pipeline.Pipeline`, used by one consumer. `run` queues a piece."""

    def __init__(
        self,
        pieces: Sequence[PreparedRequest],
        width: int,
        first: RunningRequest,
        run: Callable[[PreparedRequest], RunningRequest],
        settlement: Settlement,
        tasks: TaskSet,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: for all pieces together."""
        self._pieces = pieces
        self._width = width
        self._run = run
        self._settlement = settlement
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._first = first
        self._running = deque([(pieces[0], first)])
        self._usages: list[Usage] = []
        self._failed = False
        self._closing: asyncio.Task[None] | None = None
        self.is_gone = False

    def client_gone(self) -> None:
        """The client went away: stop the workers."""
        self.is_gone = True
        self._abort()

    async def rows(self) -> NDArray[np.float32]:
        """All rows, [inputs, width], once the open record is durable too. Raises ApiError, or
        ClientGone."""
        try:
            async with asyncio.timeout(self._timeout_s):
                parts = await self._parts()
                await self._settlement.opened()
        except TimeoutError as error:
            self._failed = True
            message = "the request took longer than this server allows: send fewer inputs"
            raise ApiError(DEADLINE_EXCEEDED, message) from error
        except ApiError:
            self._failed = True
            raise
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    async def close(self) -> None:
        """Settle and post. Returns when that is durable, or goes on alone after CLOSE_WAIT_S."""
        await wait_for(self._close_once(), CLOSE_WAIT_S)

    def abandon(self) -> None:
        """Nobody takes the answer any further: close it, whatever state it is in."""
        if self._closing is None and not self._failed and not self._is_complete:
            self.is_gone = True
        self._close_once()

    @property
    def _is_complete(self) -> bool:
        return len(self._usages) == len(self._pieces)

    async def _parts(self) -> list[NDArray[np.float32]]:
        parts = []
        waiting = iter(self._pieces[1:])
        while self._running:
            if self.is_gone:
                raise ClientGone
            while len(self._running) < PIECES_AT_ONCE and (piece := next(waiting, None)):
                self._running.append((piece, self._run(piece)))
            piece, running = self._running[0]
            parts.append(await self._rows_of(piece, running))
            self._running.popleft()
        return parts

    async def _rows_of(
        self, piece: PreparedRequest, running: RunningRequest
    ) -> NDArray[np.float32]:
        """Raises ApiError where the worker did not give what was asked for."""
        finish, vectors = await self._answer(running)
        if finish.reason != "stop":
            check_end(finish, piece, self.is_gone)
            raise ClientGone
        assert piece.encode is not None
        num_rows = len(piece.encode.lengths)
        rows = np.frombuffer(vectors, dtype="<f4") if len(vectors) % 4 == 0 else np.empty(0, "<f4")
        if rows.size != num_rows * self._width or not np.isfinite(rows).all():
            what = "numbers that are not finite"
            if rows.size != num_rows * self._width:
                what = f"{len(vectors)} bytes for {num_rows} rows of {self._width}"
            log.error("request %s: model %s gave %s", piece.request_id, piece.model.name, what)
            message = f"the model {piece.model.name!r} failed on this request"
            raise ApiError(SERVER_ERROR, message)
        self._usages.append(finish.usage)
        return rows.reshape(num_rows, self._width)

    async def _answer(self, running: RunningRequest) -> tuple[Finish, bytes]:
        """Raises ApiError: refused, or its worker was lost too often."""
        try:
            async for event in running:
                if event.finish is not None:
                    return event.finish, event.vectors
        except WorkerLost as error:
            raise worker_was_lost() from error
        raise worker_was_lost()

    def _abort(self) -> None:
        for _, running in self._running:
            running.abort()

    def _close_once(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = self._tasks.spawn(self._close())
        return self._closing

    async def _close(self) -> None:
        """Stage 10. What is still running is aborted; its usage is nobody's."""
        self._abort()
        served = self._is_complete and not self._failed
        await self._settlement.end(
            Ending(
                "finished" if served else None,
                joint_usage(self._usages) if served else Usage(0, 0, 0, 0.0),
                queue_s=self._first.queue_s,
                keeps_request=self.is_gone and not served and not self._failed,
                finish_reasons=("stop",) if served else (),
            )
        )
