"""A server without a worker of its own, and another "machine" with two: what a user sees is the
same as with workers on the server's machine."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.processes import below
from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.server import child_pids, polyhost, serving
from tests.e2e.test_workers import check, serving_workers, states, streams, undisturbed

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, slots=True)
class Home:
    """`polyhost workers serve` on a data folder of its own."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def pid_of(self, worker: str) -> int:
        """Its process: the last that the log says was started."""
        told = re.findall(rf"process started name={worker} pid=(\d+)", self.log.read_text())
        return int(told[-1])


def free_ports() -> int:
    """The first of two that nobody has."""
    for first in range(21_000, 31_000, 2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", first))
                other.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            return first
    raise OSError("no two free ports")


@pytest.fixture(scope="module")
def home_and_server(
    prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Home, Server]]:
    """Memory for two of the three models on each worker."""
    root = tmp_path_factory.mktemp("far")
    data_dir = prepared.copy_to(root)
    key = polyhost(data_dir, "workers", "key").stdout.strip()
    address = f"127.0.0.1:{free_ports()}"
    settings = {
        "POLYHOST_DATA_DIR": str(root / "home"),
        "POLYHOST_NUM_WORKERS": "2",
        "POLYHOST_DEVICE_BUDGET_BYTES": str(18 << 20),
        "POLYHOST_HOST_TIER_BYTES": str(64 << 20),
        "POLYHOST_WORKER_HEARTBEAT_TIMEOUT_S": "3",
    }
    words = ["workers", "serve", "--listen", address, f"--server-key={key}"]
    log = root / "home.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", *words, "--packs", str(data_dir / "packs")],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=out,
        )
    with process:
        try:
            assert process.stdout is not None
            tables = b"".join(iter(process.stdout.readline, b"\n")), process.stdout.readline()
            told = [process.stdout.readline() for _ in range(6)]
            file = root / "polyhost.toml"
            file.write_bytes(b"".join([*tables, *told]))
            limits = {"POLYHOST_QUEUE_TIMEOUT_S": "120", "POLYHOST_WORKER_DRAIN_TIMEOUT_S": "0.5"}
            with serving(data_dir, "--config", str(file), **limits) as server:
                server.wait_until(lambda: len(serving_workers(server)) == 2)
                assert child_pids(server, "engine.worker.main") == []
                yield Home(process, log), server
                assert server.stop() == 0
        finally:
            children = below(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


async def test_streams_outlive_a_far_worker_that_dies(
    prepared: Prepared, home_and_server: tuple[Home, Server]
) -> None:
    home, server = home_and_server
    expected = await undisturbed(server, prepared.keys["acme"])
    for worker in ("worker-0", "worker-1"):
        async with streams(server, prepared.keys["killed"]) as seen:
            os.kill(home.pid_of(worker), signal.SIGKILL)
        check(server, "killed", seen, expected)
    server.wait_until(lambda: len(serving_workers(server)) == 2)


async def test_a_far_worker_that_hangs_is_left_and_its_home_replaces_it(
    prepared: Prepared, home_and_server: tuple[Home, Server]
) -> None:
    home, server = home_and_server
    expected = await undisturbed(server, prepared.keys["acme"])
    hung = home.pid_of("worker-1")
    async with streams(server, prepared.keys["gone"]) as seen:
        os.kill(hung, signal.SIGSTOP)
    check(server, "gone", seen, expected)
    server.wait_until(lambda: home.pid_of("worker-1") != hung)
    server.wait_until(lambda: len(serving_workers(server)) == 2)


async def test_far_workers_restart_one_after_another_under_load(
    prepared: Prepared, home_and_server: tuple[Home, Server]
) -> None:
    home, server = home_and_server
    expected = await undisturbed(server, prepared.keys["acme"])
    before = [home.pid_of(worker) for worker in ("worker-0", "worker-1")]
    async with streams(server, prepared.keys["crowd"]) as seen:
        assert polyhost(server.data_dir, "workers", "restart", "--all").returncode == 0
        await asyncio.sleep(1.0)
    check(server, "crowd", seen, expected)
    server.wait_until(
        lambda: not {home.pid_of(worker) for worker in ("worker-0", "worker-1")} & set(before)
    )
    server.wait_until(lambda: len(serving_workers(server)) == 2)
    assert {row["state"] for row in states(server).values()} == {"serving"}
