"""The election by a modelled database: servers that pause, a database that is away for all or for
one, clocks that began elsewhere and are set back."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.cluster.policy.election import LOOK_S, RENEW_S, TTL_S, Candidacy, Tenure

TICK_S = 0.01
WORLD_S = 14.0
TAKES_S = TTL_S + 6 * LOOK_S
"""From the last renewal until another one has the row, where answers take as long as here."""


class Row(NamedTuple):
    holder: str
    epoch: int
    until_at: float


NOBODY = Row("", 0, 0.0)


@dataclass
class Database:
    """As the statements of registry/servers/dispatcher_leases.py."""

    row: Row = NOBODY
    away_until_s: float = 0.0
    ahead_s: float = 1e9
    """Its clock against the world's."""

    def take(self, seen: Row, who: str, at_once: bool, now_s: float) -> int | None:
        now_at = now_s + self.ahead_s
        row = self.row
        ran_out = row.until_at <= now_at or row.until_at > now_at + 2 * TTL_S
        if row != seen or not (at_once or ran_out):
            return None
        self.row = Row(who, row.epoch + 1, now_at + TTL_S)
        return row.epoch + 1

    def renew(self, who: str, epoch: int, now_s: float) -> bool:
        if (self.row.holder, self.row.epoch) != (who, epoch):
            return False
        self.row = Row(who, epoch, now_s + self.ahead_s + TTL_S)
        return True


@dataclass
class Call:
    """One statement: when it gets there, when its answer comes, and what that is."""

    asked_s: float
    there_s: float
    back_s: float
    kind: Literal["look", "take", "renew"]
    seen: Row = NOBODY
    answer: object = None
    is_done: bool = False
    failed: bool = False


@dataclass
class Server:
    """What dispatcher_lease.py does with the policy, one turn at a time."""

    name: str
    database: Database
    rng: random.Random
    clock_s: float
    stopped_until_s: float = 0.0
    cut_until_s: float = 0.0
    is_dead: bool = False
    candidacy: Candidacy = field(init=False)
    tenure: Tenure | None = None
    epoch: int = 0
    call: Call | None = None
    next_s: float = 0.0
    waits_s: float = 0.0
    ever: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.candidacy = Candidacy((self.name, ""))

    def may_grant(self, now_s: float) -> bool:
        """Whether it would grant at this moment: a stopped one does nothing."""
        is_up = not self.is_dead and now_s >= self.stopped_until_s
        return is_up and self.tenure is not None and self.tenure.may_grant(now_s + self.clock_s)

    def reach(self, now_s: float) -> None:
        """The statement arrives, even where who asked is stopped."""
        call = self.call
        if call is None or call.is_done or now_s < call.there_s:
            return
        if now_s < max(self.cut_until_s, self.database.away_until_s):
            if call.kind != "renew" or self.rng.random() < 0.5:
                call.is_done = call.failed = True
            return  # or it hangs, and gets there later
        call.is_done = True
        if call.kind == "renew":
            call.answer = self.database.renew(self.name, self.epoch, now_s)
        elif call.kind == "look":
            call.answer = self.database.row
        else:
            free = self.candidacy.is_free((call.seen.holder, ""), call.seen[1:])
            call.answer = self.database.take(call.seen, self.name, free, now_s)

    def turn(self, now_s: float) -> None:
        if self.is_dead or now_s < self.stopped_until_s:
            return
        own_s = now_s + self.clock_s
        call = self.call
        if call is None:
            if now_s >= self.next_s:
                self.ask("renew" if self.tenure else "look", now_s)
            return
        if call.is_done and now_s >= call.back_s:
            self.call = None
            self.hear(call, now_s, own_s)
        elif self.tenure is not None and now_s >= self.waits_s:
            self.tenure.waits(own_s)
            self.waits_s = now_s + RENEW_S

    def ask(self, kind: Literal["look", "take", "renew"], now_s: float, seen: Row = NOBODY) -> None:
        there_s = now_s + self.rng.choice((0.0, 0.01, 0.05))
        back_s = there_s + self.rng.choice((0.0, 0.01, 0.05))
        self.call = Call(now_s + self.clock_s, there_s, back_s, kind, seen)
        if self.tenure is not None:
            self.tenure.waits(now_s + self.clock_s)
            self.waits_s = now_s + RENEW_S

    def hear(self, call: Call, now_s: float, own_s: float) -> None:
        self.next_s = now_s + (RENEW_S if call.kind == "renew" else LOOK_S)
        if call.kind == "renew":
            assert self.tenure is not None
            held = None if call.failed else bool(call.answer)
            self.tenure.answered(call.asked_s, is_held=held)
            if self.tenure.is_lost:  # Its process ends, and another one begins to look.
                self.tenure, self.candidacy = None, Candidacy((self.name, ""))
        elif call.failed:
            return
        elif call.kind == "look":
            row = call.answer
            assert isinstance(row, Row)
            if self.candidacy.may_take((row.holder, ""), row[1:], call.asked_s, own_s):
                self.ask("take", now_s, row)
        elif isinstance(call.answer, int):
            self.epoch, self.tenure = call.answer, Tenure(call.asked_s)
            self.ever.append(self.epoch)


class Event(NamedTuple):
    at_s: float
    kind: Literal["stop", "cut", "away", "kill", "clock"]
    which: int
    for_s: float


events = st.builds(
    Event,
    st.floats(2.0, 10.0),
    st.sampled_from(["stop", "cut", "away", "kill", "clock"]),
    st.integers(0, 1),
    st.floats(0.05, 6.0),
)


def play(told: Sequence[Event], seed: int) -> tuple[Database, list[Server], list[list[bool]]]:
    """A world of two servers. Returns who might grant at each tick."""
    rng = random.Random(seed)
    database = Database()
    servers = [Server(name, database, rng, rng.choice((0.0, 1e5, -3e4))) for name in "ab"]
    left, grants = sorted(told, reverse=True), []
    for tick in range(round(WORLD_S / TICK_S)):
        now_s = tick * TICK_S
        while left and left[-1].at_s <= now_s:
            event = left.pop()
            one = servers[event.which]
            if event.kind == "stop":
                one.stopped_until_s = now_s + event.for_s
            elif event.kind == "cut":
                one.cut_until_s = now_s + event.for_s
            elif event.kind == "away":
                database.away_until_s = now_s + event.for_s
            elif event.kind == "kill":
                one.is_dead = True
            else:
                database.ahead_s += rng.choice((-3600.0, 3600.0))
        for one in servers:
            one.reach(now_s)
            one.turn(now_s)
        grants.append([one.may_grant(now_s) for one in servers])
        if all(grants[-1]):  # Only one that is cut off from the database may not know of the other.
            older = min(servers, key=lambda one: one.epoch)
            assert now_s < older.cut_until_s + TTL_S + RENEW_S, (now_s, told, seed)
    return database, servers, grants


@example([Event(2.0, "stop", 1, 2.0), Event(4.0, "away", 0, 1.0)], 6)
@given(st.lists(events, max_size=6), st.integers(0, 2**16))
def test_there_are_never_two_that_reach_the_database(told: list[Event], seed: int) -> None:
    _, servers, _ = play(told, seed)
    epochs = [epoch for one in servers for epoch in one.ever]
    assert len(set(epochs)) == len(epochs)
    assert all(one.ever == sorted(one.ever) for one in servers)


@given(st.floats(2.0, 5.0), st.floats(0.05, 8.0), st.integers(0, 2**16))
def test_a_database_that_was_away_changes_nothing(at_s: float, for_s: float, seed: int) -> None:
    _, servers, grants = play([Event(at_s, "away", 0, for_s)], seed)
    assert sum(len(one.ever) for one in servers) == 1
    holder = 0 if servers[0].ever else 1
    begun = next(tick for tick, row in enumerate(grants) if row[holder])
    assert all(row[holder] for row in grants[begun:])


@given(st.floats(3.0, 5.0), st.sampled_from(["kill", "stop"]), st.booleans(), st.integers(0, 2**16))
def test_another_one_follows_in_time(
    at_s: float, kind: Literal["kill", "stop"], clock: bool, seed: int
) -> None:
    """The first one does not know that it stood still, and must not grant when it wakes."""
    told = [Event(at_s, "clock", 0, 1.0)] if clock else []
    told += [Event(at_s + 0.001, kind, which, 6.0) for which in (0,)]
    _, servers, grants = play(told, seed)
    if not (servers[0].ever and servers[0].ever[0] == 1):
        return  # The other one had it.
    later = round((at_s + TAKES_S) / TICK_S)
    assert all(row == [False, True] for row in grants[later:])
    assert len(servers[1].ever) == 1


def test_what_the_server_s_own_process_left_is_taken_at_once() -> None:
    one = Candidacy(("a", "a:1"))
    assert not one.may_take(("b", "b:1"), (1, 50.0), 0.0, 0.0)
    assert one.may_take(("a", "a:1"), (1, 50.0), 0.0, 0.0)
    assert not one.may_take(("a", "elsewhere:1"), (1, 50.0), 0.0, 0.0)
    assert one.may_take(("b", "b:1"), (2, 0.0), 0.0, 0.0)


def test_a_holder_that_was_stopped_knows_nothing_until_it_has_asked() -> None:
    tenure = Tenure(100.0)
    assert tenure.may_grant(101.9)
    assert not tenure.may_grant(102.0)
    tenure.waits(100.5)
    tenure.waits(110.0)  # It was asked before the stop; the answer may lie there.
    assert not tenure.may_grant(110.0)
    tenure.answered(100.5, is_held=True)
    assert not tenure.may_grant(110.0)
    tenure.answered(110.1, is_held=None)
    assert not tenure.may_grant(110.2), "it was away since when?"
    tenure.answered(110.2, is_held=True)
    assert tenure.may_grant(110.3)
    tenure.answered(110.5, is_held=None)
    assert tenure.may_grant(112.4), "nobody can have taken the row"
    tenure.answered(112.6, is_held=False)
    assert not tenure.may_grant(112.6)
