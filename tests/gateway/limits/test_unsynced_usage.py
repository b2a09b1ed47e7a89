"""What Redis has not been told: no end is lost, nothing is owed twice."""

from dataclasses import replace

from gateway.limits.policy.rate_limit import DAY_S, Reservation, Taken, UsedAmounts
from gateway.limits.store import Past
from gateway.limits.unsynced_usage import MAX_STAMPS, EndedReservation, UnsyncedUsage

TAKEN = (
    Taken("month", "cost", 0, 7, 90, "month"),
    Taken("day", "tokens", DAY_S, 3, 50),
    Taken("minute", "tokens", 60, 3, 50),
)
USED = UsedAmounts(4, 5, 30, day=11, month=7, posted_at=100.0)


def test_what_was_used_is_owed_and_paid_once() -> None:
    unsynced = UnsyncedUsage()
    unsynced.owe_used(Reservation("a", TAKEN), USED)
    unsynced.owe(Past("month", 0, period=7, spent=5), 100.0)
    owed = unsynced.owed()
    assert owed == [
        Past("month", 0, period=7, spent=35),
        Past("day", DAY_S, ((0.0, 9),), spent=9),
        Past("minute", 60, ((0.0, 9),), spent=9),
    ]
    assert unsynced.bundle("one", 10, 101.0) == ("one", owed)
    unsynced.owe_used(Reservation("b", TAKEN[1:2]), USED)  # while they are being told
    assert unsynced.bundle("two", 10) == ("one", owed)  # not answered: the same once more
    unsynced.paid("one")
    left = Past("day", DAY_S, ((0.0, 9),), spent=9)
    assert unsynced.owed() == [left]
    assert unsynced.bundle("two", 10) == ("two", [left])
    unsynced.paid("two")
    assert unsynced.bundle("three", 10) is None
    assert not unsynced.is_behind


def test_what_may_have_been_told_is_told_anew_to_another_epoch() -> None:
    unsynced = UnsyncedUsage()
    for second in (1.0, 3.0):
        unsynced.owe(Past("month", 0, period=7, spent=5), second)
        unsynced.owe(Past("day", 0, period=70, spent=5), second)
        unsynced.bundle(f"at {second}", 1)
    unsynced.begin_epoch(2.0, is_restored=False)
    assert sorted((each.name, each.spent) for each in unsynced.owed()) == [("day", 5), ("month", 5)]
    unsynced.paid("at 1.0")  # of the epoch before
    assert len(unsynced.owed()) == 2


def test_an_epoch_is_told_what_the_ledger_does_not_tell() -> None:
    unsynced = UnsyncedUsage()
    unsynced.open["c"] = Reservation("c", TAKEN)
    for name, posted_at in (("a", 99.0), ("b", 101.0)):
        used = UsedAmounts(1, 1, 10, month=7, posted_at=posted_at)
        unsynced.ended[name] = EndedReservation(Reservation(name, TAKEN[:1]), used)
    unsynced.in_doubt("d")
    unsynced.owe(Past("month", 0, period=7, spent=1000), 99.9)
    unsynced.owe(Past("month", 0, period=7, spent=2), 100.0)
    unsynced.begin_epoch(100.0, is_restored=False)
    assert unsynced.owed() == [Past("month", 0, period=7, spent=12)]
    assert (unsynced.ended, unsynced.local_ids) == ({}, {"c"})
    assert unsynced.bundle("b", 10)
    unsynced.paid("b")
    unsynced.report(["c"])
    assert not unsynced.is_behind


def test_an_epoch_that_began_long_before_is_told_everything() -> None:
    """A start without Redis: what was used until it is met lies in no sums that it has."""
    unsynced = UnsyncedUsage()
    unsynced.owe_used(Reservation("a", TAKEN), USED)
    unsynced.pasts["day"] = past = Past("day", DAY_S, ((5.0, 9),))
    unsynced.begin_epoch(20.0, is_restored=True)
    assert sum(each.spent for each in unsynced.owed()) == 30 + 9
    unsynced.restored([Past("day", DAY_S), past])
    assert not unsynced.pasts
    unsynced.pasts["day"] = past
    unsynced.begin_epoch(200.0, is_restored=False)  # which the ledger will be asked for
    assert (unsynced.owed(), unsynced.pasts) == ([], {})


def test_a_long_outage_is_remembered_less_exactly_and_in_whole() -> None:
    unsynced = UnsyncedUsage()
    for second in range(10 * MAX_STAMPS + 1):
        unsynced.owe(Past("month", 0, period=7, spent=3), float(second))
    assert [each.spent for each in unsynced.owed()] == [3 * (10 * MAX_STAMPS + 1)]
    unsynced.begin_epoch(5.0 * MAX_STAMPS, is_restored=False)
    (left,) = unsynced.owed()  # never too little
    assert 3 * 5 * MAX_STAMPS < left.spent < 3 * 6 * MAX_STAMPS


def test_what_has_left_its_minute_is_not_told() -> None:
    unsynced = UnsyncedUsage()
    unsynced.owe_used(Reservation("a", TAKEN[2:]), USED)
    unsynced.owe_used(Reservation("b", TAKEN[2:]), replace(USED, posted_at=150.0))
    assert unsynced.bundle("one", 10, 160.5) == ("one", [Past("minute", 60, ((0.0, 9),), spent=9)])
    unsynced.paid("one")
    unsynced.owe_used(Reservation("c", TAKEN[2:]), USED)
    assert unsynced.bundle("two", 10, 160.5) is None
    assert not unsynced.is_behind


def test_a_local_one_that_redis_may_hold_is_given_back_when_it_ends() -> None:
    unsynced = UnsyncedUsage()
    for name in ("a", "b"):
        unsynced.open[name] = Reservation(name, TAKEN[2:])
        unsynced.local_ids.add(name)
    unsynced.in_doubt("a")
    assert not unsynced.ended
    for name in ("a", "b"):
        unsynced.end_local(unsynced.open.pop(name), USED)
    assert set(unsynced.ended) == {"a"}
    assert [each.spent for each in unsynced.owed()] == [2 * 9]


def test_what_is_being_asked_for_is_no_orphan() -> None:
    unsynced = UnsyncedUsage()
    unsynced.asked.add("slow")
    unsynced.compare(["slow"])
    unsynced.compare(["slow"])
    assert not unsynced.ended


def test_what_ends_while_it_is_told_is_given_back() -> None:
    unsynced = UnsyncedUsage()
    unsynced.local_ids.add("a")
    unsynced.report(["a"])
    assert unsynced.ended["a"].used is None


def test_orphans_are_given_back_when_seen_twice() -> None:
    unsynced = UnsyncedUsage()
    unsynced.open["mine"] = Reservation("mine", ())
    unsynced.compare(["mine", "under way", "lost"])
    assert not unsynced.ended
    unsynced.compare(["mine", "lost", "later"])
    assert set(unsynced.ended) == {"lost"}
