"""The scheduler's queue of one unit, and where it gets pages from."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from engine.memory.kv_cache import KvCache
from engine.memory.request_kv import Demand, Hit
from engine.policy.step_pace import StepPace
from engine.request import Request


class KvSupply(Protocol):
    """Where pages for KV come from."""

    def reclaim(self) -> tuple[int, int]:
        """Free the pages whose fence has passed: (how many, how many are still fenced)."""

    def make_room(self, num_pages: int) -> int:
        """Have cached KV give pages back; how many are on their way (fenced)."""

    def num_kv_pages(self) -> int:
        """Pages that KV could have beside the weights that are there."""

    @property
    def num_spare_pages(self) -> int:
        """Pages that an admission leaves for those that run."""


@dataclass(frozen=True, slots=True)
class Short:
    """The request that found too little memory, or no row, when it last was its queue's turn.

    hit      what the prefix cache had of it; None: nobody has looked
    needed   blocks it lacked beside that
    """

    request: Request
    hit: Hit | None = None
    needed: Demand | None = None


@dataclass(slots=True)
class ModelQueue:
    """Requests of one unit, oldest first. `cache` is None unless it is resident.

    tag     the service it has had
    short   whom the queue waits for; nobody younger overtakes it
    page_rates  what its requests' positions take of the arena (charges.py)
    pace    what its steps have taken
    """

    unit_id: str
    cache: KvCache | None = None
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    tag: float = 0.0
    short: Short | None = None
    page_rates: tuple[tuple[float, float], ...] = ()
    pace: StepPace = field(default_factory=StepPace)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def encodes(self) -> bool:
        """Whether it is resident and an encoder's: its requests have no KV."""
        return self.cache is not None and not self.cache.groups

    def requests(self) -> Iterator[Request]:
        """All of them, running first."""
        yield from self.running
        yield from self.waiting


def running_in(queues: Iterable[ModelQueue]) -> list[tuple[ModelQueue, Request]]:
    """All running requests with their queues."""
    return [(queue, request) for queue in queues for request in queue.running]
