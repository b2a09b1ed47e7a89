"""Whose turn it is, by the books' rules: what ours (gateway/policy/fair_share.py) is compared to.

    fcfs          nobody's: the oldest ticket goes first, whoever sent it
    vtc_tokens    the Virtual Token Counter as published (OSDI'24): prompt tokens, and generated
                  ones twice, over the tenant's weight, in place of device seconds
    round_robin   the tenant whose turn was longest ago, a ticket a turn
    quota         rounds: a tenant may use so many device seconds (times its weight) in a round, and
                  within a round the oldest ticket goes first

All are TenantOrders: the queue, leases and heads that do not fit are the product's.
"""

from collections.abc import Iterator

from gateway.policy.fair_share import NOTHING, FairShare, Used


class Waiting:
    """Counts of waiting tickets; what every order needs."""

    def __init__(self) -> None:
        self._num_waiting: dict[str, int] = {}

    def enqueue(self, tenant_id: str, weight: float) -> None:
        """A new ticket of the tenant waits."""
        self._num_waiting[tenant_id] = self._num_waiting.get(tenant_id, 0) + 1

    def restore(self, tenant_id: str) -> None:
        """A granted ticket waits again."""
        self._num_waiting[tenant_id] = self._num_waiting.get(tenant_id, 0) + 1

    def dequeue(self, tenant_id: str) -> None:
        """A ticket stopped waiting."""
        left = self._num_waiting[tenant_id] - 1
        if left:
            self._num_waiting[tenant_id] = left
        else:
            del self._num_waiting[tenant_id]

    def expect(self, tenant_id: str, used: Used) -> None:
        """Nothing is counted."""

    def settle(self, tenant_id: str, rest: Used) -> None:
        """Nothing is counted."""

    def charge(self, tenant_id: str, used: Used, expected: Used = NOTHING) -> None:
        """Nothing is counted."""

    def waiting(self) -> Iterator[tuple[str, int]]:
        """(tenant, tickets waiting), in no order."""
        return iter(self._num_waiting.items())

    def check_integrity(self) -> None:
        """Raises AssertionError if a count is not positive."""
        for tenant_id, count in self._num_waiting.items():
            if count < 1:
                raise AssertionError(f"tenant {tenant_id}: {count} waiting")


class Fcfs(Waiting):
    """All counters are equal, so the oldest ticket decides."""

    def counter(self, tenant_id: str) -> float:
        """The same for everybody."""
        return 0.0


class RoundRobin(Waiting):
    """The counter is the number of the tenant's last turn; who has not had one goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._num_turns = 0
        self._last_turn: dict[str, int] = {}

    def dequeue(self, tenant_id: str) -> None:
        """Its turn is over. A ticket that was aborted has used one up as well."""
        super().dequeue(tenant_id)
        self._num_turns += 1
        self._last_turn[tenant_id] = self._num_turns

    def counter(self, tenant_id: str) -> float:
        """When it had its last turn."""
        return float(self._last_turn.get(tenant_id, 0))


class Counted:
    """A TenantOrder over our counters, with the lift on return; siblings say what is counted."""

    def __init__(self, max_lead: float) -> None:
        self._share = FairShare(max_lead)

    def enqueue(self, tenant_id: str, weight: float) -> None:
        """A new ticket of the tenant waits."""
        self._share.enqueue(tenant_id, weight)

    def restore(self, tenant_id: str) -> None:
        """A granted ticket waits again."""
        self._share.restore(tenant_id)

    def dequeue(self, tenant_id: str) -> None:
        """A ticket stopped waiting."""
        self._share.dequeue(tenant_id)

    def expect(self, tenant_id: str, used: Used) -> None:
        """Count device seconds."""
        self._share.expect(tenant_id, used)

    def settle(self, tenant_id: str, rest: Used) -> None:
        """Take back device seconds."""
        self._share.settle(tenant_id, rest)

    def charge(self, tenant_id: str, used: Used, expected: Used = NOTHING) -> None:
        """Count device seconds."""
        self._share.charge(tenant_id, used, expected)

    def counter(self, tenant_id: str) -> float:
        """What the tenant has had."""
        return self._share.counter(tenant_id)

    def waiting(self) -> Iterator[tuple[str, int]]:
        """(tenant, tickets waiting), in no order."""
        return self._share.waiting()

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not agree."""
        self._share.check_integrity()


class TokenCounter(Counted):
    """Counts tokens. As published it has no limit to a tenant's lead."""

    def __init__(self) -> None:
        super().__init__(float("inf"))

    def expect(self, tenant_id: str, used: Used) -> None:
        """Count tokens, generated ones twice."""
        self._share.expect(tenant_id, Used(used.units))

    def settle(self, tenant_id: str, rest: Used) -> None:
        """Take back tokens."""
        self._share.settle(tenant_id, Used(rest.units))

    def charge(self, tenant_id: str, used: Used, expected: Used = NOTHING) -> None:
        """Count tokens, generated ones twice."""
        self._share.charge(tenant_id, Used(used.units), Used(expected.units))


class Quota(Counted):
    """The counter is the number of the round that the tenant is in."""

    def __init__(self, quota_s: float) -> None:
        super().__init__(float("inf"))
        if quota_s <= 0:
            raise ValueError("a quota is more than 0 seconds")
        self._quota_s = quota_s

    def counter(self, tenant_id: str) -> float:
        """Whole quotas used."""
        return float(self._share.counter(tenant_id) // self._quota_s)
