"""The gateway's error tree and the one table from errors to HTTP.

    ApiError                 ends in OpenAI's error object with a stable `code`
    ClientGone               nobody waits for the answer any more
    WorkerLost               workers died with it too often, after tokens: an error event, no bill
    IllegalTransition        a bug: an event that a state table does not allow

Messages tell the caller what to do. `retry_after_s` is set only where waiting helps. `is_final`:
the request alone is over a limit, so it never goes, however long its caller waits.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

_PATH = re.compile(r"(?<![\w.])/\w")
"""The beginning of an absolute path; a model's name has its slash within."""


class WorkerLost(Exception):
    """The worker that was running this request is gone, and it is not tried again."""


class IllegalTransition(Exception):
    """An event that the object's state does not allow (a bug); nothing was changed."""


class ClientGone(Exception):
    """The client went away before its answer was ready; there is nobody to answer."""


Fault: TypeAlias = Literal["none", "client", "limit", "server"]
"""Whose it is that a request got no answer: the request's, a limit's (a full queue is one, too), or
this server's. `none`: it got one."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A row of the table: HTTP status, OpenAI `type`, stable `code`."""

    status: int
    type: str
    code: str

    @property
    def fault(self) -> Fault:
        """As metrics count it."""
        if self.status >= 500:
            return "server"
        return "limit" if self.status == 429 else "client"


INVALID_REQUEST = ErrorKind(400, "invalid_request_error", "invalid_request")
INVALID_CONSTRAINT = ErrorKind(400, "invalid_request_error", "invalid_constraint")
CONTEXT_LENGTH = ErrorKind(400, "invalid_request_error", "context_length_exceeded")
UNSUPPORTED_PARAMETER = ErrorKind(400, "invalid_request_error", "unsupported_parameter")
WRONG_TASK = ErrorKind(400, "invalid_request_error", "wrong_task")
INVALID_API_KEY = ErrorKind(401, "invalid_request_error", "invalid_api_key")
IP_NOT_AUTHORIZED = ErrorKind(401, "invalid_request_error", "ip_not_authorized")
FORBIDDEN = ErrorKind(403, "invalid_request_error", "permission_denied")
MODEL_NOT_FOUND = ErrorKind(404, "invalid_request_error", "model_not_found")
NOT_FOUND = ErrorKind(404, "invalid_request_error", "not_found")
PREVIOUS_NOT_FOUND = ErrorKind(404, "invalid_request_error", "previous_response_not_found")
METHOD_NOT_ALLOWED = ErrorKind(405, "invalid_request_error", "method_not_allowed")
REQUEST_TIMEOUT = ErrorKind(408, "invalid_request_error", "request_timeout")
CONFLICT = ErrorKind(409, "invalid_request_error", "conflict")
IDEMPOTENCY_CONFLICT = ErrorKind(409, "invalid_request_error", "idempotency_conflict")
IDEMPOTENCY_RUNNING = ErrorKind(409, "invalid_request_error", "idempotency_in_progress")
TOO_LARGE = ErrorKind(413, "invalid_request_error", "request_too_large")
UNSUPPORTED_MEDIA = ErrorKind(415, "invalid_request_error", "unsupported_media_type")
HEADERS_TOO_LARGE = ErrorKind(431, "invalid_request_error", "headers_too_large")
RATE_LIMITED = ErrorKind(429, "rate_limit_error", "rate_limit_exceeded")
INSUFFICIENT_QUOTA = ErrorKind(429, "insufficient_quota", "insufficient_quota")
QUEUE_FULL = ErrorKind(429, "rate_limit_error", "queue_full")
SERVER_ERROR = ErrorKind(500, "server_error", "server_error")
UNAVAILABLE = ErrorKind(503, "server_error", "service_unavailable")
MODEL_FAILED = ErrorKind(503, "server_error", "model_failed")

DEADLINE_EXCEEDED = ErrorKind(504, "server_error", "deadline_exceeded")
# By their status SDKs would ask again: to be told the same, or to wait as long once more.
_NOT_TO_BE_RETRIED = (INSUFFICIENT_QUOTA, IDEMPOTENCY_CONFLICT, MODEL_FAILED, DEADLINE_EXCEEDED)


class ApiError(Exception):
    """An answer other than 2xx. Raised anywhere before the first byte of the answer is sent."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_final = is_final

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What SDKs obey: how long to wait, and whether it is of any use to ask again."""
        headers = []
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", b"%d" % seconds))
            milliseconds = max(1, math.ceil(self.retry_after_s * 1000))
            headers.append((b"retry-after-ms", b"%d" % milliseconds))
        if self.kind in _NOT_TO_BE_RETRIED:
            headers.append((b"x-should-retry", b"false"))
        if self.kind == REQUEST_TIMEOUT:  # What may yet come of the body is nothing to read.
            headers.append((b"connection", b"close"))
        if self.kind.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind.type,
                "param": self.param,
                "code": self.kind.code,
            }
        }


def model_gone(name: str) -> ApiError:
    """The catalog does not name it any more."""
    return ApiError(MODEL_NOT_FOUND, f"the model {name!r} is no longer available", param="model")


def context_overflow(max_context: int, what: str, advice: str, param: str) -> ApiError:
    """A prompt that does not fit. LiteLLM looks for the beginning of this message, LangChain for
    the code in it: by these they know that a shorter prompt, or another model, may do."""
    message = (
        f"This model's maximum context length is {max_context} tokens. However, {what}. {advice} "
        f"({CONTEXT_LENGTH.code})"
    )
    return ApiError(CONTEXT_LENGTH, message, param)


def wrong_task(name: str, task: str) -> ApiError:
    """A model of this task was asked for something else."""
    does, routes = {
        "generate": ("generates text", "/v1/chat/completions or /v1/completions"),
        "embed": ("embeds texts", "/v1/embeddings"),
        "classify": ("classifies texts", "/v1/classify, /v1/rerank or /v1/score"),
    }[task]
    return ApiError(WRONG_TASK, f"the model {name!r} {does}: use {routes}", "model")


def model_failed(name: str, reason: str) -> ApiError:
    """It is hosted and cannot be served now."""
    return ApiError(MODEL_FAILED, f"the model {name!r} cannot be served: {for_tenants(reason)}")


def for_tenants(reason: str) -> str:
    """A worker's words without the paths of this server's files: those are in the log, on the
    operators' pages and in `polyhost why`."""
    if _PATH.search(reason) is None:
        return reason
    return "its pack is damaged or cannot be read; tell the operator of this server"


def unenforceable(reason: str) -> ApiError:
    """A form of answer that the worker cannot hold a model to."""
    text = f"the requested output format cannot be enforced: {reason}"
    return ApiError(INVALID_CONSTRAINT, text)


def model_replaced(name: str) -> ApiError:
    """Another revision has its name: token ids of the old one may mean nothing to it."""
    message = f"the model {name!r} was replaced while the request was queued: retry the request"
    return ApiError(UNAVAILABLE, message, retry_after_s=1.0)
