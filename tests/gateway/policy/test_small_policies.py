"""Pricing, service estimates and budgets: small tables of decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy import service_estimate
from gateway.policy.budget import (
    MIN_DEVICE_BYTES,
    MIN_RESERVE_BYTES,
    device_budget_bytes,
    host_tier_bytes,
    reserve_bytes,
)
from gateway.policy.pricing import TokenPrices, cost_nanos
from gateway.policy.service_estimate import ServiceEstimator, estimate_wait_s

PRICES = TokenPrices(prompt_nanos=100, cached_nanos=10, completion_nanos=1000)
GB = 1 << 30


def test_prices_by_outcome() -> None:
    assert cost_nanos(PRICES, "finished", 7, 3, 2) == 4 * 100 + 3 * 10 + 2 * 1000
    assert cost_nanos(PRICES, "disconnected", 7, 3, 2) == cost_nanos(PRICES, "finished", 7, 3, 2)
    assert cost_nanos(PRICES, "failed", 7, 3, 2) == 0
    assert cost_nanos(PRICES, "cache_hit", 7, 0, 2) == 9 * 10


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 2**40))
def test_a_bill_is_exact_however_large(prompt: int, completion: int, price: int) -> None:
    prices = TokenPrices(price, price, price)
    assert cost_nanos(prices, "finished", prompt, 0, completion) == (prompt + completion) * price


@pytest.mark.parametrize("counts", [(1, 2, 0), (-1, 0, 0), (1, 0, -1), (1, -1, 0)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        cost_nanos(PRICES, "finished", *counts)


def test_before_anything_ended_the_guess_is_the_bound() -> None:
    prediction = ServiceEstimator().predict("t", "m", 100, 50)
    assert prediction.output_tokens == 50
    assert prediction.service_s == pytest.approx(200 * service_estimate.DEFAULT_UNIT_S)


def test_an_encoder_is_guessed_by_its_prompt_alone() -> None:
    estimator = ServiceEstimator()
    assert estimator.predict("t", "m", 100, 0).units == 100
    estimator.observe("t", "m", 100, 0, 0.5)
    prediction = estimator.predict("t", "m", 50, 0)
    assert prediction.output_tokens == 0
    assert prediction.service_s == pytest.approx(0.25)


def test_guesses_follow_what_was_used() -> None:
    estimator = ServiceEstimator()
    for _ in range(40):
        estimator.observe("t", "m", 100, 10, 0.24)
    prediction = estimator.predict("t", "m", 100, 50)
    assert prediction.output_tokens == 10
    assert prediction.service_s == pytest.approx(0.24)
    assert estimator.predict("t", "m", 100, 5).output_tokens == 5
    # Another tenant's lengths are its own, the model's speed is everybody's.
    other = estimator.predict("u", "m", 100, 50)
    assert other.output_tokens == 50
    assert other.service_s == pytest.approx(200 * 0.002)


def test_estimates_forget_models_and_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_estimate, "MAX_OUTPUTS", 3)
    estimator = ServiceEstimator()
    for i in range(9):
        estimator.observe(f"t{i}", "m", 1, 1, 1.0)
    assert len(estimator._outputs) == 3
    estimator.keep_models(frozenset())
    assert estimator.predict("t8", "m", 1, 7).output_tokens == 7


def test_wait_estimates_are_at_least_a_second_and_bounded() -> None:
    assert estimate_wait_s(0.0, 0, 60.0) == 1.0
    assert estimate_wait_s(10.0, 2, 60.0) == 5.0
    assert estimate_wait_s(1e6, 1, 60.0) == 60.0


def test_device_budget() -> None:
    demo = frozenset({"a", "b", "c"})
    weights = {"a": 30 << 20, "b": 20 << 20, "c": 10 << 20}
    assert device_budget_bytes(123, 8 * GB, weights, demo) == 123
    assert device_budget_bytes(0, 8 * GB, weights, demo) == 60 << 20
    assert device_budget_bytes(0, 8 * GB, {**weights, "own": 1}, demo) == 2 * GB
    assert device_budget_bytes(0, 8 * GB, weights, frozenset()) == 2 * GB
    assert device_budget_bytes(0, 8 * GB, {}, demo) == 2 * GB
    assert device_budget_bytes(0, 0, {}, demo) == MIN_DEVICE_BYTES
    assert device_budget_bytes(0, GB, {"a": 1, "b": 1}, demo) == MIN_DEVICE_BYTES


def test_reserve() -> None:
    assert reserve_bytes(0, 8 * GB) == 0
    assert reserve_bytes(5, 8 * GB) == 5
    assert reserve_bytes(-1, 8 * GB) == 4 * GB
    assert reserve_bytes(-1, -GB) == MIN_RESERVE_BYTES


def test_host_tier() -> None:
    assert host_tier_bytes(0, 8 * GB, 8 * GB) == 0
    assert host_tier_bytes(5, 8 * GB, 0) == 5
    assert host_tier_bytes(-1, 8 * GB, 8 * GB) == GB
    assert host_tier_bytes(-1, 8 * GB, 64 << 20) == 32 << 20
    assert host_tier_bytes(-1, 8 * GB, 0) == 0
