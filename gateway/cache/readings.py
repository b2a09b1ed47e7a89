"""Questions taken apart for the rule, those of kept entries only once: part of stage 4.

Comes in: a question and the neighbours that the store has found. Goes out: what `cache_choice`
wants. A reading takes microseconds a word, so hostile questions of 2,000 characters take a few
milliseconds each: whoever else is served comes in between. What is remembered goes by the entry,
which is its tenant's: what others have asked changes no look-up's time. Nothing here decides.
"""

import asyncio
from collections.abc import Sequence

from cachetools import LRUCache

from gateway.cache.types import Entry, Neighbour
from gateway.policy.cache_choice import Candidate
from gateway.policy.cache_reading import LONGEST_CHARS, Reading, read

CHARS_AT_A_TIME = 500
"""What is read before others have their turn: up to a millisecond."""
_BYTES, _BYTES_PER_PART, _BYTES_PER_CHAR, _MOST_BYTES_OF_CHAR = 3000, 100, 30, 4
"""What a reading takes at most, measured over hostile texts (tests/gateway/cache/test_readings.py):
by text, by word or other part in one of its fields, by character that is read, by character of the
text. Not by characters alone: of some texts each is a word of many fields."""


def bytes_of(reading: Reading) -> int:
    """No less than it takes."""
    num_chars = len(reading.text)
    parts = (
        *(reading.words, reading.word_set, reading.commons, reading.content, reading.stems),
        *(reading.names, reading.numbers, reading.negatives, reading.dates, reading.units),
        *(reading.quoted, reading.code, reading.capitals, reading.signs, reading.light),
        *(reading.opposable, reading.bared, reading.parts, reading.movable),
    )
    read_bytes = _BYTES_PER_CHAR * min(num_chars, LONGEST_CHARS)
    parts_bytes = _BYTES_PER_PART * sum(map(len, parts))
    return _BYTES + parts_bytes + read_bytes + _MOST_BYTES_OF_CHAR * num_chars


class Readings:
    """One object per gateway process. On the event loop. `max_bytes`: 0 remembers nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: LRUCache[str, Reading] = LRUCache(max_bytes, getsizeof=bytes_of)
        self._num_forgotten = 0

    @property
    def num_bytes(self) -> int:
        """Of what is remembered."""
        return int(self._kept.currsize)

    @property
    def num_forgotten(self) -> int:
        """How often all of it was."""
        return self._num_forgotten

    async def of(
        self, question: str, near: Sequence[Neighbour], since: int
    ) -> tuple[Reading, list[Candidate]]:
        """The question, and its neighbours. `since`: `num_forgotten` before the store was asked for
        these: where something was forgotten meanwhile, they may be what was dropped, and are not
        remembered."""
        asked = read(question)
        num_chars = len(question)
        candidates = []
        for one in near:
            reading = self._known(one.entry)
            if reading is None:
                if num_chars > CHARS_AT_A_TIME:
                    await asyncio.sleep(0)
                    num_chars = 0
                num_chars += len(one.entry.question)
                reading = self._read(one.entry, since)
            candidates.append(candidate_of(one, reading))
        return asked, candidates

    def forget(self) -> None:
        """All of it: something was dropped, and its words shall not stay."""
        self._num_forgotten += 1
        self._kept.clear()

    def _known(self, entry: Entry) -> Reading | None:
        """The question is looked at: an id stands for one as far as a store is to be trusted."""
        reading = self._kept.get(entry.entry_id)
        return reading if reading is not None and reading.text == entry.question else None

    def _read(self, entry: Entry, since: int) -> Reading:
        reading = read(entry.question)
        if since == self._num_forgotten and bytes_of(reading) <= self._kept.maxsize:
            self._kept[entry.entry_id] = reading
        return reading


def candidate_of(one: Neighbour, reading: Reading | None = None) -> Candidate:
    """An entry as the rule sees it."""
    entry = one.entry
    return Candidate(entry.entry_id, entry.question, one.similarity, entry.confidence, reading)
