"""Who is the dispatcher: one lock, epochs that rise; what processes are told at their start."""

import asyncio
import stat
import time
from pathlib import Path

import pytest

from gateway.server.dispatcher_process import my_turn
from gateway.server.process_setup import ProcessConfig, dispatcher_lock, read_config, write_config
from gateway.settings.config import SettingsError
from gateway.settings.settings import Settings
from gateway.workers.curve_keys import WorkerAddress
from tests.gateway.ipc.test_ipc import until

FAR = 1 << 40
"""An epoch that the clock has not come to."""


async def test_one_is_active_and_the_next_one_has_the_next_epoch(tmp_path: Path) -> None:
    lock, stop = tmp_path / "lock", asyncio.Event()
    lock.write_text(str(FAR))
    epochs: list[int | None] = []

    async def wait(release: asyncio.Event) -> None:
        async with my_turn(lock, stop) as epoch:
            epochs.append(epoch)
            await release.wait()

    first, second = asyncio.Event(), asyncio.Event()
    waiting = [asyncio.create_task(wait(release)) for release in (first, second)]
    await until(lambda: epochs)
    await asyncio.sleep(0.1)
    assert epochs == [FAR + 1]
    first.set()
    second.set()
    await until(lambda: epochs == [FAR + 1, FAR + 2])
    await asyncio.gather(*waiting)
    for told in ("no number", "7"):  # lost, or of a folder put back from a backup
        lock.write_text(told)
        before_at = int(time.time())
        async with my_turn(lock, stop) as epoch:
            assert epoch is not None
            assert before_at <= epoch <= time.time()


async def test_who_is_told_to_stop_waits_no_longer(tmp_path: Path) -> None:
    stop = asyncio.Event()
    (tmp_path / "lock").touch()
    async with my_turn(tmp_path / "lock", asyncio.Event()) as epoch:
        assert epoch
        asyncio.get_running_loop().call_later(0.01, stop.set)
        async with my_turn(tmp_path / "lock", stop) as other:
            assert other is None


def test_what_processes_are_told_is_this_user_s_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), gateway_processes=3, demo_api_key="secret")
    config = ProcessConfig(settings, [WorkerAddress("worker-0", "ipc:///w")], 8000, "/lock")
    for _ in range(2):  # what an earlier server left is replaced
        path = write_config(config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_config(str(path)) == config
    path.write_bytes(path.read_bytes().replace(b'"gateway_processes":3', b'"gateway_processes":33'))
    with pytest.raises(SettingsError, match="gateway_processes"):
        read_config(str(path))
    with dispatcher_lock(settings):
        assert (path.parent / "dispatcher.lock").stat().st_uid == path.stat().st_uid


async def test_a_lock_whose_name_was_deleted_is_the_same_lock(tmp_path: Path) -> None:
    """A process that comes later finds what the others have, and the epoch goes on."""
    settings, stop = Settings(data_dir=str(tmp_path)), asyncio.Event()
    with dispatcher_lock(settings) as lock:
        async with my_turn(Path(lock), asyncio.Event()) as epoch:
            assert epoch
            (tmp_path / "run" / "dispatcher.lock").unlink()
            asyncio.get_running_loop().call_later(0.1, stop.set)
            async with my_turn(Path(lock), stop) as other:
                assert other is None
        async with my_turn(Path(lock), asyncio.Event()) as later:
            assert later
            assert later > epoch
