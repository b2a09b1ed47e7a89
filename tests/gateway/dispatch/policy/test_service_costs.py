"""Loads: who caused them pays, who uses what they brought pays back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.policy.service_costs import (
    OUTPUT_UNITS,
    LoadCosts,
    ServiceEstimator,
    Transfer,
)

PLACE = ("w", "pack")


def test_causes_are_charged_in_proportion_to_their_backlog() -> None:
    account = LoadCosts()
    account.begin(PLACE, {"a": 3.0, "b": 1.0, "c": 0.0})
    assert account.finish(PLACE, 8.0) == [Transfer("a", 6.0), Transfer("b", 2.0)]


def test_later_users_pay_back_as_much_again_as_they_use_until_it_is_paid() -> None:
    account = LoadCosts()
    account.begin(PLACE, {"a": 3.0, "b": 1.0})
    account.finish(PLACE, 8.0)
    back = account.use(PLACE, "c", 4.0)
    assert back == [Transfer("c", 4.0), Transfer("a", -3.0), Transfer("b", -1.0)]
    account.use(PLACE, "c", 100.0)
    assert account.charged_s == {"a": 0.0, "b": 0.0, "c": 8.0}
    assert account.use(PLACE, "c", 1.0) == []


def test_who_alone_caused_a_load_pays_it_off_with_its_own_use() -> None:
    account = LoadCosts()
    account.begin(PLACE, {"a": 1.0})
    account.finish(PLACE, 2.0)
    assert account.use(PLACE, "a", 2.0) == []
    assert account.use(PLACE, "b", 5.0) == [], "it is paid"
    assert account.charged_s == {"a": 2.0}


def test_a_load_that_nobody_waits_for_is_the_systems() -> None:
    account = LoadCosts()
    account.begin(PLACE, {})
    assert account.finish(PLACE, 2.0, {"late": 5.0}) == []
    assert account.finish(PLACE, 1.0, {"seen at its end only": 5.0})
    assert account.system_s == 2.0
    assert account.use(("w", "other"), "b", 5.0) == []


def test_what_leaves_is_not_paid_back() -> None:
    account = LoadCosts()
    for place in (PLACE, ("w", "more"), ("v", "pack")):
        account.begin(place, {"a": 1.0})
        account.finish(place, 2.0)
    account.begin(("w", "third"), {"a": 1.0})
    account.end(PLACE)
    assert account.use(PLACE, "b", 5.0) == []
    account.lose_worker("w")
    assert account.use(("w", "more"), "b", 5.0) == []
    assert not account.is_known(("w", "third"))
    assert account.use(("v", "pack"), "b", 5.0)


def test_a_load_that_came_to_nothing_is_forgotten() -> None:
    account = LoadCosts()
    account.begin(PLACE, {"a": 1.0})
    account.begin(("w", "goes on"), {"a": 1.0})
    account.begin(("v", "pack"), {"a": 1.0})
    account.keep_under_way("w", {("w", "goes on")})
    assert not account.is_known(PLACE)
    assert account.is_known(("w", "goes on"))
    assert account.is_known(("v", "pack"))


@given(
    backlog=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 9.0), min_size=1),
    took_s=st.floats(0.1, 5.0),
    uses=st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.01, 3.0)), max_size=30),
)
def test_all_charges_together_are_the_load_whoever_uses_it(
    backlog: dict[str, float], took_s: float, uses: list[tuple[str, float]]
) -> None:
    account = LoadCosts()
    account.begin(PLACE, backlog)
    account.finish(PLACE, took_s)
    for tenant, service_s in uses:
        assert sum(t.service_s for t in account.use(PLACE, tenant, service_s)) == pytest.approx(0)
    assert sum(account.charged_s.values()) == pytest.approx(took_s)
    others = sum(s for name, s in account.charged_s.items() if name not in backlog)
    assert 0 <= others <= took_s + 1e-9


def test_of_what_goes_on_the_rest_is_predicted() -> None:
    estimator = ServiceEstimator()
    estimator.observe("t", "m", 10, 50, 0.0)
    assert estimator.predict("t", "m", 10, 100).output_tokens == 50
    resumed = estimator.predict("t", "m", 10, 100, 30)
    assert (resumed.output_tokens, resumed.units) == (20, 40 + OUTPUT_UNITS * 20)
    assert estimator.predict("t", "m", 10, 100, 80).output_tokens == 1
    assert estimator.predict("t", "e", 10, 0).output_tokens == 0
