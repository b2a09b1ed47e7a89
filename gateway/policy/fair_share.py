"""Fair share between tenants: a Virtual Token Counter in service (pure).

After "Fairness in Serving Large Language Models" (OSDI'24). Each tenant has one counter over all
models and workers: the service it has had (device seconds), divided by its weight. Among waiting
tenants the smallest counter goes first. Ours differs from the paper in four ways:

- The unit is service, not tokens. A grant charges the predicted service at once, so that a burst
  cannot slip in before its first charge; the end of the request trues it up, either way.
- A tenant that comes back with nothing waiting is lifted to the smallest counter among those that
  wait (idle time is not banked), or, if nobody waits, to the counter of the tenant that stopped
  waiting last.
- At the same moment a counter is lowered to at most `max_lead_s` above that floor: a tenant that
  was served where nobody else wanted anything is not locked out for as long.
- Counters of tenants with nothing to remember are forgotten, so the table is bounded by the
  tenants that are ahead of the floor or waiting.

Two tenants that wait all the time and contend for one worker are apart by at most
2 (largest charge + what outstanding grants may still cost) / weight; tests/gateway/policy checks
it on random runs.
"""

from collections.abc import Iterator
from typing import Protocol

FORGET_ABOVE = 10_000
"""Tenants remembered before those at or below the floor are dropped."""


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

    def charge(self, tenant_id: str, service_s: float, units: float = 0.0) -> None:
        """Add service and work; below 0: more had been predicted."""
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
    """Counters of all tenants. `num_waiting` per tenant is kept by enqueue/restore/dequeue."""

    def __init__(self, max_lead_s: float) -> None:
        self._max_lead_s = max_lead_s
        self._counters: dict[str, float] = {}
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

    def charge(self, tenant_id: str, service_s: float, units: float = 0.0) -> None:
        """Add service (below 0: the prediction was too high, or nothing came of the grant).

        `units` of work are for other orders: what counts here is service.
        """
        counter = self._counters.get(tenant_id, self._last_floor)
        self._counters[tenant_id] = counter + service_s / self._weights.get(tenant_id, 1.0)

    def counter(self, tenant_id: str) -> float:
        """Service over weight; a tenant not seen before stands at the floor."""
        counter = self._counters.get(tenant_id)
        return self.floor() if counter is None else counter

    def floor(self) -> float:
        """The smallest counter among the waiting; without any, where the last one stood."""
        if not self._num_waiting:
            return self._last_floor
        return min(self._counters[tenant_id] for tenant_id in self._num_waiting)

    def waiting(self) -> Iterator[tuple[str, int]]:
        """(tenant, tickets waiting), in no order."""
        return iter(self._num_waiting.items())

    def check_integrity(self) -> None:
        """Raises AssertionError if a waiting tenant has no counter or a count is not positive."""
        for tenant_id, count in self._num_waiting.items():
            if count < 1 or tenant_id not in self._counters:
                raise AssertionError(f"tenant {tenant_id}: {count} waiting without a counter")

    def _forget(self) -> None:
        floor = self.floor()
        for tenant_id, counter in list(self._counters.items()):
            if tenant_id not in self._num_waiting and counter <= floor:
                del self._counters[tenant_id]
                self._weights.pop(tenant_id, None)
