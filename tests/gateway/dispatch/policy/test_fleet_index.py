"""The index is of the workers as they are, and its candidates are those worth a look."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.policy.fleet_index import MOST_CANDIDATES, FleetIndex

STATES = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from(["resident", "warm", "loading"]), max_size=3
)


def filled(number: int, **states: str) -> FleetIndex:
    """So many workers with nothing, `w000` the emptiest."""
    index = FleetIndex()
    for place in range(number):
        index.note_states(f"w{place:03}", states)
        index.note_bytes(f"w{place:03}", (number - place) << 30, (number - place) << 30)
    return index


@given(st.lists(st.tuples(st.integers(0, 5), STATES, st.integers(0, 1 << 40), st.booleans())))
def test_it_agrees_with_what_it_was_told(
    steps: list[tuple[int, dict[str, str], int, bool]],
) -> None:
    index, truth = FleetIndex(), dict[str, dict[str, str]]()
    for number, states, size, is_lost in steps:
        worker_id = f"w{number}"
        if is_lost:
            index.lose(worker_id)
            truth.pop(worker_id, None)
        else:
            index.note_states(worker_id, states)
            index.note_bytes(worker_id, size, size)
            truth[worker_id] = states
        index.check_integrity(truth)
        assert sorted(index.candidates("a")) == sorted(truth)  # few: all are looked at
        holders = [w for w, models in truth.items() if models.get("a") == "resident"]
        assert set(index.having("a", "resident")) == set(holders)


def test_an_index_that_is_wrong_says_so() -> None:
    index = filled(2)
    with pytest.raises(ValueError, match="the index has"):
        index.check_integrity({"w000": {}})


def test_a_large_fleet_shows_warm_copies_and_the_emptiest() -> None:
    index = filled(200)
    for place in (150, 160, 170):
        index.note_states(f"w{place}", {"m": "warm"})
    index.note_states("w000", {"m": "resident"})
    found = index.candidates("m")
    assert len(found) == MOST_CANDIDATES
    assert found[:3] == ["w150", "w160", "w170"]
    assert "w000" not in found, "it is there already"
    assert {"w001", "w002", "w003"} <= set(found)


def test_those_to_avoid_are_left_out_of_the_ones_at_rest() -> None:
    index = filled(200)
    for place in range(200):
        index.note_bytes(f"w{place:03}", 0, (200 - place) << 30)
    avoid = {f"w{place:03}" for place in range(50)}
    shown = set(index.candidates("m", avoid)) - set(index.candidates("m"))
    assert shown
    assert not shown & avoid


def test_what_is_claimed_is_not_offered_again() -> None:
    index = filled(30)
    first = next(index.with_room("m", 20 << 30))
    index.take(first, 25 << 30)
    assert first not in list(index.with_room("m", 20 << 30))
    assert all(int(name[1:]) <= 10 for name in index.with_room("m", 20 << 30))


def test_spreading_comes_to_everybody() -> None:
    index = filled(100)
    seen = {name for _ in range(10) for name in index.spread(12)}
    assert len(seen) == 100


def test_where_a_model_has_failed_it_is_loaded_by_operators_only() -> None:
    index = filled(200)
    for place in range(190):
        index.note_states(f"w{place:03}", {"m": "failed"})
    shown = set[str]()
    for _ in range(8):
        shown.update(index.candidates("m"))
        index.none_loadable("m")
    assert shown == {f"w{place}" for place in range(190, 200)}
    assert "w000" in index.candidates("m", and_failed=True)


def test_others_are_shown_where_none_of_the_candidates_can_load_it() -> None:
    index, seen = filled(1000), set[str]()
    assert index.candidates("m") == index.candidates("m")
    for _ in range(70):
        seen.update(index.candidates("m"))
        index.none_loadable("m")
    assert len(seen) == 1000
    index.candidates("n")
    index.none_loadable("m")  # not asked about last
    assert set(index.candidates("n")) <= {f"w{place:03}" for place in range(40)}
