"""When spending has reached a threshold, and when a message not taken is tried again. Pure.

A percent of a sum is reached when what was spent is that much of it or more, in whole nano-units;
nothing is reached of a sum that is 0.
"""

from collections.abc import Iterable

FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 3600.0
GIVE_UP_S = 3 * 86_400.0
"""After so long nobody is told of it any more; it stays in the list."""


def reached(percents: Iterable[int], spent_nanos: int, budget_nanos: int) -> list[int]:
    """Those percents, the lowest first."""
    if budget_nanos <= 0:
        return []
    return sorted(p for p in percents if spent_nanos * 100 >= p * budget_nanos)


def retry_at(num_tries: int, raised_at: float, now_at: float) -> float | None:
    """When to try again after `num_tries` failures: twice as long each time; None: never."""
    if now_at - raised_at >= GIVE_UP_S:
        return None
    return now_at + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(num_tries - 1, 20))
