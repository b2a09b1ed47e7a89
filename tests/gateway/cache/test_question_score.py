"""What two questions say of one another, word by word."""

import random
import string

import numpy as np
import pytest

from gateway.cache.question_score import (
    FIGURES,
    LEAST_LOG_ODDS,
    MAX_WORDS,
    agrees,
    figures_of,
    fitted,
    read_question,
    view,
)
from tests.gateway.cache.reading_kit import reading_of


def figures(a: str, b: str, cosine: float = 0.9) -> dict[str, float]:
    """By name, and the same the other way round."""
    one, two = reading_of(a), reading_of(b)
    found = figures_of(one, two, cosine)
    assert found == pytest.approx(figures_of(two, one, cosine))
    return dict(zip(FIGURES, found, strict=True))


def odds(a: str, b: str, cosine: float = 0.95) -> float:
    return view(reading_of(a), reading_of(b), cosine).log_odds


def test_the_same_words_differ_in_nothing() -> None:
    found = figures("How do I reset it?", "how do I reset it", 1.0)
    assert found == {**dict.fromkeys(FIGURES, 0.0), "cosine": 1.0, "own match": 1.0}


def test_words_of_one_question_alone_are_matched_by_what_they_mean() -> None:
    same = figures("delete my account", "remove my account")
    other = figures("open my account", "remove my account")
    assert same["own match"] == pytest.approx(1.0, abs=0.02)
    assert other["own match"] < 0.6
    assert same["one word"] == other["one word"] == 1.0
    assert same["frame"] == pytest.approx((2 / 4) ** 2)


def test_what_only_one_question_says_is_no_replacement() -> None:
    found = figures("reset my password", "please reset my password now")
    assert (found["one word"], found["frame"]) == (0.0, 0.0)
    assert found["own match"] < 0.6


def test_a_word_that_is_said_more_often_counts() -> None:
    assert figures("is it a very old book", "is it a very very old book")["own match"] < 1.01
    assert figures("x = y", "x == y")["numbers"] == 1.0


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        ("in 5 days", "in 7 days", True),
        ("in 5 days", "in 15 days", True),
        ("is -5 cold", "is 5 cold", True),
        ("a 5 and a 7", "a 7 and a 5", False),
        ("7 + 3", "7 * 3", True),
        ("pay 5 $", "pay 5 €", True),
        ("٤ ايام", "٣ ايام", True),
        ("in five days", "in 5 days", True),
        ("e-mail me", "e mail me", False),
        ("is it open?", "is it open", False),
    ],
)
def test_numbers_and_signs(a: str, b: str, differs: bool) -> None:
    assert figures(a, b)["numbers"] == float(differs)


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        ("can dogs eat it", "can't dogs eat it", True),
        ("can dogs eat it", "can\u2019t dogs eat it", True),
        ("with milk", "without milk", True),
        ("I do not go without it", "I go with it", False),
        ("mit Gluten", "kein Gluten", True),
        ("работает", "не работает", True),
        ("a knot", "a note", False),
    ],
)
def test_negation(a: str, b: str, differs: bool) -> None:
    assert figures(a, b)["negation"] == float(differs)


def test_order_counts_where_all_words_are_shared() -> None:
    assert figures("from Rome to Oslo", "from Oslo to Rome")["order"] == 1.0
    assert figures("from Rome to Oslo", "to Oslo from Rome now")["order"] == 0.0


def test_each_figure_moves_the_score_as_it_must() -> None:
    weights = fitted()
    assert len(weights.values) == len(FIGURES)
    signs = dict(zip(FIGURES, np.sign(weights.values).tolist(), strict=True))
    assert signs.pop("cosine") == signs.pop("own match") == 1.0
    assert set(signs.values()) == {-1.0}


def test_traps_score_below_what_is_asked_otherwise() -> None:
    asked = "What is the fastest train from Rome to Oslo on day 3?"
    otherwise = odds(asked, "What is the quickest train from Rome to Oslo on day 3?")
    for trap in (
        "What is the fastest train from Oslo to Rome on day 3?",
        "What is the fastest train from Rome to Oslo on day 4?",
        "What isn't the fastest train from Rome to Oslo on day 3?",
        "What is the fastest train from Rome to Bonn on day 3?",
    ):
        assert odds(asked, trap, 0.99) < otherwise


def test_the_same_but_for_capitals_and_punctuation() -> None:
    asked = reading_of("How do I  reset it?")
    assert view(asked, reading_of("how do i reset it"), 1.0).is_same
    for other in ("how do i reset, it", "how do i reset it + that", "do i reset it how"):
        assert not view(asked, reading_of(other), 1.0).is_same


def test_covers_say_how_well_each_word_is_found() -> None:
    pair = view(reading_of("delete my account"), reading_of("my account: remove it"), 0.9)
    assert len(pair.covers) == 3
    assert min(pair.covers) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("text", ["", "?!", "a " * (MAX_WORDS + 1), " ", "\U0001f600" * 3000])
def test_what_cannot_be_compared_is_never_the_same_by_score(text: str) -> None:
    asked, other = reading_of("How do I reset it?"), reading_of(text)
    for pair in (view(asked, other, 0.99), view(other, asked, 0.99)):
        assert pair.log_odds < 0
        assert not pair.is_same
    assert view(other, other, 1.0).log_odds >= LEAST_LOG_ODDS
    assert view(other, other, 1.0).is_same


def test_a_reading_is_bounded_whatever_the_text() -> None:
    draw = random.Random(3)
    for _ in range(40):
        text = "".join(draw.choices(string.printable + "日本語не\u2019\U0001f600", k=4000))
        found = reading_of(text)
        assert len(found.words) <= MAX_WORDS + 1
        assert found.num_bytes >= found.states.nbytes + len(text)


def test_a_word_without_a_state_matches_nothing() -> None:
    found = read_question("ab cd", [(0, 2), (3, 5)], np.zeros((2, 8), np.float32))
    assert not found.states.any()
    assert figures_of(found, found, 1.0)[1] == 1.0


def test_the_model_of_the_weights_is_known_by_its_probe() -> None:
    weights = fitted()
    probe = np.array([*weights.probe, 0.3], np.float32)
    assert weights.know(probe)
    assert weights.know(probe + np.float32(0.004)), "as an 8-bit pack has it"
    assert not weights.know(-probe)
    assert not weights.know(probe[:3])


@pytest.mark.parametrize(
    ("a", "b", "cosine", "same"),
    [
        ("The shop opens at 9.", "The shop opens at 9!", 0.99, True),
        ("The shop opens at 9.", "The shop opens at 10.", 0.99, False),
        ("You can delete it.", "You can remove it.", 0.97, True),
        ("You can delete it.", "You can remove it.", 0.85, False),
        ("It is safe.", "It is not safe.", 0.97, False),
        ("word " * 200, "word " * 190, 0.97, True),
        ("word " * 200 + "7", "word " * 190 + "8", 0.97, False),
    ],
)
def test_answers_agree(a: str, b: str, cosine: float, same: bool) -> None:
    assert agrees(reading_of(a), reading_of(b), cosine) is same
