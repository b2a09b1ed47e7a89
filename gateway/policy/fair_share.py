"""Fair share between tenants: a Virtual Token Counter in service (pure).

After "Fairness in Serving Large Language Models" (OSDI'24). Each tenant has one counter over all
models and workers: the service it has had (device seconds), divided by its weight. Among waiting
tenants the smallest counter goes first. Ours differs from the paper in four ways:

- The unit is service, not tokens. A grant counts the predicted service at once, so that a burst
  cannot slip in before its first charge; the end of the request takes the prediction back and
  charges what was used.
- A tenant that comes back with nothing waiting is lifted to the smallest counter among those that
  wait (idle time is not banked), or, if nobody waits, to the counter of the tenant that stopped
  waiting last. This floor is of charges alone: predictions are taken back when they prove too
  high, and whoever had been lifted by one would stay behind for good.
- At the same moment charges are lowered to at most `max_lead_s` above that floor: a tenant that
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

    def expect(self, tenant_id: str, service_s: float, units: float = 0.0) -> None:
        """Add what a grant is predicted to use; below 0: take that back, the grant is over."""
        ...

    def charge(self, tenant_id: str, service_s: float, units: float = 0.0) -> None:
        """Add service and work that were used."""
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

    def expect(self, tenant_id: str, service_s: float, units: float = 0.0) -> None:
        """A grant is predicted to use so much; below 0: that grant is over.

        `units` of work are for other orders: what counts here is service.
        """
        expected_s, num_grants = self._expected.get(tenant_id, (0.0, 0))
        num_grants += -1 if service_s < 0 else 1
        if num_grants:
            self._expected[tenant_id] = (expected_s + service_s, num_grants)
        else:  # and no rest of rounding
            del self._expected[tenant_id]

    def charge(self, tenant_id: str, service_s: float, units: float = 0.0) -> None:
        """Add service that was used."""
        counter = self._counters.get(tenant_id, self._last_floor)
        self._counters[tenant_id] = counter + service_s / self._weights.get(tenant_id, 1.0)

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
