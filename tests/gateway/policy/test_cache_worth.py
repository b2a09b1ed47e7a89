"""What a kept answer is worth."""

from gateway.policy.cache_worth import worth_when_made, worth_when_used


def test_saved_cost_a_byte_counts() -> None:
    assert worth_when_made(0.0, 1000, 10) > worth_when_made(0.0, 1000, 20)
    assert worth_when_made(0.0, 2000, 10) > worth_when_made(0.0, 1000, 10)
    once = worth_when_made(0.0, 1000, 10)
    assert worth_when_used(once, 0.0, 1000, 10) == 2 * once


def test_old_savings_count_less_as_the_clock_goes_on() -> None:
    old = worth_when_used(worth_when_made(0.0, 1000, 10), 0.0, 1000, 10)
    assert worth_when_made(old + 1, 1, 10) > old
    assert worth_when_used(old, 10 * old, 1000, 10) > 10 * old


def test_what_costs_nothing_is_still_worth_its_bytes() -> None:
    assert worth_when_made(5.0, 0, 100) > worth_when_made(5.0, 0, 200) > 5.0
