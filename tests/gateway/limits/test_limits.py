"""The acting half of limits: whose they are, headers, words and holds that close once."""

from collections.abc import Sequence
from dataclasses import replace
from secrets import token_hex

import msgspec
import pytest

from engine.protocol import SamplingParams
from gateway.errors import ApiError
from gateway.limits.limits import RATES, Limiter, LimitReservation, go_duration
from gateway.limits.policy.rate_limit import Draw, Refusal
from gateway.limits.store import LimitDecision, MemoryStore
from gateway.prepare.lengths import Lengths, lengths_of
from gateway.pricing.policy.pricing import FREE, Prices, Rates
from gateway.types import HostedModel, PreparedRequest, Principal
from registry.accounts.quotas import LIMIT_NAMES, UNLIMITED, Limits

MODEL = HostedModel("m", "r", "p", 100, 100, 0)
PRICED = replace(MODEL, revision="priced")
PRICES = Prices(prompt_nanos=10, cached_nanos=1, completion_nanos=100)


def principal(**limits: int) -> Principal:
    return Principal("t", "k", frozenset(), Limits(**limits))


def request(model: HostedModel = MODEL) -> PreparedRequest:
    rates = Rates(listed=PRICES, agreed=PRICES) if model.revision == PRICED.revision else FREE
    return PreparedRequest(
        token_hex(8), "chat", model, [1] * 3, 7, SamplingParams(), [], rates=rates
    )


def limiter(store: MemoryStore, rejected: list[str], gateway: Limits = UNLIMITED) -> Limiter:
    return Limiter(store, lambda: 1000.0, rejected.append, lambda: gateway)


async def refusal(limits: Limiter, who: Principal, what: PreparedRequest) -> str:
    with pytest.raises(ApiError) as caught:
        await limits.reserve(who, what, {})
    return caught.value.message


async def test_a_hold_closes_once() -> None:
    store = MemoryStore()
    who = principal(tokens_per_minute=100)
    hold = await limiter(store, []).reserve(who, request(), {})
    await hold.settle(3, 1, 0, 0.0)
    await hold.settle(1, 0, 0, 0.0)
    await hold.release()
    store.check_integrity()
    headers: dict[str, str] = {}
    await limiter(store, []).reserve(who, request(), headers)
    assert headers["x-ratelimit-remaining-tokens"] == "86"
    assert store.num_open == 1


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
    assert "tokens per minute (limit 15, used 10, requested 10)" in caught.value.message
    assert headers["x-ratelimit-remaining-requests"] == "4"
    assert rejected == ["tokens"]


async def test_headers_tell_of_the_tightest_limit() -> None:
    who = msgspec.structs.replace(
        principal(tokens_per_minute=500, output_tokens_per_day=40),
        tenant_limits=Limits(requests_per_day=3),
    )
    headers: dict[str, str] = {}
    # What all tenants share is not told of, however tight.
    limits = limiter(MemoryStore(), [], Limits(requests_per_minute=5, input_tokens_per_minute=16))
    await limits.reserve(who, request(), headers)
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == (
        "40",
        "33",
    )
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-reset-requests"] == "24h7m20s"
    assert "x-should-retry" not in headers
    for _ in range(2):
        await limits.reserve(who, request(), headers)
    with pytest.raises(ApiError, match="try again in 24h7m20s"):
        await limits.reserve(who, request(), headers)
    assert headers["x-should-retry"] == "false"  # no client waits for a day


async def test_what_never_fits_is_not_to_be_retried() -> None:
    headers: dict[str, str] = {}
    with pytest.raises(ApiError, match="this request alone") as caught:
        await limiter(MemoryStore(), []).reserve(principal(tokens_per_minute=9), request(), headers)
    assert caught.value.retry_after_s is None
    assert headers["x-should-retry"] == "false"


async def test_keys_of_a_tenant_share_its_limits_and_tenants_the_models() -> None:
    store = MemoryStore()
    model = replace(MODEL, limits=Limits(input_tokens_per_minute=8))
    limits = limiter(store, [], Limits(max_concurrency=3))
    tenant = Limits(requests_per_minute=1)

    def who(tenant_id: str, key_id: str) -> Principal:
        return Principal(tenant_id, key_id, frozenset(), UNLIMITED, tenant_limits=tenant)

    await limits.reserve(who("a", "a1"), request(model), {})
    said = await refusal(limits, who("a", "a2"), request(model))
    assert "your tenant's requests per minute" in said
    await limits.reserve(who("b", "b1"), request(model), {})
    said = await refusal(limits, who("c", "c1"), request(model))
    assert "the model's input tokens per minute (limit 8, requested 3)" in said
    hold = await limits.reserve(who("c", "c1"), request(), {})
    said = await refusal(limits, who("d", "d1"), request())
    assert "this server's concurrent requests" in said
    await hold.release()
    await limits.reserve(who("d", "d1"), request(), {})
    store.check_integrity()


async def test_what_is_not_limited_has_no_headers_and_is_not_counted() -> None:
    headers: dict[str, str] = {}
    store = MemoryStore()
    await limiter(store, []).reserve(principal(max_output_tokens=5), request(), headers)
    assert headers == {}
    assert store.num_counts == store.num_open == 0


def test_every_limit_is_a_rate_a_length_or_a_budget() -> None:
    others = {"max_prompt_tokens", "max_output_tokens", "day_budget_nanos", "month_budget_nanos"}
    assert {rate.field for rate in RATES} | others == set(LIMIT_NAMES)


WORST_NANOS = 3 * 10 + 7 * 100
NOW_AT = 1_772_064_000.0


async def test_a_budget_is_never_overrun_by_a_unit() -> None:
    store = MemoryStore()
    limits = Limiter(store, lambda: 1.0, lambda meter: None, wall_clock=lambda: NOW_AT)
    who = principal(month_budget_nanos=100 * WORST_NANOS + WORST_NANOS - 1)
    held, refused = list[LimitReservation](), list[ApiError]()
    headers: dict[str, str] = {}
    for _ in range(500):
        try:
            held.append(await limits.reserve(who, request(PRICED), headers))
        except ApiError as error:
            refused.append(error)
    told = {(e.kind.status, e.kind.code, e.retry_after_s) for e in refused}
    assert told == {(429, "insufficient_quota", None)}
    assert headers["x-should-retry"] == "false"
    assert len(held) == 100
    await held[0].settle(3, 7, WORST_NANOS, NOW_AT)
    await held[1].release()
    await held[2].settle(3, 7, WORST_NANOS - 1, NOW_AT)  # some of its prompt was cached
    said = await refusal(
        limits, msgspec.structs.replace(who, limits=Limits(month_budget_nanos=1)), request(PRICED)
    )
    assert "alone may cost 0.00000073, more than the key's budget for a month, 0.0000" in said
    await limits.reserve(who, request(PRICED), {})
    await limits.reserve(who, request(PRICED), {})
    said = await refusal(limits, who, request(PRICED))
    assert "budget for this month" in said
    assert "0 of 0.000073729 is left and this request may cost 0.00000073" in said
    store.check_integrity()


async def test_budgets_of_all_scopes_hold() -> None:
    store = MemoryStore()
    model = replace(PRICED, limits=Limits(day_budget_nanos=2 * WORST_NANOS))
    limits = limiter(store, [], Limits(month_budget_nanos=3 * WORST_NANOS))
    who = msgspec.structs.replace(principal(), tenant_limits=Limits(day_budget_nanos=WORST_NANOS))
    await limits.reserve(who, request(model), {})
    assert "your tenant's budget for this day" in await refusal(limits, who, request(model))
    other = msgspec.structs.replace(who, tenant_id="u")
    await limits.reserve(other, request(model), {})
    third = msgspec.structs.replace(who, tenant_id="v")
    assert "the model's budget for this day" in await refusal(limits, third, request(model))
    await limits.reserve(third, request(PRICED), {})
    said = await refusal(limits, msgspec.structs.replace(who, tenant_id="w"), request(PRICED))
    assert "this server's budget for this month" in said
    assert "left" not in said  # what others have spent
    assert "may cost 0.00000073" in said


async def test_what_is_posted_after_midnight_is_of_the_new_day() -> None:
    midnight, now_at = 1_772_064_000.0, [1_772_064_000.0 - 1]  # 26 February 2026
    store = MemoryStore()
    limits = Limiter(store, lambda: 1.0, lambda meter: None, wall_clock=lambda: now_at[0])
    who = principal(day_budget_nanos=WORST_NANOS, month_budget_nanos=2 * WORST_NANOS)
    before = await limits.reserve(who, request(PRICED), {})
    now_at[0] = midnight + 1
    await before.settle(3, 7, WORST_NANOS, now_at[0])
    assert "key's budget for this day" in await refusal(limits, who, request(PRICED))
    now_at[0] += 86_400
    day_after = await limits.reserve(who, request(PRICED), {})
    await day_after.settle(3, 7, WORST_NANOS, midnight + 5 * 86_400)  # 3 March
    now_at[0] = midnight + 6 * 86_400
    in_march = await limits.reserve(who, request(PRICED), {})
    await in_march.settle(3, 7, WORST_NANOS, now_at[0])
    now_at[0] += 86_400
    assert "key's budget for this month" in await refusal(limits, who, request(PRICED))
    store.check_integrity()


def test_lengths_are_the_shortest_of_all() -> None:
    who = msgspec.structs.replace(
        principal(max_prompt_tokens=9), tenant_limits=Limits(max_prompt_tokens=7)
    )
    model = replace(MODEL, limits=Limits(max_output_tokens=4))
    assert lengths_of(who, model, Limits(max_prompt_tokens=8)) == Lengths(7, 4)
    assert lengths_of(principal(), MODEL, UNLIMITED) == Lengths(0, 0)
    lengths = Lengths(7, 4)
    lengths.check_prompt("messages", 7)
    with pytest.raises(ApiError, match="8 tokens, more than your limit of 7"):
        lengths.check_prompt("messages", 8)
    lengths.check_output("max_tokens", 4)
    with pytest.raises(ApiError, match="max_tokens is 5, more than your limit of 4"):
        lengths.check_output("max_tokens", 5)


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
        (86_400, "24h0m0s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


async def test_a_budget_that_nobody_can_tell_is_503_and_worth_another_try() -> None:
    class Blind(MemoryStore):
        async def reserve(
            self, reservation_id: str, draws: Sequence[Draw], now_s: float
        ) -> LimitDecision:
            return LimitDecision((), refusal=Refusal(draws[-1], 0, 1.0, is_unknown=True))

    headers: dict[str, str] = {}
    who = principal(month_budget_nanos=100, requests_per_minute=9)
    with pytest.raises(ApiError, match="cannot be determined at the moment") as caught:
        await limiter(Blind(), []).reserve(who, request(PRICED), headers)
    assert (caught.value.kind.status, caught.value.retry_after_s) == (503, 1.0)
    assert headers == {}
