"""The file of a batch: its lines one by one, and what is wrong with them.

Comes in: the file's bytes in pieces. Goes out: lines with their numbers, or OpenAI's error objects
for lines that no request can be made of. A line is `{"custom_id", "method", "url", "body"}`. Never
more than a line and a piece is in memory; of earlier lines a digest of the `custom_id` stays.
"""

import hashlib
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from gateway.types import RequestKind

RESPONSES = "/v1/responses"
ENDPOINTS: dict[str, tuple[RequestKind, str]] = {
    RESPONSES: ("chat", "responses"),
    "/v1/chat/completions": ("chat", ""),
    "/v1/completions": ("completion", ""),
    "/v1/embeddings": ("embedding", ""),
    "/v1/classify": ("classify", ""),
    "/v1/rerank": ("rerank", ""),
    "/v1/score": ("score", ""),
}
"""What a request to each is, and its dialect's name, if it is not the one of its kind."""
_NOTHING = msgspec.Raw(b"null")
MAX_LINES = 50_000
MAX_ERRORS = 100
"""That are told; the file is not read further."""
MAX_CUSTOM_ID_CHARS = 512
MAX_MODEL_CHARS = 128
"""As in the catalog."""
MAX_MESSAGE_CHARS = 512
"""Of an error that is told; longer ones are cut."""


class BatchLine(msgspec.Struct):
    """One request."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = _NOTHING

    def refused(self, endpoint: str) -> str:
        """The field that a line may not have, or ""."""
        is_response = endpoint == RESPONSES
        for name, is_there in (
            ("stream", self.stream),
            ("background", is_response and self.background),
            ("previous_response_id", is_response and self.previous_response_id),
            ("conversation", is_response and self.conversation != _NOTHING),
        ):
            if is_there:
                return name
        return ""


_CUSTOM_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_line_decoder = msgspec.json.Decoder(BatchLine)
_body_decoder = msgspec.json.Decoder(_Body)


class WrongLine(Exception):
    """No request can be made of a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(slots=True)
class CheckedInput:
    """What was found. `error_lines`: OpenAI's error objects; none where the file is right."""

    model: str = ""
    num_lines: int = 0
    error_lines: list[dict[str, Any]] = field(default_factory=list)


def lines_of(pieces: Iterable[bytes], max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers in the file, the first 1. One that is longer
    than `max_bytes` comes as its beginning, which is no JSON. Raises WrongLine where more than
    MAX_LINES are empty."""
    return chain.from_iterable(_lines_by_piece(pieces, max_bytes))


def _lines_by_piece(
    pieces: Iterable[bytes], max_bytes: int
) -> Generator[list[tuple[int, bytes]], None, None]:
    """As `lines_of`, of each piece those that end in it."""
    rest, number, num_empty, is_cut = b"", 0, 0, False
    for piece in pieces:
        found = []
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            number += 1
            if not line.strip():
                num_empty += not is_cut
            elif not is_cut:
                found.append((number, line[:max_bytes]))
            is_cut = False
        if num_empty > MAX_LINES:
            message = f"the file has more than {MAX_LINES} empty lines: leave them out"
            raise WrongLine("too_many_empty_lines", message)
        if len(rest) > max_bytes:
            if not is_cut:
                found.append((number + 1, rest[:max_bytes]))
            rest, is_cut = b"", True
        yield found
    if rest.strip() and not is_cut:
        yield [(number + 1, rest)]


def custom_id_of(data: bytes) -> str:
    """Of a line that may be cut, where it begins with that; else ""."""
    found = _CUSTOM_ID.match(data)
    try:
        return "" if found is None else msgspec.json.decode(found[1], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def read_line(data: bytes) -> BatchLine:
    """Raises WrongLine."""
    try:
        line = _line_decoder.decode(data)
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise WrongLine("invalid_line", f"the line is not a request: {error}") from error
    except msgspec.DecodeError as error:
        message = "the line is not valid JSON, or longer than a request may be"
        raise WrongLine("invalid_json_line", message) from error
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise WrongLine("invalid_custom_id", message, "custom_id")
    if line.method != "POST":
        raise WrongLine("invalid_method", "method must be POST", "method")
    return line


class InputCheck:
    """Checks all of a file, a piece at a time. `found` is whole when `step` has returned False."""

    def __init__(self, pieces: Iterable[bytes], max_line_bytes: int, endpoint: str) -> None:
        self.found = CheckedInput()
        self._endpoint = endpoint
        self._steps = _lines_by_piece(pieces, max_line_bytes)
        self._seen: set[bytes] = set()

    def step(self) -> bool:
        """Check the next piece. False: nothing more is to be read."""
        try:
            lines = next(self._steps, None)
        except WrongLine as wrong:
            return self._fail(wrong)
        if lines is None:
            if self.found.num_lines:
                return False
            return self._fail(WrongLine("empty_file", "the file has no requests: add one"))
        return all(self._has_more(number, data) for number, data in lines)

    def _has_more(self, number: int, data: bytes) -> bool:
        found = self.found
        found.num_lines += 1
        if found.num_lines > MAX_LINES:
            message = f"the file has more than {MAX_LINES} requests: make several files of it"
            return self._fail(WrongLine("too_many_tasks", message))
        try:
            _check(read_line(data), self._endpoint, found, self._seen)
        except WrongLine as wrong:
            found.error_lines.append(error_line(number, wrong))
        return len(found.error_lines) < MAX_ERRORS

    def _fail(self, wrong: WrongLine) -> bool:
        self.found.error_lines.append(error_line(None, wrong))
        return False


def _check(line: BatchLine, endpoint: str, found: CheckedInput, seen: set[bytes]) -> None:
    """Raises WrongLine."""
    if line.url != endpoint:
        message = f"url {line.url[:80]!r} is not the endpoint of the batch, {endpoint}"
        raise WrongLine("mismatched_endpoint", message, "url")
    digest = hashlib.blake2b(line.custom_id.encode(errors="replace"), digest_size=16).digest()
    if digest in seen:
        message = f"custom_id {line.custom_id[:80]!r} is there more than once"
        raise WrongLine("duplicate_custom_id", message, "custom_id")
    seen.add(digest)
    try:
        body = _body_decoder.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WrongLine("invalid_request", f"the body is not a request: {error}", "body") from error
    name = body.refused(endpoint)
    if name:
        raise WrongLine("unsupported_parameter", f"{name} is not supported in batches", name)
    if len(body.model) > MAX_MODEL_CHARS:
        message = f"model has more than {MAX_MODEL_CHARS} characters: send a name of GET /v1/models"
        raise WrongLine("model_not_found", message, "model")
    found.model = found.model or body.model
    if body.model != found.model:
        message = f"the batch has requests to {found.model[:80]!r}: all must be to one model"
        raise WrongLine("mismatched_model", message, "model")


def error_line(number: int | None, wrong: WrongLine) -> dict[str, Any]:
    """OpenAI's object; `number` None: it is the whole file's."""
    return {
        "code": wrong.code,
        "line": number,
        "message": wrong.message[:MAX_MESSAGE_CHARS],
        "param": wrong.param,
    }
