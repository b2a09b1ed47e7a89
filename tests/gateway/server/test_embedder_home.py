"""The embedder's process: started with its model, small, and begun anew for a larger one."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import zmq

from engine.config import decode_worker_config
from gateway.server import embedder_home
from gateway.server.embedder_home import ROOM_BYTES, EmbedderHome
from gateway.settings import Settings

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def settings_of(folder: Path, **more: object) -> Settings:
    return Settings(data_dir=str(folder), cache_embedder="bag", **more)  # type: ignore[arg-type]


@asynccontextmanager
async def running(home: EmbedderHome) -> AsyncIterator[None]:
    task = asyncio.create_task(home.run())
    try:
        yield
    finally:
        await home.process.stop(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def starts(home: EmbedderHome, count: int) -> None:
    async with asyncio.timeout(20):
        while home.process.num_starts < count or home.process.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_worker_would_take_its_configuration(tmp_path: Path) -> None:
    home = EmbedderHome(settings_of(tmp_path, cache_embed_threads=2), SLEEP, print)
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
    home = EmbedderHome(settings_of(tmp_path), SLEEP, lambda reason: None)
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
    assert embedder_home.connection(none, context, "gateway-0") is None
    assert embedder_home.connection(settings_of(tmp_path), context, "gateway-0") is not None
    context.term()
