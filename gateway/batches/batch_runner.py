"""Finds batches that nobody holds, and runs some at a time in this gateway process.

A batch belongs to whoever has claimed it last; a process says every few seconds that it holds it,
and one that was silent for LOST_S has lost it. What an earlier life of the same process held is
free at once: a token begins with what names the process in all its lives. The first look comes when
the ledger has closed what an earlier life left open, so that a line is not made again while its
first time is still being posted.

Of one tenant a quarter of the batches run at a time, and the next one is of the tenant that has the
fewest running in all processes: nobody's batches keep those of others waiting.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from collections import Counter
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from gateway.batches.batch_lines import BatchParts
from gateway.batches.batch_run import BatchRun
from registry.state.batches import BatchRecord

log = logging.getLogger(__name__)

LOOK_S = 5.0
LOST_S = 30.0
BREAK_OFF_S = 10.0
"""How long what is broken off may take to be written."""


class BatchRunner:
    """Of one gateway process. Used on the event loop."""

    def __init__(
        self, parts: BatchParts, owner: str, max_running: int, first_look_s: float
    ) -> None:
        """`owner`: this process, in its next life too; "": it is known by no name. `first_look_s`:
        after `start`."""
        self._owner = owner
        self._prefix = ""
        self._has_looked = False
        self._parts = parts
        self._max_running = max_running
        self._first_look_s = first_look_s
        self._running: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_called = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._is_away = False

    def start(self) -> None:
        """Before requests come."""
        if self._owner:
            self._prefix = hashlib.sha256(self._owner.encode()).hexdigest()[:16] + "-"
        self._looking = asyncio.create_task(self._look_for_ever())

    def call(self) -> None:
        """There is a new batch."""
        self._is_called.set()

    async def close(self, timeout_s: float) -> None:
        """Begin nothing more, and let lines that run end, for at most so long; then break them off.
        Another process, or the next life of this one, goes on with the rest."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for run in self._running.values():
            run.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for run in self._running.values():
            run.break_off()
        if self._tasks:
            _, hung = await asyncio.wait(self._tasks, timeout=BREAK_OFF_S)
            for task in hung:
                task.cancel()
            await asyncio.gather(*hung, return_exceptions=True)
        await asyncio.to_thread(self._parts.beats.close)

    async def _look_for_ever(self) -> None:
        await asyncio.sleep(self._first_look_s)
        while True:
            try:
                await self._look()
                self._is_away = False
            except SQLAlchemyError as error:
                if not self._is_away:
                    log.warning("batches cannot be looked for, the next look tries: %s", error)
                self._is_away = True
            self._is_called.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._is_called.wait()
            except TimeoutError:
                continue

    async def _look(self) -> None:
        """Raises SQLAlchemyError."""
        parts = self._parts
        if self._prefix and not self._has_looked:
            await parts.threads.write(partial(parts.store.release_all, self._prefix))
        self._has_looked = True
        while len(self._running) < self._max_running:
            token, now_at = self._prefix + secrets.token_hex(16), parts.now_at()
            without = list(self._running), self._full_tenants()
            claim = partial(parts.store.claim, token, now_at, now_at - LOST_S, *without)
            batch: BatchRecord | None = await parts.threads.write(claim)
            if batch is None:
                return
            log.info("batch %s runs state=%s", batch.id, batch.state)
            run = self._running[batch.id] = BatchRun(batch, token, parts)
            task = asyncio.create_task(self._run(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _full_tenants(self) -> list[str]:
        """Those that have as many batches running here as one tenant may: a quarter."""
        counts = Counter(run.batch.tenant_id for run in self._running.values())
        most = math.ceil(self._max_running / 4)
        return [tenant_id for tenant_id, num in counts.items() if num >= most]

    async def _run(self, run: BatchRun) -> None:
        try:
            await run.run()
            log.info("batch %s state=%s", run.batch.id, run.batch.state)
        finally:
            del self._running[run.batch.id]
            self.call()
