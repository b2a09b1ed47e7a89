"""The figures of a score."""

from collections.abc import Sequence

import pytest

from gateway.policy.cache_confidence import CLASSES, Confidence
from gateway.policy.cache_reading import read
from gateway.policy.cache_score import (
    ALIKE,
    FARTHEST,
    OTHER_WORDS,
    SAME_CONTENT,
    Neighbour,
    features_of,
    kind_of,
)
from gateway.policy.cache_weights import FITTED, NAMES

ASKED = read("How do I reset my old password?")


def near(
    group: str, similarity: float, text: str = "reset password", *, passes: bool = True
) -> Neighbour:
    """A neighbour."""
    return Neighbour(similarity, group, Confidence(group, 1, 0), read(text), passes)


def figures(neighbours: Sequence[Neighbour]) -> dict[str, float]:
    """By name; the first that passes leads."""
    lead = next(one for one in neighbours if one.passes)
    return dict(zip(NAMES, features_of(ASKED, neighbours, lead), strict=True))


def test_each_figure_has_a_weight() -> None:
    assert len(figures([near("g", 0.9)])) == len(NAMES) == len(FITTED.values)


def test_a_lone_one() -> None:
    found = figures([near("g", 0.9)])
    assert found["lone"] == 1.0
    assert found["second"] == FARTHEST
    assert found["margin"] == pytest.approx(0.9 - FARTHEST)
    assert (found["votes"], found["missing"], found["words"]) == (1.0, 0.0, 0.0)
    assert found["lone near"] == pytest.approx(0.15)


def test_a_group_and_others() -> None:
    found = figures(
        [near("g", 0.9), near("g", 0.85), near("h", 0.8, "old password"), near("g", 0.7)]
    )
    assert (found["lone"], found["second"]) == (0.0, 0.85)
    assert found["margin"] == pytest.approx(0.1)
    assert (found["alike"], found["run"]) == (3 / 8, 2 / 8)
    assert found["elsewhere"] == pytest.approx(2 / 3)
    assert (found["missing"], found["words"]) == (1.0, 3.0)
    assert 0.8 < found["votes"] < 0.95


def test_those_that_do_not_pass_count_against_and_do_not_second() -> None:
    alone = figures([near("g", 0.9)])
    found = figures([near("h", 0.95, passes=False), near("g", 0.9), near("g", 0.8, passes=False)])
    assert found["margin"] == pytest.approx(-0.05)
    assert found["votes"] < 0.5 < alone["votes"]
    assert (found["lone"], found["second"], found["alike"]) == (1.0, FARTHEST, 2 / 8)


def test_records_of_the_group_count() -> None:
    good = Neighbour(0.9, "g", Confidence("g", 9, 0), read("reset password"), True)
    bad = Neighbour(0.8, "g", Confidence("g", 0, 9), read("reset password"), True)
    assert figures([good])["record"] > figures([good, bad])["record"] > figures([bad])["record"]


def test_classes() -> None:
    asked, same = read("How do I reset it?"), near("g", 0.9, "How can I reset it?")
    other = near("h", 0.8, "How can I break it?")
    assert kind_of(asked, [same, other], same) == SAME_CONTENT
    assert kind_of(asked, [other], other) == OTHER_WORDS
    assert kind_of(asked, [same, near("g", 0.7)], same) == ALIKE
    assert kind_of(asked, [same, near("g", 0.7, passes=False)], same) == SAME_CONTENT
    assert len(CLASSES) == 3
