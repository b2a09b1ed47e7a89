"""Files and uploads: an object for the bytes, a row that makes it exist, and what is reserved.

The order of writes is object first, row second, and the other way round to delete, as for stored
responses; what a crash leaves in between is an object without a row, or a reservation, and the
sweeper deletes both (gateway/state/sweeper.py). Where a commit fails it may have come through all
the same, so the object stays for the sweeper. All of it blocks and runs in threads.
"""

import hashlib
import logging
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from engine.objects.object_store import ObjectMissing, ObjectStore, ObjectWriter, new_name
from gateway.files.file_fields import FilePage
from gateway.state.state_threads import Damaged
from registry.errors import NotFound
from registry.session import appending, reading
from registry.state import batches, file_quota, files, uploads
from registry.state.file_quota import FileBounds, FileReservation
from registry.state.files import FileRecord, FileViewer
from registry.state.uploads import UploadPartRecord, UploadRecord

log = logging.getLogger(__name__)

ACTOR = "gateway"


class UploadOver(Exception):
    """An upload has ended, or has as many parts as it may."""


class FileHeld(Exception):
    """A batch is still to read the file."""


class QuotaReached(Exception):
    """The tenant may not have so much more."""


class _Unwanted(Exception):
    """A transaction is taken back."""


class FileStore:
    """One object per gateway process. Raises SQLAlchemyError and OSError where database or objects
    fail, NotFound of what the viewer may not see."""

    def __init__(self, engine: Engine, objects: ObjectStore, bounds: FileBounds) -> None:
        self.engine = engine
        self.objects = objects
        self._bounds = bounds

    def close(self) -> None:
        """When nothing more is asked."""
        self.engine.dispose()

    def writer(self, tenant_id: str, kind: str) -> ObjectWriter:
        """Of a new object: `files.KIND` or `uploads.KIND`."""
        return self.objects.writer(new_name(tenant_id, kind))

    def reserve(self, wanted: FileReservation) -> None:
        """Raises QuotaReached."""
        with appending(self.engine, ACTOR) as session:
            if not file_quota.reserve(session, wanted, self._bounds):
                raise QuotaReached

    def check_room(self, session: Session, tenant_id: str) -> None:
        """Raises QuotaReached where the tenant has all that it may have."""
        found, bounds = file_quota.locked_usage(session, tenant_id), self._bounds
        if found.num_bytes >= bounds.max_bytes or found.num_files >= bounds.max_files:
            raise QuotaReached

    def keep(self, writer: ObjectWriter, record: FileRecord) -> FileRecord | None:
        """A file is whole, and what was reserved under its id is settled. Returns it with its
        object; None, keeping nothing, where nothing is reserved any more."""
        record = _with_object(record, writer)
        with appending(self.engine, ACTOR) as session:
            if files.add(session, record, record.id):
                return record
        self.discard([record.object_name])
        return None

    def give_up(self, writer: ObjectWriter | None, reservation_id: str) -> None:
        """Nothing becomes of it."""
        if writer is not None:
            writer.abort()
        with appending(self.engine, ACTOR) as session:
            file_quota.release(session, reservation_id)

    def get(self, viewer: FileViewer, file_id: str) -> FileRecord:
        """One file."""
        with reading(self.engine) as session:
            return files.get(session, viewer, file_id)

    def listed(self, viewer: FileViewer, page: FilePage) -> list[FileRecord]:
        """Files of a page, and one more where there are more."""
        with reading(self.engine) as session:
            return files.listed(
                session,
                viewer,
                limit=page.limit + 1,
                descending=page.descending,
                after=page.after,
                purpose=page.purpose,
            )

    def remove(self, viewer: FileViewer, file_id: str) -> None:
        """Delete one file. Raises FileHeld."""
        with appending(self.engine, ACTOR) as session:
            if batches.is_input(session, viewer.tenant_id, file_id):
                raise FileHeld
            record = files.remove(session, viewer, file_id)
        self.discard([record.object_name])

    def pieces(self, record: FileRecord) -> Generator[bytes, None, None]:
        """The bytes of a file. The last of them come when all were found right. Raises NotFound
        where they are gone, Damaged."""
        digest, last = hashlib.sha256(), b""
        try:
            for piece in self.objects.pieces(record.object_name):
                if last:
                    yield last
                digest.update(piece)
                last = piece
        except ObjectMissing as error:
            # It was deleted since the row was read; or this server has another folder.
            log.warning("the object of file %s is not there", record.id)
            raise NotFound(f"file {record.id!r} does not exist") from error
        if digest.hexdigest() != record.sha256:
            raise Damaged(record.id)
        yield last

    def add_upload(self, record: UploadRecord) -> None:
        """A pending one. Raises QuotaReached."""
        with appending(self.engine, ACTOR) as session:
            if not uploads.add(session, record, self._bounds):
                raise QuotaReached

    def upload(
        self, viewer: FileViewer, upload_id: str
    ) -> tuple[UploadRecord, dict[str, UploadPartRecord]]:
        """An upload with its parts."""
        with reading(self.engine) as session:
            record = uploads.get(session, viewer, upload_id)
            return record, uploads.parts(session, upload_id)

    def claim_part(self, viewer: FileViewer, upload_id: str, num_bytes: int) -> None:
        """A part of at most so many bytes is to come. Raises UploadOver, QuotaReached."""
        with appending(self.engine, ACTOR) as session:
            record = uploads.get(session, viewer, upload_id)
            if record.state != "pending" or record.expires_at <= viewer.now_at:
                raise UploadOver(f"the upload is {ended_state(record, viewer.now_at)}")
            if record.num_parts >= uploads.MAX_PARTS:
                raise UploadOver(f"the upload has {uploads.MAX_PARTS} parts, which is the maximum")
            if not uploads.claim_part(session, upload_id, num_bytes, self._bounds):
                raise QuotaReached

    def keep_part(
        self, writer: ObjectWriter, part: UploadPartRecord, num_claimed: int
    ) -> UploadPartRecord:
        """A part is whole. Raises UploadOver, keeping nothing."""
        stored = writer.finish()
        part = replace(part, object_name=stored.name, size_bytes=stored.size_bytes)
        with appending(self.engine, ACTOR) as session:
            if uploads.add_part(session, part, num_claimed):
                return part
        self.discard([part.object_name])
        raise UploadOver("the upload ended while the part was sent")

    def give_up_part(self, writer: ObjectWriter | None, upload_id: str, num_claimed: int) -> None:
        """Nothing becomes of it."""
        if writer is not None:
            writer.abort()
        with appending(self.engine, ACTOR) as session:
            uploads.unclaim_part(session, upload_id, num_claimed)

    def part_pieces(self, parts: Sequence[UploadPartRecord]) -> Generator[bytes, None, None]:
        """The bytes of parts, one after another. Raises UploadOver where an object is gone."""
        for part in parts:
            try:
                yield from self.objects.pieces(part.object_name)
            except ObjectMissing as error:
                raise UploadOver("the upload ended while it was completed") from error

    def complete(
        self, upload_id: str, writer: ObjectWriter, record: FileRecord
    ) -> FileRecord | None:
        """The parts of an upload have become a file. Returns it with its object; None, keeping
        nothing, where the upload has ended."""
        record = _with_object(record, writer)
        try:
            with appending(self.engine, ACTOR) as session:
                parts = uploads.end(session, upload_id, "completed", record.id)
                if parts is None or not files.add(session, record, upload_id):
                    raise _Unwanted
        except _Unwanted:
            self.discard([record.object_name])
            return None
        self.discard(parts)
        return record

    def cancel(self, viewer: FileViewer, upload_id: str) -> UploadRecord:
        """A pending upload and all its parts go; one that has ended stays as it is."""
        with appending(self.engine, ACTOR) as session:
            uploads.get(session, viewer, upload_id)
            parts = uploads.end(session, upload_id, "cancelled")
            if parts is not None:
                file_quota.release(session, upload_id)
            record = uploads.get(session, viewer, upload_id)
        self.discard(parts or ())
        return record

    def discard(self, names: Iterable[str]) -> None:
        """What has no row any more. What cannot be deleted is left to the sweeper."""
        for name in names:
            try:
                self.objects.delete(name)
            except OSError as error:
                log.warning("object %s could not be deleted: %s", name, error)


def ended_state(record: UploadRecord, now_at: float) -> str:
    """Its state; a pending one past its end is expired, whether that was written or not."""
    is_late = record.state == "pending" and record.expires_at <= now_at
    return "expired" if is_late else record.state


def _with_object(record: FileRecord, writer: ObjectWriter) -> FileRecord:
    stored = writer.finish()
    return replace(
        record,
        object_name=stored.name,
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
    )
