"""Where the beginnings of prompts are: what was granted last, as far as it can still be there."""

import pytest

from gateway.dispatch.policy.prefix_places import (
    MARKED,
    MOST_PLACES,
    PrefixPlaces,
    prefix_marks,
)


def test_a_worker_has_what_it_was_granted_as_far_as_two_prompts_are_one() -> None:
    places = PrefixPlaces()
    places.note([1, 2, 3, 4], "w", 10.0)
    places.note([1, 2, 30], "v", 11.0)
    assert places.hits([1, 2, 3, 5], "m") == {
        "w": MARKED[2],
        "v": MARKED[1],
    }
    assert places.hits([9], "m") == {}
    assert places.hits([], "m") == {}


def test_what_left_a_worker_is_not_there() -> None:
    places = PrefixPlaces()
    places.note([1], "w", 10.0)
    places.note([1], "v", 10.0)
    places.void("w", 12.0, "m")
    assert set(places.hits([1], "m")) == {"v"}
    assert set(places.hits([1], "n")) == {"w", "v"}, "another model's is there"
    places.note([1], "w", 13.0)
    assert places.hits([1], "m")["w"] == MARKED[0]
    places.void("w", 14.0)
    assert set(places.hits([1], "m")) == set(places.hits([1], "n")) == {"v"}


def test_models_that_are_hosted_no_more_are_forgotten() -> None:
    places = PrefixPlaces()
    places.void("w", 1.0, "m")
    places.void("w", 1.0, "gone")
    places.void("w", 0.5)
    places.keep_models({"m"})
    assert list(places._void_s) == [("w", "")]
    places.void("w", 1.0, "m")
    places.keep_models({"m"})
    assert set(places._void_s) == {("w", ""), ("w", "m")}


def test_it_is_bounded() -> None:
    places = PrefixPlaces(most_marks=3)
    for mark in range(5):
        places.note([mark], "w", float(mark))
    assert len(places) == 3
    assert places.hits([1], "m") == {}
    for number in range(MOST_PLACES + 2):
        places.note([4], f"w{number}", 9.0)
    hits = places.hits([4], "m")
    assert len(hits) == MOST_PLACES
    assert "w0" not in hits


def test_prompts_share_marks_as_far_as_they_share_tokens() -> None:
    one = list(range(1000))
    other = [*one[:200], *range(5000, 5800)]
    marks = prefix_marks("t", "m", one), prefix_marks("t", "m", other)
    shared = [a == b for a, b in zip(*marks, strict=True)]
    assert shared == [num_tokens <= 200 for num_tokens in MARKED if num_tokens <= 1000]
    assert len(set(marks[0])) == len(marks[0])


def test_another_tenant_or_model_shares_none() -> None:
    tokens = list(range(64))
    found = [prefix_marks(*who, tokens) for who in (("t", "m"), ("u", "m"), ("t", "n"), ("tm", ""))]
    assert len({mark for marks in found for mark in marks}) == sum(map(len, found))


@pytest.mark.parametrize(("length", "count"), [(0, 0), (15, 0), (16, 1), (24, 2), (31, 2), (32, 3)])
def test_a_mark_names_whole_beginnings_only(length: int, count: int) -> None:
    assert len(prefix_marks("t", "m", [7] * length)) == count


def test_the_longest_prompts_have_a_last_mark() -> None:
    assert len(prefix_marks("t", "m", [7] * (MARKED[-1] + 999))) == len(MARKED)
