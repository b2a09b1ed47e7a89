"""Budgets of calendar periods: when they begin and end, and what goes along into the next."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.limits import PeriodKind, period_of
from gateway.limits.policy.rate_limit import (
    Draw,
    Refusal,
    Spend,
    Taken,
    UsedAmounts,
    release,
    reserve,
    settle,
)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("kind", "now", "began", "ends"),
    [
        ("day", "2026-02-28T23:59:59", "2026-02-28", "2026-03-01"),
        ("day", "2026-03-01T00:00:00", "2026-03-01", "2026-03-02"),
        ("month", "2026-02-28T23:59:59", "2026-02-01", "2026-03-01"),
        ("month", "2028-02-29T12:00:00", "2028-02-01", "2028-03-01"),
        ("month", "2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
        ("month", "2027-01-01T00:00:00", "2027-01-01", "2027-02-01"),
    ],
)
def test_periods_are_calendar_ones(kind: PeriodKind, now: str, began: str, ends: str) -> None:
    period = period_of(kind, at(now))
    assert (period.began_at, period.ends_at) == (at(began), at(ends))
    assert period_of(kind, period.ends_at).number == period.number + 1
    assert period_of(kind, period.began_at) == period


def draw(cost: int, limit: int, period: int = 1) -> Draw:
    return Draw("n", "cost", 0, limit, cost, period, 60.0)


def take(spend: Spend, *arguments: int) -> Taken:
    taken = reserve([spend], [draw(*arguments)], 0.0)
    assert isinstance(taken, tuple), taken
    return taken[0]


def test_a_new_period_begins_with_what_is_under_way() -> None:
    spend = Spend(1)
    settle(spend, take(spend, 30, 100), UsedAmounts(0, 0, 20))
    long = take(spend, 80, 100)
    refusal = reserve([spend], [draw(1, 100)], 0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.used, refusal.wait_s) == (100, 60.0)
    # The first 20 are of the old period; what runs on will be billed in the new one.
    other = take(spend, 20, 100, 2)
    assert isinstance(reserve([spend], [draw(1, 100, 2)], 0.0), Refusal)
    settle(spend, long, UsedAmounts(0, 0, 50))
    release(spend, other)
    assert spend.total == 50
    assert spend.figures(draw(1, 100, 2), 0.0).remaining == 50
    take(spend, 1, 100, 1)  # a clock that goes back a little changes nothing
    assert spend.period == 2


def test_what_ends_first_in_a_new_period_is_of_that_one() -> None:
    spend = Spend(1)
    long, longer = take(spend, 60, 100), take(spend, 10, 100)
    settle(spend, long, UsedAmounts(0, 0, 60, day=2))  # nobody has reserved in the second one yet
    refusal = reserve([spend], [draw(31, 100, 2)], 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.used == 70
    settle(spend, longer, UsedAmounts(0, 0, 10, day=2))
    assert (spend.period, spend.total, spend.reserved) == (2, 70, 0)


def test_what_could_never_be_paid_is_told() -> None:
    refusal = reserve([Spend(1)], [draw(101, 100)], 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.wait_s is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "settle", "release", "roll"]),
            st.integers(0, 60),
            st.integers(0, 1000),
        ),
        max_size=80,
    )
)
def test_no_period_is_billed_more_than_its_budget(steps: list[tuple[str, int, int]]) -> None:
    limit, period, spend = 100, 1, Spend(1)
    billed: dict[int, int] = {}
    held: list[Taken] = []
    for action, cost, pick in steps:
        if action == "roll":
            period += 1
        if action == "reserve":
            result = reserve([spend], [draw(cost, limit, period)], 0.0)
            held += result if isinstance(result, tuple) else ()
        elif action in ("settle", "release") and held:
            taken = held.pop(pick % len(held))
            used = min(cost, taken.cost) if action == "settle" else 0
            settle(spend, taken, UsedAmounts(0, 0, used, day=period))
            billed[period] = billed.get(period, 0) + used
        assert spend.reserved == sum(taken.cost for taken in held)
        assert all(sum_ <= limit for sum_ in billed.values())
