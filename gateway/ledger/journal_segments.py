"""A journal's segments (stage 10, below journal.py): their bytes, and their files on the disk.

    spare --begin_next--> newest --the next one begins--> whole --release--> deleted

    segment  = 8 bytes that say what this is, then frames, then zeros (its room is allocated ahead)
    frame    = mark (4 bytes), length (4), CRC-32 of the rest (4), kind (1), record as msgpack

Records are maps by field name, so that a journal of an earlier release is read by a later one:
fields that are new have defaults. Reading tells three things apart: the end (zeros), a torn tail (a
frame that is not whole, and no whole one behind it: it never was durable), and damage (whole frames
behind it: something that was written is lost). What is behind damage is found by its mark.

`RecordCodec` has bytes alone. `Files` is the disk, a seam for tests: the few calls whose order and
failures decide what survives. `Segments` are numbered files, one of them the newest, and a spare
one ahead. What is written, and when, is journal.py's.
"""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from gateway.settings.settings import Settings
from registry.money.ledger import Checkpoint, OpenRecord, Posting

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


OnDurable = Callable[[Sequence[Any], BaseException | None], None]
"""(tags, None): these are durable; (tags, error): these never will be."""


class JournalRefused(Exception):
    """Nothing new is taken now, for the reason given."""


class JournalStopped(Exception):
    """The journal ended before the record was durable; a restart's recovery closes it."""


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """See settings.py."""

    segment_bytes: int
    max_bytes: int
    min_free_bytes: int
    flush_interval_s: float
    sync_interval_s: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> "JournalLimits":
        """Of every journal in the data folder."""
        return cls(
            settings.journal_segment_bytes,
            settings.journal_max_bytes,
            settings.journal_min_free_bytes,
            settings.ledger_flush_interval_s,
            settings.ledger_sync_interval_s,
        )


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Between two frames of a segment."""

    segment: int
    offset: int = 0


class Files(Protocol):
    """What a journal needs of a folder. Paths are absolute; errors are OSError.

    Tests run the journal on one that forgets what was not synced, or that is full, at any call.
    """

    def allocate(self, path: Path, num_bytes: int, head: bytes) -> None:
        """Make a file of zeros that begins with `head`, its room taken on the disk, and sync it.
        Leaves nothing behind where it fails."""

    def open(self, path: Path) -> int:
        """For `write` and `sync`."""

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """All of it."""

    def sync(self, descriptor: int) -> None:
        """Its data survives a power cut from here on."""

    def close(self, descriptor: int) -> None:
        """Forget the descriptor."""

    def rename(self, path: Path, to: Path) -> None:
        """And sync the folder."""

    def delete(self, path: Path) -> None:
        """And sync the folder."""

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """So many bytes from there, or as many as there are."""

    def names(self, folder: Path) -> list[str]:
        """Of what lies in it, sorted."""

    def free_bytes(self, folder: Path) -> int:
        """What this user may still take of the disk."""


class DiskFiles:
    """The real one."""

    def allocate(self, path: Path, num_bytes: int, head: bytes) -> None:
        """See Files."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            self.write(descriptor, head, 0)
            os.fsync(descriptor)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        self._sync_folder(path.parent)

    def open(self, path: Path) -> int:
        """See Files."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """See Files."""
        num_written = os.pwrite(descriptor, data, offset)
        while num_written < len(data):
            num_written += os.pwrite(descriptor, data[num_written:], offset + num_written)

    def sync(self, descriptor: int) -> None:
        """See Files."""
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        """See Files."""
        os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """See Files."""
        path.rename(to)
        self._sync_folder(to.parent)

    def delete(self, path: Path) -> None:
        """See Files."""
        path.unlink(missing_ok=True)
        self._sync_folder(path.parent)

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """See Files."""
        with path.open("rb") as stream:
            left = os.fstat(stream.fileno()).st_size - offset
            stream.seek(offset)
            return stream.read(max(0, min(num_bytes, left)))

    def names(self, folder: Path) -> list[str]:
        """See Files."""
        return sorted(os.listdir(folder))

    def free_bytes(self, folder: Path) -> int:
        """See Files."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


logger = logging.getLogger(__name__)

SPARE = "spare"
SUFFIX = ".journal"
_WHOLE_FILE = 1 << 40


class Segments:
    """Of one folder. Knows where each ends durably, as the journal says after a sync, and reads no
    further. One thread begins segments, another one reads and releases them."""

    def __init__(self, folder: Path, segment_bytes: int, files: Files) -> None:
        self.has_spare = False
        self.num_damaged = 0
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._files = files
        self._codec = RecordCodec()
        self._ends: dict[int, int] = {}
        """Segments that are there -> where their durable part ends."""
        self._current = self._last_old = 0

    def find(self) -> Position:
        """See what an earlier process left: where that begins. A spare one that is there may be
        half made: it is made anew. Raises OSError."""
        left = [int(name.split(".")[0]) for name in self._files.names(self._folder) if _is(name)]
        self._ends = dict.fromkeys(left, _WHOLE_FILE)
        self._current = self._last_old = max(left, default=0)
        return Position(min(left, default=self._current))

    def make_spare(self) -> None:
        """Unless there is one. Raises OSError."""
        if not self.has_spare:
            path = self._folder / SPARE
            self._files.allocate(path, self._segment_bytes, SEGMENT_HEAD)
            self.has_spare = True

    def begin_next(self) -> int:
        """The spare one becomes the newest: its descriptor. Raises OSError."""
        number = self._current + 1
        self.has_spare = False  # Where the call fails, nobody knows which name it has.
        self._files.rename(self._folder / SPARE, self._path(number))
        descriptor = self._files.open(self._path(number))
        self._ends[number] = len(SEGMENT_HEAD)
        self._current = number
        return descriptor

    def synced(self, end: int) -> None:
        """The newest is durable up to there."""
        self._ends[self._current] = end

    def is_old(self, at: Position) -> bool:
        """Whether what comes there was left by an earlier process."""
        return at.segment <= self._last_old

    @property
    def num_bytes(self) -> int:
        """Room that they take, the spare one and the newest not counted."""
        return max(0, len(self._ends) - 1) * self._segment_bytes

    @property
    def durable(self) -> Position:
        """The end of what is durable."""
        return Position(self._current, self._ends.get(self._current, 0))

    def read(self, at: Position, max_bytes: int) -> tuple[list[Record], Position]:
        """Records that are durable from there on, and where they end. What is damaged is reported
        and passed over. Raises OSError."""
        whole = self.is_old(at) or at.segment < self._current  # First: then its end is final.
        end = self._ends.get(at.segment)
        if end is None:
            return [], self._after(at)
        data = self._files.read(self._path(at.segment), at.offset, end - at.offset)
        records: list[Record] = []
        offset = 0
        try:
            for found, offset in self._codec.read(data):
                if isinstance(found, Damage):
                    self._damaged(at, found)
                    continue
                records.append(found)
                if offset >= max_bytes:
                    return records, Position(at.segment, at.offset + offset)
        except UnknownRecord as error:
            raise OSError(f"{self._path(at.segment)}: {error}") from error
        return records, self._after(at) if whole else Position(at.segment, end)

    def release(self, before: Position) -> None:
        """All records before it are in the database. Raises OSError."""
        for number in sorted(self._ends):
            if number >= before.segment:
                return
            self._files.delete(self._path(number))
            del self._ends[number]

    def discard(self) -> None:
        """After `stop`: everything is in the database. Raises OSError."""
        for number in sorted(self._ends):
            self._files.delete(self._path(number))
        self._files.delete(self._folder / SPARE)

    def _after(self, at: Position) -> Position:
        """The beginning of the next segment there is."""
        later = [number for number in list(self._ends) if number > at.segment]
        return Position(min(later, default=max(at.segment, self._last_old + 1)))

    def _damaged(self, at: Position, damage: Damage) -> None:
        begin = at.offset + damage.offset
        where = f"{self._path(at.segment)} at {begin}: {damage.num_bytes} bytes"
        if damage.torn:
            logger.warning("journal: removed records that were never durable: %s", where)
            return
        self.num_damaged += 1
        logger.error("JOURNAL DAMAGED, records are lost: %s; the rest can be read", where)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012}{SUFFIX}"


def _is(name: str) -> bool:
    return name.endswith(SUFFIX) and name.split(".")[0].isdigit()
