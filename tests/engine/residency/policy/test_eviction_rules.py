"""Why a model may leave or not: one test a rule."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.residency.policy.eviction import choose_victims
from engine.residency.policy.eviction_rules import (
    Candidate,
    Demand,
    EvictionParams,
    HalfLives,
    IncomingModel,
)
from tests.engine.residency.policy.test_eviction import NEW, NOW, PARAMS, resident, wanted


def kept(*candidates: Candidate, new: IncomingModel = NEW, short: int = 1) -> dict[str, str]:
    return dict(choose_victims(new, short, candidates, NOW, PARAMS).kept)


def gone(*candidates: Candidate, new: IncomingModel = NEW, short: int = 1) -> tuple[str, ...]:
    victims = choose_victims(new, short, candidates, NOW, PARAMS)
    return (*victims.evict, *victims.drain)


def incoming(**change: object) -> IncomingModel:
    return dataclasses.replace(NEW, **change)  # type: ignore[arg-type]


def test_every_rule_has_its_name() -> None:
    held = [
        resident("pinned", pinned=True),
        resident("unused", used=False, resident_since_s=NOW - 0.5),
        resident("fresh", resident_since_s=NOW - 0.3),
        resident("dear", demand=wanted(100.0)),
        resident("free"),
    ]
    assert kept(*held) == {
        "pinned": "pinned",
        "unused": "first use",
        "fresh": "residence",
        "dear": "margin",
    }
    scores = choose_victims(NEW, 1, held, NOW, PARAMS).scores
    assert scores["dear"] > scores["free"] == 0.0


def test_what_the_gateway_has_decided_wins_over_margin_and_residence_only() -> None:
    forced = incoming(forced=True, queued_at_s=NOW)
    fresh = resident("fresh", resident_since_s=NOW - 0.3, demand=wanted(100.0))
    assert gone(fresh) == ()
    assert gone(fresh, new=forced) == ("fresh",)
    assert gone(resident("a", pinned=True), new=forced) == ()
    assert gone(resident("a", used=False, resident_since_s=NOW), new=forced) == ()
    assert gone(resident("a", floors=(("t", 1),)), new=forced) == ()


def test_idle_models_leave_for_whoever_waits_and_busy_ones_do_not() -> None:
    asked = incoming(queued_at_s=NOW)
    dear = resident("dear", demand=wanted(100.0), resident_since_s=NOW - 0.1)
    for busy, leaves in ((False, ("dear",)), (True, ())):
        held = dataclasses.replace(dear, busy=busy)
        victims = choose_victims(asked, 1, [held], NOW, EvictionParams())
        assert victims.evict == leaves
        assert victims.kept == ({"dear": "residence"} if busy else {})
    old = dataclasses.replace(dear, busy=True, resident_since_s=NOW - 100)
    assert choose_victims(asked, 1, [old], NOW, EvictionParams()).kept == {"dear": "margin"}
    starved = incoming(queued_at_s=NOW - EvictionParams().starvation_s)
    assert choose_victims(starved, 1, [old], NOW, EvictionParams()).drain == ("dear",)


def test_the_backlog_is_demand() -> None:
    dear = resident("dear", demand=wanted(20.0))
    asked = incoming(queued_at_s=NOW)
    assert gone(dear, new=asked) == ()
    assert gone(dear, new=dataclasses.replace(asked, backlog_s=40.0)) == ("dear",)


def test_a_prefetch_takes_only_idle_models_of_clearly_smaller_worth() -> None:
    ahead = incoming(prefetch=True, demand=wanted(8.0), queued_at_s=NOW - 100)  # it never starves
    assert gone(resident("a", demand=wanted(2.0)), new=ahead) == ("a",)
    assert kept(resident("a", demand=wanted(3.0)), new=ahead) == {"a": "margin"}
    asked = dataclasses.replace(ahead, prefetch=False, queued_at_s=NOW)
    assert gone(resident("a", demand=wanted(3.0)), new=asked) == ("a",)
    assert kept(resident("a", busy=True), new=ahead) == {"a": "busy"}
    assert kept(resident("a", resident_since_s=NOW - 0.2), new=ahead) == {"a": "residence"}


def test_a_floor_holds_against_others_and_not_against_the_tenants_own() -> None:
    floor = (("t", 1500),)
    mine = [resident(name, floors=floor, last_used_s=NOW - 90) for name in ("a", "b")]
    other = resident("other", demand=wanted(0.1))
    starved = incoming(queued_at_s=NOW - 10)
    assert kept(*mine, other, new=starved) == {"a": "floor", "b": "floor"}
    assert gone(*mine, other, new=starved) == ("other",)
    own = dataclasses.replace(starved, floors=floor)
    assert gone(*mine, other, new=own) == ("a",)
    wide = [dataclasses.replace(c, floors=(("t", 1000),)) for c in mine]
    assert gone(*wide, other, new=starved, short=20) == ("a", "other")


def test_what_drains_is_no_part_of_a_floor() -> None:
    floor = (("t", 1000),)
    leaving = resident("leaving", draining=True, num_pages=1, floors=floor)
    assert kept(leaving, resident("a", floors=floor), short=5) == {"a": "floor"}


rows = st.lists(
    st.builds(
        resident,
        st.uuids().map(str),
        num_bytes=st.integers(1, 1000),
        demand=st.builds(wanted, st.floats(0, 5)),
        busy=st.booleans(),
        draining=st.booleans(),
        floors=st.sampled_from([(), (("t", 900),), (("t", 900), ("u", 300))]),
    ),
    max_size=8,
)


@given(rows, st.integers(1, 60), st.booleans())
def test_floors_hold_whatever_is_asked(held: list[Candidate], short: int, own: bool) -> None:
    floors = (("t", 900),) if own else ()
    new = incoming(queued_at_s=NOW - 100, floors=floors)
    left = set(gone(*held, new=new, short=short))
    for tenant, floor in (("t", 900), ("u", 300)):
        if own and tenant == "t":
            continue
        mine = [c for c in held if not c.draining and tenant in dict(c.floors)]
        before = sum(c.num_bytes for c in mine)
        after = sum(c.num_bytes for c in mine if c.model_id not in left)
        assert after >= min(before, floor)


def test_an_empty_past_is_no_demand() -> None:
    assert Demand().rate(NOW, PARAMS.half_lives) == 0.0
    assert PARAMS.half_lives.fast_s == pytest.approx(10.0)


HALF_LIVES = HalfLives(10.0, 100.0)


def steady(share: float, seconds: float) -> Demand:
    demand = Demand()
    for tick in range(int(seconds * 10)):
        demand = demand.added(share / 10, tick / 10, HALF_LIVES)
    return demand


def test_it_is_the_share_of_the_device_under_steady_load() -> None:
    assert steady(0.25, 1000.0).rate(1000.0, HALF_LIVES) == pytest.approx(0.25, rel=0.02)


def test_a_burst_is_forgotten_sooner_than_a_habit() -> None:
    burst = Demand().added(20.0, 0.0, HALF_LIVES)
    habit = steady(0.25, 1000.0)
    habit = Demand(habit.fast_s, habit.slow_s, 0.0)  # as of the burst's moment
    assert burst.rate(0.0, HALF_LIVES) > 1.5 * habit.rate(0.0, HALF_LIVES)
    assert burst.rate(60.0, HALF_LIVES) < habit.rate(60.0, HALF_LIVES)


def test_halves() -> None:
    one = Demand().added(8.0, 0.0, HALF_LIVES)
    later = one.added(0.0, 100.0, HALF_LIVES)
    assert later.slow_s == pytest.approx(4.0)
    assert later.fast_s == pytest.approx(8.0 / 1024)
    assert one.rate(100.0, HALF_LIVES) == pytest.approx(later.rate(100.0, HALF_LIVES))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), max_size=20))
def test_many_at_once_are_one_after_the_other(steps: list[tuple[float, float]]) -> None:
    used = sorted(steps)
    single = Demand()
    for now_s, service_s in used:
        single = single.added(service_s, now_s, HALF_LIVES)
    assert Demand().added_often(used, HALF_LIVES) == single  # to the last bit: runs repeat
