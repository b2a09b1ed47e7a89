"""Deletes what is not to be kept any longer: expired responses and files, objects without a row,
old keys.

One loop a server, in the process that does the database's background work; several at one database
do no harm, since each step finds what is there to be deleted.

    every LOOK_S                  background responses whose process has died are failed
    every `interval_s`            responses and conversations past their tenant's retention: rows,
                                  then objects; keys of idempotent requests after a day; files
                                  and uploads past their end, and what dead processes reserved
    every ORPHANS_S, and first    objects without a row that are older than ORPHAN_AGE_S: a crash
    of all                        came between object and row

An object is older than any request may run before it counts as one without a row: whoever wrote it
writes the row at once or never.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from engine.objects.object_store import ObjectStore
from gateway.settings.settings import Settings
from gateway.settings.state_settings import DAY_S
from gateway.state import conversation_store, response_store
from gateway.state.background import LOST, LOST_S
from gateway.state.objects import objects_of
from gateway.state.response_store import ACTOR
from registry.session import appending, reading
from registry.state import (
    batches,
    conversations,
    file_quota,
    files,
    idempotency,
    responses,
    uploads,
)

log = logging.getLogger(__name__)

LOOK_S = 10.0
ORPHANS_S = 6 * 3600.0
ORPHAN_AGE_S = DAY_S
BATCH = 500
KINDS = (
    (response_store.KIND, responses.without_row),
    (conversation_store.KIND, conversations.without_row),
    (files.KIND, files.without_row),
    (uploads.KIND, uploads.without_row),
    (batches.KIND, batches.without_row),
)
"""Of objects, and who knows which of them have a row."""
PAUSE_S = 0.05
"""Between two batches, so that who waits for the database gets it."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one look deleted, and how many responses it failed."""

    num_lost: int = 0
    num_expired: int = 0
    num_orphans: int = 0


class StateSweeper:
    """`run` it for as long as the server runs."""

    def __init__(
        self,
        engine: Engine,
        objects: ObjectStore,
        retention_days: int,
        interval_s: float,
        wall_clock: Callable[[], float] = time.time,
        file_retention_days: int = 30,
    ) -> None:
        self._engine = engine
        self._objects = objects
        self._retention_days = retention_days
        self._file_retention_days = file_retention_days
        self._interval_s = interval_s
        self._wall_clock = wall_clock
        self._swept_at = self._orphans_at = -math.inf

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._interval_s))
            try:
                await asyncio.to_thread(self.look)
            except (SQLAlchemyError, OSError) as error:
                log.warning("stored state could not be swept, the next look tries: %s", error)

    def look(self) -> Swept:
        """Once: what is due. Blocks. Raises SQLAlchemyError, OSError."""
        now_at = self._wall_clock()
        num_lost = self._fail_lost(now_at)
        num_expired = num_orphans = 0
        if now_at - self._swept_at >= self._interval_s:
            self._objects.check()  # Rows whose objects are out of reach stay, too.
            num_expired = self._expire(now_at) + self._expire_files(now_at)
            self._swept_at = now_at
        if now_at - self._orphans_at >= ORPHANS_S:
            num_orphans = self._delete_orphans(now_at)
            self._orphans_at = now_at
        if num_lost or num_expired or num_orphans:
            log.info(
                "stored state: %d lost, %d expired, %d objects without a row",
                *(num_lost, num_expired, num_orphans),
            )
        return Swept(num_lost, num_expired, num_orphans)

    def _fail_lost(self, now_at: float) -> int:
        before_at = now_at - LOST_S
        with reading(self._engine) as session:
            if not responses.has_lost(session, before_at):
                return 0
        with appending(self._engine, ACTOR) as session:
            return responses.fail_lost(session, "server_error", LOST, before_at=before_at)

    def _expire(self, now_at: float) -> int:
        with reading(self._engine) as session:
            found = responses.tenants_of(session)
        num = 0
        for tenant_id, own_days in found.items():
            days = self._retention_days
            days = days if own_days is None else min(days, own_days)
            before_at = now_at - days * DAY_S
            for remove_before in (responses.remove_before, conversations.remove_before):
                while names := self._expire_batch(remove_before, tenant_id, before_at):
                    for name in names:
                        self._objects.delete(name)
                    num += len(names)
                    time.sleep(PAUSE_S)
        with appending(self._engine, ACTOR) as session:
            idempotency.remove_before(session, now_at - idempotency.KEEP_S)
        return num

    def _expire_batch(
        self, remove_before: Callable[..., Sequence[str]], tenant_id: str, before_at: float
    ) -> Sequence[str]:
        with appending(self._engine, ACTOR) as session:
            return remove_before(session, tenant_id, before_at, limit=BATCH)

    def _expire_files(self, now_at: float) -> int:
        """Files, and parts of uploads. Where none are kept, all."""
        days = self._file_retention_days
        since_at = now_at - days * DAY_S if days else math.inf
        with reading(self._engine) as session:
            without = batches.input_files(session) if days else set()

        def remove_files(session: Session) -> tuple[int, Sequence[str]]:
            names = files.remove_expired(session, now_at, since_at, limit=BATCH, without=without)
            return len(names), names

        removals: tuple[Callable[[Session], tuple[int, Sequence[str]]], ...] = (
            lambda session: uploads.expire(session, now_at, limit=BATCH),
            remove_files,
            lambda session: (file_quota.remove_expired(session, now_at, limit=BATCH), ()),
        )
        num_objects = 0
        for remove in removals:
            num_removed = -1
            while num_removed:
                with appending(self._engine, ACTOR) as session:
                    num_removed, names = remove(session)
                for name in names:
                    self._objects.delete(name)
                num_objects += len(names)
                if num_removed:
                    time.sleep(PAUSE_S)
        with appending(self._engine, ACTOR) as session:
            batches.remove_before(session, since_at)
        return num_objects

    def _delete_orphans(self, now_at: float) -> int:
        before_at = now_at - ORPHAN_AGE_S
        self._objects.delete_unfinished(before_at)
        old = (found.name for found in self._objects.list() if found.modified_at < before_at)
        num = 0
        while names := list(itertools.islice(old, BATCH)):
            with reading(self._engine) as session:
                for kind, without_row in KINDS:
                    of_kind = [name for name in names if name.split("/")[1] == kind]
                    num += sum(map(self._objects.delete, without_row(session, of_kind)))
            time.sleep(PAUSE_S)
        return num


def build_sweeper(engine: Engine, settings: Settings) -> StateSweeper:
    """Of a server."""
    days, interval_s = settings.response_retention_days, settings.state_sweep_interval_s
    keep_days, objects = settings.file_retention_days, objects_of(engine, settings)
    return StateSweeper(engine, objects, days, interval_s, file_retention_days=keep_days)
