"""What a cached extent is worth, beside another."""

import pytest

from engine.policy.kv_value import ValueParams, cost_rank, rank

PARAMS = ValueParams(half_life_s=60.0)


def test_later_used_more_often_fuller_and_nearer_the_beginning_is_worth_more() -> None:
    base = rank(8, 0, 0, 100.0, PARAMS)
    assert rank(8, 0, 0, 101.0, PARAMS) > base
    assert rank(8, 1, 0, 100.0, PARAMS) > base
    assert rank(7, 0, 0, 100.0, PARAMS) < base
    assert rank(8, 0, 8, 100.0, PARAMS) < base


def test_a_half_life_halves() -> None:
    assert rank(8, 0, 0, 160.0, PARAMS) == pytest.approx(rank(16, 0, 0, 100.0, PARAMS))


def test_hits_are_outlived() -> None:
    """A prefix that was once popular goes in the end."""
    assert rank(8, 8 * 100, 0, 0.0, PARAMS) < rank(8, 0, 0, 60.0 * 7, PARAMS)


def test_dear_tokens_in_few_bytes_are_worth_keeping() -> None:
    assert cost_rank(2.0, 100.0) == pytest.approx(cost_rank(1.0, 100.0) + 1)
    assert cost_rank(1.0, 50.0) == pytest.approx(cost_rank(1.0, 100.0) + 1)


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_impossible_costs_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        cost_rank(*bad)


def test_a_half_life_is_positive() -> None:
    with pytest.raises(ValueError, match="half_life_s"):
        ValueParams(0.0)
