"""What Redis has not been told: no end is lost, nothing is owed twice."""

from gateway.policy.rate_limit import DAY_S, Reservation, Taken, Used
from gateway.store.arrears import MAX_STAMPS, Arrears, Ended
from gateway.store.base import Past

TAKEN = (
    Taken("month", "cost", 0, 7, 90, "month"),
    Taken("day", "tokens", DAY_S, 3, 50),
    Taken("minute", "tokens", 60, 3, 50),
)
USED = Used(4, 5, 30, day=11, month=7, posted_at=100.0)


def test_days_and_money_are_owed_and_paid_once() -> None:
    arrears = Arrears()
    arrears.owe_used(Reservation("a", TAKEN), USED)
    arrears.owe(Past("month", 0, period=7, spent=5), 100.0)
    owed = arrears.owed()
    assert owed == [
        Past("month", 0, period=7, spent=35),
        Past("day", DAY_S, ((0.0, 9),), spent=9),
    ]
    assert arrears.bundle("one", 10) == ("one", owed)
    arrears.owe_used(Reservation("b", TAKEN[1:]), USED)  # while they are being told
    assert arrears.bundle("two", 10) == ("one", owed)  # not answered: the same once more
    arrears.paid("one")
    left = Past("day", DAY_S, ((0.0, 9),), spent=9)
    assert arrears.owed() == [left]
    assert arrears.bundle("two", 10) == ("two", [left])
    arrears.paid("two")
    assert arrears.bundle("three", 10) is None
    assert not arrears.is_behind


def test_what_may_have_been_told_is_told_anew_to_another_epoch() -> None:
    arrears = Arrears()
    for second in (1.0, 3.0):
        arrears.owe(Past("month", 0, period=7, spent=5), second)
        arrears.owe(Past("day", 0, period=70, spent=5), second)
        arrears.bundle(f"at {second}", 1)
    arrears.begin_epoch(2.0, is_restored=False)
    assert sorted((each.name, each.spent) for each in arrears.owed()) == [("day", 5), ("month", 5)]
    arrears.paid("at 1.0")  # of the epoch before
    assert len(arrears.owed()) == 2


def test_an_epoch_is_told_what_the_ledger_does_not_tell() -> None:
    arrears = Arrears()
    arrears.open["c"] = Reservation("c", TAKEN)
    for name, posted_at in (("a", 99.0), ("b", 101.0)):
        used = Used(1, 1, 10, month=7, posted_at=posted_at)
        arrears.ended[name] = Ended(Reservation(name, TAKEN[:1]), used)
    arrears.in_doubt("d")
    arrears.owe(Past("month", 0, period=7, spent=1000), 99.9)
    arrears.owe(Past("month", 0, period=7, spent=2), 100.0)
    arrears.begin_epoch(100.0, is_restored=False)
    assert arrears.owed() == [Past("month", 0, period=7, spent=12)]
    assert (arrears.ended, arrears.local_ids) == ({}, {"c"})
    assert arrears.bundle("b", 10)
    arrears.paid("b")
    arrears.told(["c"])
    assert not arrears.is_behind


def test_an_epoch_that_began_long_before_is_told_everything() -> None:
    """A start without Redis: what was used until it is met lies in no sums that it has."""
    arrears = Arrears()
    arrears.owe_used(Reservation("a", TAKEN), USED)
    arrears.pasts["day"] = past = Past("day", DAY_S, ((5.0, 9),))
    arrears.begin_epoch(20.0, is_restored=True)
    assert sum(each.spent for each in arrears.owed()) == 30 + 9
    arrears.restored([Past("day", DAY_S), past])
    assert not arrears.pasts
    arrears.pasts["day"] = past
    arrears.begin_epoch(200.0, is_restored=False)  # which the ledger will be asked for
    assert (arrears.owed(), arrears.pasts) == ([], {})


def test_a_long_outage_is_remembered_less_exactly_and_in_whole() -> None:
    arrears = Arrears()
    for second in range(10 * MAX_STAMPS + 1):
        arrears.owe(Past("month", 0, period=7, spent=3), float(second))
    assert [each.spent for each in arrears.owed()] == [3 * (10 * MAX_STAMPS + 1)]
    arrears.begin_epoch(5.0 * MAX_STAMPS, is_restored=False)
    (left,) = arrears.owed()  # never too little
    assert 3 * 5 * MAX_STAMPS < left.spent < 3 * 6 * MAX_STAMPS


def test_what_ends_while_it_is_told_is_given_back() -> None:
    arrears = Arrears()
    arrears.local_ids.add("a")
    arrears.told(["a"])
    assert arrears.ended["a"].used is None


def test_strangers_are_given_back_when_seen_twice() -> None:
    arrears = Arrears()
    arrears.open["mine"] = Reservation("mine", ())
    arrears.compare(["mine", "under way", "lost"])
    assert not arrears.ended
    arrears.compare(["mine", "lost", "later"])
    assert set(arrears.ended) == {"lost"}
