"""Filters for people."""

import pytest

from admin.rendering.templating import codes, hint


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("exports_quota_bytes", "10737418240", "10.0 GiB"),
        ("exports_keep_s", "604800.0", "7 d"),
        ("status_interval_s", "0.1", ""),
        ("page_bytes", "0", ""),
        ("port", "8000", ""),
        ("host", '"127.0.0.1"', ""),
    ],
)
def test_sizes_and_durations_of_settings_have_units(name: str, value: str, said: str) -> None:
    assert hint(value, name) == said


def test_words_in_backticks_are_code_and_inert() -> None:
    assert codes("set `a_b` to <x>") == "set <code>a_b</code> to &lt;x&gt;"
