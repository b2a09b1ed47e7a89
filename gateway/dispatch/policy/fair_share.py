"""Shares of tenants: whose turn it is, and what of a worker is left to others (pure).

`FairShare` orders the tenants that wait, by the service they have had; `Headroom` says how much
free capacity of a worker a grant must leave. Both keep books of their own and decide by nothing
else. What a request will cost, and who pays for loads, is service_costs.py's.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

FORGET_ABOVE = 10_000
"""Tenants remembered before those at or below the floor are dropped."""


class UsedService(NamedTuple):
    """Service in device seconds, and the same work in units (tokens, an output token for two)."""

    service_s: float
    units: float = 0.0


NOTHING = UsedService(0.0)


class TenantOrder(Protocol):
    """Which of the waiting tenants goes next: the one with the smallest counter, then its oldest
    ticket. `FairShare` is ours; `bench/sim/baselines` has those it is compared with."""

    def enqueue(self, tenant_id: str, weight: float) -> None:
        """A new ticket of the tenant waits."""
        ...

    def restore(self, tenant_id: str) -> None:
        """A granted ticket waits again through no doing of the tenant."""
        ...

    def dequeue(self, tenant_id: str) -> None:
        """A ticket stopped waiting: granted, aborted or timed out."""
        ...

    def expect(self, tenant_id: str, used: UsedService) -> None:
        """Add what a grant is predicted to use."""
        ...

    def settle(self, tenant_id: str, rest: UsedService) -> None:
        """A grant is over: take back what is left of its prediction."""
        ...

    def charge(self, tenant_id: str, used: UsedService, expected: UsedService = NOTHING) -> None:
        """Add service and work that were used; so much of it a grant had been predicted to use."""
        ...

    def counter(self, tenant_id: str) -> float:
        """What the order goes by."""
        ...

    def waiting(self) -> Iterator[tuple[str, int]]:
        """(tenant, tickets waiting), in no order."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not agree."""
        ...


class FairShare:
    """A Virtual Token Counter in service, with the counters of all tenants.

    After "Fairness in Serving Large Language Models" (OSDI'24). Each tenant has one counter over
    all models and workers: the service it has had (device seconds), divided by its weight. Among
    waiting tenants the smallest counter goes first. Ours differs from the paper in four ways:

    - The unit is service, not tokens. A grant counts the predicted service at once, so that a burst
      cannot slip in before its first charge; while the request runs, what it has used takes the
      place of what was predicted, and its end takes the rest back.
    - A tenant that comes back with nothing waiting is lifted to the smallest counter among those
      that wait (idle time is not banked), or, if nobody waits, to the counter of the tenant that
      stopped waiting last. This floor is of charges alone: predictions are taken back when they
      prove too high, and a tenant that one had lifted would stay behind for good.
    - At the same moment charges are lowered to at most `max_lead_s` above that floor: a tenant that
      was served where nobody else wanted anything is not locked out for as long.
    - Counters of tenants with nothing to remember are forgotten, so the table is bounded by the
      tenants that are ahead of the floor or waiting.

    Two tenants that wait all the time and contend for one worker are apart by at most 2 (largest
    charge + what outstanding grants may still cost) / weight; tests/gateway/dispatch/policy checks
    it on random runs. `num_waiting` per tenant is kept by enqueue/restore/dequeue.
    """

    def __init__(self, max_lead_s: float) -> None:
        self._max_lead_s = max_lead_s
        self._counters: dict[str, float] = {}
        # What outstanding grants are predicted to use: service and how many, only while there are.
        self._expected: dict[str, tuple[float, int]] = {}
        self._weights: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._last_floor = 0.0

    def enqueue(self, tenant_id: str, weight: float) -> None:
        """A new ticket of the tenant waits; a tenant that had none is lifted and clamped."""
        if weight <= 0:
            raise ValueError("a weight must be above 0")
        self._weights[tenant_id] = weight
        if tenant_id not in self._num_waiting:
            floor = self.floor()
            counter = self._counters.get(tenant_id, floor)
            ceiling = floor + self._max_lead_s / weight
            self._counters[tenant_id] = min(max(counter, floor), ceiling)
        self._num_waiting[tenant_id] = self._num_waiting.get(tenant_id, 0) + 1
        if len(self._counters) > FORGET_ABOVE:
            self._forget()

    def restore(self, tenant_id: str) -> None:
        """A granted ticket waits again through no doing of the tenant: no lift, no clamp."""
        self._counters.setdefault(tenant_id, self.floor())
        self._num_waiting[tenant_id] = self._num_waiting.get(tenant_id, 0) + 1

    def dequeue(self, tenant_id: str) -> None:
        """A ticket stopped waiting: granted, aborted or timed out."""
        left = self._num_waiting[tenant_id] - 1
        if left:
            self._num_waiting[tenant_id] = left
            return
        del self._num_waiting[tenant_id]
        self._last_floor = max(self._last_floor, self._counters[tenant_id])

    def expect(self, tenant_id: str, used: UsedService) -> None:
        """A grant is predicted to use so much. Units are for other orders: service counts here."""
        expected_s, num_grants = self._expected.get(tenant_id, (0.0, 0))
        self._expected[tenant_id] = (expected_s + used.service_s, num_grants + 1)

    def settle(self, tenant_id: str, rest: UsedService) -> None:
        """A grant is over, with so much of its prediction unused."""
        expected_s, num_grants = self._expected[tenant_id]
        if num_grants > 1:
            self._expected[tenant_id] = (expected_s - rest.service_s, num_grants - 1)
        else:  # and no rest of rounding
            del self._expected[tenant_id]

    def charge(self, tenant_id: str, used: UsedService, expected: UsedService = NOTHING) -> None:
        """Add service that was used. `expected`: what of it `expect` has counted already.

        Below 0 it is given back: another pays for a load, or what was computed was lost.
        """
        counter = self._counters.get(tenant_id, self._last_floor)
        self._counters[tenant_id] = counter + used.service_s / self._weights.get(tenant_id, 1.0)
        if expected.service_s:
            expected_s, num_grants = self._expected[tenant_id]
            self._expected[tenant_id] = (expected_s - expected.service_s, num_grants)

    def counter(self, tenant_id: str) -> float:
        """Service used or expected, over weight; a tenant not seen before stands at the floor."""
        counter = self._counters.get(tenant_id)
        counter = self.floor() if counter is None else counter
        expected_s, _ = self._expected.get(tenant_id, (0.0, 0))
        return counter + expected_s / self._weights.get(tenant_id, 1.0)

    def floor(self) -> float:
        """The smallest sum of charges among the waiting; without any, where the last one stood."""
        if not self._num_waiting:
            return self._last_floor
        return min(self._counters[tenant_id] for tenant_id in self._num_waiting)

    def waiting(self) -> Iterator[tuple[str, int]]:
        """(tenant, tickets waiting), in no order."""
        return iter(self._num_waiting.items())

    def leads(self) -> dict[str, float]:
        """How far tenants' charges are above the floor (below it: negative), where they are not
        at it: what a restart should remember. Predictions are not in it: what runs ends with us."""
        floor = self.floor()
        return {name: at - floor for name, at in self._counters.items() if at != floor}

    def restore_leads(self, leads: Mapping[str, float]) -> None:
        """Begin where another life of the dispatcher stood; only before anybody has waited.

        Who was behind begins at the floor, as everybody does who comes back: there is no credit.
        """
        if self._num_waiting or self._counters:
            raise ValueError("leads are restored at the start, not later")
        ahead = sorted(((lead, name) for name, lead in leads.items() if lead > 0), reverse=True)
        self._counters = {name: self._last_floor + lead for lead, name in ahead[:FORGET_ABOVE]}

    def check_integrity(self) -> None:
        """Raises AssertionError if a waiting tenant has no counter or a count is not positive."""
        for tenant_id, count in self._num_waiting.items():
            if count < 1 or tenant_id not in self._counters:
                raise AssertionError(f"tenant {tenant_id}: {count} waiting without a counter")
        for tenant_id, (expected_s, num_grants) in self._expected.items():
            if num_grants < 1 or expected_s < -1e-6:
                raise AssertionError(f"tenant {tenant_id}: {num_grants} grants, {expected_s} s")

    def _forget(self) -> None:
        floor = self.floor()
        for tenant_id, counter in list(self._counters.items()):
            if (
                tenant_id not in self._num_waiting
                and tenant_id not in self._expected
                and counter <= floor
            ):
                del self._counters[tenant_id]
                self._weights.pop(tenant_id, None)


LOOKAHEAD_SHARE = 8
"""A worker with n rows takes n + n/8 requests (engine/models/status.py)."""
RECENT_S = 60.0
FRESH_S = 0.5
"""A request that has waited for longer is one of a backlog."""
RARE_SHARE = 0.5
"""Of the mean of what tenants have on a worker: who has no more there asks seldom (as
engine/scheduling/queues.py has it)."""
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
    """What tenants hold by worker, what they have reserved, and who was served lately.

    There are two reasons to leave some of a worker free:

    - An operator has reserved a share of each worker for a tenant. What of it the tenant does not
      use stays free: request places (rows of a step) and KV memory.
    - Others were served lately. A worker takes in some requests more than it has rows, so that a
      row that becomes free is filled in the next step; a tenant with a backlog then leaves half of
      these places free. A request that has just come, of a tenant that is first in the fair order
      and has little here, is sent to the worker at once, where it need not wait for a row either
      (engine/scheduling/queues.py). So nobody gains service by it, no row stands idle, and
      no tenant with a backlog takes it. How long a request has waited does not tell a backlog by
      itself: a tenant that keeps twice as many requests open as there are rows waits only as long
      as one answer takes. Where nobody else was served for RECENT_S, all places are taken.

    A tenant that has to leave rows to a reservation has none of these places: a request there would
    go before one that came for the free row. A tenant with nothing on a worker is never held back
    by a reservation of memory: its request might be larger than what reservations leave, and would
    wait for ever.
    """

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
        if not self.reserved:
            return 0

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
