"""Which worker a head keeps, and for how long."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.policy.kept_worker import CLEARLY, expected_first, lacking_lifetimes


def test_what_lacks_more_takes_longer() -> None:
    assert lacking_lifetimes(0, 4, 0, 100) == 0.0
    assert lacking_lifetimes(0, 4, -5, 100) == 0.0
    one_row, memory = lacking_lifetimes(1, 4, 0, 100), lacking_lifetimes(0, 4, 60, 100)
    assert one_row == pytest.approx(math.log(5 / 4))
    assert memory == pytest.approx(math.log(5 / 2.6))
    assert lacking_lifetimes(1, 4, 60, 100) == memory  # the longer of the two
    all_of_four, the_last = lacking_lifetimes(0, 4, 100, 100), lacking_lifetimes(0, 1, 25, 25)
    assert all_of_four == pytest.approx(math.log(5))
    assert the_last == pytest.approx(math.log(2))
    assert lacking_lifetimes(0, 0, 7, 0) == the_last  # nothing is known of who has it


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_it_falls_whatever_ends(sizes: list[int], share: float) -> None:
    used = sum(sizes)
    missing, before = int(share * used), math.inf
    for place, size in enumerate(sizes):
        lack = lacking_lifetimes(0, len(sizes) - place, missing, used)
        assert lack <= before + 1e-9
        missing, used, before = missing - size, used - size, lack


def test_the_choice_stays_unless_another_lacks_clearly_less() -> None:
    assert expected_first({}, "a") == ""
    assert expected_first({"a": 0.5, "b": 0.2}, "") == "b"
    assert expected_first({"b": 0.5, "a": 0.5}, "") == "a"
    assert expected_first({"a": 0.5, "b": 0.3}, "a") == "a"
    assert expected_first({"a": 0.5, "b": 0.2}, "a") == "b"
    assert expected_first({"b": 0.9}, "a") == "b"  # it is gone


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcde"), st.floats(0.001, 1.0), min_size=5), max_size=60
    )
)
def test_it_cannot_wander_for_ever(looks: list[dict[str, float]]) -> None:
    """What the kept one lacks falls, whatever happens on others, and a change halves it."""
    kept, lack = "", 1.0
    num_changes = 0
    for look in looks:
        if kept:
            look[kept] = min(look[kept], lack)
        chosen = expected_first(look, kept)
        if kept and chosen != kept:
            assert look[chosen] < CLEARLY * look[kept]
            num_changes += 1
        kept, lack = chosen, look[chosen]
    assert num_changes <= 10  # 2 ** -10 < 0.001
