"""Claims: by model and by worker, and how they end."""

import pytest

from gateway.dispatch.policy.claims import CLAIM_LOADS, MIN_CLAIM_S, Claims


def claimed(*pairs: str) -> Claims:
    """`model@worker`, each a load of two seconds."""
    claims = Claims()
    for pair in pairs:
        model_id, _, worker_id = pair.partition("@")
        claims.add(model_id, worker_id, 10, 2.0, 0.0, forced=False)
    return claims


def test_loads_of_one_worker_come_one_after_the_other() -> None:
    claims = claimed("a@w", "b@w", "a@v")
    assert {c.worker_id: c.ready_s for c in claims.of("a").values()} == {"w": 2.0, "v": 2.0}
    assert claims.of("b")["w"].ready_s == 4.0
    assert set(claims.on("w")) == {"a", "b"}


def test_they_end_each_for_itself() -> None:
    claims = claimed("a@w", "a@v", "b@w")
    states = {("w", "a"): "resident", ("v", "a"): "loading", ("w", "b"): "failed"}
    assert claims.drop_ended(1.0, lambda w, m: states[w, m]) == []
    assert [(c.model_id, c.worker_id) for c in claims] == [("a", "v")]
    claims.lose_worker("v")
    assert not claims
    assert not claims.on("v")


def test_one_that_comes_to_nothing_is_given_back() -> None:
    claims = claimed("a@w")
    assert max(MIN_CLAIM_S, CLAIM_LOADS * 2.0) == 8.0
    assert claims.drop_ended(7.9, lambda w, m: "cold") == []
    assert [claim.model_id for claim in claims.drop_ended(8.0, lambda w, m: "cold")] == ["a"]
    assert claims.drop_ended(9.0, lambda w, m: None) == []


def test_a_worker_is_told_to_load_a_model_once() -> None:
    claims = claimed("a@w")
    with pytest.raises(ValueError, match="has been told to load 'a'"):
        claims.add("a", "w", 10, 2.0, 1.0, forced=False)
    assert claims.of("a")["w"].ready_s == 2.0
