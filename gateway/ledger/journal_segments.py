"""A journal's segments on the disk: numbered files, one of them the newest, and a spare one ahead
(stage 10, below journal.py).

    spare --begin_next--> newest --the next one begins--> whole --release--> deleted

Knows where each ends durably, as the journal says after a sync, and reads no further. One thread
begins segments, another one reads and releases them. What is written, and when, is journal.py's.
"""

import logging
from pathlib import Path

from gateway.ledger.journal_files import Files
from gateway.ledger.journal_format import (
    SEGMENT_HEAD,
    Damage,
    Record,
    RecordCodec,
    UnknownRecord,
)
from gateway.ledger.journal_types import Position

logger = logging.getLogger(__name__)

SPARE = "spare"
SUFFIX = ".journal"
_WHOLE_FILE = 1 << 40


class Segments:
    """Of one folder."""

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
        """Records that are durable from there on, and where they end. What is damaged is told and
        passed over. Raises OSError."""
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
            logger.warning("journal %s of records that were never durable are cut", where)
            return
        self.num_damaged += 1
        logger.error("JOURNAL DAMAGED, records are lost: %s; the rest is read", where)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012}{SUFFIX}"


def _is(name: str) -> bool:
    return name.endswith(SUFFIX) and name.split(".")[0].isdigit()
