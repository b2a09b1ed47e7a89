"""Strikes, terms that double, and what clears them."""

from collections.abc import Callable

from gateway.policy.quarantine import FIRST_TERM_S, LONGEST_TERM_S, Quarantine

KEY = ("m", "r1")


def test_two_deaths_in_a_row_are_a_term_that_ends() -> None:
    quarantine = Quarantine()
    assert quarantine.worker_died([KEY, KEY], "killed", 10.0) == []
    assert quarantine.worker_died([KEY, ("n", "r1")], "killed", 20.0) == ["m"]
    assert quarantine.reason("n", "r1", 20.0) is None
    reason = quarantine.reason(*KEY, 20.0)
    assert reason is not None
    assert "killed" in reason
    assert quarantine.reasons(20.0) == {"m": reason}
    assert quarantine.reason(*KEY, 20.0 + FIRST_TERM_S) is None
    assert quarantine.reasons(20.0 + FIRST_TERM_S) == {}
    assert quarantine.reason("m", "r2", 20.0) is None


def test_one_more_death_after_a_term_is_a_term_twice_as_long_up_to_a_bound() -> None:
    quarantine = Quarantine()
    now_s = 0.0
    quarantine.worker_died([KEY], "", now_s)
    for number in range(12):
        assert quarantine.worker_died([KEY], "", now_s) == ["m"]
        term_s = min(LONGEST_TERM_S, FIRST_TERM_S * 2**number)
        assert quarantine.reason(*KEY, now_s + term_s - 1) is not None
        now_s += term_s
        assert quarantine.reason(*KEY, now_s) is None


def test_work_that_ended_between_two_deaths_clears_the_first() -> None:
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "", 0.0)
    quarantine.served(*KEY)
    assert quarantine.worker_died([KEY], "", 1.0) == []


def test_requests_that_were_still_running_add_no_second_term() -> None:
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "", 0.0)
    assert quarantine.worker_died([KEY], "", 1.0) == ["m"]
    assert quarantine.worker_died([KEY], "", 2.0) == []


def test_an_operator_or_a_new_revision_ends_it_at_once() -> None:
    ends: list[Callable[[Quarantine], object]] = [
        lambda q: q.clear("m"),
        lambda q: q.keep([("m", "r2")]),
    ]
    for end in ends:
        quarantine = Quarantine()
        quarantine.worker_died([KEY], "", 0.0)
        quarantine.worker_died([KEY], "", 0.0)
        end(quarantine)
        assert quarantine.reason(*KEY, 0.0) is None
        assert quarantine.worker_died([KEY], "", 0.0) == []
