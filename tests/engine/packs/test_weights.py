"""Bytes arrive as they were written, or not at all: pack checks, loader jobs, views."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.backend.base import Backend
from engine.backend.cpu import CpuBackend
from engine.errors import ChecksumMismatch, PackError
from engine.pack import BLOB_NAME, CHUNK_BYTES, PackIndex, read_index, write_index
from engine.packs.host_tier import HostTier
from engine.packs.loader import DiskLoad, HostFill, HostLoad, PackLoader, ReadJob
from engine.packs.weights import build_views, check_pack, verify_blob
from tests.engine.pack_rig import flip_byte, random_pack

SIZES = (4096 * 3, CHUNK_BYTES + 4096 * 5, 4096)


class FarBackend(CpuBackend):
    """A device whose memory the host cannot reach: everything goes through copy_in."""

    def host_view(self, offset: int, num_bytes: int) -> Any:
        return None


@dataclass
class Bench:
    pack_dir: Path
    index: PackIndex
    backend: Backend
    offsets: list[int]

    def arrived(self) -> bool:
        blob = np.fromfile(self.pack_dir / BLOB_NAME, dtype=np.uint8)
        arena = self.backend.arena.numpy()
        return all(
            np.array_equal(
                arena[place : place + segment.num_bytes],
                blob[segment.offset : segment.offset + segment.num_bytes],
            )
            for place, segment in zip(self.offsets, self.index.segments, strict=True)
        )


@pytest.fixture(params=[CpuBackend, FarBackend])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    pack_dir = random_pack(tmp_path / "pack", SIZES)
    backend = request.param(CHUNK_BYTES * 3)
    backend.poison(0, CHUNK_BYTES * 3)
    # Out of order, with gaps: runs lie wherever the pool had room.
    return Bench(pack_dir, read_index(pack_dir), backend, [CHUNK_BYTES * 2, 8192, 0])


def wait(job: ReadJob, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not job.done:
        assert time.monotonic() < end
        time.sleep(0.001)
    job.close()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("verify", [True, False])
def test_disk_to_arena(bench: Bench, num_threads: int, verify: bool) -> None:
    loader = PackLoader(num_threads)
    job = DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets, verify)
    loader.start(job)
    wait(job)
    job.result()
    assert bench.arrived()
    assert job.duration_s > 0
    loader.close()


def test_through_the_host_tier(bench: Bench, tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "test", 1 << 30)
    loader = PackLoader(2)
    fill = tier.begin_fill(bench.index.revision, bench.index.total_bytes)
    assert fill is not None
    filling = HostFill(bench.index, bench.pack_dir, fill)
    loader.start_slowly(filling)
    wait(filling)
    filling.result()
    assert not tier.has(bench.index.revision)
    tier.commit(fill)
    slab = tier.acquire(bench.index.revision, bench.index.total_bytes)
    assert slab is not None
    job = HostLoad(bench.index, slab, bench.backend, bench.offsets)
    loader.start(job)
    wait(job)
    job.result()
    tier.release(slab)
    assert bench.arrived()
    loader.close()


@pytest.mark.parametrize("where", [0, SIZES[0], SIZES[0] + CHUNK_BYTES + 77, sum(SIZES) - 1])
def test_a_flipped_byte_is_found_wherever_it_is(bench: Bench, where: int) -> None:
    flip_byte(bench.pack_dir / BLOB_NAME, where)
    loader = PackLoader(2)
    job = DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets)
    loader.start(job)
    wait(job)
    with pytest.raises(ChecksumMismatch, match="register the model again"):
        job.result()
    with pytest.raises(ChecksumMismatch):
        verify_blob(bench.pack_dir, bench.index)
    loader.close()


def test_a_truncated_blob_is_an_error_and_no_fault(bench: Bench) -> None:
    job = DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets)
    with (bench.pack_dir / BLOB_NAME).open("r+b") as file:
        file.truncate(SIZES[0] + 4096)
    loader = PackLoader(2)
    loader.start(job)
    wait(job)
    with pytest.raises(PackError, match="is truncated"):
        job.result()
    with pytest.raises(PackError, match="bytes instead of"):
        check_pack(bench.pack_dir, bench.index)
    loader.close()


def test_a_missing_blob_is_a_pack_error(bench: Bench) -> None:
    (bench.pack_dir / BLOB_NAME).unlink()
    with pytest.raises(PackError, match="cannot be read"):
        DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets)
    with pytest.raises(PackError, match="cannot be read"):
        verify_blob(bench.pack_dir, bench.index)
    with pytest.raises(PackError, match="is incomplete"):
        check_pack(bench.pack_dir, bench.index)


@pytest.mark.parametrize("slowly", [True, False])
def test_a_cancelled_job_is_done_soon_and_touches_nothing_afterwards(
    bench: Bench, slowly: bool
) -> None:
    loader = PackLoader(1)
    jobs = [DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets) for _ in range(20)]
    for job in jobs:
        (loader.start_slowly if slowly else loader.start)(job)
    for job in jobs:
        job.cancel()
    for job in jobs:
        wait(job)
        job.result()  # being cancelled is no error
    bench.backend.arena.fill_(0x55)
    loader.close()
    assert bool((bench.backend.arena == 0x55).all())
    assert all(job.cancelled for job in jobs[1:])


def test_closing_ends_slow_jobs(bench: Bench) -> None:
    loader = PackLoader(1)
    jobs = [DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets) for _ in range(20)]
    for job in jobs:
        loader.start_slowly(job)
    loader.close()
    for job in jobs:
        wait(job)


def test_loads_are_served_in_order_and_before_fills(tmp_path: Path) -> None:
    pack_dir = random_pack(tmp_path / "pack", [4096] * 60)
    index = read_index(pack_dir)
    backend = CpuBackend(1 << 20)
    offsets = [4096 * i for i in range(60)]
    order: list[str] = []
    gate = threading.Event()

    class Named(DiskLoad):
        name = ""

        def work(self, chunk: Any) -> None:
            assert gate.wait(20)
            super().work(chunk)
            order.append(self.name)

    def named(name: str) -> Named:
        job = Named(index, pack_dir, backend, offsets)
        job.name = name
        return job

    loader = PackLoader(1)
    slow, first, second = named("slow"), named("first"), named("second")
    loader.start_slowly(slow)
    loader.start(first)
    loader.start(second)
    gate.set()
    for job in (slow, first, second):
        wait(job)
    loader.close()
    assert order == ["slow"] + ["first"] * 60 + ["second"] * 60 + ["slow"] * 59


def test_views_lie_over_the_arena(bench: Bench) -> None:
    loader = PackLoader(2)
    job = DiskLoad(bench.index, bench.pack_dir, bench.backend, bench.offsets)
    loader.start(job)
    wait(job)
    loader.close()
    views = build_views(bench.backend.arena, bench.index, bench.offsets, 7)
    assert views.generation == 7
    assert views.tensors.keys() == {"t0", "t1", "t2", "tied"}
    assert views.tensors["tied"] is views.tensors["t0"]
    base = bench.backend.arena.data_ptr()
    for number, place in enumerate(bench.offsets):
        tensor = views.tensors[f"t{number}"]
        assert tensor.data_ptr() == base + place
        assert tensor.dtype == torch.float32
        assert tensor.shape == (SIZES[number] // 4,)
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize(
    "change",
    [
        {"total_bytes": 1},
        {"tied": {"x": "nowhere"}},
        {"segments": ()},
        {"chunks": ()},
        {"files": {"config.json": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_index_that_does_not_fit_its_blob_is_refused(
    bench: Bench, change: dict[str, Any]
) -> None:
    with pytest.raises(PackError, match="register the model again"):
        check_pack(bench.pack_dir, msgspec.structs.replace(bench.index, **change))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "cuda"}, {"offset": 1 << 40}, {"offset": -256}, {"shape": (1,)}, {"segment": 9}],
    ids=str,
)
def test_a_tensor_outside_its_place_is_refused(bench: Bench, change: dict[str, Any]) -> None:
    wrong = msgspec.structs.replace(bench.index.tensors[1], **change)
    index = msgspec.structs.replace(bench.index, tensors=(bench.index.tensors[0], wrong))
    with pytest.raises(PackError, match="the index of"):
        check_pack(bench.pack_dir, index)


def test_every_flipped_bit_of_the_index_is_found(tmp_path: Path) -> None:
    pack_dir = random_pack(tmp_path / "pack", [4096])
    path = pack_dir / "index.msgpack"
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip_byte(path, position)
        with pytest.raises(ChecksumMismatch):
            read_index(pack_dir)
        path.write_bytes(whole)
    for size in (0, 3, 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(PackError):
            read_index(pack_dir)


def test_a_pack_of_another_version_is_refused(tmp_path: Path) -> None:
    pack_dir = random_pack(tmp_path / "pack", [4096])
    index = read_index(pack_dir)
    write_index(pack_dir, msgspec.structs.replace(index, version=99))
    with pytest.raises(PackError, match="version 99"):
        read_index(pack_dir)
