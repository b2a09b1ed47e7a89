"""The scheduler's queue of one unit, and where it gets pages from."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from engine.kv_cache import KvCache
from engine.request import Request


class KvSupply(Protocol):
    """Where pages for KV come from."""

    def reclaim(self) -> tuple[int, int]:
        """Free the pages whose fence has passed: (how many, how many are still fenced)."""

    def make_room(self, num_pages: int, now_s: float) -> int:
        """Have cached KV give pages back; how many are on their way (fenced)."""

    def num_kv_pages(self) -> int:
        """Pages that KV could have beside the weights that are there."""

    @property
    def num_spare_pages(self) -> int:
        """Pages that an admission leaves for those that run."""


@dataclass(slots=True)
class ModelQueue:
    """Requests of one unit, oldest first. `cache` is None unless it is resident.

    tag          the service it has had
    short_order  order of the request that found too little memory, or no row, when it last was the
                 queue's turn
    """

    unit_id: str
    cache: KvCache | None = None
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    tag: float = 0.0
    short_order: int | None = None

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def requests(self) -> Iterator[Request]:
        """All of them, running first."""
        yield from self.running
        yield from self.waiting
