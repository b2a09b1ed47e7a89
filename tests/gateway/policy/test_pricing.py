"""What a request costs: the table of outcomes, and every bill against Fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.pricing import (
    FREE,
    MAX_BILLED_S,
    MICROS,
    WHOLE,
    Billed,
    Consumption,
    Cost,
    Prices,
    Rates,
    cost_of,
    micros,
    most_nanos,
)

PRICES = Prices(100, 10, 1000, 20, 5_000_000, 700)
LISTED = Rates(1.0, PRICES, PRICES)

nanos = st.integers(0, 2**40)
prices = st.builds(Prices, nanos, nanos, nanos, nanos, nanos, nanos)
shares = st.integers(0, WHOLE)
rates = st.builds(Rates, st.just(0.0), prices, prices, shares)


@st.composite
def consumptions(draw: st.DrawFn) -> Consumption:
    prompt = draw(st.integers(0, 10**6))
    return Consumption(
        prompt,
        draw(st.integers(0, prompt)),
        draw(st.integers(0, 10**6)),
        draw(st.integers(0, 2 * MAX_BILLED_S * MICROS)),
        draw(st.integers(0, 2 * MAX_BILLED_S * MICROS)),
        draw(st.booleans()),
    )


def exact(prices: Prices, share: int, outcome: Billed, used: Consumption) -> Fraction:
    """The same bill in Fractions, from the documentation's words."""
    if outcome == "failed":
        return Fraction(0)
    if outcome == "cache_hit":
        amount = Fraction((used.prompt_tokens + used.completion_tokens) * prices.cached_nanos)
    else:
        fresh = prices.embedding_nanos if used.is_encoder else prices.prompt_nanos
        service_s = min(Fraction(used.service_us, 10**6), Fraction(MAX_BILLED_S))
        load_s = min(Fraction(used.load_us, 10**6), Fraction(MAX_BILLED_S))
        amount = (
            (used.prompt_tokens - used.cached_tokens) * fresh
            + used.cached_tokens * prices.cached_nanos
            + used.completion_tokens * prices.completion_nanos
            + service_s * prices.service_second_nanos
            + load_s * prices.load_second_nanos
        )
    return amount * Fraction(share, WHOLE)


def test_prices_by_outcome() -> None:
    used = Consumption(7, 3, 2)
    paid = Cost(4 * 100, 3 * 10, 2 * 1000, list_nanos=2430)
    assert cost_of(LISTED, "finished", used) == paid
    assert cost_of(LISTED, "disconnected", used) == paid
    assert cost_of(LISTED, "failed", used) == Cost()
    assert cost_of(LISTED, "cache_hit", used) == Cost(cached_nanos=90, list_nanos=90)
    assert cost_of(FREE, "finished", used) == Cost()


def test_an_encoders_input_has_its_own_price_and_seconds_have_theirs() -> None:
    used = Consumption(7, 0, 0, service_us=1_500_000, load_us=2_000_001, is_encoder=True)
    cost = cost_of(LISTED, "finished", used)
    assert (cost.input_nanos, cost.service_nanos, cost.load_nanos) == (140, 7_500_000, 1400)


@given(rates, st.sampled_from(["finished", "disconnected", "failed", "cache_hit"]), consumptions())
def test_a_bill_is_the_exact_one_rounded_down_once(
    rates: Rates, outcome: Billed, used: Consumption
) -> None:
    cost = cost_of(rates, outcome, used)
    assert cost.cost_nanos == math.floor(exact(rates.agreed, rates.share, outcome, used))
    assert cost.list_nanos == math.floor(exact(rates.listed, WHOLE, outcome, used))
    parts = (cost.input_nanos, cost.cached_nanos, cost.output_nanos)
    assert min(*parts, cost.service_nanos, cost.load_nanos) >= 0


@given(rates, consumptions(), st.sampled_from(["finished", "disconnected", "cache_hit"]))
def test_no_bill_is_above_what_was_reserved(
    rates: Rates, used: Consumption, outcome: Billed
) -> None:
    most = most_nanos(rates, used.prompt_tokens, used.completion_tokens)
    assert cost_of(rates, outcome, used).cost_nanos <= most


def test_half_a_nano_unit_is_the_clients() -> None:
    half = Rates(0.0, Prices(1), Prices(1), WHOLE // 2)
    assert cost_of(half, "finished", Consumption(3, 0, 0)).cost_nanos == 1
    assert cost_of(half, "finished", Consumption(1, 0, 0)).cost_nanos == 0


def test_meters_share_one_rounding() -> None:
    half = Rates(0.0, FREE.listed, Prices(1, 1, 1), WHOLE // 2)
    cost = cost_of(half, "finished", Consumption(2, 1, 1))
    assert (cost.input_nanos, cost.cached_nanos, cost.output_nanos) == (0, 1, 0)


@given(st.floats(0, 1e9))
def test_microseconds_are_whole_and_never_a_whole_one_off(seconds: float) -> None:
    exact_us = Fraction(seconds) * 10**6
    assert abs(micros(seconds) - exact_us) < 1 + exact_us / 2**52


def test_a_clock_that_went_back_costs_nothing() -> None:
    assert micros(-0.5) == 0


@pytest.mark.parametrize(
    "counts", [(1, 2, 0, 0), (-1, 0, 0, 0), (1, 0, -1, 0), (1, -1, 0, 0), (1, 0, 0, -1)]
)
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        Consumption(*counts)
