"""What a cached extent is worth, beside another."""

import math

import pytest

from engine.memory.policy.kv_value import Reuse, ValueParams, cost_rank, rank, worth

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


def test_worth_is_seconds_saved_a_second_and_a_byte() -> None:
    """One use of 8 blocks of 16 tokens in 1000 bytes, just now: back to the definition."""
    total = rank(8, 0, 0, 500.0, PARAMS) + cost_rank(16.0, 1000.0)
    now = worth(total, 0.001, 0.5, 500.0, PARAMS)
    assert now == pytest.approx(0.5 * 8 * 16 * 0.001 / 1000 * math.log(2) / PARAMS.half_life_s)
    later = worth(total, 0.001, 0.5, 500.0 + PARAMS.half_life_s, PARAMS)
    assert later == pytest.approx(now / 2)


def test_the_chance_of_reuse_is_what_was_seen_and_fades() -> None:
    reuse = Reuse()
    assert reuse.chance == 0.5
    for _ in range(200):
        reuse.add(10, 0)
    assert reuse.chance < 0.03
    for _ in range(200):
        reuse.add(10, 9)
    assert reuse.chance == pytest.approx(0.9, abs=0.05)
