"""The picture of a month: whose days, how many bars, where the budget's line is."""

from admin.month_chart import is_month, month_of

JAN = 1_767_225_600.0
"""2026-01-01, UTC."""
DAY_S = 86_400.0
NANOS = 10**9


def test_days_so_far_and_to_come() -> None:
    costs = {int(JAN + n * DAY_S): 10 * NANOS for n in range(10)}
    month = month_of(costs, JAN + 9.5 * DAY_S, 250 * NANOS, "USD")
    assert (month.spent, month.at_end) == (100 * NANOS, 315 * NANOS)
    assert month.reached == "01-25"
    assert month.is_over
    assert [day.is_coming for day in month.days] == [False] * 10 + [True] * 22
    assert month.days[9].label == month.days[10].label == "01-10", "today stands twice"
    assert month.days[-1].label == "01-31"
    assert month.chart.count('class="bar"') == 10
    assert month.chart.count('class="coming"') == 22
    assert month.chart.count('class="budget"') == 1


def test_hours_add_up_to_days_and_others_are_left_out() -> None:
    costs = {int(JAN + n * 3600): NANOS for n in range(30)} | {int(JAN - 1): 99, int(JAN + 9e6): 9}
    month = month_of(costs, JAN + 1.25 * DAY_S, 0, "USD")
    assert [day.total for day in month.days[:2]] == [24 * NANOS, 30 * NANOS]
    assert (month.budget, month.reached, month.is_over) == (0, "", False)


def test_a_month_without_anything_and_its_first_moment() -> None:
    for now_at in (JAN, JAN + 1, JAN + 31 * DAY_S - 1):
        month = month_of({}, now_at, NANOS, "USD")
        assert (month.spent, month.is_over) == (0, False)
        assert "nan" not in month.chart
    assert month_of({int(JAN): 5}, JAN, 0, "USD").at_end is None


def test_what_is_this_month() -> None:
    now_at = JAN + 5 * DAY_S
    assert is_month(JAN, JAN + 6 * DAY_S, now_at)
    assert is_month(JAN, JAN + 31 * DAY_S, now_at)
    assert not is_month(JAN, JAN + 5 * DAY_S, now_at)
    assert not is_month(JAN + DAY_S, JAN + 6 * DAY_S, now_at)
    assert not is_month(JAN, JAN + 32 * DAY_S, now_at)
