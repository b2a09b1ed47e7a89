"""The workers of a server: what memory and device each gets, when one begins anew with more."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from engine.config import decode_worker_config
from gateway.server.child_process import WORKER_COMMAND
from gateway.server.worker_launcher import (
    ROOM_BYTES,
    EmbedderLauncher,
    WorkerLauncher,
    embedder_connection,
    main_memory,
)
from gateway.server.worker_slots import WorkerSlot
from gateway.settings.settings import Settings

FREE_BYTES = 16 << 30
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def settings_of(folder: Path, **more: object) -> Settings:
    return Settings(data_dir=str(folder), cache_embedder="bag", **more)  # type: ignore[arg-type]


def launcher(settings: Settings, slot: WorkerSlot) -> WorkerLauncher:
    memory = main_memory(settings, FREE_BYTES)
    return WorkerLauncher(settings, slot, memory, WORKER_COMMAND, lambda *told: None)


@asynccontextmanager
async def running(home: EmbedderLauncher) -> AsyncIterator[None]:
    task = asyncio.create_task(home.run())
    try:
        yield
    finally:
        await home.process.stop(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def starts(home: EmbedderLauncher, count: int) -> None:
    async with asyncio.timeout(20):
        while home.process.num_starts < count or home.process.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_worker_would_take_its_configuration(tmp_path: Path) -> None:
    home = EmbedderLauncher(settings_of(tmp_path, cache_embed_threads=2), SLEEP, print)
    home.set_weights({"bag": 1000, "other": 10**9})
    config = decode_worker_config(home.config())
    assert (config.worker_id, config.device) == ("embedder-0", "cpu")
    assert config.engine.arena_bytes == 2000 + ROOM_BYTES
    assert config.engine.num_threads == 2
    assert config.engine.host_tier_bytes == 0
    assert "embed" in config.engine.shm_prefix


async def test_it_starts_when_its_model_is_there_and_again_for_a_larger_one(
    tmp_path: Path,
) -> None:
    home = EmbedderLauncher(settings_of(tmp_path), SLEEP, lambda worker_id, reason, cause: None)
    async with running(home):
        home.set_weights({"other": 5})
        await asyncio.sleep(0.05)
        assert home.process.num_starts == 0
        home.set_weights({"bag": 1000})
        await starts(home, 1)
        home.set_weights({"bag": 1000})
        home.set_weights({"bag": ROOM_BYTES // 4})  # there is room
        assert home.process.num_starts == 1
        home.set_weights({"bag": ROOM_BYTES})
        await starts(home, 2)
        arena = json.loads(home.config())["engine"]["arena_bytes"]
        assert arena == 3 * ROOM_BYTES


def test_without_a_name_there_is_no_connection(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    none = Settings(data_dir=str(tmp_path))
    assert embedder_connection(none, context, "gateway-0") is None
    assert embedder_connection(settings_of(tmp_path), context, "gateway-0") is not None
    context.term()


def test_the_demo_s_small_budget_grows_for_other_models(tmp_path: Path) -> None:
    settings = Settings(demo=True, data_dir=str(tmp_path))
    home = launcher(settings, WorkerSlot("worker-0", "cpu"))
    demo = {"python": 9 << 20, "shakespeare": 8 << 20, "sherlock": 7 << 20}
    home.set_weights(demo)
    assert json.loads(home.config())["engine"]["arena_bytes"] == 24 << 20
    home.set_weights({**demo, "small": 1 << 20})
    assert not home.is_outgrown, "it fits as things are"
    home.set_weights({**demo, "own": 20 << 20})
    assert home.is_outgrown
    assert json.loads(home.config())["engine"]["arena_bytes"] > 24 << 20
    assert not home.is_outgrown


@pytest.mark.parametrize(
    ("device", "host_tier_bytes", "expected"),
    [("cpu", -1, True), ("cpu", 1 << 30, False), ("auto", -1, False), ("cuda:0", -1, False)],
)
def test_a_cpu_that_was_told_nothing_copies_weights_only_when_crowded(
    tmp_path: Path, device: str, host_tier_bytes: int, expected: bool
) -> None:
    settings = Settings(data_dir=str(tmp_path), host_tier_bytes=host_tier_bytes)
    home = launcher(settings, WorkerSlot("worker-0", device))
    assert json.loads(home.config())["engine"]["host_tier_when_crowded"] is expected


def test_workers_of_one_machine_divide_what_is_chosen_for_one(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), host_tier_bytes=1 << 30)
    slots = [WorkerSlot(f"worker-{n}", "cpu", (n,), num_workers=2, num_in_memory=2) for n in (0, 1)]
    one = decode_worker_config(launcher(settings, WorkerSlot("worker-0", "cpu")).config())
    first, second = (decode_worker_config(launcher(settings, slot).config()) for slot in slots)
    assert first.engine.arena_bytes * 2 == one.engine.arena_bytes
    assert first.engine.reserve_bytes * 2 == one.engine.reserve_bytes
    # One host tier: both know it by the same name and size.
    assert first.engine.host_tier_bytes == one.engine.host_tier_bytes == 1 << 30
    assert first.engine.shm_prefix == second.engine.shm_prefix
    assert (first.worker_id, second.worker_id) == ("worker-0", "worker-1")
    assert first.endpoint != second.endpoint
    assert ((first.cpus, second.cpus), first.num_workers) == (([0], [1]), 2)


def test_a_table_of_its_own_goes_before_what_holds_for_all(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), num_threads=2, device_budget_bytes=1 << 30)
    slot = WorkerSlot("worker-1", "cuda:1", (), memory_bytes=2 << 30, threads=5)
    config = decode_worker_config(launcher(settings, slot).config())
    assert (config.device, config.device_arena_bytes) == ("cuda:1", 2 << 30)
    assert config.engine.num_threads == 5
