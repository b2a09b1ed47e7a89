"""/v1/uploads: files that come in parts, for those that are too large for one request.

    create     reserve the file's bytes for an hour
    add_part   take a part's bytes; it may be sent again, and be left out at the end
    complete   join the parts, in the order that is asked for, into a file
    cancel     nothing of it stays

Comes in: whose key it is, and a body. Goes out: OpenAI's objects as JSON. Parts may come side by
side. Joining copies them, a megabyte at a time, so for that while they take twice their space; it
checks their size, and their MD5 if one is given. To complete an upload again gives the same file,
so that a client that lost the answer may ask once more.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec

from engine.objects.object_store import ObjectWriter
from gateway.api.bodies import decode_body, invalid
from gateway.files.file_access import FileAccess
from gateway.files.file_body import FileBody, FileForm
from gateway.files.file_fields import (
    expires_in,
    filename_of,
    most_bytes,
    purpose_of,
    upload_object,
)
from gateway.files.file_store import UploadOver, ended_state
from gateway.files.receiver import FileReceiver, expected_bytes, too_large
from gateway.settings.base_settings import MIB
from gateway.types import Principal
from registry.state import files, uploads
from registry.state.files import FileRecord
from registry.state.uploads import UploadPartRecord, UploadRecord

ID_PREFIX, PART_PREFIX, FILE_PREFIX = "upload_", "part_", "file-"
UPLOAD_S = 3600.0
"""How long an upload may take."""
MAX_PART_BYTES = 64 * MIB
_encode = msgspec.json.Encoder().encode


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """When the file of an upload expires."""

    anchor: str
    seconds: int


class UploadBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/uploads. `mime_type` is not kept."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    filename: str
    mime_type: Annotated[str, msgspec.Meta(max_length=255)]
    purpose: str
    expires_after: ExpiresAfter | None = None


class CompleteBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/uploads/{upload_id}/complete. `md5`: of the file, in hex."""

    part_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=uploads.MAX_PARTS)]
    md5: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None


_new_decoder = msgspec.json.Decoder(UploadBody)
_complete_decoder = msgspec.json.Decoder(CompleteBody)


class UploadsService:
    """One object per gateway process. All of it raises ApiError."""

    def __init__(self, access: FileAccess, receiver: FileReceiver) -> None:
        self._access = access
        self._receiver = receiver

    async def create(self, principal: Principal, body: bytes) -> bytes:
        """A pending upload."""
        access = self._access
        access.check_keeps(principal)
        asked = decode_body(_new_decoder, body)
        purpose, after = purpose_of(asked.purpose), asked.expires_after
        most = most_bytes(purpose, access.settings.max_upload_bytes)
        if asked.bytes > most:
            raise too_large(most)
        now_at = access.wall_clock()
        record = UploadRecord(
            id=ID_PREFIX + secrets.token_hex(16),
            tenant_id=principal.tenant_id,
            purpose=purpose,
            filename=filename_of(asked.filename),
            size_bytes=asked.bytes,
            state="pending",
            num_parts=0,
            parts_bytes=0,
            created_at=now_at,
            expires_at=now_at + UPLOAD_S,
            file_expires_s=expires_in(after.anchor, str(after.seconds)) if after else None,
        )
        await access.read(principal, "upload", record.id, lambda: access.store.add_upload(record))
        return _encode(upload_object(record))

    async def add_part(self, principal: Principal, upload_id: str, body: FileBody) -> bytes:
        """A part. Raises ClientGone."""
        access, store, tenant_id = self._access, self._access.store, principal.tenant_id
        form = FileForm(body.content_type, "data", ())
        most = min(MAX_PART_BYTES, access.settings.max_upload_bytes)
        num_bytes = expected_bytes(body, most)
        viewer = access.viewer(principal)
        now_at = viewer.now_at
        part = UploadPartRecord(PART_PREFIX + secrets.token_hex(16), upload_id, 0, "", now_at)
        with self._receiver.place(tenant_id):
            await access.read(
                principal,
                "upload",
                upload_id,
                lambda: store.claim_part(viewer, upload_id, num_bytes),
            )
            writer: ObjectWriter | None = None
            try:
                writer = await self._receiver.receive(
                    body, form, lambda: store.writer(tenant_id, uploads.KIND), lambda: most
                )
                part = await self._receiver.write(partial(store.keep_part, writer, part, num_bytes))
            except BaseException as error:
                await self._receiver.undo(partial(store.give_up_part, writer, upload_id, num_bytes))
                if isinstance(error, UploadOver):
                    raise invalid("upload_id", f"{error}: create a new one") from error
                raise
        return _encode(
            {
                "id": part.id,
                "object": "upload.part",
                "created_at": int(part.created_at),
                "upload_id": upload_id,
            }
        )

    async def complete(self, principal: Principal, upload_id: str, body: bytes) -> bytes:
        """Its parts become a file."""
        access, store = self._access, self._access.store
        asked = decode_body(_complete_decoder, body)
        viewer = access.viewer(principal)
        upload, parts = await access.read(
            principal, "upload", upload_id, lambda: store.upload(viewer, upload_id)
        )
        if upload.state == "completed":
            return await self._completed(principal, upload)
        if ended_state(upload, viewer.now_at) != "pending":
            state = ended_state(upload, viewer.now_at)
            raise invalid("upload_id", f"the upload is {state}: create a new one")
        wanted = _wanted_parts(upload, parts, asked.part_ids)
        try:
            with self._receiver.place(principal.tenant_id):
                file = await self._join(upload, wanted, asked.md5)
        except UploadOver as error:
            raise invalid("upload_id", f"{error}: create a new one") from error
        if file is None:  # another request ended it meanwhile
            return await self.complete(principal, upload_id, body)
        ended = replace(upload, state="completed", file_id=file.id)
        return _encode(upload_object(ended, file))

    async def cancel(self, principal: Principal, upload_id: str) -> bytes:
        """It has no parts any more, and takes none. One that has ended stays as it is."""
        access = self._access
        viewer = access.viewer(principal)
        record = await access.read(
            principal, "upload", upload_id, lambda: access.store.cancel(viewer, upload_id)
        )
        if record.state != "cancelled":
            raise invalid("upload_id", f"the upload is {record.state}: it cannot be cancelled")
        return _encode(upload_object(record))

    async def _completed(self, principal: Principal, upload: UploadRecord) -> bytes:
        access, file_id = self._access, upload.file_id or ""
        viewer = access.viewer(principal)
        file = await access.read(
            principal, "file", file_id, lambda: access.store.get(viewer, file_id)
        )
        return _encode(upload_object(upload, file))

    async def _join(
        self, upload: UploadRecord, parts: Sequence[UploadPartRecord], md5: str | None
    ) -> FileRecord | None:
        """None where the upload has ended meanwhile."""
        access, store, receiver = self._access, self._access.store, self._receiver
        digest = hashlib.md5(usedforsecurity=False)
        pieces = store.part_pieces(parts)
        writer = await receiver.write(lambda: store.writer(upload.tenant_id, files.KIND))

        def step() -> bool:
            piece = next(pieces, b"")
            writer.write(piece)
            if md5 is not None:
                digest.update(piece)
            return bool(piece)

        try:
            while await receiver.write(step):
                pass
            if md5 is not None and digest.hexdigest() != md5.lower():
                message = "md5 is not that of the parts in this order: send what is wrong again"
                raise invalid("md5", message)
            now_at = access.wall_clock()
            record = FileRecord(
                id=FILE_PREFIX + secrets.token_hex(16),
                tenant_id=upload.tenant_id,
                purpose=upload.purpose,
                filename=upload.filename,
                size_bytes=0,
                sha256="",
                object_name="",
                created_at=now_at,
                expires_at=access.expires_at(now_at, upload.file_expires_s),
            )
            return await receiver.write(partial(store.complete, upload.id, writer, record))
        except BaseException:
            await receiver.undo(writer.abort)
            raise


def _wanted_parts(
    upload: UploadRecord, parts: dict[str, UploadPartRecord], part_ids: Sequence[str]
) -> list[UploadPartRecord]:
    """Raises ApiError where they are not the upload's, or not all of its bytes."""
    missing = [part_id for part_id in part_ids if part_id not in parts]
    if missing:
        raise invalid("part_ids", f"the upload has no part {missing[0][:80]!r}: send it first")
    if len(set(part_ids)) != len(part_ids):
        raise invalid("part_ids", "part_ids names a part twice: name each once")
    wanted = [parts[part_id] for part_id in part_ids]
    num_bytes = sum(part.size_bytes for part in wanted)
    if num_bytes != upload.size_bytes:
        message = (
            f"the parts have {num_bytes} bytes and the upload was created for "
            f"{upload.size_bytes}: send the missing parts, or create another upload"
        )
        raise invalid("part_ids", message)
    return wanted
