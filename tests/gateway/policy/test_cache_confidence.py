"""What is learnt of answers, and from when on they may be given."""

import math
import random

import msgspec
import pytest

from gateway.policy.cache_confidence import (
    CLASSES,
    ENTRY_MEMORY,
    MEMORY,
    NEVER,
    NUM_BINS,
    Calibration,
    Confidence,
    bin_of,
    chance,
    learned,
    least_score,
    merged,
    recorded,
    upper_bound,
)


def taught(kind: int, score: float, num_right: int, num_wrong: int) -> Calibration:
    """After so many comparisons of one score."""
    calibration = Calibration()
    for is_right in [True] * num_right + [False] * num_wrong:
        calibration = recorded(calibration, kind, score, is_right)
    return calibration


def exact_bound(num_wrong: int, num_all: int, level: float = 0.2) -> float:
    """The rate at which a Poisson count is at most `num_wrong` with probability `level`."""
    low, high = 0.0, 1000.0
    for _ in range(80):
        rate = (low + high) / 2
        at_most = sum(math.exp(-rate) * rate**k / math.factorial(k) for k in range(num_wrong + 1))
        low, high = (rate, high) if at_most > level else (low, rate)
    return low / num_all


@pytest.mark.parametrize("num_wrong", [0, 1, 2, 5, 20, 60])
def test_bound_is_that_of_poisson(num_wrong: int) -> None:
    assert upper_bound(num_wrong, 1000) == pytest.approx(exact_bound(num_wrong, 1000), rel=0.02)


def test_nothing_may_be_answered_before_it_is_shown() -> None:
    assert least_score(Calibration(), 0, 0.01) == NEVER
    assert least_score(taught(0, 5.0, 150, 0), 0, 0.01) == NEVER
    assert least_score(taught(0, 5.0, 170, 0), 0, 0.01) <= 5.0


def test_scores_never_seen_are_not_answered() -> None:
    assert least_score(taught(0, 5.0, 4000, 0), 0, 0.01) > 4.6


def test_a_class_answers_for_itself() -> None:
    calibration = taught(0, 5.0, 400, 0)
    assert least_score(calibration, 1, 0.01) == NEVER
    assert least_score(calibration, 2, 0.01) == NEVER


def test_wrong_ones_raise_the_bar() -> None:
    calibration = merged(taught(0, 5.0, 600, 0), taught(0, 2.0, 90, 10))
    assert 4.7 <= least_score(calibration, 0, 0.01) <= 5.0
    assert 1.7 <= least_score(calibration, 0, 0.05) <= 2.0
    for _ in range(20):
        calibration = recorded(calibration, 0, 5.0, False)
    assert least_score(calibration, 0, 0.01) == NEVER


def test_budget_holds_over_seeds() -> None:
    """Answers given by the rule, with an error that falls with the score: of all requests no more
    are answered wrongly than the budget says, in the mean over random orders."""
    shares = []
    for seed in range(10):
        draw = random.Random(seed)
        calibration, given, wrong = Calibration(), 0, 0
        for _ in range(3000):
            score = draw.uniform(-2, 7)
            is_right = draw.random() < 1 / (1 + math.exp(-score - 0.5))
            may = score >= least_score(calibration, 0, 0.02)
            if may and draw.random() >= 0.05:
                given += 1
                wrong += not is_right
            else:
                calibration = recorded(calibration, 0, score, is_right, 20.0 if may else 1.0)
        assert given > 500
        shares.append(wrong / 3000)
    assert sum(shares) / len(shares) <= 0.02


def test_of_those_answered_few_are_wrong_however_rare_they_are() -> None:
    """A budget of all requests does not pay for a small share of bad answers."""
    calibration = merged(taught(0, 5.0, 90, 10), taught(0, -3.0, 0, 3000))
    assert upper_bound(10, 100) * 100 / 3100 < 0.01
    assert least_score(calibration, 0, 0.01) == NEVER


def test_counts_are_bounded_and_fade() -> None:
    calibration, record = Calibration(), Confidence()
    for i in range(int(3 * MEMORY)):
        calibration = recorded(calibration, i % len(CLASSES), i % 9 - 2.0, i % 2 == 0)
        record = learned(record, i % 2 == 0)
    assert sum(calibration.right) + sum(calibration.wrong) <= MEMORY
    assert record.agreed + record.disagreed <= ENTRY_MEMORY
    assert len(calibration.right) == NUM_BINS * len(CLASSES)
    twice = merged(calibration, calibration)
    assert sum(twice.right) + sum(twice.wrong) <= MEMORY * 1.000001


def test_states_travel() -> None:
    calibration, record = taught(2, 0.0, 2, 1), Confidence("e1", 3.0, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(calibration), type=Calibration) == calibration
    assert msgspec.json.decode(msgspec.json.encode(record), type=Confidence) == record
    assert merged(Calibration(), calibration) == calibration == merged(calibration, Calibration())


@pytest.mark.parametrize("score", [-1e9, -4.0, 0.0, 7.9, 1e9])
def test_every_score_has_a_bin(score: float) -> None:
    assert 0 <= bin_of(score) < NUM_BINS


def test_chance_moves_from_the_prior_to_the_counts() -> None:
    assert chance(Calibration(), 0, 1.0, 0.7) == 0.7
    assert chance(taught(0, 1.0, 0, 10), 0, 1.0, 1.0) == pytest.approx(0.5)
    assert chance(taught(0, 1.0, 990, 0), 0, 1.0, 0.5) > 0.99
