"""Service estimates and budgets: small tables of decisions."""

import pytest

from gateway.dispatch.policy import service_costs as service_estimate
from gateway.dispatch.policy.service_costs import ServiceEstimator, estimate_wait_s
from gateway.server.policy.memory_budget import (
    MIN_DEVICE_BYTES,
    MIN_RESERVE_BYTES,
    device_budget_bytes,
    host_tier_bytes,
    reserve_bytes,
)

GB = 1 << 30


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


def test_a_tenants_first_request_is_expected_to_be_like_those_of_others() -> None:
    estimator = ServiceEstimator()
    for _ in range(3):
        estimator.observe("t", "m", 10, 40, 0.5)
    assert estimator.predict("new", "m", 10, 400).output_tokens == 40
    assert estimator.predict("new", "m", 10, 30).output_tokens == 30
    assert estimator.predict("new", "other", 10, 400).output_tokens == 400
    estimator.keep_models(frozenset())
    assert estimator.predict("new", "m", 10, 400).output_tokens == 400


def test_guesses_follow_what_was_used() -> None:
    estimator = ServiceEstimator()
    for _ in range(40):
        estimator.observe("t", "m", 100, 10, 0.24)
    prediction = estimator.predict("t", "m", 100, 50)
    assert prediction.output_tokens == 10
    assert prediction.service_s == pytest.approx(0.24)
    assert estimator.predict("t", "m", 100, 5).output_tokens == 5
    # The model's speed is everybody's; so are lengths, until a tenant has its own.
    estimator.observe("u", "m", 100, 50, 0.4)
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
