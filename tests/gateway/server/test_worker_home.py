"""`polyhost workers serve` with small programs as workers: what it waits for, what it leaves."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from gateway.ipc import machine
from gateway.metrics.families import MetricsRegistry
from gateway.server import local_homes, worker_home
from gateway.server.process_parts import REMOTE_SILENCE_S, Resources
from gateway.server.worker_home import WorkerHome, serve_workers
from gateway.server.worker_launcher import WorkerGuard, shm_prefix
from gateway.server.worker_slots import WorkerSlot
from gateway.settings.settings import Settings
from gateway.settings.worker_settings import WorkerSpec
from gateway.workers.curve_keys import WorkerAddress, key_pair
from gateway.workers.worker_client import ZmqWorkerClient
from registry.errors import RegistryError

SLOW_TO_DRAIN = """
import json, pathlib, signal, sys, time

config = json.loads(sys.stdin.readline())
folder, engine = pathlib.Path(config["packs_dir"]), config["engine"]
pathlib.Path(engine["shm_dir"], engine["shm_prefix"] + "-1.pack").touch()

def drain(*_):
    time.sleep(1.0)
    (folder / "drained").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, drain)
(folder / "ready").touch()
time.sleep(600)
"""
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_what_runs_may_end_and_shared_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (local_homes, worker_home):
        monkeypatch.setattr(module, "WORKER_STOP_TIMEOUT_S", 0.1)
    settings = Settings(data_dir=str(tmp_path), shutdown_timeout_s=60.0)
    key = key_pair(tmp_path / "server").public_key
    program = (sys.executable, "-c", SLOW_TO_DRAIN)
    home = asyncio.create_task(
        serve_workers(settings, "127.0.0.1", free_port(), [key], tmp_path, program)
    )
    while not (tmp_path / "ready").exists():
        assert not home.done(), home
        await asyncio.sleep(0.01)
    assert list(machine.SHM_DIR.glob(f"{shm_prefix(settings)}-*"))
    os.kill(os.getpid(), signal.SIGTERM)
    await home
    assert (tmp_path / "drained").exists(), "it was not killed before"
    assert not list(machine.SHM_DIR.glob(f"{shm_prefix(settings)}-*"))


def test_a_home_is_as_patient_as_the_setting_says_and_its_server_is_not(tmp_path: Path) -> None:
    """A step that lasts for seconds is a reason to go on elsewhere, but none to kill it."""
    settings = Settings(data_dir=str(tmp_path), worker_heartbeat_timeout_s=15.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slot = WorkerSlot("worker-0", "cpu", endpoint="tcp://127.0.0.1:7")
    home = WorkerHome(settings, [slot], WorkerGuard("", [], ""), context, SLEEP)
    addresses = [WorkerAddress("near", "ipc://near"), WorkerAddress("far", "tcp://far:7", "k" * 40)]
    engine = cast(Any, None)
    server = Resources(settings, addresses, engine, context, MetricsRegistry()).clients("g")
    assert silence_s(home._clients["worker-0"]) == silence_s(server["near"]) == 15.0
    assert silence_s(server["far"]) == REMOTE_SILENCE_S
    context.destroy()


def silence_s(client: ZmqWorkerClient) -> float:
    return client._connection._heartbeat_timeout_s


async def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
            await serve_workers(
                Settings(data_dir=str(tmp_path)), "127.0.0.1", port, ["k" * 40], tmp_path, SLEEP
            )


@pytest.mark.parametrize(
    ("settings", "port", "said"),
    [
        ({"workers": (WorkerSpec(endpoint="tcp://a:1", public_key="k" * 40),)}, 7000, "remove"),
        ({"num_workers": 2}, 65535, "choose a lower one"),
    ],
)
async def test_what_cannot_be_had_is_one_line_for_the_operator(
    tmp_path: Path, settings: dict[str, Any], port: int, said: str
) -> None:
    with pytest.raises(RegistryError, match=said):
        await serve_workers(
            Settings(data_dir=str(tmp_path), **settings),
            "127.0.0.1",
            port,
            ["k" * 40],
            tmp_path,
            SLEEP,
        )
