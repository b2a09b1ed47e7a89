"""The acting half of limits: headers, words and holds that close once."""

import pytest

from engine.protocol import SamplingParams
from gateway.errors import ApiError
from gateway.limits import Limiter, go_duration
from gateway.store.memory import MemoryStore
from gateway.types import HostedModel, Limits, PreparedRequest, Principal

MODEL = HostedModel("m", "r", "p", 100, 100, 0)


def principal(**limits: int) -> Principal:
    return Principal("t", "k", frozenset(), Limits(**limits))


def request(num_prompt: int = 3, max_tokens: int = 7) -> PreparedRequest:
    ids = [1] * num_prompt
    return PreparedRequest("id", "chat", MODEL, ids, max_tokens, SamplingParams(), [])


def limiter(store: MemoryStore, rejected: list[str]) -> Limiter:
    return Limiter(store, lambda: 1000.0, rejected.append)


async def test_a_hold_closes_once() -> None:
    store = MemoryStore()
    hold = await limiter(store, []).reserve(principal(tokens_per_minute=100), request(), {})
    await hold.settle(4)
    await hold.settle(1)
    await hold.release()
    store.check_integrity()
    _, tokens = await store.figures("k", Limits(tokens_per_minute=100), 1000.0)
    assert tokens is not None
    assert tokens.remaining == 96
    assert store.num_open == 0


async def test_headers_of_granted_and_refused() -> None:
    store, rejected = MemoryStore(), list[str]()
    who = principal(requests_per_minute=5, tokens_per_minute=15)
    headers: dict[str, str] = {}
    await limiter(store, rejected).reserve(who, request(), headers)
    assert headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "1m0.5s",
        "x-ratelimit-limit-tokens": "15",
        "x-ratelimit-remaining-tokens": "5",
        "x-ratelimit-reset-tokens": "1m0.5s",
    }
    headers = {}
    with pytest.raises(ApiError) as caught:
        await limiter(store, rejected).reserve(who, request(), headers)
    assert caught.value.kind.code == "rate_limit_exceeded"
    assert caught.value.retry_after_s == 60.5
    assert "tokens per minute (limit 15, used 10, this request 10)" in caught.value.message
    assert headers["x-ratelimit-remaining-requests"] == "4"
    assert rejected == ["tokens"]


async def test_what_never_fits_is_not_to_be_retried() -> None:
    headers: dict[str, str] = {}
    with pytest.raises(ApiError, match="this request alone") as caught:
        await limiter(MemoryStore(), []).reserve(principal(tokens_per_minute=9), request(), headers)
    assert caught.value.retry_after_s is None
    assert headers["x-should-retry"] == "false"


async def test_unlimited_keys_have_no_headers() -> None:
    headers: dict[str, str] = {}
    await limiter(MemoryStore(), []).reserve(principal(), request(), headers)
    assert headers == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0004, "1ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (59.5, "59.5s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.234, "1m1.234s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
