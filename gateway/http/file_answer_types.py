"""What answers about files, uploads and batches hold, as types: answer_types.py for these."""

from typing import Literal

import msgspec

from registry.state.batches import BatchState


class _Struct(msgspec.Struct, kw_only=True):
    pass


class FileAnswer(_Struct):
    """A file of /v1/files."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FilesAnswer(_Struct):
    """GET /v1/files: a page."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeletedAnswer(_Struct):
    """DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: bool


class UploadAnswer(_Struct):
    """An upload of /v1/uploads."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled"]
    file: FileAnswer | None


class UploadPartAnswer(_Struct):
    """POST /v1/uploads/{upload_id}/parts."""

    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class _BatchError(_Struct):
    code: str
    line: int | None
    message: str
    param: str | None


class _BatchErrors(_Struct):
    object: Literal["list"]
    data: list[_BatchError]


class _BatchCounts(_Struct):
    total: int
    completed: int
    failed: int


class BatchAnswer(_Struct):
    """A batch of /v1/batches."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: _BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: _BatchCounts
    metadata: dict[str, str] | None


class BatchesAnswer(_Struct):
    """GET /v1/batches: a page."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
