"""Thresholds are reached to the unit; tries get rarer and end."""

import pytest

from admin.alerts.alerts import GIVE_UP_S, LONGEST_RETRY_S, reached, retry_at


@pytest.mark.parametrize(
    ("spent", "budget", "expected"),
    [
        (0, 100, []),
        (49, 100, []),
        (50, 100, [50]),
        (80, 100, [50, 80]),
        (250, 100, [50, 80, 100]),
        (1, 3, []),
        (2, 3, [50]),
        (3 * 10**15, 3 * 10**15 + 1, [50, 80]),
        (5, 0, []),
        (-5, 100, []),
    ],
)
def test_reached(spent: int, budget: int, expected: list[int]) -> None:
    assert reached((100, 50, 80), spent, budget) == expected


def test_tries_get_rarer_and_end() -> None:
    now_at, waits = 1000.0, list[float]()
    for num_tries in range(1, 1000):
        at = retry_at(num_tries, 1000.0, now_at)
        if at is None:
            break
        waits.append(at - now_at)
        now_at = at
    assert waits[:4] == [10, 20, 40, 80]
    assert max(waits) == LONGEST_RETRY_S
    assert now_at - 1000.0 >= GIVE_UP_S
    assert len(waits) < 100
