"""What a month will have cost."""

from hypothesis import given
from hypothesis import strategies as st

from admin.rendering.policy.forecast import Forecast, forecast


def test_days_to_come_cost_what_the_newest_did() -> None:
    found = forecast([1000, 10, 10, 10, 10, 10, 10, 10, 4], num_days=12, share_of_today=0.5)
    assert found.past == (1000, 1010, 1020, 1030, 1040, 1050, 1060, 1070)
    assert found.spent == 1074
    assert found.coming == (1079, 1089, 1099, 1109)
    assert found.at_end == 1109


def test_a_first_day_goes_by_its_own_pace() -> None:
    assert forecast([6], 30, 0.25).coming[:2] == (24, 48)
    assert forecast([6], 30, 0.01) == Forecast((), 6, ())
    assert forecast([6], 30, 0.0).at_end is None


def test_the_last_day_and_quiet_months() -> None:
    assert forecast([10, 10, 5], 3, 0.5).coming == (30,)
    assert forecast([0, 0, 0], 30, 0.5).at_end == 0
    assert forecast([-10, 3], 4, 0.0).coming == (-7, -7, -7), "nobody is foretold to earn"


def test_when_a_budget_is_reached() -> None:
    found = forecast([10, 10, 4], num_days=10, share_of_today=0.4)
    assert found.reached_on(10) == 0
    assert found.reached_on(20) == 1
    assert found.reached_on(24) == 2
    assert found.reached_on(45) == 4
    assert found.reached_on(1000) is None
    assert forecast([5], 30, 0.0).reached_on(5) == 0
    assert forecast([5], 30, 0.0).reached_on(6) is None


@given(
    st.lists(st.integers(0, 10**15), min_size=1, max_size=31),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 10),
)
def test_it_never_goes_down_and_has_every_day(costs: list[int], share: float, more: int) -> None:
    found = forecast(costs, len(costs) + more, share)
    assert found.spent == sum(costs)
    assert len(found.past) == len(costs) - 1
    assert len(found.coming) in (0, more + 1)
    ends = (*found.past, found.spent, *found.coming)
    assert list(ends) == sorted(ends)
