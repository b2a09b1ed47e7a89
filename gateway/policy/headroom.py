"""Room on a worker that a request must leave to others (pure, but for its own books).

Two reasons to leave some:

- An operator has reserved a share of each worker for a tenant. What of it the tenant does not use
  stays free: request places (rows of a step) and KV memory.
- Others were served lately. A worker takes in some requests more than it has rows, so that a row
  that becomes free is filled in the next step; half of these places are then left free by whoever
  has a backlog. A request that has just come, of a tenant that is first in the fair order and has
  little here, is sent to the worker at once, where it need not wait for a row either
  (engine/scheduling/tenants_here.py). So nobody gains service by it, no row stands idle, and of
  those who all have a backlog nobody takes it. How long a request has waited does not tell a
  backlog by itself: a tenant that keeps twice as many requests open as there are rows waits only
  as long as one answer takes. Where nobody else was served for RECENT_S, all places are taken.

Who has to leave rows to a reservation has none of these places: a request there would go before one
that came for the free row.

A tenant with nothing on a worker is never held back by a reservation of memory: its request might
be larger than what reservations leave, and would wait for ever.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

LOOKAHEAD_SHARE = 8
"""A worker with n rows takes n + n/8 requests (engine/worker/leases.py)."""
RECENT_S = 60.0
FRESH_S = 0.5
"""A request that has waited for longer is one of a backlog."""
RARE_SHARE = 0.5
"""Of the mean of what tenants have on a worker: who has no more there asks seldom (as
engine/scheduling/tenants_here.py has it)."""
MAX_RECENT = 10_000


class Wanted(NamedTuple):
    """What a request takes of a worker, and what is free there before it."""

    kv_bytes: int
    free_requests: int
    free_kv_bytes: int
    fresh: bool = False
    """It has just come, and its tenant is the first in order."""


class Held(NamedTuple):
    """What a tenant's requests have of a worker, at their worst case."""

    num_requests: int = 0
    kv_bytes: int = 0


class Headroom:
    """What tenants hold by worker, what they have reserved, and who was served lately."""

    def __init__(self) -> None:
        self.reserved: Mapping[str, float] = {}
        self._held: dict[str, dict[str, Held]] = {}
        self._served: dict[str, float] = {}  # when, by tenant; the last one last

    def take(self, worker_id: str, tenant_id: str, kv_bytes: int, now_s: float) -> None:
        """A request of the tenant was granted."""
        held = self._held.setdefault(worker_id, {})
        before = held.get(tenant_id, Held())
        held[tenant_id] = Held(before.num_requests + 1, before.kv_bytes + kv_bytes)
        self._served.pop(tenant_id, None)
        self._served[tenant_id] = now_s
        oldest = next(iter(self._served))
        while now_s - self._served[oldest] > RECENT_S or len(self._served) > MAX_RECENT:
            del self._served[oldest]
            oldest = next(iter(self._served))

    def give_back(self, worker_id: str, tenant_id: str, kv_bytes: int) -> None:
        """It is not there any more."""
        held = self._held[worker_id]
        before = held.pop(tenant_id)
        if before.num_requests > 1:
            held[tenant_id] = Held(before.num_requests - 1, before.kv_bytes - kv_bytes)
        elif not held:
            del self._held[worker_id]

    def may_take(self, worker_id: str, tenant_id: str, wanted: Wanted, now_s: float) -> bool:
        """Whether a request of the tenant leaves what it must."""
        if not self.reserved and len(self._served) < 2:
            return True
        held = self._held.get(worker_id, {})
        own = held.get(tenant_id, Held())
        num_places = wanted.free_requests + sum(each.num_requests for each in held.values())
        num_rows = rows_of(num_places)
        left = self._rows_left(held, tenant_id, num_rows)
        own_rows = math.ceil(self.reserved.get(tenant_id, 0.0) * num_rows)
        lookahead = num_places - num_rows
        places = left + lookahead if left else 0
        rare = wanted.fresh and _is_rare(held, tenant_id)
        backlog = not rare and own.num_requests >= own_rows
        if num_rows > 1 and backlog and self._others_came(tenant_id, now_s):
            places = max(places, left + -(-lookahead // 2))
        if wanted.free_requests - 1 < places:
            return not own.num_requests and num_rows <= 1
        return not own.num_requests or self._leaves_memory(held, tenant_id, wanted)

    def check_integrity(self, num_running: Mapping[str, int]) -> None:
        """Raises AssertionError unless as many requests are held as run, by worker."""
        counted = {
            worker_id: sum(each.num_requests for each in held.values())
            for worker_id, held in self._held.items()
        }
        if counted != num_running:
            raise AssertionError(f"held {counted}, running {num_running}")

    def _others_came(self, tenant_id: str, now_s: float) -> bool:
        """The two that were served last will do to know."""
        last = [name for name, _ in zip(reversed(self._served), range(2), strict=False)]
        return any(name != tenant_id and now_s - self._served[name] <= RECENT_S for name in last)

    def _rows_left(self, held: Mapping[str, Held], tenant_id: str, num_rows: int) -> int:
        """Rows that the others have reserved and do not use.

        Rounded up together: many small shares with a row each would be more rows than there are,
        and nobody's turn. Who has a row of its own to come leaves whole rows only: shares of less
        than one have theirs in common.
        """

        def unused(name: str, share: float) -> float:
            return max(0.0, share * num_rows - held.get(name, Held()).num_requests)

        others = [unused(name, share) for name, share in self.reserved.items() if name != tenant_id]
        if unused(tenant_id, self.reserved.get(tenant_id, 0.0)):
            return sum(map(int, others))
        return math.ceil(sum(others) - 1e-9)

    def _leaves_memory(self, held: Mapping[str, Held], tenant_id: str, wanted: Wanted) -> bool:
        if not wanted.kv_bytes or not self.reserved:
            return True
        total = wanted.free_kv_bytes + sum(each.kv_bytes for each in held.values())
        left = sum(
            max(0.0, share * total - held.get(name, Held()).kv_bytes)
            for name, share in self.reserved.items()
            if name != tenant_id
        )
        return wanted.free_kv_bytes - wanted.kv_bytes >= left


def _is_rare(held: Mapping[str, Held], tenant_id: str) -> bool:
    """Whether the tenant has little on a worker, beside what others have there."""
    own = held.get(tenant_id, Held()).num_requests
    total = sum(each.num_requests for each in held.values())
    return own * len({*held, tenant_id}) <= total * RARE_SHARE


def rows_of(num_places: int) -> int:
    """Rows of a step of a worker that takes in so many requests."""
    rows = num_places * LOOKAHEAD_SHARE // (LOOKAHEAD_SHARE + 1)
    while rows + 1 + max(1, (rows + 1) // LOOKAHEAD_SHARE) <= num_places:
        rows += 1
    return max(1, rows)
