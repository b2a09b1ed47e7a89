"""Copies that the rate of their model does not need (memory for KV: test_placement.py)."""

import pytest

from gateway.dispatch.policy.relief import (
    ENOUGH_FREE,
    MIN_REPLICA_IDLE_S,
    REPLICA_IDLE_LOADS,
    IdleCopy,
    surplus,
)

OLD = [IdleCopy("b", 5.0, 1.0), IdleCopy("a", 5.0, 1.0), IdleCopy("c", 4.0, 1.0)]


def test_the_longest_idle_one_leaves() -> None:
    decision = surplus("m", 3, 0.1, OLD, 100.0)
    assert decision is not None
    assert (decision.worker_id, decision.reason) == ("c", "surplus replica")
    decision = surplus("m", 3, 0.1, OLD[:2], 100.0)
    assert decision is not None
    assert decision.worker_id == "a"


@pytest.mark.parametrize(
    ("num_copies", "busy_share"), [(1, 0.0), (2, 0.51), (3, 1.01)], ids=["last", "two", "three"]
)
def test_the_last_one_and_what_is_needed_stay(num_copies: int, busy_share: float) -> None:
    assert surplus("m", num_copies, busy_share, OLD, 100.0) is None
    assert surplus("m", num_copies + 1, busy_share, OLD, 100.0) is not None


def test_one_that_was_just_used_stays() -> None:
    short, long = IdleCopy("a", 0.0, 0.1), IdleCopy("a", 0.0, 10.0)
    assert surplus("m", 9, 0.0, [short], MIN_REPLICA_IDLE_S - 0.1) is None
    assert surplus("m", 9, 0.0, [short], MIN_REPLICA_IDLE_S) is not None
    assert surplus("m", 9, 0.0, [long], REPLICA_IDLE_LOADS * 10.0 - 0.1) is None
    assert surplus("m", 9, 0.0, [long], REPLICA_IDLE_LOADS * 10.0) is not None


def test_one_stays_where_nobody_needs_its_bytes() -> None:
    spare = IdleCopy("a", 0.0, 1.0, free_share=ENOUGH_FREE)
    assert surplus("m", 3, 0.0, [spare], 100.0) is None
    decision = surplus("m", 3, 0.0, [spare, IdleCopy("b", 9.0, 1.0, ENOUGH_FREE - 0.01)], 100.0)
    assert decision is not None
    assert decision.worker_id == "b"
