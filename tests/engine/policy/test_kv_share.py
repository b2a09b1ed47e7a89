"""Shares of KV memory: who may start, and who goes first."""

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.policy.kv_share import Holding, Share, choose_victim, may_start, share_of

FREE_FOR_ALL = Share(math.inf, contended=False)


def test_a_tenant_alone_may_take_everything() -> None:
    share = share_of(100, 0.5, num_tenants=1)
    assert may_start({"a": 90.0}, "a", 50.0, share)


def test_beside_others_a_tenant_stays_within_its_share_but_for_one_request() -> None:
    share = share_of(100, 0.5, num_tenants=2)
    assert may_start({"a": 30.0}, "a", 20.0, share)
    assert not may_start({"a": 30.0}, "a", 21.0, share)
    assert may_start({"b": 30.0}, "a", 99.0, share)  # its first, however large
    assert may_start({"a": 99.0}, "a", 99.0, share_of(100, 1.0, num_tenants=2))


def test_who_is_above_its_share_goes_first_but_never_its_oldest() -> None:
    share = share_of(100, 0.5, num_tenants=2)
    holdings = [Holding("a", 1), Holding("a", 2), Holding("b", 3)]
    assert choose_victim(holdings, {"a": 60.0, "b": 10.0}, share) == 1
    assert choose_victim(holdings, {"a": 40.0, "b": 10.0}, share) == 2
    assert choose_victim(holdings, {}, FREE_FOR_ALL) == 2
    assert choose_victim([Holding("a", 1), Holding("b", 2)], {"a": 90.0, "b": 5.0}, share) == 1
    assert choose_victim([Holding("a", 1)], {"a": 90.0}, share) == 0


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
    st.lists(st.floats(0, 200), min_size=3, max_size=3),
    st.floats(0.05, 1.0),
)
def test_the_oldest_of_all_is_only_chosen_when_it_is_alone(
    tenants: list[str], pages: list[float], part: float
) -> None:
    holdings = [Holding(tenant, order) for order, tenant in enumerate(tenants)]
    held = dict(zip("abc", pages, strict=True))
    chosen = choose_victim(holdings, held, share_of(100, part, len(set(tenants))))
    assert chosen != 0 or len(holdings) == 1
