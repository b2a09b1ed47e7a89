"""Demand with two half-lives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy.demand import Demand, HalfLives

HALF_LIVES = HalfLives(10.0, 100.0)


def steady(share: float, seconds: float) -> Demand:
    demand = Demand()
    for tick in range(int(seconds * 10)):
        demand = demand.added(share / 10, tick / 10, HALF_LIVES)
    return demand


def test_it_is_the_share_of_the_device_under_steady_load() -> None:
    assert steady(0.25, 1000.0).rate(1000.0, HALF_LIVES) == pytest.approx(0.25, rel=0.02)


def test_a_burst_is_forgotten_sooner_than_a_habit() -> None:
    burst = Demand().added(20.0, 0.0, HALF_LIVES)
    habit = steady(0.25, 1000.0)
    habit = Demand(habit.fast_s, habit.slow_s, 0.0)  # as of the burst's moment
    assert burst.rate(0.0, HALF_LIVES) > 1.5 * habit.rate(0.0, HALF_LIVES)
    assert burst.rate(60.0, HALF_LIVES) < habit.rate(60.0, HALF_LIVES)


def test_halves() -> None:
    one = Demand().added(8.0, 0.0, HALF_LIVES)
    later = one.added(0.0, 100.0, HALF_LIVES)
    assert later.slow_s == pytest.approx(4.0)
    assert later.fast_s == pytest.approx(8.0 / 1024)
    assert one.rate(100.0, HALF_LIVES) == pytest.approx(later.rate(100.0, HALF_LIVES))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), max_size=20))
def test_many_at_once_are_one_after_the_other(steps: list[tuple[float, float]]) -> None:
    used = sorted(steps)
    single = Demand()
    for now_s, service_s in used:
        single = single.added(service_s, now_s, HALF_LIVES)
    assert Demand().added_often(used, HALF_LIVES) == single  # to the last bit: runs repeat
