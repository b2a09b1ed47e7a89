"""/v1/files: files that a tenant sends whole, lists, reads and deletes.

    create     reserve by the body's length, take the bytes, look at the fields, keep
    listed, retrieve, content, remove      of a file that is kept

Comes in: whose key it is, and a body or query. Goes out: OpenAI's objects as JSON, or a file's
bytes. Whose a file is, is one rule (`FileAccess.viewer`): the tenant's, not expired, and not older
than files are kept. All else is missing in the same words. A tenant with zero retention has no
files: what it was promised is that nothing of it stays.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from engine.objects.object_store import ObjectWriter
from gateway.api.bodies import invalid
from gateway.errors import NOT_FOUND, UNAVAILABLE, ApiError
from gateway.files.file_access import FileAccess
from gateway.files.file_body import FileBody, FileForm
from gateway.files.file_fields import (
    ANCHOR,
    FORM_FIELDS,
    SECONDS,
    expires_in,
    file_object,
    filename_of,
    list_object,
    most_bytes,
    page_of,
    purpose_of,
)
from gateway.files.file_store import FileStore
from gateway.files.receiver import FileReceiver, expected_bytes
from gateway.files.uploads_service import UploadsService
from gateway.metrics.metrics import Metrics
from gateway.settings.settings import Settings
from gateway.state.objects import objects_of
from gateway.state.state_threads import StateThreads
from gateway.types import Principal
from registry.session import make_engine
from registry.state import files
from registry.state.file_quota import FileBounds, FileReservation
from registry.state.files import FileRecord

log = logging.getLogger(__name__)

ID_PREFIX = "file-"
UNNAMED = "upload"
"""What a file without a name is called, as OpenAI's SDKs call bytes."""
MARGIN_S = 60.0
"""How long a file may take to be kept, once it has come."""
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class FileContent:
    """The bytes of a file, a piece at a time: `piece` first, then what `rest` yields."""

    record: FileRecord
    piece: bytes
    rest: Generator[bytes, None, None]


class FilesService:
    """One object per gateway process. All that is asked for a `principal` raises ApiError."""

    def __init__(self, access: FileAccess, receiver: FileReceiver) -> None:
        self.access = access
        self._receiver = receiver
        self.uploads = UploadsService(access, receiver)

    async def close(self) -> None:
        """When no more requests come."""
        await asyncio.to_thread(self.access.threads.close)
        self.access.store.close()

    async def create(self, principal: Principal, body: FileBody) -> bytes:
        """A new file. Raises ClientGone."""
        access, store, tenant_id = self.access, self.access.store, principal.tenant_id
        access.check_keeps(principal)
        form = FileForm(body.content_type, "file", FORM_FIELDS)
        most = access.settings.max_file_bytes
        num_bytes = expected_bytes(body, most)
        file_id = ID_PREFIX + secrets.token_hex(16)
        until_at = access.wall_clock() + access.settings.file_body_timeout_s + MARGIN_S
        wanted = FileReservation(file_id, tenant_id, num_bytes, until_at)
        with self._receiver.place(tenant_id):
            await access.read(principal, "file", file_id, lambda: store.reserve(wanted))
            writer: ObjectWriter | None = None
            try:
                writer = await self._receiver.receive(
                    body,
                    form,
                    lambda: store.writer(tenant_id, files.KIND),
                    lambda: most_bytes(form.fields.get("purpose"), most),
                )
                record = self._record(principal, file_id, form)
                kept = await self._receiver.write(partial(store.keep, writer, record))
                if kept is None:
                    message = "the file took too long to be stored: send it again"
                    raise ApiError(UNAVAILABLE, message)
            except BaseException:
                await self._receiver.undo(partial(store.give_up, writer, file_id))
                raise
        return _encode(file_object(kept))

    async def listed(self, principal: Principal, params: Mapping[str, Sequence[str]]) -> bytes:
        """A page of them."""
        page = page_of(params)
        viewer = self.access.viewer(principal)

        def work() -> bytes:
            found = self.access.store.listed(viewer, page)
            return _encode(list_object([file_object(each) for each in found], page.limit))

        try:
            return await self.access.read(principal, "file", page.after, work)
        except ApiError as error:
            if error.kind == NOT_FOUND:
                message = f"after: no file has the id {page.after[:80]!r}"
                raise invalid("after", message) from error
            raise

    async def retrieve(self, principal: Principal, file_id: str) -> bytes:
        """One of them."""
        return _encode(file_object(await self._found(principal, file_id)))

    async def remove(self, principal: Principal, file_id: str) -> bytes:
        """Delete it. What is being read of it is read to its end."""
        viewer, store = self.access.viewer(principal), self.access.store
        await self.access.read(principal, "file", file_id, lambda: store.remove(viewer, file_id))
        return _encode({"id": file_id, "object": "file", "deleted": True})

    async def content(self, principal: Principal, file_id: str) -> FileContent:
        """Its bytes, the first of them read. Close it when done."""
        record = await self._found(principal, file_id)
        rest = self.access.store.pieces(record)
        first = await self.access.read(principal, "file", file_id, lambda: next(rest, b""))
        return FileContent(record, first, rest)

    async def advance(self, content: FileContent) -> bool:
        """The next piece. False at the end. Raises OSError, Damaged."""
        content.piece = await self.access.threads.go_on(lambda: next(content.rest, b""))
        return bool(content.piece)

    def close_content(self, content: FileContent) -> None:
        """Whether or not all of it was read."""
        with suppress(ValueError):  # a thread reads on, and closes it then
            content.rest.close()

    async def _found(self, principal: Principal, file_id: str) -> FileRecord:
        viewer, store = self.access.viewer(principal), self.access.store
        return await self.access.read(
            principal, "file", file_id, lambda: store.get(viewer, file_id)
        )

    def _record(self, principal: Principal, file_id: str, form: FileForm) -> FileRecord:
        """Without its object. Raises ApiError by what the form says."""
        fields = form.fields
        now_at = self.access.wall_clock()
        own_s = expires_in(fields.get(ANCHOR), fields.get(SECONDS))
        return FileRecord(
            id=file_id,
            tenant_id=principal.tenant_id,
            purpose=purpose_of(fields.get("purpose")),
            filename=filename_of(UNNAMED if form.filename is None else form.filename),
            size_bytes=0,
            sha256="",
            object_name="",
            created_at=now_at,
            expires_at=self.access.expires_at(now_at, own_s),
        )


def build_files(
    settings: Settings, metrics: Metrics, wall_clock: Callable[[], float]
) -> FilesService:
    """Of one gateway process. Connects to the database and makes folders when first asked."""
    engine = make_engine(settings.registry_url)
    store = FileStore(
        engine,
        objects_of(engine, settings),
        FileBounds(settings.files_quota_bytes, settings.max_files),
    )
    threads = StateThreads(settings.file_threads, settings.max_state_waiting, "files")
    access = FileAccess(settings, store, threads, wall_clock)

    def count(result: str) -> None:
        metrics.files_received.labels(result).inc()

    return FilesService(access, FileReceiver(threads, settings.max_file_bodies, count))
