"""How fast work goes: what it did lately counts, what it did long ago does not."""

import pytest

from admin.registration.policy.pace import HALF_LIFE_S, STALLED_S, Pace


def after(*looks: tuple[float, float]) -> Pace:
    pace = Pace()
    for now_s, done in looks:
        pace = pace.seen(done, now_s)
    return pace


def test_nothing_is_said_before_it_has_been_seen_twice() -> None:
    assert after((5.0, 100.0)).per_s == 0.0
    assert after((5.0, 100.0), (6.0, 140.0)).per_s == 40.0


def test_work_at_an_even_pace_has_that_pace() -> None:
    looks = [(1.0 + n * 0.3, n * 30.0) for n in range(40)]
    assert after(*looks).per_s == pytest.approx(100.0)


def test_another_pace_is_half_there_after_the_half_life() -> None:
    slow = [(1.0 + n, n * 10.0) for n in range(20)]
    now_s, done = slow[-1]
    assert after(*slow, (now_s + HALF_LIFE_S, done + 30.0 * HALF_LIFE_S)).per_s == pytest.approx(
        20.0
    )


def test_what_stands_still_comes_to_a_stand() -> None:
    looks = [(1.0, 0.0), (2.0, 100.0), *((2.0 + n, 100.0) for n in range(1, 60))]
    assert after(*looks).per_s < 0.1


def test_less_than_before_is_other_work_and_a_clock_that_stands_is_passed_over() -> None:
    again = after((1.0, 0.0), (2.0, 100.0), (3.0, 10.0))
    assert (again.per_s, again.done) == (0.0, 10.0)
    assert after((1.0, 0.0), (2.0, 100.0), (2.0, 120.0)).per_s == 100.0


def test_work_that_stands_still_has_no_pace_after_a_while() -> None:
    pace = after((1.0, 0.0), (2.0, 80.0))
    assert pace.at(2.0) == pace.at(2.0 + HALF_LIFE_S) == 80.0
    assert pace.at(2.0 + 3 * HALF_LIFE_S) == pytest.approx(20.0)
    assert pace.at(2.5 + STALLED_S) == 0.0
    assert pace.seen(160.0, 3.0).at(3.0) > 0.0, "looking at it changed nothing"
