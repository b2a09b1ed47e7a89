"""Who asked for the cache, and whose answers repeat."""

import pytest

from gateway.policy.cache_rule import CacheAsk, CacheDecision, decide
from gateway.types import CacheMode


@pytest.mark.parametrize(
    ("key_mode", "requested", "temperature", "has_seed", "decision"),
    [
        ("off", None, 0.0, True, "off"),
        ("off", "exact", 0.0, False, "lookup"),
        ("off", "exact", 0.7, True, "lookup"),
        ("off", "exact", 0.7, False, "bypass"),
        ("exact", None, 0.0, False, "lookup"),
        ("exact", None, 1.0, False, "bypass"),
        ("exact", "off", 0.0, True, "off"),
    ],
)
def test_decisions(
    key_mode: CacheMode,
    requested: CacheMode | None,
    temperature: float,
    has_seed: bool,
    decision: CacheDecision,
) -> None:
    assert decide(CacheAsk(key_mode, requested, temperature, has_seed)) == decision
