"""What requests leave to others: reserved shares, and a row for who asks seldom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.headroom import RECENT_S, Headroom, Wanted, rows_of

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
    """As engine/worker/leases.py makes the one of the other."""
    assert rows_of(rows + max(1, rows // 8)) == rows
