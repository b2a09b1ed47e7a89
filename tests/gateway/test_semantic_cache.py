"""Exact answers: scoped, bounded in bytes, and gone after their time however often they are hit."""

from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import SamplingParams
from gateway.errors import ApiError
from gateway.semantic_cache import CachedAnswer, SemanticCache, key_of, requested_mode
from gateway.types import HostedModel, PreparedRequest

MODEL = HostedModel("m", "rev", "p", 100, 100, 0)
REQUEST = PreparedRequest("id", "chat", MODEL, [1, 2], 7, SamplingParams(0.5, 1.0, 3), [9], ("x",))
ANSWER = CachedAnswer("text", "stop", 3)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_entries_live_their_time_and_no_hit_prolongs_it() -> None:
    clock = Clock()
    cache = SemanticCache(10_000, 60.0, clock)
    cache.keep(key_of("t", REQUEST), ANSWER)
    for clock.now_s in (10.0, 30.0, 59.0):
        assert cache.find(key_of("t", REQUEST)) == ANSWER
    clock.now_s = 60.0
    assert cache.find(key_of("t", REQUEST)) is None
    assert cache.size_bytes == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": replace(MODEL, revision="other")},
        {"kind": "completion"},
        {"prompt_token_ids": [1, 3]},
        {"max_tokens": 8},
        {"sampling": SamplingParams(0.5, 1.0, 4)},
        {"sampling": SamplingParams(0.5, 0.9, 3)},
        {"sampling": SamplingParams(0.0, 1.0, 3)},
        {"stop_strings": ("x", "y")},
        {"stop_strings": ()},
        {"stop_token_ids": [8]},
    ],
)
def test_everything_the_text_depends_on_is_in_the_key(change: dict[str, Any]) -> None:
    cache = SemanticCache(10_000, 60.0, Clock())
    cache.keep(key_of("t", REQUEST), ANSWER)
    assert cache.find(key_of("t", replace(REQUEST, **change))) is None


def test_what_the_text_does_not_depend_on_is_not() -> None:
    cache = SemanticCache(10_000, 60.0, Clock())
    greedy = replace(REQUEST, sampling=SamplingParams(0.0, 0.5, 1))
    cache.keep(key_of("t", greedy), ANSWER)
    same = replace(greedy, request_id="b", stream=True, sampling=SamplingParams(0.0, 1.0, 2))
    assert cache.find(key_of("t", same)) == ANSWER


def test_tenants_never_share() -> None:
    cache = SemanticCache(10_000, 60.0, Clock())
    cache.keep(key_of("t", REQUEST), ANSWER)
    assert cache.find(key_of("u", REQUEST)) is None


def test_bytes_are_bounded_and_the_least_recently_used_goes() -> None:
    cache = SemanticCache(4_000, 60.0, Clock())
    asks = [replace(REQUEST, max_tokens=n) for n in range(1, 6)]
    for ask in asks[:4]:
        cache.keep(key_of("t", ask), CachedAnswer("x" * 400, "stop", 1))
    assert cache.find(key_of("t", asks[0])) is not None
    cache.keep(key_of("t", asks[4]), CachedAnswer("x" * 400, "stop", 1))
    assert cache.size_bytes <= 4_000
    assert cache.find(key_of("t", asks[0])) is not None
    assert cache.find(key_of("t", asks[1])) is None
    cache.keep(key_of("t", REQUEST), CachedAnswer("x" * 5_000, "stop", 1))
    assert cache.find(key_of("t", REQUEST)) is None
    SemanticCache(0, 60.0, Clock()).keep(key_of("t", REQUEST), ANSWER)


def test_modes_of_the_header() -> None:
    assert requested_mode({}) is None
    assert requested_mode({"x-polyhost-cache-mode": "off"}) == "off"
    assert requested_mode({"x-polyhost-cache-mode": "exact"}) == "exact"
    with pytest.raises(ApiError, match="must be off or exact"):
        requested_mode({"x-polyhost-cache-mode": "shadow"})
