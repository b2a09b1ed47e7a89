"""A body with a file in it, as it comes: `multipart/form-data` taken apart piece by piece.

Comes in: what a request says of its body, and the body's bytes as they arrive. Goes out: the small
fields of the form, and the file's bytes, never more of them at a time than arrived together. The
parser is python-multipart's, which Starlette's own forms use as well; those would write the file to
a temporary folder first.

Fields may stand before the file or behind it, so what they say is checked at the end.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from gateway.api.bodies import invalid, unsupported
from gateway.errors import INVALID_REQUEST, TOO_LARGE, UNSUPPORTED_MEDIA, ApiError

FORM = b"multipart/form-data"
MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
MIN_BOUNDARY_BYTES = 8
"""Bytes that begin like a boundary cost most where the boundary is short. Clients use 16 to 70."""
OVERHEAD_BYTES = 65_536
"""What a form may have beside its file: boundaries, headers, fields, what follows the end."""


@dataclass(frozen=True, slots=True)
class FileBody:
    """A request's body. `length_bytes` None: nobody said. `receive`: the next bytes, none at the
    end; raises ClientGone, and ApiError where the body takes too long."""

    content_type: str
    length_bytes: int | None
    receive: Callable[[], Awaitable[bytes]]


class FileForm:
    """What has come of a form. `fields`: by name, without the file's; `filename` None: it has
    none."""

    def __init__(self, content_type: str, file_field: str, known: Collection[str]) -> None:
        """`file_field`: what the file is called; `known`: the other fields that there may be.
        Raises ApiError where the body is no form."""
        media, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if media != FORM or not boundary:
            message = "unsupported Content-Type: send the file as multipart/form-data"
            raise ApiError(UNSUPPORTED_MEDIA, message)
        if len(boundary) < MIN_BOUNDARY_BYTES:
            message = (
                f"the form's boundary is shorter than {MIN_BOUNDARY_BYTES} bytes: use a longer one"
            )
            raise ApiError(INVALID_REQUEST, message)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.has_file = False
        self.file_field = file_field
        self._known = known
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._field: str | None = None
        self._text = bytearray()
        self._pieces: list[bytes] = []
        self._num_beside = 0
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._headers.clear,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from error

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the body. Returns those of the file among them. Raises ApiError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from error
        pieces, self._pieces = self._pieces, []
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._num_beside += len(data) - len(piece)
        if self._num_beside > OVERHEAD_BYTES:
            message = f"the form has more than {OVERHEAD_BYTES} bytes beside its file: send less"
            raise ApiError(TOO_LARGE, message)
        return piece

    def check_end(self) -> None:
        """All of the body has come. Raises ApiError where the form is not whole."""
        if not self._has_ended:
            raise ApiError(INVALID_REQUEST, "the form ends before its last boundary: send it again")
        if not self.has_file:
            raise invalid(self.file_field, f"{self.file_field} is required: send a file")

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers(self) -> None:
        """A part begins. Raises ApiError."""
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = _text(options.get(b"name", b""), "the name of a field")
        if name == self.file_field:
            if self.has_file:
                raise invalid(name, f"{name} is there more than once: send one file")
            self.has_file, self._field = True, None
            if b"filename" in options:
                self.filename = _text(options[b"filename"], "the file's name")
            return
        if name not in self._known:
            raise unsupported(name[:80])
        if name in self.fields or len(self.fields) >= MAX_FIELDS:
            raise invalid(name, f"{name} is there more than once: send it once")
        self._field = name

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        """Raises ApiError."""
        if self._field is None:
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            most = f"the maximum is {MAX_FIELD_BYTES} bytes"
            raise invalid(self._field, f"{self._field} is too long, {most}")

    def _on_part_end(self) -> None:
        """Raises ApiError."""
        if self._field is not None:
            self.fields[self._field] = _text(bytes(self._text), self._field)
            self._text.clear()
            self._field = None

    def _on_end(self) -> None:
        self._has_ended = True


def _text(data: bytes, what: str) -> str:
    """Raises ApiError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(INVALID_REQUEST, f"{what} is not valid UTF-8") from error


def _malformed(error: Exception) -> ApiError:
    return ApiError(INVALID_REQUEST, f"the form is malformed: {error}")
