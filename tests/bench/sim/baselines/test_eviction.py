"""The books' orders of eviction, and the guards that they share with ours."""

import dataclasses

import pytest

from bench.sim.baselines.eviction import (
    Future,
    Never,
    Ranked,
    Worth,
    furthest,
    largest,
    last_used,
    least_demanded,
)
from bench.sim.types import Arrival
from engine.residency.policy.eviction import (
    EvictionPolicy,
    GreedyDual,
    Victims,
    choose_kv_victim,
    choose_victims,
)
from engine.residency.policy.eviction_rules import Candidate, Demand, EvictionParams, IncomingModel

PARAMS = EvictionParams(
    starvation_s=2.0, first_use_grace_s=1.0, fast_half_life_s=10.0, slow_half_life_s=10.0
)
NOW = 1000.0
NEW = IncomingModel("new", 1000, Demand(), reload_s=0.1, weight=1.0, queued_at_s=NOW)
STARVED = dataclasses.replace(NEW, queued_at_s=NOW - 2.0)


def resident(name: str, **change: object) -> Candidate:
    """A model of ten pages, unused for a while."""
    base = Candidate(
        model_id=name,
        num_pages=10,
        num_bytes=1000,
        demand=Demand(),
        reload_s=0.1,
        weight=1.0,
        pinned=False,
        busy=False,
        draining=False,
        used=True,
        resident_since_s=NOW - 100.0,
        last_used_s=NOW - 50.0,
    )
    return dataclasses.replace(base, **change)  # type: ignore[arg-type]


def order(policy: EvictionPolicy, *candidates: Candidate, new: IncomingModel = NEW) -> list[str]:
    """Who goes first, second, ...: what is evicted as ever more pages are short."""
    found: list[str] = []
    for short in range(10, 10 * len(candidates) + 1, 10):
        victims = policy.victims(new, short, candidates, NOW)
        found += sorted({*victims.evict, *victims.drain} - set(found))
    return found


A = resident("a", num_bytes=3000, demand=Demand(5.0, 5.0, NOW), last_used_s=NOW - 9.0)
B = resident("b", num_bytes=1000, demand=Demand(9.0, 9.0, NOW), last_used_s=NOW - 40.0)
C = resident("c", num_bytes=2000, demand=Demand(1.0, 1.0, NOW), last_used_s=NOW - 20.0)
# Model 0 comes next, model 2 later, model 1 never again.
FUTURE = Future(
    [Arrival(NOW + at_s, 0, model, ((0, 1),), 1, 1) for at_s, model in ((-5, 1), (1, 0), (7, 2))],
    num_models=3,
)


@pytest.mark.parametrize(
    ("worth", "expected"),
    [
        (last_used, ["b", "c", "a"]),
        (least_demanded(PARAMS.half_lives), ["c", "a", "b"]),
        (largest, ["a", "c", "b"]),
        (furthest(FUTURE, {"a": 0, "b": 1, "c": 2}), ["b", "c", "a"]),
    ],
    ids=["lru", "lfu", "size", "belady"],
)
def test_order(worth: Worth, expected: list[str]) -> None:
    assert order(Ranked(worth, PARAMS), A, B, C) == expected


def test_an_unused_time_out_protects_until_the_incoming_model_has_waited() -> None:
    policy = Ranked(last_used, PARAMS, idle_timeout_s=30.0)
    assert order(policy, A, B, C) == ["b"]
    assert order(policy, A, B, C, new=STARVED) == ["b", "c", "a"]


def test_guards_are_those_of_ours() -> None:
    policy = Ranked(last_used, PARAMS)
    guarded = (
        resident("pinned", pinned=True, last_used_s=0.0),
        resident("new", last_used_s=0.0),
        resident("fresh", used=False, resident_since_s=NOW - 0.5),
        resident("working", used=False, busy=True, resident_since_s=NOW - 90.0),
    )
    for new in (NEW, STARVED):
        assert policy.victims(new, 20, [*guarded, A], NOW) == Victims()
        assert policy.victims(new, 10, [*guarded, A], NOW) == Victims(evict=("a",))


def test_busy_models_go_last_and_only_for_one_that_has_waited() -> None:
    policy = Ranked(last_used, PARAMS)
    busy = resident("busy", busy=True, last_used_s=0.0)
    assert policy.victims(NEW, 10, [busy], NOW) == Victims()
    assert policy.victims(STARVED, 20, [busy, A], NOW) == Victims(evict=("a",), drain=("busy",))


def test_what_drains_is_room_to_come() -> None:
    leaving = resident("leaving", draining=True)
    assert Ranked(last_used, PARAMS).victims(NEW, 10, [leaving, A], NOW) == Victims()


def test_never_is_never_but_for_kv() -> None:
    policy = Never(PARAMS)
    assert order(policy, A, B, C, new=STARVED) == []
    assert policy.kv_victim("a", [A, B, C], NOW) == "b"


def test_kv_victim_is_the_least_worth_of_the_others() -> None:
    policy = Ranked(largest, PARAMS)
    assert policy.kv_victim("a", [A, B, C], NOW) == "c"
    assert policy.kv_victim("a", [A, B, resident("d", draining=True)], NOW) == "d"
    assert policy.kv_victim("a", [A, resident("p", pinned=True)], NOW) is None


def test_the_future_is_what_comes_after_now() -> None:
    assert FUTURE.next_use_s(0, NOW) == NOW + 1
    assert FUTURE.next_use_s(1, NOW) == float("inf")
    assert FUTURE.next_use_s(1, NOW - 6) == NOW - 5
    assert FUTURE.next_use_s(2, NOW + 7) == float("inf")


def test_ours_as_an_object_is_ours() -> None:
    policy, candidates = GreedyDual(PARAMS), [A, B, C]
    for short in (5, 15, 25, 35):
        assert policy.victims(STARVED, short, candidates, NOW) == choose_victims(
            STARVED, short, candidates, NOW, PARAMS
        )
    assert policy.kv_victim("a", candidates, NOW) == choose_kv_victim("a", candidates, NOW, PARAMS)
