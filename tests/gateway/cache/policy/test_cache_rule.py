"""Who asked for the cache, whose answers repeat, and whose meaning is compared."""

import pytest

from gateway.cache.policy.cache_rule import CacheDecision, CacheHeaders, CacheRequest, decide
from gateway.types import CacheMode, CachePolicy


def ask(
    key: CacheMode = "off",
    header: CacheMode | None = None,
    temperature: float = 0.0,
    has_seed: bool = False,
    sampled: bool = False,
    wishes_sampled: bool | None = None,
    has_turn: bool = True,
    has_embedder: bool = True,
) -> CacheRequest:
    policy = CachePolicy(key, sampled=sampled)
    wish = CacheHeaders(header, sampled=wishes_sampled)
    return CacheRequest(policy, wish, temperature, has_seed, True, has_turn, has_embedder)


@pytest.mark.parametrize(
    ("given", "decision", "mode"),
    [
        (ask("off", has_seed=True), "off", "off"),
        (ask("off", "exact"), "lookup", "exact"),
        (ask("off", "exact", 0.7, True), "lookup", "exact"),
        (ask("off", "exact", 0.7), "bypass", "off"),
        (ask("exact"), "lookup", "exact"),
        (ask("exact", None, 1.0), "bypass", "off"),
        (ask("exact", "off", has_seed=True), "off", "off"),
        (ask("semantic"), "lookup", "semantic"),
        (ask("semantic", "exact"), "lookup", "exact"),
        (ask("semantic", None, 0.7), "bypass", "off"),
        (ask("semantic", None, 0.7, True), "lookup", "exact"),
        (ask("semantic", None, 0.7, sampled=True), "lookup", "semantic"),
        (ask("semantic", None, 0.7, sampled=True, wishes_sampled=False), "bypass", "off"),
        (ask("exact", None, 0.7, wishes_sampled=True), "lookup", "exact"),
        (ask("semantic", has_turn=False), "lookup", "exact"),
        (ask("semantic", has_embedder=False), "lookup", "exact"),
        (ask("shadow"), "lookup", "shadow"),
        (ask("shadow", has_turn=False), "bypass", "off"),
        (ask("shadow", None, 0.7, True), "bypass", "off"),
    ],
)
def test_decisions(given: CacheRequest, decision: CacheDecision, mode: CacheMode) -> None:
    plan = decide(given)
    assert (plan.decision, plan.mode) == (decision, mode)


def test_only_what_is_drawn_without_a_seed_is_any_of_many() -> None:
    for given, drawn in (
        (ask("semantic", sampled=True), False),
        (ask("semantic", None, 0.7, has_seed=True, sampled=True), False),
        (ask("semantic", None, 0.7, sampled=True), True),
    ):
        assert decide(given).drawn is drawn


def test_the_lower_age_counts_and_wishes_are_passed_on() -> None:
    policy = CachePolicy("exact", max_age_s=60.0, false_hit_budget=0.02)
    wish = CacheHeaders(max_age_s=90.0, reads=False)
    plan = decide(CacheRequest(policy, wish, 0.0, False))
    assert plan.max_age_s == 60.0
    assert plan.false_hit_budget == 0.02
    assert not plan.reads
    assert plan.keeps
    assert decide(CacheRequest(policy, CacheHeaders(max_age_s=5.0), 0.0, False)).max_age_s == 5.0
    assert decide(CacheRequest(CachePolicy("exact"), CacheHeaders(), 0.0, False)).max_age_s is None


def test_answers_that_are_not_plain_pass_by() -> None:
    given = CacheRequest(CachePolicy("semantic"), CacheHeaders(), 0.0, False, is_plain=False)
    assert decide(given).decision == "bypass"
