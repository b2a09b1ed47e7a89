"""The pictures on a model's page: each shows its own figures, by hour."""

import re

import pytest

from admin.model_charts import PICTURES, picture, shown
from registry.model_list import Hour

HOURS = [
    Hour(0, 4, 1, 100, 300, 5, 2.0),
    Hour(3600),
    Hour(7200, 2, 0, 10, 20, 5, 0.1),
]


@pytest.mark.parametrize(
    ("show", "first", "last"),
    [
        ("requests", "00:00 UTC: 4 requests, 1 failed", "02:00 UTC: 2 requests, 0 failed"),
        ("tokens", "00:00 UTC: 100 tokens in, 300 out", "02:00 UTC: 10 tokens in, 20 out"),
        ("first", "00:00 UTC: 500 ms on average", "02:00 UTC: 50 ms on average"),
    ],
)
def test_each_picture_says_its_figures(show: str, first: str, last: str) -> None:
    text = str(picture(HOURS, "tiny", show))
    assert first in text
    assert last in text
    tall = [float(h) for h in re.findall(r'class="bar" [^>]*height="([0-9.]+)"', text)]
    assert len(tall) == 2, "an hour without a request has no bar"
    assert tall[0] > tall[1]


def test_what_the_address_says_is_taken_where_there_is_such_a_picture() -> None:
    assert [shown(key) for key in PICTURES] == list(PICTURES)
    assert shown("<script>") == "requests"
