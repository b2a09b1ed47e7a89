"""What is learnt of answers, and from when on they may be given."""

import math
import random

import msgspec
import pytest

from gateway.cache.policy.cache_choice import ALIKE, LONE, SURE
from gateway.cache.policy.cache_confidence import (
    BIN_WIDTH,
    CLASSES,
    ENTRY_MEMORY,
    FEWEST_IN_BIN,
    LOWEST_SCORE,
    MEMORY,
    NEVER,
    NUM_BINS,
    PRIOR,
    Calibration,
    Confidence,
    bin_of,
    chance,
    learned,
    least_score,
    merged,
    recorded,
)


def taught(kind: int, score: float, num_right: int, num_wrong: int) -> Calibration:
    """After so many comparisons of one score."""
    calibration = Calibration()
    for is_right in [True] * num_right + [False] * num_wrong:
        calibration = recorded(calibration, kind, score, is_right)
    return calibration


def test_before_the_first_comparison_a_score_must_be_within_the_budget_itself() -> None:
    """Log-odds of 4.6 are one in a hundred."""
    for kind in (ALIKE, LONE):
        assert 4.6 - BIN_WIDTH <= least_score(Calibration(), kind, 0.01) <= 4.6 + BIN_WIDTH
        assert least_score(Calibration(), kind, 0.01, may_start=False) == NEVER
    assert least_score(Calibration(), ALIKE, 0.05) < least_score(Calibration(), ALIKE, 0.01)
    assert least_score(Calibration(), ALIKE, 0.0) == NEVER


def test_what_looks_sure_is_believed_whatever_its_score_until_it_was_wrong() -> None:
    assert least_score(Calibration(), SURE, 0.01) == LOWEST_SCORE
    assert least_score(Calibration(), SURE, 0.001) == NEVER
    assert least_score(taught(SURE, 2.0, 1, 1), SURE, 0.01) > 2.0
    assert least_score(taught(SURE, 2.0, 400, 1), SURE, 0.01) <= 2.0


def test_scores_that_were_shown_to_be_right_come_under_the_budget() -> None:
    assert least_score(taught(0, 2.0, 20, 0), 0, 0.01) > 2.0
    assert least_score(taught(0, 2.0, 200, 0), 0, 0.01) <= 2.0


def test_scores_never_seen_are_not_answered_for_the_merits_of_others() -> None:
    calibration = taught(0, 5.0, 4000, 0)
    assert least_score(calibration, 0, 0.01) > 4.0
    few = calibration
    for _ in range(int(FEWEST_IN_BIN)):
        few = recorded(few, 0, 2.0, True)
    assert least_score(few, 0, 0.01) <= 2.0


def test_a_few_faults_outweigh_what_the_score_says() -> None:
    start = least_score(Calibration(), LONE, 0.01)
    assert least_score(taught(LONE, start + 0.1, 0, int(PRIOR)), LONE, 0.01) > start


def test_a_class_answers_for_itself() -> None:
    calibration = taught(0, 2.0, 400, 0)
    assert least_score(calibration, 0, 0.01) <= 2.0
    assert least_score(calibration, 1, 0.01) == least_score(Calibration(), 1, 0.01)
    assert least_score(calibration, 2, 0.01) == least_score(Calibration(), 2, 0.01)


def test_wrong_ones_raise_the_bar() -> None:
    calibration = merged(taught(0, 5.0, 600, 0), taught(0, 2.0, 90, 10))
    assert 2.3 < least_score(calibration, 0, 0.01) <= 5.0
    assert 1.7 <= least_score(calibration, 0, 0.05) <= 2.0
    for _ in range(40):
        calibration = recorded(calibration, 0, 5.0, False)
    assert least_score(calibration, 0, 0.01) > 5.0


def test_a_sample_of_hits_stands_for_all_of_them() -> None:
    """One audit in twenty: 20 of them that were right weigh as 400 requests, not as 20."""
    calibration = taught(0, 2.0, 97, 3)
    bar = least_score(calibration, 0, 0.02)
    for _ in range(20):
        calibration = recorded(calibration, 0, 5.0, True, 20.0)
    assert least_score(calibration, 0, 0.02) <= 2.0 < bar


@pytest.mark.parametrize(("budget", "shift"), [(0.01, 0.0), (0.02, 0.5), (0.02, 0.0)])
def test_budget_holds_over_seeds(budget: float, shift: float) -> None:
    """Answers given by the rule, with an error that falls with the score, as the score says or less
    often: of those given no more than the budget are wrong, in the mean over orders."""
    share, given = served(budget, shift)
    assert given > 0.3
    assert share <= budget


def test_scores_that_promise_too_much_are_found_out() -> None:
    """Errors are 1.6 times as frequent as the score says: not 1.6 times the budget are made."""
    share, _ = served(0.02, -0.5)
    assert share <= 0.028


def served(budget: float, shift: float) -> tuple[float, float]:
    """Of the answers given the share that was wrong, and of the requests the share that got one."""
    wrongs, rates = [], []
    for seed in range(10):
        draw = random.Random(seed)
        calibration, given, wrong = Calibration(), 0, 0
        bar = least_score(calibration, 0, budget)
        for _ in range(3000):
            score = draw.uniform(-2, 7)
            is_right = draw.random() < 1 / (1 + math.exp(-score - shift))
            may = score >= bar
            if may and draw.random() >= 0.05:
                given += 1
                wrong += not is_right
            else:
                calibration = recorded(calibration, 0, score, is_right, 20.0 if may else 1.0)
                bar = least_score(calibration, 0, budget)
        wrongs.append(wrong / given)
        rates.append(given / 3000)
    return sum(wrongs) / len(wrongs), sum(rates) / len(rates)


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
