"""The charts: each shows its own figures; whose days a month has, and where its budget is."""

import re

import pytest

from admin.rendering.charts import PICTURES, Stack, hours_chart, is_month, month_of, shown, stacked
from registry.lists.models import Hour

HOURS = [
    Hour(0, 4, 1, 100, 300, 5, 2.0),
    Hour(3600),
    Hour(7200, 2, 0, 10, 20, 5, 0.1),
]


@pytest.mark.parametrize(
    ("show", "first", "last"),
    [
        ("requests", "00:00 UTC: 4 requests, 1 failed", "02:00 UTC: 2 requests, 0 failed"),
        ("tokens", "00:00 UTC: 100 input tokens, 300", "02:00 UTC: 10 input tokens, 20 output"),
        ("first", "00:00 UTC: mean 500 ms", "02:00 UTC: mean 50 ms"),
    ],
)
def test_each_picture_says_its_figures(show: str, first: str, last: str) -> None:
    text = str(hours_chart(HOURS, "tiny", show))
    assert first in text
    assert last in text
    tall = [float(h) for h in re.findall(r'class="bar" [^>]*height="([0-9.]+)"', text)]
    assert len(tall) == 2, "an hour without a request has no bar"
    assert tall[0] > tall[1]


@pytest.mark.parametrize(
    ("cost", "scale"),
    [
        (0, ["0", "1", "2", "3", "4"]),
        (5, ["0", "0.000000002", "0.000000004", "0.000000006", "0.000000008"]),
        (3_000_000 * 10**9, ["0", "1,000,000", "2,000,000", "3,000,000", "4,000,000"]),
    ],
)
def test_a_scale_of_money_has_no_exponents(cost: int, scale: list[str]) -> None:
    text = str(stacked(["11-23"], [Stack("tiny", "c0", [cost])], "Cost by day", "USD"))
    assert [line for line in re.findall(r">([0-9.,e+-]+)</text>", text) if line != "11-23"] == scale


def test_what_the_address_says_is_taken_where_there_is_such_a_picture() -> None:
    assert [shown(key) for key in PICTURES] == list(PICTURES)
    assert shown("<script>") == "requests"


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


def test_letters_and_scale_keep_their_size_however_narrow() -> None:
    """Across in percent, so that nothing has to be scrolled or scaled."""
    text = str(hours_chart(HOURS, "tiny", "requests"))
    assert "viewBox" not in text
    assert 'class="chart axis-3"' in text
    widths = re.findall(r'class="bar" x="[0-9.]+%" width="([0-9.]+)%"', text)
    assert [float(wide) for wide in widths] == pytest.approx([70 / 3] * 2, abs=0.01)
    scale = re.findall(r'<text x="-8" y="[0-9.]+" text-anchor="end">', text)
    assert len(scale) == 5, "beside the bars"
