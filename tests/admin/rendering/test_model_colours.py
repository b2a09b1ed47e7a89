"""Colours tell models apart, are the same everywhere, and do not change when a model comes."""

import pytest

from admin.rendering.model_colours import NUM_SLOTS, ModelColours, assign, by_rank

NAMES = ["acme", "initech", "stark-industries", "a", "b", "c", "d", "e"]


def test_eight_models_have_eight_colours() -> None:
    colours = ModelColours(lambda: NAMES)
    assert len({colours.classes(name) for name in NAMES}) == 8
    assert all(not colours.hatch(name) for name in NAMES)


def test_past_eight_a_pattern_tells_them_apart_and_nothing_changes_for_the_first() -> None:
    names = [f"model-{n}" for n in range(NUM_SLOTS)]
    assert len(set(assign(names).values())) == NUM_SLOTS
    for end in range(1, NUM_SLOTS):
        assert assign(names[:end]).items() <= assign(names[: end + 1]).items()


def test_a_database_that_is_away_leaves_what_was_known() -> None:
    clock = iter([0.0, 0.1, 10.0, 11.0, 11.1])  # each question looks at it twice
    looks = iter([NAMES])
    colours = ModelColours(lambda: next(looks), lambda: next(clock))
    before = colours.classes(NAMES[-1])
    with pytest.raises(StopIteration):
        colours.classes(NAMES[-1])
    assert colours.classes(NAMES[-1]) == before


def test_parts_of_a_chart_have_colours_by_rank() -> None:
    assert by_rank(["ten_b", "ten_a", ""]) == {"ten_b": "c0", "ten_a": "c1", "": "rest"}
