"""Lines of a batch's output and error files, and the batch as it is told. OpenAI's objects."""

import hashlib
from typing import Any

import msgspec

from gateway.errors import ApiError
from registry.state.batches import BatchRecord

OUTPUT_PURPOSE = "batch_output"
WINDOW = "24h"
EXPIRED = ("batch_expired", "the batch's time was up before this request was answered")
_encode = msgspec.json.Encoder().encode


def line_id(batch_id: str, number: int) -> str:
    """What a line's request is called: 128 bits in hex, the same however often it is made, so that
    the ledger posts it once."""
    return hashlib.sha256(f"{batch_id}/{number}".encode()).hexdigest()[:32]


def answered_line(custom_id: str, request_id: str, body: bytes) -> bytes:
    """Of a request that was answered."""
    if b"\n" in body:
        body = _encode(msgspec.json.decode(body))
    return _line(custom_id, request_id, 200, body)


def refused_line(custom_id: str, request_id: str, error: ApiError) -> bytes:
    """Of a request that was refused, or failed."""
    return _line(custom_id, request_id, error.kind.status, _encode(error.body()))


def unanswered_line(custom_id: str, request_id: str, code: str, message: str) -> bytes:
    """Of a request that was not made."""
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return _encode(line) + b"\n"


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """OpenAI's object."""
    ended = {f"{record.state}_at": record.ended_at}
    shown = {
        "in_progress_at": record.in_progress_at,
        "finalizing_at": record.finalizing_at,
        "cancelling_at": record.cancelling_at,
        **dict.fromkeys(("completed_at", "failed_at", "expired_at", "cancelled_at")),
        **(ended if record.ended_at is not None else {}),
    }
    errors = {"object": "list", "data": list(record.error_lines)} if record.error_lines else None
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model or None,
        "errors": errors,
        "input_file_id": record.input_file_id,
        "completion_window": WINDOW,
        "status": record.state,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at),
        **{name: None if at is None else int(at) for name, at in shown.items()},
        "request_counts": {
            "total": record.num_lines,
            "completed": record.num_completed,
            "failed": record.num_failed,
        },
        "metadata": record.details or None,
    }


def _line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    return (
        b'{"id":"batch_req_%b","custom_id":%b,"response":{"status_code":%d,"request_id":"%b",'
        b'"body":%b},"error":null}\n'
    ) % (request_id.encode(), _encode(custom_id), status, request_id.encode(), body)
