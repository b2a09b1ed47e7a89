"""Shares of tenants: the order of counters, and what of a worker is left to others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.policy import fair_share
from gateway.dispatch.policy.fair_share import (
    RECENT_S,
    FairShare,
    Headroom,
    UsedService,
    Wanted,
    rows_of,
)

LEAD_S = 30.0


def share_of(**counters: float) -> FairShare:
    """Tenants that all wait, with these counters."""
    share = FairShare(max_lead_s=1e9)
    for tenant_id in counters:
        share.enqueue(tenant_id, 1.0)
    for tenant_id, counter in counters.items():
        share.charge(tenant_id, UsedService(counter))
    return share


def test_a_charge_is_divided_by_the_weight() -> None:
    share = FairShare(LEAD_S)
    share.enqueue("light", 1.0)
    share.enqueue("heavy", 4.0)
    share.charge("light", UsedService(2.0))
    share.charge("heavy", UsedService(2.0))
    assert share.counter("light") == 2.0
    assert share.counter("heavy") == 0.5


def test_who_comes_back_is_lifted_to_the_smallest_waiting() -> None:
    share = share_of(a=5.0, b=7.0)
    share.enqueue("new", 1.0)
    assert share.counter("new") == 5.0


def test_idle_time_is_not_banked_even_if_nobody_waits() -> None:
    share = share_of(a=5.0)
    share.dequeue("a")
    share.enqueue("new", 1.0)
    assert share.counter("new") == 5.0


def test_who_stays_is_not_lifted_by_more_tickets() -> None:
    share = share_of(a=5.0, b=7.0)
    share.charge("a", UsedService(-4.0))
    share.enqueue("a", 1.0)
    assert share.counter("a") == 1.0


def test_a_lead_is_forgiven_beyond_the_bound_when_coming_back() -> None:
    share = FairShare(LEAD_S)
    share.enqueue("busy", 2.0)
    share.charge("busy", UsedService(1000.0))
    share.dequeue("busy")
    share.enqueue("other", 1.0)
    # Alone, it set the floor; the other starts there and nothing is forgiven.
    share.enqueue("busy", 2.0)
    assert share.counter("busy") == share.counter("other") == 500.0
    share.dequeue("busy")
    share.charge("busy", UsedService(1000.0))
    share.enqueue("busy", 2.0)
    assert share.counter("busy") == 500.0 + LEAD_S / 2.0


def test_a_returned_ticket_neither_lifts_nor_forgives() -> None:
    share = share_of(a=5.0, b=7.0)
    share.dequeue("a")
    share.charge("a", UsedService(-4.0))
    share.restore("a")
    assert share.counter("a") == 1.0


def test_a_prediction_moves_its_tenant_and_nobody_else() -> None:
    share = share_of(a=5.0)
    share.expect("a", UsedService(60.0))
    assert share.counter("a") == 65.0
    share.enqueue("b", 1.0)
    share.dequeue("a")
    share.dequeue("b")
    share.enqueue("c", 1.0)
    assert share.counter("b") == share.counter("c") == 5.0
    share.settle("a", UsedService(60.0))
    share.charge("a", UsedService(1.0))
    assert share.counter("a") == 6.0
    share.check_integrity()


def test_who_is_served_while_it_comes_back_banks_nothing() -> None:
    """A prediction that proves too high is no credit against those who waited meanwhile."""
    share = share_of(a=0.0, b=100.0)
    share.dequeue("a")
    share.expect("a", UsedService(100.0))
    share.enqueue("a", 1.0)
    share.settle("a", UsedService(100.0))
    share.charge("a", UsedService(1.0))
    assert share.counter("a") == 101.0


def test_what_a_grant_uses_takes_the_place_of_its_prediction() -> None:
    share = share_of(a=0.0, b=0.0)
    share.expect("a", UsedService(10.0))
    share.charge("a", UsedService(4.0), UsedService(4.0))
    assert share.counter("a") == 10.0
    assert share.leads() == {"a": 4.0}
    share.charge("a", UsedService(9.0), UsedService(6.0))
    assert share.counter("a") == 13.0
    share.settle("a", UsedService(0.0))
    assert share.counter("a") == 13.0
    share.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from(["serve", "leave", "come"]), st.floats(0.01, 2.0)), max_size=80
    )
)
def test_who_leaves_and_comes_back_gains_no_more_than_the_bound(
    life: list[tuple[str, float]],
) -> None:
    """One tenant always waits, the other comes and goes; one grant at a time, charged at once.

    From the moment it came back, the returning tenant never gets more than two largest charges
    beyond what the other gets meanwhile: its time away has earned it nothing.
    """
    share = FairShare(max_lead_s=1e9)
    share.enqueue("stays", 1.0)
    share.enqueue("returns", 1.0)
    had = {"stays": 0.0, "returns": 0.0}
    there, largest, begin = True, max((s for _, s in life), default=0.0), dict(had)
    for what, seconds in life:
        if what == "leave" and there:
            share.dequeue("returns")
            there = False
        elif what == "come" and not there:
            share.enqueue("returns", 1.0)
            there, begin = True, dict(had)
        waiting = [name for name, _ in share.waiting()]
        name = min(waiting, key=lambda n: (share.counter(n), n))
        share.charge(name, UsedService(seconds))
        had[name] += seconds
        gained = had["returns"] - begin["returns"]
        assert gained <= had["stays"] - begin["stays"] + 2 * largest + 1e-9
    share.check_integrity()


def test_idle_tenants_at_the_floor_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "FORGET_ABOVE", 3)
    share = FairShare(LEAD_S)
    for i in range(10):
        share.enqueue(f"t{i}", 1.0)
        share.dequeue(f"t{i}")
    share.enqueue("last", 1.0)
    share.check_integrity()
    assert len(share._counters) <= 5


def test_a_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="weight"):
        FairShare(LEAD_S).enqueue("a", 0.0)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    jobs=st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.2, 3.0)), min_size=30, max_size=150),
    slots=st.integers(1, 4),
)
def test_gap_of_tenants_that_always_wait_is_bounded(
    weights: list[float], jobs: list[tuple[float, float]], slots: int
) -> None:
    """Every tenant always waits; a worker runs `slots` requests at a time.

    U = the largest real or predicted service of a request. What a tenant has in the slots may
    still be wrong by one prediction each, hence the bound 2 (1 + slots) U / smallest weight.
    """
    share = FairShare(max_lead_s=1e9)
    names = [f"t{i}" for i in range(len(weights))]
    for name, weight in zip(names, weights, strict=True):
        share.enqueue(name, weight)
    served = dict.fromkeys(names, 0.0)
    running: list[tuple[str, float, float]] = []
    largest = max(max(real, real * factor) for real, factor in jobs)
    for real, factor in jobs:
        if len(running) == slots:
            name, predicted, used = running.pop(0)
            share.settle(name, UsedService(predicted))
            share.charge(name, UsedService(used))
            served[name] += used
        name = min(names, key=lambda n: (share.counter(n), n))
        share.expect(name, UsedService(real * factor))
        running.append((name, real * factor, real))
        gaps = [served[n] / w for n, w in zip(names, weights, strict=True)]
        assert max(gaps) - min(gaps) <= 2 * (1 + slots) * largest / min(weights)
    share.check_integrity()


ROWS, PLACES = 64, 72


def fill(headroom: Headroom, tenant: str, most: int = PLACES, now_s: float = 0.0) -> int:
    """Requests that the tenant gets in of `most`, with memory for all."""
    taken = 0
    for number in range(most):
        used = sum(held.num_requests for held in headroom._held.get("w", {}).values())
        if used >= PLACES or not headroom.may_take(
            "w", tenant, Wanted(1, PLACES - used, 999), now_s
        ):
            return number
        headroom.take("w", tenant, 1, now_s)
        taken += 1
    return taken


def test_alone_a_tenant_takes_every_place() -> None:
    headroom = Headroom()
    assert fill(headroom, "a") == PLACES


def test_beside_others_every_row_is_taken_and_places_beyond_are_left() -> None:
    headroom = Headroom()
    headroom.take("w", "quiet", 1, 0.0)
    headroom.give_back("w", "quiet", 1)
    assert fill(headroom, "flood") == ROWS + (PLACES - ROWS) // 2
    free = (PLACES - ROWS) // 2
    assert headroom.may_take("w", "quiet", Wanted(1, free, 999, fresh=True), 0.0)
    assert fill(headroom, "quiet") == 0, "what has waited is a backlog too"


def test_a_crowd_takes_no_place_beyond_however_short_its_requests_wait() -> None:
    """Twice as many open as there are rows: each waits for less than half a second."""
    headroom = Headroom()
    headroom.take("w", "quiet", 1, 0.0)
    headroom.give_back("w", "quiet", 1)
    free = PLACES - fill(headroom, "flood")
    assert not headroom.may_take("w", "flood", Wanted(1, free, 999, fresh=True), 0.0)
    for number in range(free):
        assert headroom.may_take("w", "quiet", Wanted(1, free - number, 999, fresh=True), 0.0)
        headroom.take("w", "quiet", 1, 0.0)


def test_who_has_nothing_here_is_not_therefore_before_others() -> None:
    headroom = Headroom()
    for tenant in ("a", "b"):
        headroom.take("w", tenant, 1, 0.0)
    assert not headroom.may_take("w", "c", Wanted(1, 1, 999), 0.0), "it is not its turn"
    assert headroom.may_take("w", "c", Wanted(1, 1, 999, fresh=True), 0.0)


def test_who_has_gone_leaves_its_row_to_others() -> None:
    headroom = Headroom()
    headroom.take("w", "quiet", 1, 0.0)
    headroom.give_back("w", "quiet", 1)
    assert fill(headroom, "flood", now_s=RECENT_S + 1) == PLACES


def test_a_reserved_share_stays_free_whoever_came_when() -> None:
    headroom = Headroom()
    headroom.reserved = {"gold": 0.25}
    assert fill(headroom, "flood") == ROWS * 3 // 4
    beyond = (PLACES - ROWS) // 2
    assert fill(headroom, "gold") == ROWS // 4 + beyond
    for _ in range(ROWS // 4 + beyond):
        headroom.give_back("w", "gold", 1)
    assert fill(headroom, "third") == 0


@pytest.mark.parametrize("places", [2, 3, 5, 9, PLACES])
@pytest.mark.parametrize("num_tenants", [1, 10, 1000])
def test_many_small_shares_leave_half_of_the_rows_to_others(places: int, num_tenants: int) -> None:
    headroom = Headroom()
    headroom.reserved = {f"gold-{n}": 0.5 / num_tenants for n in range(num_tenants)}
    num_taken = 0
    while headroom.may_take("w", "other", Wanted(1, places - num_taken, 999), 0.0):
        headroom.take("w", "other", 1, 0.0)
        num_taken += 1
    assert num_taken == max(1, rows_of(places) // 2)
    for n in range(places):
        gold = f"gold-{n % num_tenants}"
        if headroom.may_take("w", gold, Wanted(1, places - num_taken, 999), 0.0):
            headroom.take("w", gold, 1, 0.0)
            num_taken += 1
    assert num_taken >= rows_of(places), "the other half is theirs, however it is cut"


def test_reserved_memory_stays_free_but_for_a_tenants_first_request() -> None:
    headroom = Headroom()
    headroom.reserved = {"gold": 0.5}
    assert headroom.may_take("w", "big", Wanted(90, PLACES, 100), 0.0), "it would never fit"
    headroom.take("w", "big", 30, 0.0)
    assert headroom.may_take("w", "big", Wanted(20, PLACES - 1, 70), 0.0)
    assert not headroom.may_take("w", "big", Wanted(21, PLACES - 1, 70), 0.0)
    assert headroom.may_take("w", "gold", Wanted(70, PLACES - 1, 70), 0.0)


def test_books_are_checked() -> None:
    headroom = Headroom()
    headroom.take("w", "a", 5, 0.0)
    headroom.check_integrity({"w": 1})
    with pytest.raises(AssertionError):
        headroom.check_integrity({})
    headroom.give_back("w", "a", 5)
    headroom.check_integrity({})


@given(st.integers(1, 2000))
def test_rows_are_read_off_the_places(rows: int) -> None:
    """As engine/models/status.py makes the one of the other."""
    assert rows_of(rows + max(1, rows // 8)) == rows
