"""Loads that find their pages occupied: what is moved, what waits, and what is called off."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.memory.page_pool import Owner, PageRun
from engine.pack import BLOB_NAME, PackIndex, read_index, write_index
from engine.packs.host_tier import HostTier
from engine.packs.loader import ReadJob
from engine.packs.weight_store import DiskWeightStore
from engine.residency.loaded_models import ModelInstance, ResidencyEvent
from engine.residency.weight_space import KvClaim
from tests.engine.pack_rig import PAGE, Rig, flip_byte, random_pack

Kv = Literal["none", "paged", "stubborn"]


class World:
    """A rig whose packs are named by their segments' pages, and whose bytes are checked."""

    def __init__(self, tmp_path: Path, num_pages: int, kv: Kv = "paged", **config: Any) -> None:
        self.tmp_path = tmp_path
        self.rig = Rig(tmp_path, num_pages, kv=kv, **config)
        self.residency = self.rig.residency
        self.packs: dict[str, Path] = {}
        self.content: dict[str, np.ndarray[Any, Any]] = {}
        self.pinned: set[str] = set()

    def host(self, **packs: Sequence[int]) -> None:
        """Packs with segments of so many pages, beside those that are hosted."""
        for name, lengths in packs.items():
            folder = self.tmp_path / name
            sizes = [PAGE * length for length in lengths]
            self.packs[name] = random_pack(folder, sizes, len(self.packs))
            self.content[name] = np.fromfile(folder / BLOB_NAME, dtype=np.float32)
        self.catalog()

    def catalog(self, *without: str) -> None:
        packs = [pack for name, pack in self.packs.items() if name not in without]
        self.rig.catalog(*packs, pinned=sorted(self.pinned))

    def instance(self, name: str) -> ModelInstance:
        return self.residency._models.by_id[name]

    def runs(self, name: str) -> list[tuple[int, int]]:
        return [(run.first, run.num_pages) for run in self.instance(name).runs]

    def check(self) -> None:
        for name, model in self.residency._models.by_id.items():
            if model.views is not None:
                tensors = [
                    model.views.tensors[f"t{i}"] for i in range(len(model.views.tensors) - 1)
                ]
                assert np.array_equal(torch.cat(tensors).numpy(), self.content[name]), name
        self.rig.kv.check()

    def poll(self, after_s: float = 0.01) -> list[ResidencyEvent]:
        events = self.rig.poll(after_s)
        self.check()
        return events

    def settle(self, step_s: float = 0.01) -> list[tuple[str, str]]:
        """(kind, model) of what happened until nothing is under way."""
        events: list[tuple[str, str]] = []
        end = time.monotonic() + 20
        while time.monotonic() < end:
            events += [(event.kind, event.model_id) for event in self.poll(step_s)]
            states = {row.state for row in self.residency.status_rows({})}
            if not states & {"loading", "draining"}:
                return events
            time.sleep(0.0003)
        raise AssertionError(f"nothing settled: {events} {self.residency.status_rows({})}")

    def load(self, *names: str) -> list[tuple[str, str]]:
        for name in names:
            self.residency.request_load(name, self.rig.now_s)
        return self.settle()

    def unload(self, *names: str) -> None:
        for name in names:
            self.residency.begin_drain(name, self.rig.now_s, "asked for")
        self.settle()


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Any]:
    made: list[World] = []

    def make(num_pages: int, kv: Kv = "paged", **config: Any) -> World:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(World(folder, num_pages, kv, **config))
        return made[-1]

    yield make
    for world in made:
        world.residency.close()


def comb(world: World) -> None:
    """Models of one and two pages with a free page beside each: `a.bb.c.dd.` from page 0 on."""
    world.host(a=[1], w=[1], b=[2], x=[1], c=[1], y=[1], d=[2], z=[1])
    world.load("a", "w", "b", "x", "c", "y", "d", "z")
    world.unload("w", "x", "y", "z")
    world.poll()


def test_weights_move_and_nobody_has_to_go(worlds: Any) -> None:
    world: World = worlds(11)
    comb(world)
    world.host(large=[4])
    before = {name: world.residency.weights(name).generation for name in "abcd"}
    # `a.bb.c.dd..`: the cheapest four pages in a row are behind bb.
    assert world.load("large") == [("moved", "c"), ("moved", "d"), ("loaded", "large")]
    assert [world.runs(name) for name in "abcd"] == [[(0, 1)], [(2, 2)], [(4, 1)], [(5, 2)]]
    assert world.runs("large") == [(7, 4)]
    changed = {n for n, g in before.items() if world.residency.weights(n).generation != g}
    assert changed == set("cd")
    assert world.residency.num_moved_pages == 3


def test_cached_kv_is_evicted_and_live_kv_moved(worlds: Any) -> None:
    world: World = worlds(12)
    world.host(a=[2], large=[7])
    world.load("a")
    kv = world.rig.kv
    kv.grow("a", 10)
    kv._release([page for page in kv.pages if page.page not in (4, 6, 11)])
    for page in kv.pages:
        page.live = page.page != 4  # `aa..c.k....k`: seven free, one cached
    world.poll()
    assert world.load("large") == [("loaded", "large")]
    assert world.runs("large") == [(2, 7)]
    assert (kv.num_evicted, kv.num_moved) == (1, 1)
    assert sorted(page.page for page in kv.pages) == [10, 11]


def test_pinned_models_are_moved_too(worlds: Any) -> None:
    world: World = worlds(16)
    world.host(first=[5], pinned=[4], large=[3, 8], other=[6])
    world.pinned = {"pinned"}
    world.catalog()
    world.load("first", "pinned")  # pinned is in the middle now
    world.poll(100)
    events = world.load("large")
    assert events == [("evicted", "first"), ("moved", "pinned"), ("loaded", "large")]
    assert world.runs("pinned") == [(3, 4)]
    world.poll(100)
    assert ("loaded", "other") in world.load("other")


def test_a_model_comes_back_to_where_it_was(worlds: Any) -> None:
    world: World = worlds(20)
    world.host(a=[2], b=[3, 2], c=[1])
    world.load("a", "b")
    home = world.runs("b")
    world.unload("b")
    world.unload("a")  # now there is room lower down
    world.poll()
    world.load("b")
    assert world.runs("b") == home
    world.unload("b")
    world.load("a")
    world.rig.kv.grow("a", 17)  # down to page 3, into b's home
    kept = [page for page in world.rig.kv.pages if page.page in (3, 4, 6)]
    world.rig.kv._release([page for page in world.rig.kv.pages if page not in kept])
    world.poll()
    world.load("b")
    assert world.runs("b") == home
    assert world.rig.kv.num_moved == 3
    world.unload("b")
    world.load("c")
    assert world.runs("c") == [(2, 1)]  # the lowest hole: in b's home
    world.load("b")
    assert world.runs("b") != home


def test_a_load_called_off_before_its_pages_are_ripe_reads_nothing(worlds: Any) -> None:
    world: World = worlds(8, fence_lag=4)
    world.host(a=[5], b=[6])
    world.load("a")
    world.unload("a")
    world.residency.request_load("b", world.rig.now_s)
    world.poll()
    assert world.instance("b").job is None
    assert len(world.instance("b").runs) == 1  # its own, but still read by steps in flight
    assert world.rig.pool.num_unripe > 0
    world.residency.begin_drain("b", world.rig.now_s, "never mind")
    assert [event.kind for event in world.poll()] == ["evicted"]
    for _ in range(6):
        world.poll()
    assert world.rig.pool.num_free == 8


@pytest.mark.parametrize("how", ["unload", "removed", "replaced", "rejected", "drained"])
def test_a_model_that_leaves_while_it_was_to_be_moved(worlds: Any, how: str) -> None:
    world: World = worlds(11, fence_lag=3)
    comb(world)
    for _ in range(5):
        world.poll()
    world.host(large=[4])
    kv = world.rig.kv
    assert kv.grow("a", 1)  # page 10: and the plan has to wait for what it releases
    world.rig.pool.release(kv.pages[0].owner, [kv.pages[0].page])
    kv.pages.clear()
    world.unload("a")
    world.residency.request_load("large", world.rig.now_s)
    world.rig.residency.begin_drain("b", world.rig.now_s, "x") if how == "drained" else None
    world.rig.busy = {"b"}
    world.poll()
    assert world.instance("large").placement is not None or how == "drained"
    if how == "unload":
        world.residency.begin_drain("b", world.rig.now_s, "asked for")
    elif how == "removed":
        world.catalog("b")
    elif how == "replaced":
        world.instance("b").next_spec = world.instance("b").spec
    elif how == "rejected":
        world.residency.reject("b", "its weights cannot be bound to its modules")
    world.poll()
    world.rig.busy = set()
    events = world.settle()
    assert ("loaded", "large") in events
    assert ("moved", "b") not in events
    world.check()


def test_a_queued_load_leaves_the_catalog_with_all_it_has_claimed(worlds: Any) -> None:
    world: World = worlds(11, fence_lag=3)
    comb(world)
    world.host(large=[4])
    world.residency.request_load("large", world.rig.now_s)
    world.poll()
    assert world.instance("large").placement is not None  # what it is to write is not ripe yet
    world.catalog("large")
    assert not world.residency.knows("large")
    for _ in range(6):
        world.poll()
    assert world.rig.pool.num_free == 5


def test_claims_are_given_back_for_kv(worlds: Any) -> None:
    world: World = worlds(11, fence_lag=3)
    comb(world)
    world.host(large=[4])
    world.residency.request_load("large", world.rig.now_s)
    world.poll()
    rig = world.rig
    assert world.residency.pending_pages() < 4
    assert world.residency.make_kv_space("a", rig.now_s, rig.is_busy, rig.drop_kv)
    assert world.instance("large").placement is None
    assert world.residency.pending_pages() == 5
    # `.aa` and the holes: 5 pages are free, and large needs them all.
    for num_pages, is_placed in ((1, False), (0, True), (1, False)):
        claim = KvClaim("a", num_pages)
        world.residency.poll(rig.now_s, rig.is_busy, rig.drop_kv, claim)
        assert (world.instance("large").placement is not None) == is_placed
        world.check()
    assert ("loaded", "large") in world.settle()


def test_no_load_sends_away_the_model_of_a_claim(worlds: Any) -> None:
    world: World = worlds(11)
    world.host(a=[6], large=[7])
    world.load("a")
    world.residency.request_load("large", world.rig.now_s)
    rig = world.rig
    for _ in range(5):
        rig.now_s += 100.0
        claim = KvClaim("a", 1)
        world.residency.poll(rig.now_s, rig.is_busy, rig.drop_kv, claim)
        assert world.instance("a").state == "resident"
    assert ("evicted", "a") in world.settle()


def test_kv_that_cannot_be_moved_is_walked_around(worlds: Any) -> None:
    world: World = worlds(12, kv="stubborn")
    world.host(a=[2], large=[5])
    world.load("a")
    kv = world.rig.kv
    kv.grow("a", 10)
    kept = [page for page in kv.pages if page.page in (6, 9)]  # `aa....k..k..`
    kv._release([page for page in kv.pages if page not in kept])
    world.poll()
    world.poll(100)
    assert world.load("large") == [("evicted", "a"), ("loaded", "large")]


def test_kv_that_goes_by_itself_is_not_waited_for_twice(worlds: Any) -> None:
    world: World = worlds(12, fence_lag=2)
    world.host(a=[2], large=[8])
    world.load("a")
    kv = world.rig.kv
    kv.grow("a", 10)
    kept = [page for page in kv.pages if page.page == 5]
    kv._release([page for page in kv.pages if page not in kept])
    # Everything else is fenced: the live page has nowhere to go yet.
    world.residency.request_load("large", world.rig.now_s)
    world.poll()
    assert world.instance("large").placement is not None
    kv._release(kept)
    assert world.settle() == [("loaded", "large")]
    assert kv.num_moved == 0


def test_steps_in_flight_read_what_they_were_launched_with(tmp_path: Path) -> None:
    """The step is held up; weights move behind it, and no loader comes near what it reads."""
    world = World(tmp_path, 11, execution="thread")
    comb(world)
    world.host(large=[4])
    rig, gate = world.rig, threading.Event()
    old = {name: world.residency.weights(name).tensors["t0"] for name in "abcd"}

    def read() -> dict[str, torch.Tensor]:
        assert gate.wait(20)
        return {name: tensor.clone() for name, tensor in old.items()}

    world.residency.request_load("large", rig.now_s)
    rig._step += 1
    rig.pool.begin_step(rig._step)
    step = rig.backend.launch(rig._step, read)
    for _ in range(20):
        rig.poll(0.01)
        assert world.instance("large").job is None
        time.sleep(0.001)
    assert world.residency.num_moved_pages == 3
    gate.set()
    for name, tensor in step.wait().items():
        assert np.array_equal(tensor.numpy(), world.content[name])
    while world.residency.state("large") != "resident":
        rig.poll(0.01)
    world.check()
    world.residency.close()
    rig.backend.close()


def test_a_damaged_small_file_is_found_by_the_load(worlds: Any, tmp_path: Path) -> None:
    world: World = worlds(8)
    world.host(a=[2])
    folder = world.packs["a"]
    (folder / "tokenizer.json").write_bytes(b"{}" * 1000)
    index = read_index(folder)
    write_index(folder, _with_files(index, {"tokenizer.json": 12345}))
    world.catalog("a")
    world.catalog()
    assert world.residency.state("a") == "cold"
    assert world.load("a") == [("failed", "a")]
    assert "damaged" in world.residency.reason("a")
    assert world.load("a") == []
    flip_byte(folder / "tokenizer.json", 1)


def _with_files(index: PackIndex, files: dict[str, int]) -> PackIndex:
    return PackIndex(**{**{f: getattr(index, f) for f in index.__struct_fields__}, "files": files})


def test_a_model_may_be_rejected_in_every_state(worlds: Any) -> None:
    world: World = worlds(8, fence_lag=3)
    world.host(a=[2], b=[6], c=[2])
    world.residency.reject("c", "too large a step")
    assert world.residency.state("c") == "failed"
    assert world.load("c") == []  # and stays so
    world.load("a")
    world.residency.request_load("b", world.rig.now_s - 100)  # waits: a is fresh
    world.poll()
    world.residency.reject("b", "too large a step")
    assert world.residency.state("b") == "failed"
    world.residency.reject("a", "too large a step")
    assert world.residency.state("a") == "failed"
    world.host(d=[3])
    world.residency.request_load("d", world.rig.now_s)
    world.poll()
    assert world.residency.state("d") == "loading"
    world.residency.reject("d", "too large a step")
    assert world.settle()[-1] == ("evicted", "d")
    for _ in range(5):
        world.poll()
    assert world.rig.pool.num_free == 8


def test_fills_of_the_host_tier_wait_for_the_memory_they_take_the_place_of(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleting = True
    monkeypatch.setattr(HostTier, "is_deleting", property(lambda tier: deleting))
    world: World = worlds(8, host_tier_bytes=1 << 20)
    world.host(a=[2])
    world.load("a")
    revision = world.residency.index("a").revision
    for _ in range(5):
        world.poll()
    assert isinstance(world.residency._weight_store, DiskWeightStore)
    host = world.residency._weight_store._host
    assert host.is_filling(revision)
    assert not host.has(revision)
    deleting = False
    end = time.monotonic() + 20
    while not host.has(revision):
        assert time.monotonic() < end
        world.poll()


def test_the_first_token_comes_before_the_next_drain(worlds: Any) -> None:
    """Two busy models, room for one, and a drain that gives no time at all: both get on."""
    world: World = worlds(8, drain_timeout_s=0.0, starvation_s=0.0)
    world.host(a=[5], b=[5])
    tokens = {"a": 0, "b": 0}
    started = dict.fromkeys("ab", False)  # each needs two steps to its first token
    end = time.monotonic() + 20
    while min(tokens.values()) < 3:
        assert time.monotonic() < end, tokens
        world.rig.busy = {"a", "b"}
        for name in "ab":
            world.residency.request_load(name, world.rig.now_s)
            if world.residency.state(name) not in ("resident", "draining"):
                started[name] = False
                continue
            world.residency.touch(name, 0.01, world.rig.now_s, produced=started[name])
            tokens[name] += started[name]
            started[name] = True
        world.poll(2.0)
        time.sleep(0.0003)


def test_a_job_is_never_started_on_pages_that_are_not_ripe(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = worlds(8, fence_lag=5)
    world.host(a=[5], b=[6])
    run_part, unripe = ReadJob.run_part, []

    def guarded(job: ReadJob, number: int) -> None:
        unripe.append(world.rig.pool.has_fences)
        run_part(job, number)

    monkeypatch.setattr(ReadJob, "run_part", guarded)
    world.load("a")
    for name in "bab":
        world.poll(100)
        world.load(name)
    assert not any(unripe)


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[list[int]], list[bool], list[bool], int]:
    """Models by their segments, which of them leave again, KV pages (live or not), fence lag."""
    instances = draw(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=6)
    )
    leave = draw(st.lists(st.booleans(), min_size=len(instances), max_size=len(instances)))
    return (
        instances,
        leave,
        draw(st.lists(st.booleans(), max_size=12)),
        draw(st.sampled_from([0, 1, 3])),
    )


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(memory=memories(), data=st.data())
def test_memory_that_suffices_in_total_suffices(
    tmp_path_factory: pytest.TempPathFactory,
    memory: tuple[list[list[int]], list[bool], list[bool], int],
    data: st.DataObject,
) -> None:
    """However it is cut up by weights and KV: nobody leaves for want of a hole."""
    lengths, leave, kv_pages, fence_lag = memory
    world = World(tmp_path_factory.mktemp("w"), 48, fence_lag=fence_lag)
    world.host(**{f"u{number}": sizes for number, sizes in enumerate(lengths)})
    names = list(world.packs)
    for name in names:
        for live in kv_pages[:2] if world.load(name) else ():
            world.rig.kv.grow(name, 1, live)
    world.unload(*[name for name, leaves in zip(names, leave, strict=True) if leaves])
    staying = [name for name, leaves in zip(names, leave, strict=True) if not leaves]
    for live in kv_pages if staying else ():
        world.rig.kv.grow(staying[0], data.draw(st.integers(1, 3)), live)
    held = [page for page in world.rig.kv.pages if data.draw(st.booleans())]
    world.rig.kv._release(held)
    pool = world.rig.pool
    spare = pool.num_free + pool.num_fenced + world.rig.kv.num_evictable() - 1  # 1: its first KV
    if spare > 0:
        first = data.draw(st.integers(1, spare))
        rest = data.draw(st.integers(0, spare - first))
        world.host(new=[first, rest] if rest else [first])
        live_before = sum(page.live for page in world.rig.kv.pages)
        events = world.load("new")
        assert {kind for kind, _ in events} <= {"moved", "loaded"}
        assert world.residency.state("new") == "resident"
        assert sum(page.live for page in world.rig.kv.pages) == live_before
        owned = pool.owned(Owner("new", "weights"))
        assert owned == first + rest == sum(PageRun(*run).num_pages for run in world.runs("new"))
    world.residency.close()
