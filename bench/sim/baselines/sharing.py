"""Whose turn it is, by the books' rules: what ours (gateway/dispatch/policy/fair_share.py) is
compared to.

    fcfs          nobody's: the oldest ticket goes first, whoever sent it
    vtc_tokens    the Virtual Token Counter as published (OSDI'24): prompt tokens, and generated
                  ones twice, over the tenant's weight, in place of device seconds
    round_robin   the tenant whose turn was longest ago, a ticket a turn
    quota         rounds: a tenant may use so many device seconds (times its weight) in a round, and
                  within a round the oldest ticket goes first

All are TenantOrders: the queue, leases and heads that do not fit are the product's.
"""

from gateway.dispatch.policy.fair_share import NOTHING, FairShare, UsedService


class Fcfs(FairShare):
    """All counters are equal, so the oldest ticket decides."""

    def __init__(self) -> None:
        super().__init__(float("inf"))

    def counter(self, tenant_id: str) -> float:
        """The same for everybody."""
        return 0.0


class RoundRobin(Fcfs):
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


class TokenCounter(FairShare):
    """Counts tokens, generated ones twice. As published it has no limit to a tenant's lead."""

    def __init__(self) -> None:
        super().__init__(float("inf"))

    def expect(self, tenant_id: str, used: UsedService) -> None:
        """Count tokens."""
        super().expect(tenant_id, UsedService(used.units))

    def settle(self, tenant_id: str, rest: UsedService) -> None:
        """Take back tokens."""
        super().settle(tenant_id, UsedService(rest.units))

    def charge(self, tenant_id: str, used: UsedService, expected: UsedService = NOTHING) -> None:
        """Count tokens."""
        super().charge(tenant_id, UsedService(used.units), UsedService(expected.units))


class Quota(FairShare):
    """The counter is the number of the round that the tenant is in."""

    def __init__(self, quota_s: float) -> None:
        super().__init__(float("inf"))
        if quota_s <= 0:
            raise ValueError("a quota is more than 0 seconds")
        self._quota_s = quota_s

    def counter(self, tenant_id: str) -> float:
        """Whole quotas used."""
        return float(super().counter(tenant_id) // self._quota_s)
