"""Which prompts are prepared on the event loop: those that should take no time."""

import threading
from collections.abc import Callable

from gateway.prepare.codecs import Pace, PreparePool

LONG = 1 << 40


def where() -> str:
    """The thread's name."""
    return threading.current_thread().name


def times(pace: Pace, tell: Callable[[], None], until: Callable[[], bool]) -> int:
    """How often it has to be told until that holds."""
    count = 0
    while not until():
        tell()
        count += 1
        assert count < 10_000
    return count


def slow(pace: Pace, seconds: float) -> None:
    """Some in a row."""
    for _ in range(10):
        pace.took(1000, seconds)


def test_what_is_expected_grows_with_the_length() -> None:
    pace = Pace()
    assert 0 < pace.expected_s(100) < pace.expected_s(10_000) < pace.expected_s(LONG)


def test_slower_ones_count_at_once_and_quicker_ones_little_by_little() -> None:
    pace = Pace()
    usual_s = pace.expected_s(1000)
    pace.took(1000, 1000 * usual_s)
    assert pace.expected_s(1000) < 3 * usual_s, "it may have waited for a core"
    slow(pace, 20 * usual_s)
    assert pace.expected_s(1000) > 10 * usual_s
    num = times(pace, lambda: pace.took(1000, usual_s), lambda: pace.expected_s(1000) < 2 * usual_s)
    assert 3 < num < 20


def test_what_threads_do_makes_it_be_tried_again_after_a_while() -> None:
    pace = Pace()
    usual_s = pace.expected_s(1000)
    slow(pace, 20 * usual_s)
    num = times(pace, pace.passed_on, lambda: pace.expected_s(1000) < 2 * usual_s)
    assert 50 < num < 500


async def test_short_work_needs_no_thread_and_long_work_has_one() -> None:
    pool, pace = PreparePool(1, 4, inline_s=0.05), Pace()
    assert await pool.run_paced(where, pace, 10) == threading.main_thread().name
    assert (await pool.run_paced(where, pace, LONG)).startswith("prepare")
    slow(pace, 1000.0)
    assert (await pool.run_paced(where, pace, 10)).startswith("prepare")
    pool.close()


async def test_without_a_bound_everything_goes_to_a_thread() -> None:
    pool, pace = PreparePool(1, 4), Pace()
    for _ in range(3):
        assert (await pool.run_paced(where, pace, 10)).startswith("prepare")
    pool.close()
