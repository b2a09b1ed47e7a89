"""Fair share between tenants: a Virtual Token Counter in service (pure).

After "Fairness in Serving Large Language Models" (OSDI'24). Each tenant has one counter over all
models and workers: the service it has had (device seconds), divided by its weight. Among waiting
tenants the smallest counter goes first. Ours differs from the paper in four ways:

- The unit is service, not tokens. A grant counts the predicted service at once, so that a burst
  cannot slip in before its first charge; while the request runs, what it has used takes the place
  of what was predicted, and its end takes the rest back.
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

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

FORGET_ABOVE = 10_000
"""Tenants remembered before those at or below the floor are dropped."""


class Used(NamedTuple):
    """Service in device seconds, and the same work in units (tokens, an output token for two)."""

    service_s: float
    units: float = 0.0


NOTHING = Used(0.0)


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

    def expect(self, tenant_id: str, used: Used) -> None:
        """Add what a grant is predicted to use."""
        ...

    def settle(self, tenant_id: str, rest: Used) -> None:
        """A grant is over: take back what is left of its prediction."""
        ...

    def charge(self, tenant_id: str, used: Used, expected: Used = NOTHING) -> None:
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

    def expect(self, tenant_id: str, used: Used) -> None:
        """A grant is predicted to use so much. Units are for other orders: service counts here."""
        expected_s, num_grants = self._expected.get(tenant_id, (0.0, 0))
        self._expected[tenant_id] = (expected_s + used.service_s, num_grants + 1)

    def settle(self, tenant_id: str, rest: Used) -> None:
        """A grant is over, with so much of its prediction unused."""
        expected_s, num_grants = self._expected[tenant_id]
        if num_grants > 1:
            self._expected[tenant_id] = (expected_s - rest.service_s, num_grants - 1)
        else:  # and no rest of rounding
            del self._expected[tenant_id]

    def charge(self, tenant_id: str, used: Used, expected: Used = NOTHING) -> None:
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
