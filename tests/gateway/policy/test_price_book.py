"""Which price holds for whom and when."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.price_book import Plan, PriceBook, Terms
from gateway.policy.pricing import FREE, WHOLE, Prices

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
