"""Batches in the database, and the objects of what was answered.

The order of writes is that of files: objects first, rows second. A segment is one object of output
lines, one of error lines, or both; the transaction that adds their rows also says which lines are
in them. At the end the segments are joined into files, whose ids are made of the batch's, and one
transaction stores the files, ends the batch and forgets its segments: done again after a crash, it
comes to the same. All of it blocks and runs in threads.
"""

import hashlib
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from typing import Any

from engine.objects.object_store import ObjectWriter
from gateway.files.file_store import ACTOR, FileStore
from registry.accounts import api_keys
from registry.errors import NotFound
from registry.session import appending, reading
from registry.state import batches, file_quota, files
from registry.state.batches import BatchRecord, BatchState, SegmentRecord
from registry.state.file_quota import FileBounds, FileReservation
from registry.state.files import FileRecord, FileViewer

ANY = FileBounds(1 << 62, 1 << 62)
"""What was answered is never thrown away because the tenant's quota is full; but then no batch is
begun any more."""


class BatchLost(Exception):
    """Another process holds the batch, or it has ended."""


class BatchStore:
    """One object per gateway process. Raises SQLAlchemyError and OSError where database or objects
    fail, NotFound of what the viewer may not see."""

    def __init__(self, store: FileStore) -> None:
        self._files = store
        self._engine = store.engine
        self._objects = store.objects

    def create(self, record: BatchRecord, max_active: int, max_ended: int) -> bool:
        """False where its tenant has so many that have not ended. Raises QuotaReached where its
        outputs could only be kept beyond the quota."""
        with appending(self._engine, ACTOR) as session:
            self._files.check_room(session, record.tenant_id)
            return batches.add(session, record, max_active, max_ended)

    def get(self, viewer: FileViewer, batch_id: str) -> BatchRecord:
        """One batch."""
        with reading(self._engine) as session:
            return batches.get(session, viewer, batch_id)

    def listed(self, viewer: FileViewer, limit: int, after: str) -> list[BatchRecord]:
        """A page, and one more where there are more."""
        with reading(self._engine) as session:
            return batches.listed(session, viewer, limit=limit + 1, after=after)

    def cancel(self, viewer: FileViewer, batch_id: str) -> BatchRecord:
        """See batches.cancel."""
        with appending(self._engine, ACTOR) as session:
            return batches.cancel(session, viewer, batch_id, viewer.now_at)

    def claim(
        self,
        token: str,
        now_at: float,
        lost_at: float,
        without: Collection[str],
        without_tenants: Collection[str],
    ) -> BatchRecord | None:
        """See batches.claim."""
        with reading(self._engine) as session:  # most looks find nothing, and write nothing
            has_free = batches.has_free(session, lost_at, without, without_tenants)
        if not has_free:
            return None
        with appending(self._engine, ACTOR) as session:
            return batches.claim(
                session,
                token,
                now_at,
                lost_at=lost_at,
                without=without,
                without_tenants=without_tenants,
            )

    def beat(self, batch_id: str, token: str, now_at: float) -> BatchState | None:
        """See batches.beat."""
        with appending(self._engine, ACTOR) as session:
            return batches.beat(session, batch_id, token, now_at)

    def release(self, batch_id: str, token: str) -> None:
        """See batches.release."""
        with appending(self._engine, ACTOR) as session:
            batches.release(session, batch_id, token)

    def release_all(self, prefix: str) -> None:
        """See batches.release_all."""
        with appending(self._engine, ACTOR) as session:
            batches.release_all(session, prefix)

    def change(self, batch_id: str, token: str, states: Collection[str], **values: Any) -> bool:
        """See batches.change."""
        with appending(self._engine, ACTOR) as session:
            return batches.change(session, batch_id, token, states, **values)

    def is_key_usable(self, batch: BatchRecord, now_at: float) -> bool:
        """Whether the key that made it is, by the database."""
        with reading(self._engine) as session:
            try:
                key = api_keys.get_key(session, batch.key_id)
            except NotFound:
                return False
        return key.tenant_id == batch.tenant_id and key.usable(now_at)

    def input_pieces(self, batch: BatchRecord) -> Generator[bytes, None, None]:
        """The bytes of its file. Raises NotFound where that is gone, Damaged."""
        viewer = FileViewer(batch.tenant_id, 0.0, 0.0)
        yield from self._files.pieces(self._files.get(viewer, batch.input_file_id))

    def commit(
        self, batch: BatchRecord, token: str, outputs: Sequence[bytes], errors: Sequence[bytes]
    ) -> None:
        """Lines were answered: the batch's bits and counts say which, and how many of them. Raises
        BatchLost, changing nothing."""
        segments = []
        done = batch.num_completed + batch.num_failed
        for has_errors, lines in ((False, outputs), (True, errors)):
            if lines:
                writer = self._files.writer(batch.tenant_id, batches.KIND)
                try:
                    writer.write(b"".join(lines))
                    stored = writer.finish()
                except BaseException:
                    writer.abort()
                    raise
                own_id = f"{batch.id}_{done:06d}{'e' if has_errors else 'o'}"
                segments.append(
                    SegmentRecord(own_id, batch.id, has_errors, stored.name, stored.size_bytes)
                )
        values = {
            "answered": batch.answered,
            "num_completed": batch.num_completed,
            "num_failed": batch.num_failed,
        }
        with appending(self._engine, ACTOR) as session:
            if batches.change(session, batch.id, token, ("in_progress", "cancelling"), **values):
                batches.add_segments(session, segments)
                return
        self._files.discard([segment.object_name for segment in segments])
        raise BatchLost(batch.id)

    def segments(self, batch: BatchRecord) -> list[SegmentRecord]:
        """In the order in which they were committed."""
        with reading(self._engine) as session:
            return batches.segments(session, batch.id)

    def segment_pieces(self, segments: Sequence[SegmentRecord]) -> Generator[bytes, None, None]:
        """Their bytes, one after another."""
        for segment in segments:
            yield from self._objects.pieces(segment.object_name)

    def file_writer(self, batch: BatchRecord) -> ObjectWriter:
        """Of an output file."""
        return self._files.writer(batch.tenant_id, files.KIND)

    def finish(
        self,
        batch: BatchRecord,
        token: str,
        made: Sequence[tuple[ObjectWriter, FileRecord]],
        **values: Any,
    ) -> None:
        """The batch ends, with these files. Raises BatchLost, changing nothing."""
        records = []
        for writer, record in made:
            stored = writer.finish()
            records.append(
                replace(
                    record,
                    object_name=stored.name,
                    size_bytes=stored.size_bytes,
                    sha256=stored.sha256,
                )
            )
        names: Sequence[str] = ()
        is_mine = False
        with appending(self._engine, ACTOR) as session:
            if batches.change(session, batch.id, token, batches.ACTIVE, **values):
                is_mine = True
                for record in records:
                    wanted = FileReservation(record.id, record.tenant_id, 0, record.created_at)
                    file_quota.reserve(session, wanted, ANY)
                    files.add(session, record, record.id)
                names = batches.remove_segments(session, batch.id)
        self._files.discard(names if is_mine else [record.object_name for record in records])
        if not is_mine:
            raise BatchLost(batch.id)


def file_id_of(batch: BatchRecord, purpose: str) -> str:
    """Of an output file: the same whenever the batch is finalized."""
    return "file-" + hashlib.sha256(f"{batch.id}/{purpose}".encode()).hexdigest()[:32]
