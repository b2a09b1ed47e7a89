"""Loads, drains and evictions over a real pool, real packs and real loader threads."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from engine.errors import IllegalTransition, RequestRefused
from engine.memory.page_pool import Owner
from engine.pack import BLOB_NAME, Chunk
from engine.packs.loader import DiskLoad
from engine.protocol import ModelSpec, ResidencyState
from engine.residency.loaded_models import TRANSITIONS, InstanceEvent, ModelInstance, ResidencyEvent
from tests.engine.pack_rig import PAGE, Rig, flip_byte, random_pack

MODEL_PAGES = 6  # 2 + 1 + 3
SIZES = (2 * PAGE, 4096, 3 * PAGE)


@pytest.fixture
def packs(tmp_path: Path) -> list[Path]:
    return [random_pack(tmp_path / name, SIZES, seed) for seed, name in enumerate("abc")]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """WeightSpace for two of the models, with a little KV."""
    made = Rig(tmp_path, 2 * MODEL_PAGES + 4)
    yield made
    made.residency.close()


def settle(rig: Rig, until: str = "", step_s: float = 0.01) -> list[ResidencyEvent]:
    """Poll until an event of this kind came, or until nothing is under way."""
    events: list[ResidencyEvent] = []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        events += rig.poll(step_s)
        under_way = {row.state for row in rig.residency.status_rows({})} & {"loading", "draining"}
        if any(e.kind == until for e in events) if until else not under_way:
            return events
        time.sleep(0.0005)
    raise AssertionError(f"nothing settled: {events} {rig.residency.status_rows({})}")


def load(rig: Rig, name: str) -> list[ResidencyEvent]:
    rig.residency.request_load(name, rig.now_s)
    return settle(rig)


def states(rig: Rig) -> dict[str, str]:
    return {row.model_id: row.state for row in rig.residency.status_rows({})}


def is_right(rig: Rig, pack: Path) -> bool:
    blob = np.fromfile(pack / BLOB_NAME, dtype=np.float32)
    tensors = rig.residency.weights(pack.name).tensors
    found = torch.cat([tensors[f"t{i}"] for i in range(len(SIZES))]).numpy()
    return np.array_equal(found, blob)


def test_load_and_unload(rig: Rig, packs: list[Path]) -> None:
    assert rig.catalog(*packs) == []
    assert set(states(rig).values()) == {"cold"}
    assert load(rig, "a") == [ResidencyEvent("loaded", "a")]
    assert is_right(rig, packs[0])
    assert rig.residency.weights("a").tensors["tied"] is rig.residency.weights("a").tensors["t0"]
    assert rig.pool.owned(Owner("a", "weights")) == MODEL_PAGES
    rig.residency.request_load("a", rig.now_s)
    assert settle(rig) == []  # idempotent
    rig.residency.begin_drain("a", rig.now_s, "asked for")
    assert settle(rig) == [ResidencyEvent("evicted", "a", "asked for")]
    rig.residency.begin_drain("a", rig.now_s, "again")
    assert settle(rig) == []
    rig.poll()
    assert rig.pool.num_free == rig.pool.num_pages
    with pytest.raises(RequestRefused, match="not resident"):
        rig.residency.weights("a")
    kinds = [(s.kind, s.tier, s.size_bytes) for s in rig.residency.take_swaps()]
    size = sum(SIZES)
    assert kinds == [("load", "disk", size), ("evict", "none", size)]
    assert rig.residency.take_swaps() == []


def test_generation_changes_with_each_load(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    generations = set()
    for _ in range(3):
        load(rig, "a")
        generations.add(rig.residency.weights("a").generation)
        rig.residency.begin_drain("a", rig.now_s, "x")
        settle(rig)
    assert len(generations) == 3


def test_room_is_made_by_lru(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    for name in "ab":
        load(rig, name)
    rig.poll(60)
    rig.residency.touch("b", 0.0, rig.now_s)
    rig.poll(1)
    rig.residency.touch("a", 0.0, rig.now_s)
    rig.poll(60)
    events = load(rig, "c")
    assert events == [ResidencyEvent("evicted", "b", "room for c"), ResidencyEvent("loaded", "c")]
    assert rig.dropped == ["b"]
    assert is_right(rig, packs[0])
    assert is_right(rig, packs[2])


def test_demand_keeps_a_model(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    for name in "ab":
        load(rig, name)
    rig.poll(60)
    rig.residency.touch("a", 2.0, rig.now_s)
    rig.residency.touch("b", 0.1, rig.now_s)
    assert [e.model_id for e in load(rig, "c") if e.kind == "evicted"] == ["b"]


def test_pinned_models_stay_and_what_cannot_fit_says_so(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs, pinned=["a", "b"])
    for name in "ab":
        load(rig, name)
    rig.poll(60)
    (event,) = load(rig, "c")
    assert event.kind == "failed"
    assert "pinned models hold" in event.reason
    assert states(rig) == {"a": "resident", "b": "resident", "c": "failed"}
    rig.catalog(*packs, pinned=["a"])
    load(rig, "c")  # another try is fair: the pack was not to blame
    assert states(rig) == {"a": "resident", "b": "cold", "c": "resident"}


def test_a_model_larger_than_the_device_fails_at_once(rig: Rig, tmp_path: Path) -> None:
    rig.catalog(random_pack(tmp_path / "huge", [PAGE * 20]))
    (event,) = load(rig, "huge")
    assert event.kind == "failed"
    assert "device budget" in event.reason
    assert rig.residency.status_rows({})[0].reason == event.reason


def test_weights_alone_are_not_enough(tmp_path: Path, packs: list[Path]) -> None:
    rig = Rig(tmp_path, MODEL_PAGES)  # not a page for KV
    rig.catalog(packs[0])
    assert load(rig, "a")[0].kind == "failed"
    rig.residency.close()


def test_busy_models_drain_first(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    for name in "ab":
        load(rig, name)
        rig.residency.touch(name, 0.0, rig.now_s)
    rig.busy = {"a", "b"}
    rig.poll(60)
    rig.residency.request_load("c", rig.now_s)
    rig.poll(1)
    assert sorted(states(rig).values()) == ["draining", "loading", "resident"]
    (draining,) = (name for name, state in states(rig).items() if state == "draining")
    assert rig.residency.pending_pages() >= MODEL_PAGES
    for _ in range(5):
        assert rig.poll(0.1) == []
    rig.busy.discard(draining)
    events = settle(rig)
    assert [(e.kind, e.model_id) for e in events] == [("evicted", draining), ("loaded", "c")]
    assert rig.residency.pending_pages() == 0


def test_a_drain_is_bounded(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    rig.pool.alloc_pages(Owner("a", "kv"), 3)
    rig.busy = {"a"}
    rig.residency.begin_drain("a", rig.now_s, "asked for")
    assert rig.poll(rig.config.drain_timeout_s - 0.1) == []
    assert [e.kind for e in rig.poll(0.2)] == ["evicted"]
    assert rig.dropped == ["a"]  # where the engine preempts
    rig.poll()
    assert rig.pool.num_free == rig.pool.num_pages


def test_a_load_asked_for_while_draining_follows(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    rig.busy = {"a"}
    rig.residency.begin_drain("a", rig.now_s, "x")
    rig.poll()
    rig.residency.request_load("a", rig.now_s)
    assert states(rig)["a"] == "draining"
    rig.busy = set()
    assert [e.kind for e in settle(rig)] == ["evicted", "loaded"]
    rig.busy = {"a"}
    rig.residency.begin_drain("a", rig.now_s, "x")
    rig.residency.request_load("a", rig.now_s)
    rig.residency.begin_drain("a", rig.now_s, "changed my mind")
    rig.busy = set()
    assert [e.kind for e in settle(rig)] == ["evicted"]


def test_loads_are_served_in_the_order_of_asking(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    rig.residency.touch("a", 0.1, rig.now_s)
    load(rig, "b")
    rig.residency.touch("b", 0.1, rig.now_s)
    rig.residency.begin_drain("a", rig.now_s, "x")
    settle(rig)
    rig.busy = {"b"}
    for name in "ca":  # c fits at once; a must wait for b or c
        rig.residency.request_load(name, rig.now_s)
    events = settle(rig, "loaded")
    assert events[-1].model_id == "c"
    assert states(rig)["a"] == "loading"


def test_a_queued_load_can_be_called_off(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    for name in "ab":
        load(rig, name)
    rig.residency.request_load("c", rig.now_s)
    rig.residency.begin_drain("c", rig.now_s, "never mind")
    assert states(rig)["c"] == "cold"
    assert settle(rig) == []
    assert states(rig) == {"a": "resident", "b": "resident", "c": "cold"}


def test_a_running_load_can_be_called_off(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    for _ in range(10):
        rig.residency.request_load("a", rig.now_s)
        rig.residency.poll(rig.now_s, rig.is_busy, rig.drop_kv)  # takes pages, starts threads
        rig.residency.begin_drain("a", rig.now_s, "never mind")
        assert rig.residency.state("a") == "draining"
        settle(rig)
        assert states(rig)["a"] == "cold"
    rig.poll()
    assert rig.pool.num_free == rig.pool.num_pages
    assert rig.dropped == []


@pytest.mark.parametrize("how", ["unload", "removed", "new pack"])
def test_pages_stay_until_no_loader_touches_them(
    rig: Rig, packs: list[Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = threading.Event()
    work = DiskLoad.work

    def slow(self: DiskLoad, chunk: Chunk) -> None:
        assert gate.wait(20)
        work(self, chunk)

    monkeypatch.setattr(DiskLoad, "work", slow)
    rig.catalog(*packs)
    rig.residency.request_load("a", rig.now_s)
    rig.poll()
    if how == "unload":
        rig.residency.begin_drain("a", rig.now_s, "never mind")
    elif how == "removed":
        rig.catalog(*packs[1:])
    else:
        rig.residency.set_catalog([ModelSpec("a", str(packs[1]))])
    for _ in range(5):
        assert rig.poll(100) == []
        assert rig.residency.state("a") == "draining"
        assert rig.pool.owned(Owner("a", "weights")) == MODEL_PAGES
    gate.set()
    assert [event.kind for event in settle(rig)] == ["evicted"]
    rig.poll()
    assert rig.pool.num_free == rig.pool.num_pages
    assert rig.residency.knows("a") == (how != "removed")


def test_two_models_do_not_throw_each_other_out_unused(tmp_path: Path, packs: list[Path]) -> None:
    rig = Rig(tmp_path, MODEL_PAGES + 2)  # one at a time
    rig.catalog(*packs)
    load(rig, "a")
    rig.residency.request_load("b", rig.now_s - 100)  # starving already
    for _ in range(9):
        assert rig.poll(0.1) == []  # a has its first second
    assert [e.model_id for e in settle(rig)] == ["a", "b"]
    rig.residency.close()


@pytest.mark.parametrize("where", [5, 2 * PAGE + 100, 2 * PAGE + 4096 + 17])
def test_a_flipped_byte_is_never_served(rig: Rig, packs: list[Path], where: int) -> None:
    rig.catalog(*packs)
    flip_byte(packs[0] / BLOB_NAME, where)
    (event,) = load(rig, "a")
    assert (event.kind, event.model_id) == ("failed", "a")
    assert "damaged" in event.reason
    rig.poll()
    assert rig.pool.num_free == rig.pool.num_pages
    with pytest.raises(RequestRefused):
        rig.residency.weights("a")
    assert load(rig, "a") == []  # and not tried again for the same pack
    rig.catalog(*packs)
    assert states(rig)["a"] == "failed"
    flip_byte(packs[0] / BLOB_NAME, where)  # registered anew, under the same name
    rig.catalog(*packs)
    assert load(rig, "a") == [ResidencyEvent("loaded", "a")]
    assert is_right(rig, packs[0])


def test_bad_packs_fail_with_a_reason(rig: Rig, packs: list[Path], tmp_path: Path) -> None:
    flip_byte(packs[0] / "index.msgpack", 40)
    rig.catalog(packs[0], packs[1], tmp_path / "nowhere")
    assert states(rig) == {"a": "failed", "b": "cold", "nowhere": "failed"}
    for row in rig.residency.status_rows({}):
        assert ("register the model again" in row.reason) == (row.state == "failed")
        assert (row.load_s_estimate == -1) == (row.state == "failed")
    with pytest.raises(RequestRefused):
        rig.residency.index("a")
    assert load(rig, "a") == []


def test_a_blob_that_vanished_fails_only_its_model(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    (packs[0] / BLOB_NAME).unlink()
    rig.residency.request_load("a", rig.now_s)
    rig.residency.request_load("b", rig.now_s)
    assert [(e.kind, e.model_id) for e in settle(rig)] == [("failed", "a"), ("loaded", "b")]


def test_models_that_leave_the_catalog(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    rig.busy = {"a"}
    rig.residency.request_load("b", rig.now_s)
    rig.residency.poll(rig.now_s, rig.is_busy, rig.drop_kv)
    rig.residency.request_load("c", rig.now_s)
    assert sorted(rig.catalog()) == ["a", "b"]  # c was only queued
    assert not rig.residency.knows("c")
    rig.busy = set()
    settle(rig)
    assert states(rig) == {}
    rig.poll()
    assert rig.pool.num_free == rig.pool.num_pages
    with pytest.raises(RequestRefused, match="unknown model"):
        rig.residency.request_load("a", rig.now_s)


def test_a_model_that_comes_back_in_time_stays(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    assert rig.catalog(*packs[1:]) == ["a"]
    assert rig.catalog(*packs) == []
    assert settle(rig) == []
    assert states(rig)["a"] == "resident"


def test_a_new_pack_takes_over_after_the_old_one(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    old = rig.residency.index("a").revision
    specs = [ModelSpec("a", str(packs[1]))]
    assert rig.residency.set_catalog(specs) == ["a"]
    rig.residency.request_load("a", rig.now_s)
    assert rig.residency.index("a").revision == old
    rig.poll()  # drains by itself
    rig.residency.request_load("a", rig.now_s)
    settle(rig)
    assert rig.residency.index("a").revision != old
    assert rig.residency.pack_dir("a") == packs[1]
    blob = np.fromfile(packs[1] / BLOB_NAME, dtype=np.float32)
    tensor = rig.residency.weights("a").tensors["t0"].numpy()
    assert np.array_equal(tensor, blob[: len(tensor)])


def test_two_names_for_one_pack(rig: Rig, packs: list[Path]) -> None:
    rig.residency.set_catalog([ModelSpec(name, str(packs[0])) for name in ("one", "two")])
    for name in ("one", "two"):
        load(rig, name)
    assert set(states(rig).values()) == {"resident"}


def wait_for_fill(rig: Rig, name: str) -> None:
    end = time.monotonic() + 20
    while not rig.residency._weight_store.is_warm(rig.residency.index(name)):
        assert time.monotonic() < end
        rig.poll()
        time.sleep(0.001)


def test_the_host_tier_is_filled_and_survives_the_worker(tmp_path: Path, packs: list[Path]) -> None:
    rig = Rig(tmp_path, 2 * MODEL_PAGES + 4, host_tier_bytes=2 * sum(SIZES))
    rig.catalog(*packs)
    load(rig, "a")
    wait_for_fill(rig, "a")
    rig.residency.begin_drain("a", rig.now_s, "x")
    settle(rig)
    assert states(rig) == {"a": "warm", "b": "cold", "c": "cold"}
    for pack in packs[:1]:
        (pack / BLOB_NAME).rename(pack / "gone")  # a warm load needs no disk
        load(rig, "a")
        (pack / "gone").rename(pack / BLOB_NAME)
    assert is_right(rig, packs[0])
    weight_store = [(s.kind, s.tier) for s in rig.residency.take_swaps()]
    assert weight_store == [("load", "disk"), ("evict", "host"), ("load", "host")]
    rig.residency.close()
    successor = Rig(tmp_path, 2 * MODEL_PAGES + 4, host_tier_bytes=2 * sum(SIZES))
    successor.catalog(*packs)
    assert states(successor) == {"a": "warm", "b": "cold", "c": "cold"}
    load(successor, "a")
    assert is_right(successor, packs[0])
    assert successor.residency.take_swaps()[-1].tier == "host"
    for name in "bc":  # the tier holds two
        load(successor, name)
        wait_for_fill(successor, name)
    rig_states = states(successor)
    assert rig_states["a"] in ("cold", "resident")
    successor.catalog()
    settle(successor)
    successor.catalog()
    successor.residency.close()
    assert [path.name for path in Path(successor.config.shm_dir).iterdir()] == ["test-lock"]


def test_no_copies_where_nobody_has_to_leave(tmp_path: Path, packs: list[Path]) -> None:
    num_pages = 4 * MODEL_PAGES  # three fit, two take no more than half
    rig = Rig(tmp_path, num_pages, host_tier_bytes=1 << 30, host_tier_when_crowded=True)
    for hosted in (packs[:1], packs[:2]):
        rig.catalog(*hosted)
        load(rig, hosted[-1].name)
        for _ in range(5):
            rig.poll()
    assert list(Path(rig.config.shm_dir).iterdir()) == []
    rig.catalog(*packs)  # now somebody may: those that are here get their copies
    for name in "ab":
        wait_for_fill(rig, name)
    load(rig, "c")
    wait_for_fill(rig, "c")
    rig.catalog(packs[0])
    settle(rig)
    assert not rig.residency._weight_store.copies
    rig.residency.close()


def test_one_model_needs_no_copy_however_large(tmp_path: Path, packs: list[Path]) -> None:
    rig = Rig(tmp_path, MODEL_PAGES + 1, host_tier_bytes=1 << 30, host_tier_when_crowded=True)
    rig.catalog(packs[0])
    load(rig, "a")
    for _ in range(5):
        rig.poll()
    assert list(Path(rig.config.shm_dir).iterdir()) == []
    rig.residency.close()


def test_damage_in_between_keeps_the_tier_clean(tmp_path: Path, packs: list[Path]) -> None:
    rig = Rig(tmp_path, 2 * MODEL_PAGES + 4, host_tier_bytes=1 << 30)
    rig.catalog(*packs)
    flip_byte(packs[0] / BLOB_NAME, 99)
    load(rig, "a")
    for _ in range(5):
        rig.poll()
    assert list(Path(rig.config.shm_dir).iterdir()) == []
    rig.residency.close()


def test_fenced_pages_are_waited_for(tmp_path: Path, packs: list[Path]) -> None:
    rig = Rig(tmp_path, MODEL_PAGES + 2, fence_lag=5)
    rig.catalog(*packs)
    for name in itertools.islice(itertools.cycle("abc"), 12):
        rig.poll(100)
        load(rig, name)
        assert is_right(rig, packs["abc".index(name)])
    rig.residency.close()


def test_status_rows_and_estimates(rig: Rig, packs: list[Path]) -> None:
    rig.catalog(*packs)
    load(rig, "a")
    rig.pool.alloc_pages(Owner("a", "kv"), 2)
    rows = {row.model_id: row for row in rig.residency.status_rows({"a": (3, 4)})}
    assert (rows["a"].num_running, rows["a"].num_waiting) == (3, 4)
    assert rows["a"].kv_bytes_used == 2 * PAGE
    assert rows["b"].weight_bytes == sum(SIZES)
    assert rows["b"].load_s_estimate == rig.residency.load_estimate_s("b") > 0


@pytest.mark.parametrize("event", get_args(InstanceEvent))
@pytest.mark.parametrize("state", TRANSITIONS)
def test_illegal_transitions_change_nothing(state: ResidencyState, event: InstanceEvent) -> None:
    model = ModelInstance(ModelSpec("m", "/nowhere"), state=state, reason="before")
    if event in TRANSITIONS[state]:
        model.on(event, "after")
        assert (model.state, model.reason) == (TRANSITIONS[state][event], "after")
    else:
        with pytest.raises(IllegalTransition):
            model.on(event, "after")
        assert (model.state, model.reason) == (state, "before")
