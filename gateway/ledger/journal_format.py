"""What a journal's segments hold: frames, and how they are read where the disk lied (stage 10).

    segment  = 8 bytes that say what this is, then frames, then zeros (its room is allocated ahead)
    frame    = mark (4 bytes), length (4), CRC-32 of the rest (4), kind (1), record as msgpack

Records are maps by field name, so that a journal of an earlier release is read by a later one:
fields that are new have defaults. Reading tells three things apart: the end (zeros), a torn tail (a
frame that is not whole, and no whole one behind it: it never was durable), and damage (whole frames
behind it: something that was written is lost). What is behind damage is found by its mark.

No files here: bytes in, bytes out.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from registry.ledger import Checkpoint, OpenRecord, Posting

SEGMENT_HEAD = b"PHJRNL1\n"
MARK = b"\xf5\x9bPJ"
_FRAME = struct.Struct("<4sII")
MAX_RECORD_BYTES = 16_384
"""Ids and names are bounded to a twentieth of it; whatever claims to be longer is damage."""
END_BYTES = 1280
"""What the end of a request takes at most, which must fit whatever happens."""


class Void(msgspec.Struct, frozen=True):
    """Close an open record without a posting."""

    request_id: str


Record: TypeAlias = OpenRecord | Posting | Void | Checkpoint

_KINDS: tuple[type[Record], ...] = (OpenRecord, Posting, Void, Checkpoint)
"""By number; a kind that was written once keeps its number."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that hold no record and should. `torn`: nothing whole comes behind."""

    offset: int
    num_bytes: int
    torn: bool


class UnknownRecord(ValueError):
    """A frame is whole, but no record of this release."""


class RecordCodec:
    """One per thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = {kind: number for number, kind in enumerate(_KINDS)}
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]

    def frame(self, record: Record) -> bytes:
        """Raises ValueError on what cannot be written: text that is none, a record too long."""
        body = bytes((self._numbers[type(record)],)) + self._encoder.encode(record)
        if len(body) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(body)} bytes for request {record.request_id!r}")
        return _FRAME.pack(MARK, len(body), zlib.crc32(body)) + body

    def read(self, data: bytes) -> Iterator[tuple[Record | Damage, int]]:
        """Each record or damage in order, with the offset behind it. Raises UnknownRecord."""
        offset = len(SEGMENT_HEAD) if data.startswith(SEGMENT_HEAD) else 0
        while True:
            body = _body_at(data, offset)
            if body is not None:
                offset += _FRAME.size + len(body)
                yield self._record(body), offset
                continue
            written = len(data[offset:].rstrip(b"\0"))
            if not written:
                return
            found = _next_frame(data, offset + 1)
            end = offset + written if found is None else found
            yield Damage(offset, end - offset, torn=found is None), end
            if found is None:
                return
            offset = found

    def _record(self, body: bytes) -> Record:
        if body[0] >= len(self._decoders):
            raise UnknownRecord(f"a record of kind {body[0]}: a newer release wrote it")
        try:
            return self._decoders[body[0]].decode(memoryview(body)[1:])
        except msgspec.MsgspecError as error:
            raise UnknownRecord(f"a record that is none: {error}") from error


def _body_at(data: bytes, offset: int) -> bytes | None:
    """The frame's body, where there is a whole one."""
    if offset + _FRAME.size > len(data):
        return None
    mark, length, checksum = _FRAME.unpack_from(data, offset)
    end = offset + _FRAME.size + length
    if mark != MARK or not 0 < length <= MAX_RECORD_BYTES or end > len(data):
        return None
    body = data[offset + _FRAME.size : end]
    return body if zlib.crc32(body) == checksum else None


def _next_frame(data: bytes, offset: int) -> int | None:
    while (offset := data.find(MARK, offset)) >= 0:
        if _body_at(data, offset) is not None:
            return offset
        offset += 1
    return None
