"""Who is lost: whose row did not change in front of somebody who has looked all the while."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.policy.absences import MOST_APART_S, RENEW_S, Absences

LOST_AFTER_S = 30.0


def test_a_row_that_stays_the_same_is_lost_in_time_and_one_that_changes_never_is() -> None:
    absences, lost_at = Absences(LOST_AFTER_S), None
    for step in range(60):
        now_s = 5e5 + step * RENEW_S
        lost = absences.look({"lives": 1e9 + step, "gone": 1e9}, now_s, now_s + 0.1)
        assert "lives" not in lost
        if lost and lost_at is None:
            lost_at = step * RENEW_S
    assert lost_at is not None
    assert LOST_AFTER_S <= lost_at <= LOST_AFTER_S + 2 * RENEW_S


def test_one_that_came_back_has_all_its_time_again() -> None:
    absences = Absences(LOST_AFTER_S)
    for step in range(14):
        assert absences.look({"a": 1.0}, step * RENEW_S, step * RENEW_S) == []
    for step in range(14, 28):
        assert absences.look({"a": 2.0}, step * RENEW_S, step * RENEW_S) == []
    assert absences.look({}, 60.0, 60.0) == []
    assert absences.look({"a": 2.0}, 62.0, 62.0) == []  # deleted, and made anew


@given(st.floats(8.0, LOST_AFTER_S), st.floats(0.1, 100.0))
def test_a_pause_of_the_database_makes_nobody_lost_however_short_the_time(
    lost_after_s: float, away_s: float
) -> None:
    """When it is back, somebody else's first renewal may come as late as RENEW_S."""
    absences, now_s = Absences(lost_after_s), 0.0
    assert absences.look({"a": 1.0}, now_s, now_s) == []
    asked_s, now_s = now_s + RENEW_S, now_s + RENEW_S + away_s
    assert absences.look({"a": 1.0}, asked_s, now_s) == []
    now_s += RENEW_S
    assert absences.look({"a": 1.0}, now_s, now_s) == []


@given(st.floats(MOST_APART_S + 1, 1e4), st.integers(1, 14))
def test_a_database_that_was_away_makes_nobody_lost(away_s: float, num_looks: int) -> None:
    """Nor does an observer that was stopped: it has not seen who renewed meanwhile."""
    absences, now_s = Absences(LOST_AFTER_S), 0.0
    for _ in range(num_looks):
        assert absences.look({"a": 1.0}, now_s, now_s) == []
        now_s += RENEW_S
    began_s = now_s + away_s
    assert absences.look({"a": 1.0}, now_s, began_s) == []  # its answer came when it was back
    for _ in range(round(LOST_AFTER_S / RENEW_S) - 1):
        began_s += RENEW_S
        assert absences.look({"a": 1.0}, began_s, began_s) == []
    began_s += 2 * RENEW_S
    assert absences.look({"a": 1.0}, began_s, began_s) == ["a"]
