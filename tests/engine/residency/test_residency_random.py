"""Long random lives of a residency: whatever is asked in whatever order, the books agree.

Loader threads are real, freed pages are poisoned, fences lag; every resident model must read back
the bytes of its pack at all times, KV its stamps, no loader may write a page that is not ripe, and
in the end every page must be free. Weights and KV are moved to make room all the while.
"""

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.pack import BLOB_NAME
from engine.protocol import ModelSpec
from engine.residency.loaded_models import LoadRequest
from tests.engine.pack_rig import PAGE, Rig, flip_byte, random_pack

NUM_PAGES = 40
NUM_STEPS = 400


class Life:
    """One random life."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(
            tmp_path,
            NUM_PAGES,
            fence_lag=self.random.choice([0, 1, 4]),
            kv="stubborn" if seed % 4 == 3 else "paged",
            host_tier_bytes=self.random.choice([0, 20 * PAGE, 1 << 30]),
            host_tier_when_crowded=self.random.choice([False, True]),
            load_threads=self.random.choice([1, 3]),
            drain_timeout_s=2.0,
            starvation_s=self.random.choice([0.0, 0.5, 5.0]),
        )
        self.packs: dict[str, Path] = {}
        for number in range(7):
            sizes = [
                self.random.choice([4096, PAGE, 2 * PAGE, 5 * PAGE])
                for _ in range(self.random.randint(1, 6))
            ]
            if number == 6:
                sizes = [PAGE * (NUM_PAGES + 1)]  # never fits
            name = f"m{number}"
            self.packs[name] = random_pack(tmp_path / name, sizes, seed * 10 + number)
        flip_byte(self.packs["m5"] / BLOB_NAME, 1234)  # never served
        self.content = {
            name: np.fromfile(pack / BLOB_NAME, dtype=np.float32)
            for name, pack in self.packs.items()
        }
        self.set_catalog()

    def set_catalog(self) -> None:
        names = [name for name in self.packs if self.random.random() < 0.85]
        specs = [
            ModelSpec(
                name,
                str(self.packs[name]),
                pinned=self.random.random() < 0.1,
                weight=self.random.choice([0.5, 1.0, 2.0]),
                floors=self.random.choice([(), (("t", 1 << 16),)]),
            )
            for name in names
        ]
        for model_id in self.rig.residency.set_catalog(specs):
            if self.random.random() < 0.5:
                self.rig.residency.begin_drain(model_id, self.rig.now_s, "removed")

    def known(self) -> list[str]:
        return [name for name in self.packs if self.rig.residency.knows(name)]

    def act(self) -> None:
        residency, now_s = self.rig.residency, self.rig.now_s
        name = self.random.choice(self.known() or [""])
        choice = self.random.random()
        if not name or choice < 0.03:
            self.set_catalog()
        elif choice < 0.2:
            residency.request_load(name, now_s)
        elif choice < 0.35:
            residency.request_load(name, now_s, self.load_request())
        elif choice < 0.42:
            residency.begin_drain(name, now_s, "asked for")
        elif choice < 0.55:
            produced = self.random.random() < 0.8
            residency.touch(name, self.random.random(), now_s, produced)
        elif choice < 0.57:
            rig = self.rig
            if residency.make_kv_space(name, now_s, rig.is_busy, rig.drop_kv):
                self.rig.residency.check_integrity()
        elif choice < 0.75 and residency.state(name) == "resident":
            if name in self.rig.busy:
                self.rig.busy.discard(name)
            else:
                self.rig.busy.add(name)
        elif choice < 0.9 and residency.state(name) == "resident":
            self.change_kv(name)

    def load_request(self) -> LoadRequest:
        """Of any kind."""
        draw = self.random.random
        return LoadRequest(
            waited_s=draw() * 3,
            backlog_s=draw(),
            prefetch=draw() < 0.5,
            forced=draw() < 0.3,
            to_host_tier=draw() < 0.2,
        )

    def change_kv(self, name: str) -> None:
        """A request takes KV, ends, or becomes a cached prefix."""
        kv = self.rig.kv
        mine = [page for page in kv.pages if page.owner.model_id == name]
        choice = self.random.random()
        if mine and choice < 0.25:
            kv._release(mine[: self.random.randint(1, len(mine))])
        elif mine and choice < 0.5:
            for page in self.random.sample(mine, self.random.randint(1, len(mine))):
                page.live = not page.live
        else:
            kv.grow(name, self.random.randint(1, 4))

    def check(self) -> None:
        self.rig.kv.check()
        for name in self.known():
            if self.rig.residency.state(name) == "resident":
                assert name not in ("m5", "m6")
                tensors = self.rig.residency.weights(name).tensors
                parts = [tensors[f"t{i}"] for i in range(len(tensors) - 1)]
                assert np.array_equal(torch.cat(parts).numpy(), self.content[name])

    def end(self) -> None:
        """Unload everything."""
        self.rig.busy.clear()
        end = time.monotonic() + 30
        while self.known():
            assert time.monotonic() < end
            self.rig.residency.set_catalog([])
            self.rig.poll(0.1)
            time.sleep(0.0002)
        for _ in range(6):
            self.rig.poll()
        assert self.rig.pool.num_free == NUM_PAGES
        self.rig.residency.set_catalog([])
        self.rig.residency.close(keep_host_tier=False)
        assert list(Path(self.rig.config.shm_dir).iterdir()) == []

    def wait_for_loaders(self) -> None:
        """What a life does must not depend on how busy the machine is."""
        hosted = self.rig.residency._models.all()
        jobs = [model.job for model in hosted if model.job is not None]
        while not all(job.done for job in jobs):
            time.sleep(0.0002)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, seed)
    seen: dict[str, int] = {}
    for _ in range(NUM_STEPS):
        life.act()
        if life.random.random() < 0.7:
            for event in life.rig.poll(life.random.choice([0.0, 0.01, 0.3])):
                seen[event.kind] = seen.get(event.kind, 0) + 1
            life.check()
        if life.random.random() < 0.3:
            time.sleep(0.0005)
    life.end()
    assert seen.get("loaded", 0) > 2  # on a busy machine the loaders' threads are late
    assert seen.get("evicted", 0) > 5


def test_lives_move_weights_and_kv(tmp_path: Path) -> None:
    """The random lives are worth something only if they do, one of twenty at the least."""
    moved = [0, 0]
    for seed in range(100, 120):
        (tmp_path / str(seed)).mkdir()
        life = Life(tmp_path / str(seed), seed)
        for _ in range(NUM_STEPS):
            life.act()
            life.rig.poll(0.05)
            life.check()
            life.wait_for_loaders()
        moved[0] += life.rig.residency.num_moved_pages
        moved[1] += life.rig.kv.num_moved
        life.end()
        if min(moved) > 0:
            return
    raise AssertionError(f"pages of weights and of KV that were moved: {moved}")


def test_closing_amid_loads_stops_the_threads(tmp_path: Path) -> None:
    for _ in range(5):
        rig = Rig(tmp_path, NUM_PAGES, host_tier_bytes=1 << 30)
        pack = tmp_path / "m"
        if not pack.exists():
            random_pack(pack, [PAGE * 5] * 4)
        rig.catalog(pack)
        rig.residency.request_load("m", rig.now_s)
        rig.poll()
        rig.residency.close(keep_host_tier=False)
        rig.backend.arena.fill_(0x55)
        time.sleep(0.002)
        assert bool((rig.backend.arena == 0x55).all())
    assert list(Path(rig.config.shm_dir).iterdir()) == []
