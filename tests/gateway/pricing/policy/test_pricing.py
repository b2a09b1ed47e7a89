"""What requests cost, and by which of the dated prices."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pricing.policy.pricing import (
    FREE,
    MAX_BILLED_S,
    MICROS,
    WHOLE,
    Billed,
    Consumption,
    Cost,
    Plan,
    PriceBook,
    Prices,
    Rates,
    Terms,
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


CHEAP, DEAR, OWN = Prices(10), Prices(30), Prices(7)
BOOK = PriceBook(
    listed={"m": [(100.0, DEAR), (200.0, CHEAP)], "n": [(0.0, DEAR)]},
    plans={
        "partner": Plan([(0.0, 2000), (150.0, 2500)], {"m": [(120.0, OWN), (180.0, None)]}),
        "other": Plan([(0.0, 0), (999.0, 1)]),
    },
    terms={"t": [(50.0, Terms("partner", 1000)), (400.0, Terms("", 500))], "u": []},
)


def test_before_the_first_price_it_is_free() -> None:
    rates = BOOK.rates("x", "m", 99.9)
    assert (rates.listed, rates.agreed, rates.share) == (FREE.listed, FREE.agreed, WHOLE)
    assert BOOK.rates("x", "nothing", 1e9).listed == Prices()


def test_a_price_holds_from_its_instant_on() -> None:
    assert BOOK.rates("x", "m", 100.0).agreed == DEAR
    assert BOOK.rates("x", "m", 199.999).agreed == DEAR
    assert BOOK.rates("x", "m", 200.0).agreed == CHEAP
    assert BOOK.rates("x", "m", 200.0).at == 200.0


def test_discounts_multiply_and_a_plans_own_price_has_only_the_tenants() -> None:
    assert BOOK.rates("t", "m", 110.0).share == 8000 * 9000
    own = BOOK.rates("t", "m", 120.0)
    assert (own.listed, own.agreed, own.share) == (DEAR, OWN, 10_000 * 9000)
    assert BOOK.rates("t", "n", 120.0).agreed == DEAR
    ended = BOOK.rates("t", "m", 180.0)
    assert (ended.agreed, ended.share) == (DEAR, 7500 * 9000)
    assert BOOK.rates("t", "m", 400.0).share == 10_000 * 9500


def test_a_plan_counts_from_when_it_was_agreed() -> None:
    assert BOOK.rates("t", "n", 49.0).share == WHOLE
    assert BOOK.rates("t", "n", 50.0).share == 8000 * 9000


def test_a_plan_that_is_gone_changes_nothing() -> None:
    book = PriceBook({"m": [(0.0, DEAR)]}, {}, {"t": [(0.0, Terms("gone", 0))]})
    assert (book.rates("t", "m", 1.0).agreed, book.rates("t", "m", 1.0).share) == (DEAR, WHOLE)


def test_changes_are_those_of_the_tenant_and_inside_the_span() -> None:
    assert BOOK.changes(100.0, 400.0, "t") == [120.0, 150.0, 180.0, 200.0]
    assert BOOK.changes(100.0, 400.0, "u") == [200.0]
    assert 999.0 in BOOK.changes(0.0, 2000.0)


@given(st.sampled_from(["t", "u", "x"]), st.sampled_from(["m", "n"]), st.floats(0, 500))
def test_between_changes_nothing_changes(tenant: str, model: str, at: float) -> None:
    edges = [0.0, *BOOK.changes(0.0, 500.0, tenant), 500.0]
    began = max(edge for edge in edges if edge <= at)
    now, then = BOOK.rates(tenant, model, at), BOOK.rates(tenant, model, began)
    assert (now.listed, now.agreed, now.share) == (then.listed, then.agreed, then.share)
