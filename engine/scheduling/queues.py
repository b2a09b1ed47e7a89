"""What the scheduler keeps of unfinished requests: queues by model, counts by tenant, deadlines.

Records and counts only. What follows from them is decided in `scheduler.py`, `admission.py` and
`policy/`.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.errors import IntegrityError
from engine.memory import BlockDemand, Hit, KvCache
from engine.request import BATCH_ORDER, Request
from engine.scheduling.policy.batching import StepPace

RECENT_S = 10.0
MAX_REMEMBERED = 64
RARE_SHARE = 0.5
SLACK = 64
"""Ended requests that may lie in the heap before it is cleared of them."""


@dataclass(frozen=True, slots=True)
class Short:
    """The request that found too little memory, or no row, when it last was its queue's turn.

    hit      what the prefix cache had of it; None: nobody has looked
    needed   blocks it lacked beside that
    """

    request: Request
    hit: Hit | None = None
    needed: BlockDemand | None = None


@dataclass(slots=True)
class ModelQueue:
    """Requests of one model, oldest first, those of class batch last. `cache` is None unless it is
    resident.

    tag     the service it has had; batch_tag: of that class alone
    short   whom the queue waits for; nobody younger overtakes it
    page_rates  what its requests' positions take of the arena (`Charges`)
    pace    what its steps have taken; batch_pace: those with rows of class batch
    """

    instance_id: str
    cache: KvCache | None = None
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    tag: float = 0.0
    batch_tag: float = 0.0
    short: Short | None = None
    page_rates: tuple[tuple[float, float], ...] = ()
    pace: StepPace = field(default_factory=StepPace)
    batch_pace: StepPace = field(default_factory=StepPace)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def is_live(self) -> bool:
        """Whether a request of another class than batch waits or runs."""
        return any(heads and heads[0].order < BATCH_ORDER for heads in (self.running, self.waiting))

    @property
    def has_batch(self) -> bool:
        """Whether a request of class batch waits or runs."""
        return any(
            heads and heads[-1].order >= BATCH_ORDER for heads in (self.running, self.waiting)
        )

    @property
    def encodes(self) -> bool:
        """Whether it is resident and an encoder's: its requests have no KV."""
        return self.cache is not None and self.cache.plan.keeps_nothing

    def requests(self) -> Iterator[Request]:
        """All of them, running first."""
        yield from self.running
        yield from self.waiting


def running_in(queues: Iterable[ModelQueue]) -> list[tuple[ModelQueue, Request]]:
    """All running requests with their queues."""
    return [(queue, request) for queue in queues for request in queue.running]


class TenantCounts:
    """Of unfinished requests, of all models, that are not of class batch."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._total = 0
        self._left_s: dict[str, float] = {}  # when a tenant's last request here ended; newest last

    def add(self, tenant_id: str) -> None:
        """It has one more."""
        self._num[tenant_id] += 1
        self._total += 1
        self._left_s.pop(tenant_id, None)

    def remove(self, tenant_id: str, now_s: float) -> None:
        """One of its has ended."""
        self._num[tenant_id] -= 1
        self._total -= 1
        if not self._num[tenant_id]:
            del self._num[tenant_id]
            self._left_s[tenant_id] = now_s
            if len(self._left_s) > MAX_REMEMBERED:
                del self._left_s[next(iter(self._left_s))]

    @property
    def num_requests(self) -> int:
        """Of all tenants."""
        return self._total

    @property
    def num(self) -> int:
        """Tenants that have requests here."""
        return len(self._num)

    def rank(self, request: Request) -> int:
        """Requests that its tenant has here: whoever has fewest goes first, class batch last."""
        return BATCH_ORDER if request.is_batch else self._num[request.submit.tenant_id]

    @property
    def mean(self) -> float:
        """Requests of a tenant here. One with fewer is a light tenant, the others are heavy."""
        return self._total / max(1, len(self._num))

    def is_light_start(self, request: Request) -> bool:
        """Whether it waits for its first token, and its tenant is a light one."""
        if request.num_generated or request.num_pending:
            return False
        return self.rank(request) * len(self._num) < self._total

    def may_take_over(self, request: Request) -> bool:
        """Whether its tenant has so little here that it need not wait for a row.

        A RARE_SHARE of the mean: a tenant of a small weight that always has a backlog has less than
        the mean too, and its share of the rows.
        """
        if request.num_generated or request.num_pending:
            return False
        return self.rank(request) * len(self._num) <= self._total * RARE_SHARE

    def is_shared(self, now_s: float) -> bool:
        """Whether there is, or lately was, more than one tenant."""
        if len(self._num) > 1:
            return True
        last_s = next(reversed(self._left_s.values()), None)
        return last_s is not None and now_s - last_s <= RECENT_S

    def check_integrity(self, num_by_tenant: Counter[str]) -> None:
        """Raises IntegrityError unless these are the counts."""
        if num_by_tenant != self._num or num_by_tenant.total() != self._total:
            raise IntegrityError(f"{self._num} requests booked, {num_by_tenant} found")


class Deadlines:
    """Requests with a deadline, until they end. Knows nothing else about them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._limit = SLACK

    def add(self, request: Request) -> None:
        """Watch a request that the scheduler has taken (its `order` is unique)."""
        if request.deadline_s == math.inf:
            return
        if len(self._heap) >= self._limit:
            # A request's tokens must not be held until a deadline long after its end.
            self._heap = [item for item in self._heap if item[2].state != "finished"]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SLACK
        heapq.heappush(self._heap, (request.deadline_s, request.order, request))

    def pop_due(self, now_s: float) -> list[Request]:
        """Unfinished requests whose deadline has come, each once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            if request.state != "finished":
                due.append(request)
        return due
