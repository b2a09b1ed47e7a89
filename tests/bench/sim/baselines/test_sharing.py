"""The books' orders between tenants, in a queue of one that is served ticket by ticket."""

from collections import Counter

import pytest

from bench.sim.baselines.sharing import Fcfs, Quota, RoundRobin, TokenCounter
from gateway.dispatch.policy.fair_share import FairShare, TenantOrder, UsedService


class Queue:
    """Tickets that wait; the head of the tenant with the smallest counter goes next."""

    def __init__(self, share: TenantOrder) -> None:
        self.share = share
        self.waiting: dict[str, list[tuple[int, float, float]]] = {}
        self.sequence = 0

    def add(self, tenant: str, service_s: float, units: float, weight: float = 1.0) -> None:
        """A ticket of this cost."""
        self.waiting.setdefault(tenant, []).append((self.sequence, service_s, units))
        self.sequence += 1
        self.share.enqueue(tenant, weight)

    def serve(self, number: int) -> Counter[str]:
        """So many tickets; how many each tenant had."""
        served: Counter[str] = Counter()
        for _ in range(number):
            self.share.check_integrity()
            assert dict(self.share.waiting()) == {t: len(w) for t, w in self.waiting.items() if w}
            tenant = min(
                (t for t, tickets in self.waiting.items() if tickets),
                key=lambda t: (self.share.counter(t), self.waiting[t][0][0]),
            )
            _, service_s, units = self.waiting[tenant].pop(0)
            self.share.dequeue(tenant)
            self.share.charge(tenant, UsedService(service_s, units))
            served[tenant] += 1
        return served


def flooded(share: TenantOrder) -> Queue:
    """One tenant's hundred tickets, then ten of two others; big ones, long ones and small ones."""
    queue = Queue(share)
    for _ in range(100):
        queue.add("flood", 1.0, 1000.0)
    for _ in range(10):
        queue.add("slow", 4.0, 1000.0)
        queue.add("light", 0.5, 250.0)
    return queue


def test_first_come_first_served_whoever_floods() -> None:
    assert flooded(Fcfs()).serve(100) == {"flood": 100}


def test_turns_are_equal_whatever_they_cost() -> None:
    assert flooded(RoundRobin()).serve(30) == {"flood": 10, "slow": 10, "light": 10}


def test_tokens_are_equal_whatever_they_cost_the_device() -> None:
    served = flooded(TokenCounter()).serve(12)
    assert served["flood"] == served["slow"] == pytest.approx(served["light"] / 4, abs=1)


def test_service_is_equal_in_ours() -> None:
    served = flooded(FairShare(1e9)).serve(13)
    assert served == {"light": 8, "flood": 4, "slow": 1}


def test_weights_count_for_tokens() -> None:
    queue = Queue(TokenCounter())
    for _ in range(30):
        queue.add("one", 1.0, 100.0)
        queue.add("three", 1.0, 100.0, weight=3.0)
    assert queue.serve(28) == {"one": 7, "three": 21}


def test_a_quota_is_used_up_before_the_next_round() -> None:
    queue = flooded(Quota(4.0))
    # In the first round the flood's tickets are the oldest: four of them, then the others' share.
    assert queue.serve(4) == {"flood": 4}
    assert queue.serve(9) == {"slow": 1, "light": 8}
    assert queue.serve(4) == {"flood": 4}


def test_who_comes_back_has_not_saved_up() -> None:
    for share in (TokenCounter(), Quota(1.0)):
        queue = Queue(share)
        for _ in range(40):
            queue.add("steady", 1.0, 100.0)
        queue.serve(20)
        for _ in range(20):
            queue.add("back", 1.0, 100.0)
        assert queue.serve(20)["back"] <= 11


def test_a_grant_that_came_to_nothing_waits_again() -> None:
    for share in (Fcfs(), RoundRobin(), TokenCounter(), Quota(1.0)):
        share.enqueue("a", 1.0)
        share.dequeue("a")
        share.restore("a")
        assert dict(share.waiting()) == {"a": 1}
        share.check_integrity()


def test_a_quota_is_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Quota(0.0)
