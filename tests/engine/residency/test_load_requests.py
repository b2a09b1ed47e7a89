"""How a load is wanted: prefetches, forced loads, the host tier ahead of need; what is told."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.protocol import LoadModel, ModelSpec, SwapChoice, WarmModel
from engine.residency.loaded_models import PLAIN_LOAD, LoadRequest
from tests.engine.pack_rig import Rig, random_pack
from tests.engine.residency.test_residency import MODEL_PAGES, SIZES, load, settle, states

AHEAD = LoadRequest(prefetch=True)


@pytest.fixture
def packs(tmp_path: Path) -> list[Path]:
    return [random_pack(tmp_path / name, SIZES, seed) for seed, name in enumerate("abc")]


@pytest.fixture
def rig(tmp_path: Path, packs: list[Path]) -> Iterator[Rig]:
    """WeightSpace for two of the models; a and b are there and have been used for long."""
    made = Rig(tmp_path, 2 * MODEL_PAGES + 4, host_tier_bytes=2 * sum(SIZES))
    made.catalog(*packs)
    for name in "ab":
        load(made, name)
        made.residency.touch(name, 1.0, made.now_s)
    made.poll(60)
    made.residency.take_choices()
    yield made
    made.residency.close()


def ask(rig: Rig, name: str, load_request: LoadRequest) -> None:
    rig.residency.request_load(name, rig.now_s, load_request)


def outcomes(choice: SwapChoice) -> dict[str, str]:
    return {row.model_id: row.outcome for row in choice.candidates}


def warm(rig: Rig, name: str) -> bool:
    return rig.residency._weight_store.is_warm(rig.residency.index(name))


def test_wishes_are_what_the_gateway_says() -> None:
    assert LoadRequest.of(LoadModel("m")) == PLAIN_LOAD
    assert LoadRequest.of(LoadModel("m", 1.0, 2.0, False, True)) == LoadRequest(
        1.0, 2.0, forced=True
    )
    assert LoadRequest.of(WarmModel("m")) == LoadRequest(to_host_tier=True)
    newer = AHEAD.with_newer(LoadRequest(0.5, 3.0))
    assert newer == LoadRequest(0.5, 3.0)  # somebody waits now
    assert newer.with_newer(AHEAD).prefetch is False


def test_a_prefetch_makes_nobody_leave_who_is_worth_as_much(rig: Rig) -> None:
    ask(rig, "c", AHEAD)
    assert settle(rig) == []
    assert states(rig)["c"] == "cold"
    (choice,) = rig.residency.take_choices()
    assert (choice.incoming, choice.reason) == ("c", "prefetch")
    assert set(outcomes(choice).values()) == {"kept: margin"}
    rig.poll(500)
    ask(rig, "c", AHEAD)
    settle(rig)
    assert states(rig)["c"] == "cold"  # however long they rest: it has no demand at all


def test_a_prefetch_takes_free_pages_and_the_place_of_what_is_worth_less(rig: Rig) -> None:
    rig.residency.begin_drain("a", rig.now_s, "x")
    settle(rig)
    ask(rig, "c", AHEAD)
    assert [e.kind for e in settle(rig)] == ["loaded"]
    rig.residency.touch("c", 0.001, rig.now_s)
    rig.residency.touch("b", 5.0, rig.now_s)
    rig.residency.touch("a", 5.0, rig.now_s)
    rig.poll(5)
    ask(rig, "a", AHEAD)
    assert [(e.kind, e.model_id) for e in settle(rig)] == [("evicted", "c"), ("loaded", "a")]


def test_a_prefetch_becomes_a_load_when_somebody_waits(rig: Rig) -> None:
    rig.busy = {"a", "b"}
    rig.residency.begin_drain("a", rig.now_s, "x")
    rig.poll()
    ask(rig, "c", AHEAD)
    asked = rig.residency._models.by_id["c"]
    assert (asked.state, asked.load_request.prefetch) == ("loading", True)
    ask(rig, "c", LoadRequest(waited_s=1.5))
    assert not asked.load_request.prefetch
    assert asked.queued_at_s == pytest.approx(rig.now_s - 1.5)
    ask(rig, "c", AHEAD)
    assert not asked.load_request.prefetch  # who waits goes on waiting


def test_a_real_load_goes_before_a_prefetch(rig: Rig) -> None:
    rig.residency.begin_drain("a", rig.now_s, "x")
    settle(rig)
    ask(rig, "c", AHEAD)
    ask(rig, "a", PLAIN_LOAD)
    events = settle(rig)
    assert ("loaded", "a") in [(e.kind, e.model_id) for e in events]
    assert states(rig) == {"a": "resident", "b": "resident", "c": "cold"}


def at_work(rig: Rig) -> None:
    """Both run something, and are worth more than who waits."""
    rig.busy = {"a", "b"}
    for name in "ab":
        rig.residency.touch(name, 50.0, rig.now_s)


def draining(rig: Rig) -> int:
    return list(states(rig).values()).count("draining")


def test_forced_wins_at_once(rig: Rig) -> None:
    at_work(rig)
    ask(rig, "c", PLAIN_LOAD)
    rig.poll()
    assert draining(rig) == 0
    ask(rig, "c", LoadRequest(forced=True))
    rig.poll()
    assert draining(rig) == 1


def test_waiting_before_the_message_counts(rig: Rig) -> None:
    at_work(rig)
    ask(rig, "c", LoadRequest(waited_s=rig.config.starvation_s))
    rig.poll()
    assert draining(rig) == 1


def test_floors_reach_the_rules(rig: Rig, packs: list[Path]) -> None:
    floor = (("t", 1),)
    specs = [ModelSpec(p.name, str(p), floors=floor if p.name == "a" else ()) for p in packs]
    rig.residency.set_catalog(specs)
    rig.residency.touch("b", 50.0, rig.now_s)
    ask(rig, "c", LoadRequest(forced=True))
    assert [e.model_id for e in settle(rig) if e.kind == "evicted"] == ["b"]
    (choice,) = rig.residency.take_choices()
    assert outcomes(choice) == {"a": "kept: floor", "b": "evicted"}


def test_every_decision_says_why_once(rig: Rig) -> None:
    at_work(rig)
    ask(rig, "c", PLAIN_LOAD)
    for _ in range(20):
        rig.poll(0.01)
    (waits,) = rig.residency.take_choices()
    assert set(outcomes(waits).values()) == {"kept: margin"}
    assert waits.num_pages_short > 0
    assert all(row.demand > 0 and row.score > 0 for row in waits.candidates)
    rig.busy = set()
    assert [e.kind for e in settle(rig)] == ["evicted", "loaded"]
    last = rig.residency.take_choices()[-1]
    assert [row.outcome for row in last.candidates] == ["evicted", "kept: not needed"]
    assert last.waited_s == pytest.approx(0.2, abs=0.05)
    assert last.score > 0


def test_an_unload_and_room_for_kv_are_told_too(rig: Rig) -> None:
    assert rig.residency.make_kv_space("a", rig.now_s, rig.is_busy, rig.drop_kv)
    rig.residency.begin_drain("a", rig.now_s, "an operator unloaded it")
    told = rig.residency.take_choices()
    assert [(c.incoming, c.reason) for c in told] == [("a", "kv"), ("", "operator")]
    assert outcomes(told[0]) == {"b": "evicted"}
    assert outcomes(told[1]) == {"a": "drains"}


def test_warm_brings_a_cold_model_into_the_host_tier(rig: Rig) -> None:
    ask(rig, "c", LoadRequest(to_host_tier=True))
    end = time.monotonic() + 10
    while time.monotonic() < end and not warm(rig, "c"):
        rig.poll()
        time.sleep(0.001)
    held = {name for name in "abc" if warm(rig, name)}
    # a and b are worth more: where both of them were in the tier already, c stays out.
    assert held == {"a", "b"} or "c" in held
    assert states(rig)["c"] in ("cold", "warm")


def test_a_popular_pack_is_not_pushed_out_of_the_host_tier(tmp_path: Path) -> None:
    packs = [random_pack(tmp_path / name, SIZES, seed) for seed, name in enumerate("xyz")]
    rig = Rig(tmp_path, 4 * MODEL_PAGES, host_tier_bytes=sum(SIZES) + 4096)
    rig.catalog(*packs)
    load(rig, "x")
    end = time.monotonic() + 10
    while time.monotonic() < end and not warm(rig, "x"):
        rig.poll()
        time.sleep(0.001)
    assert warm(rig, "x")
    rig.residency.touch("x", 5.0, rig.now_s)
    load(rig, "y")  # was never of use: it stays out of the tier
    for _ in range(50):
        rig.poll(0.01)
        time.sleep(0.001)
    assert warm(rig, "x")
    assert not warm(rig, "y")
    rig.residency.close()


def test_a_wish_outlives_the_drain_of_its_model(rig: Rig) -> None:
    rig.busy = {"a"}
    rig.residency.begin_drain("a", rig.now_s, "x")
    ask(rig, "a", AHEAD)  # nothing comes back for a prefetch
    assert not rig.residency._models.by_id["a"].wanted_again
    ask(rig, "a", LoadRequest(backlog_s=2.0))
    rig.busy = set()
    assert [e.kind for e in settle(rig)] == ["evicted", "loaded"]
    assert rig.residency._models.by_id["a"].load_request == LoadRequest(backlog_s=2.0)
