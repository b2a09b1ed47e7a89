"""The journal's nouns: places in it, its bounds, and how it says no (stage 10)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Told = Callable[[Sequence[Any], BaseException | None], None]
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


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Between two frames of a segment."""

    segment: int
    offset: int = 0
