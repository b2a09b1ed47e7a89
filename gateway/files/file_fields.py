"""What callers say of a file, and what they are told of one. OpenAI's fields and objects.

Comes in: fields of a form or of a JSON body, and records. Goes out: checked values, or an ApiError
that names the field; OpenAI's objects.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.bodies import invalid, unsupported
from gateway.settings.base_settings import MIB
from registry.state.files import MAX_FILENAME_CHARS, FileRecord
from registry.state.uploads import UploadRecord

BATCH = "batch"
PURPOSES = ("assistants", BATCH, "fine-tune", "vision", "user_data", "evals")
"""What a caller may say that a file is for."""
MAX_BATCH_BYTES = 200 * MIB
"""Of a file of requests, as OpenAI has it."""
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FORM_FIELDS = ("purpose", ANCHOR, SECONDS)
LEAST_EXPIRES_S, MOST_EXPIRES_S = 3600, 30 * 86_400
MAX_PAGE = 10_000
_QUERY = frozenset({"limit", "order", "after", "purpose"})
_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FilePage:
    """Which files a list is to have."""

    limit: int = MAX_PAGE
    descending: bool = True
    after: str = ""
    purpose: str = ""


def purpose_of(text: str | None) -> str:
    """Raises ApiError."""
    if text is None:
        raise invalid("purpose", f"purpose is required: one of {', '.join(PURPOSES)}")
    if text not in PURPOSES:
        raise invalid("purpose", f"purpose {text[:80]!r} must be one of {', '.join(PURPOSES)}")
    return text


def filename_of(text: str) -> str:
    """As the file is listed; never a name of anything here. Raises ApiError."""
    if not 0 < len(text) <= MAX_FILENAME_CHARS or _UNFIT.search(text):
        message = f"the file's name must have 1 to {MAX_FILENAME_CHARS} characters, none of control"
        raise invalid("filename", message)
    return text


def most_bytes(purpose: str | None, max_bytes: int) -> int:
    """How large a file for this may be, where files may have `max_bytes`."""
    return min(max_bytes, MAX_BATCH_BYTES) if purpose == BATCH else max_bytes


def expires_in(
    anchor: str | None, seconds: str | None, field: str = "expires_after"
) -> float | None:
    """Seconds after a file is made; None: nobody said. `field`: where it is said. Raises
    ApiError."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid(f"{field}[anchor]", f"{field}[anchor] must be 'created_at'")
    text = seconds or ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        text = "0"
    if not LEAST_EXPIRES_S <= int(text) <= MOST_EXPIRES_S:
        span = f"{LEAST_EXPIRES_S} (one hour) to {MOST_EXPIRES_S} (30 days)"
        message = f"{field}[seconds] must be a whole number of seconds from {span}"
        raise invalid(f"{field}[seconds]", message)
    return float(text)


def page_of(params: Mapping[str, Sequence[str]]) -> FilePage:
    """Of a query. Raises ApiError."""
    for name in params.keys() - _QUERY:
        raise unsupported(name)
    limit = limit_of(params, MAX_PAGE, MAX_PAGE)
    order = params.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc")
    purpose = params.get("purpose", [""])[-1]
    if _UNFIT.search(purpose):  # PostgreSQL takes no NUL
        raise invalid("purpose", "purpose has control characters: remove them")
    return FilePage(limit, order == "desc", params.get("after", [""])[-1], purpose)


def limit_of(params: Mapping[str, Sequence[str]], usual: int, most: int) -> int:
    """How many a page is to have. `most`: at most 99,999. Raises ApiError."""
    limit = params.get("limit", [str(usual)])[-1]
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 5
    if not (is_number and 1 <= int(limit) <= most):
        raise invalid("limit", f"limit must be a whole number from 1 to {most}")
    return int(limit)


def file_object(record: FileRecord) -> dict[str, Any]:
    """OpenAI's object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_object(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list object. `found`: one object more than `limit` where there are more."""
    shown = found[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > limit,
    }


def upload_object(record: UploadRecord, file: FileRecord | None = None) -> dict[str, Any]:
    """OpenAI's object. `file`: what it has become."""
    return {
        "id": record.id,
        "object": "upload",
        "bytes": record.size_bytes,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": record.state,
        "file": None if file is None else file_object(file),
    }
