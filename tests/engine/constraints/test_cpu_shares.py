"""Accounts of CPU time: who becomes dear, whose turn it is, and how much others notice."""

import pytest

from engine.constraints.cpu_shares import (
    CREDIT_S,
    DEBT_S,
    MAX_TENANTS,
    OPEN_S,
    RECENT_S,
    REPAY,
    SHARE,
    STEP_S,
    CpuShares,
)


@pytest.fixture(name="shares")
def _shares() -> CpuShares[str]:
    return CpuShares()


def test_an_ordinary_tenant_is_never_dear_however_much_it_asks(shares: CpuShares[str]) -> None:
    for _ in range(10_000):
        shares.pay("a", OPEN_S / 2, OPEN_S, 0.0)
        for _ in range(30):
            shares.pay("a", STEP_S / 2, STEP_S, 0.0)
    assert not shares.is_dear("a", 0.0)
    assert not shares.spent_for_s("a", 0.0)


def test_who_costs_more_than_is_earned_is_dear_and_then_spent(shares: CpuShares[str]) -> None:
    shares.pay("a", CREDIT_S, 0.0, 0.0)
    assert not shares.is_dear("a", 0.0)
    shares.pay("a", 1.0, 0.0, 0.0)
    assert shares.is_dear("a", 0.0)
    assert not shares.spent_for_s("a", 0.0)
    shares.pay("a", DEBT_S, 0.0, 0.0)
    wait_s = shares.spent_for_s("a", 0.0)
    assert wait_s == pytest.approx(1.0 / REPAY)
    assert not shares.spent_for_s("a", wait_s + 0.1)
    assert shares.is_dear("a", wait_s + 0.1)
    assert not shares.is_dear("a", wait_s + DEBT_S / REPAY + 0.1)
    assert not shares.is_dear("b", 0.0)


def test_rows_that_cost_little_pay_a_debt_back(shares: CpuShares[str]) -> None:
    shares.pay("a", CREDIT_S + 100 * STEP_S, 0.0, 0.0)
    for _ in range(101):
        shares.pay("a", 0.0, STEP_S, 0.0)
    assert not shares.is_dear("a", 0.0)


def test_one_piece_at_a_time_from_whom_owes_least(shares: CpuShares[str]) -> None:
    for tenant, owed_s in (("a", 0.9), ("b", 0.3)):
        shares.pay(tenant, owed_s, 0.0, 0.0)
        shares.wait(tenant, f"{tenant}1")
        shares.wait(tenant, f"{tenant}2")
    served = []
    for tenant in "bbaa":
        piece = shares.next(0.0)
        assert piece is not None
        assert shares.next(0.0) is None, "one is out already"
        served.append(piece)
        shares.pay(tenant, 0.4, 0.0, 0.0)
        shares.done(0.4, 0.0)
    assert served == ["b1", "b2", "a1", "a2"]
    assert not shares.num_waiting


def test_others_keep_most_of_the_time_while_they_are_there(shares: CpuShares[str]) -> None:
    shares.pay("a", 1.0, 0.0, 0.0)
    for number in range(3):
        shares.wait("a", str(number))
    shares.serve_at_once(10.0)
    assert shares.next(10.0) == "0"
    shares.done(0.01, 10.02)
    again_s = 10.02 + 0.02 * (1 / SHARE - 1)
    assert shares.next(again_s - 0.001) is None
    assert shares.next(again_s) == "1"
    shares.done(0.01, again_s + 0.5)
    assert shares.next(again_s + 0.5 + 0.03 * (1 / SHARE - 1) - 0.001) is None, "as long as needed"
    # Nobody else has been there for a while: no reason to wait.
    assert again_s + 0.5 > 10.0 - RECENT_S
    assert shares.next(10.0 + RECENT_S) == "2"


def test_what_is_dropped_or_cleared_has_no_turn(shares: CpuShares[str]) -> None:
    shares.pay("a", 1.0, 0.0, 0.0)
    shares.wait("a", "1")
    shares.wait("a", "2")
    assert shares.drop("a", "1")
    assert not shares.drop("a", "1")
    assert shares.next(0.0) == "2"
    shares.wait("a", "3")
    shares.clear()
    assert shares.next(0.0) is None
    assert shares.is_dear("a", 0.0), "the account stays"


def test_accounts_are_bounded(shares: CpuShares[str]) -> None:
    for number in range(2 * MAX_TENANTS):
        shares.pay(str(number), 1.0, 0.0, 0.0)
    assert len(shares._owed) == MAX_TENANTS
    for number in range(2 * MAX_TENANTS):
        shares.pay(str(number), 0.0, 2.0, 0.0)
    assert not shares._owed
