"""The pure choice of who leaves the device."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.residency.policy.eviction import choose_idle_victim, choose_kv_victim, choose_victims
from engine.residency.policy.eviction_rules import (
    Candidate,
    Demand,
    EvictionParams,
    IncomingModel,
    candidate_score,
    incoming_score,
)

PARAMS = EvictionParams(
    starvation_s=2.0,
    margin=1.5,
    idle_margin=1.5,
    prefetch_margin=3.0,
    min_residence_loads=4.0,
    idle_residence_loads=4.0,
    first_use_grace_s=1.0,
    fast_half_life_s=10.0,
    slow_half_life_s=10.0,
)
NOW = 1000.0
NEW = IncomingModel("new", 1000, Demand(), reload_s=0.1, weight=1.0, queued_at_s=NOW - 1.0)


def resident(name: str, **change: object) -> Candidate:
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


def wanted(service_s: float, at_s: float = NOW) -> Demand:
    return Demand(service_s, service_s, at_s)


@dataclasses.dataclass(frozen=True)
class Left:
    """Who leaves; what is told of the others has tests of its own."""

    evict: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


def choose(short: int, *candidates: Candidate, new: IncomingModel = NEW) -> Left:
    victims = choose_victims(new, short, candidates, NOW, PARAMS)
    return Left(victims.evict, victims.drain)


def test_lowest_score_goes_first() -> None:
    hot, warm, cold = (resident(n, demand=wanted(s)) for n, s in (("h", 5), ("w", 2), ("c", 1)))
    assert choose(5, hot, cold, warm).evict == ("c",)
    assert choose(15, hot, cold, warm).evict == ("c", "w")


@pytest.mark.parametrize(
    "change",
    [{"reload_s": 1.0, "resident_since_s": 0.0}, {"weight": 10.0}, {"num_bytes": 100}],
    ids=str,
)
def test_dear_to_reload_heavy_or_small_models_are_kept(change: dict[str, object]) -> None:
    dear = resident("dear", demand=wanted(1), **change)
    plain = resident("plain", demand=wanted(2))
    assert choose(5, dear, plain).evict == ("plain",)


def test_without_demand_it_is_lru() -> None:
    old, new = resident("z", last_used_s=1.0), resident("a", last_used_s=2.0)
    assert choose(5, new, old).evict == ("z",)


def test_pinned_and_busy() -> None:
    pinned = resident("pinned", pinned=True)
    busy = resident("busy", busy=True)
    idle = resident("idle", demand=wanted(2))
    assert choose(5, pinned, busy, idle) == Left(evict=("idle",))
    assert choose(15, pinned, busy, idle) == Left(evict=("idle",), drain=("busy",))
    assert choose(25, pinned, busy, idle) == Left()  # it would not help
    assert choose(5, pinned) == Left()


def test_what_drains_already_counts() -> None:
    draining = resident("d", draining=True)
    assert choose(10, draining, resident("a")) == Left()
    assert choose(11, draining, resident("a")) == Left(evict=("a",))


def test_nobody_goes_in_vain() -> None:
    small = resident("small", num_pages=1)
    large = resident("large", num_pages=10, demand=wanted(1))
    assert choose(10, small, large).evict == ("large",)
    assert choose(11, small, large).evict == ("small", "large")


def test_for_kv_somebody_goes_whatever_its_score() -> None:
    def victim(*candidates: Candidate) -> str | None:
        return choose_kv_victim("me", candidates, NOW, PARAMS)

    me, pinned = resident("me"), resident("pinned", pinned=True)
    busy, idle = resident("busy", busy=True), resident("idle", demand=wanted(9.0))
    assert victim(me, pinned) is None
    assert victim(me, pinned, busy) == "busy"
    assert victim(me, pinned, busy, idle) == "idle"
    assert victim(me, idle, resident("leaving", draining=True, busy=True)) == "leaving"
    assert victim(resident("me", draining=True), idle) == "me"


def test_the_idle_model_worth_least_goes_before_cached_kv_that_is_worth_more() -> None:
    def victim(worth: float, *candidates: Candidate, margin: float = 1.0) -> str | None:
        params = dataclasses.replace(PARAMS, kv_margin=margin)
        return choose_idle_victim("me", worth, candidates, NOW, params)

    cheap, dear = resident("cheap", demand=wanted(0.1)), resident("dear", demand=wanted(1.0))
    score = candidate_score(cheap, NOW, PARAMS)
    assert victim(0.9 * score, cheap, dear) is None
    assert victim(1.1 * score, dear, cheap) == "cheap"
    assert victim(1.1 * score, cheap, margin=1.2) is None
    assert victim(1e9, cheap, dear, margin=math.inf) is None
    for kept in (
        {"busy": True},
        {"pinned": True},
        {"draining": True},
        {"resident_since_s": NOW - 0.3},
        {"used": False, "resident_since_s": NOW - 0.9},
        {"floors": (("t", 1000),)},
    ):
        assert victim(1e9, resident("kept", **dict(kept))) is None, kept
        assert victim(1e9, resident("kept", **dict(kept)), dear) == "dear", kept
    mine = resident("me", demand=wanted(0.01))
    assert victim(1e9, mine) is None  # its KV would go with it
    assert victim(1e9, mine, dear) == "dear"


def test_margin_and_how_waiting_wins_over_it() -> None:
    half = resident("half", demand=wanted(5.0))  # about a third of the device
    waits = [dataclasses.replace(NEW, queued_at_s=NOW - wait) for wait in (0.0, 0.5, 1.5, 2.0)]
    assert [bool(choose(5, half, new=new).evict) for new in waits] == [False, False, True, True]
    whole = resident("whole", demand=wanted(50.0))
    assert [bool(choose(5, whole, new=new).evict) for new in waits] == [False, False, False, True]


def test_minimum_residence_and_the_first_use() -> None:
    fresh = resident("fresh", resident_since_s=NOW - 0.3, demand=wanted(0.01))
    starved = dataclasses.replace(NEW, queued_at_s=NOW - 5)
    assert choose(5, fresh) == Left()
    assert choose(5, fresh, new=starved).evict == ("fresh",)
    unused = dataclasses.replace(fresh, used=False)
    assert choose(5, unused, new=starved) == Left()
    waited = dataclasses.replace(unused, resident_since_s=NOW - 1.1)
    assert choose(5, waited, new=starved).evict == ("fresh",)


def test_a_model_at_work_on_its_first_token_stays_however_long_that_takes() -> None:
    """Drained earlier, it would be back in the queue with nothing done, for ever."""
    starved = dataclasses.replace(NEW, queued_at_s=NOW - 500)
    prefilling = resident("a", busy=True, used=False, resident_since_s=NOW - 400)
    assert choose(5, prefilling, new=starved) == Left()
    assert choose(5, dataclasses.replace(prefilling, used=True), new=starved).drain == ("a",)
    # When the whole device stands still there is nothing to wait for.
    assert choose_kv_victim("b", [prefilling], NOW, PARAMS) == "a"


def test_a_incoming_model_with_a_past_needs_less_patience() -> None:
    known = dataclasses.replace(NEW, demand=wanted(10.0), queued_at_s=NOW)
    assert incoming_score(known, NOW, PARAMS) > incoming_score(NEW, NOW, PARAMS)
    assert choose(5, resident("a", demand=wanted(5)), new=known).evict == ("a",)


candidates = st.lists(
    st.builds(
        resident,
        st.uuids().map(str),
        num_pages=st.integers(1, 50),
        num_bytes=st.integers(1, 10**6),
        demand=st.builds(wanted, st.floats(0, 20), st.floats(NOW - 50, NOW)),
        reload_s=st.floats(0.001, 5),
        weight=st.floats(0.1, 10),
        pinned=st.booleans(),
        busy=st.booleans(),
        draining=st.booleans(),
        used=st.booleans(),
        resident_since_s=st.floats(NOW - 20, NOW),
        last_used_s=st.floats(NOW - 20, NOW),
    ),
    max_size=8,
)


@given(candidates, st.integers(1, 200), st.floats(0, 4))
def test_choices_are_allowed_sufficient_and_minimal(
    held: list[Candidate], short: int, waited_s: float
) -> None:
    new = dataclasses.replace(NEW, queued_at_s=NOW - waited_s)
    victims = choose_victims(new, short, held, NOW, PARAMS)
    by_name = {c.model_id: c for c in held}
    chosen = [by_name[name] for name in (*victims.evict, *victims.drain)]
    assert not any(c.pinned or c.draining for c in chosen)
    assert not any(by_name[name].busy for name in victims.evict)
    assert all(by_name[name].busy for name in victims.drain)
    coming = sum(c.num_pages for c in held if c.draining)
    freed = sum(c.num_pages for c in chosen)
    if chosen:
        assert freed + coming >= short
        assert all(freed + coming - c.num_pages < short for c in chosen)
    else:
        allowed = [c for c in held if not c.pinned and not c.draining]
        patient = waited_s >= PARAMS.starvation_s
        settled = all(c.used or (not c.busy and NOW - c.resident_since_s >= 1.0) for c in allowed)
        enough = coming + sum(c.num_pages for c in allowed) >= short
        assert coming >= short or not (patient and settled and enough)
    if victims.drain:
        idle = [c for c in held if not (c.busy or c.pinned or c.draining)]
        left = [c for c in idle if c not in chosen and candidate_score(c, NOW, PARAMS) == 0.0]
        reserve = [c for c in left if c.used and NOW - c.resident_since_s >= 4 * c.reload_s]
        assert sum(c.num_pages for c in reserve) < short
