"""Connections by tcp: encrypted, and given up as soon as ZeroMQ's heartbeats find them dead."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import zmq

from engine.protocol import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from engine.worker.worker_link import WorkerLink
from gateway.workers.curve_keys import KeyPair, WorkerAddress, key_pair
from gateway.workers.worker_client import ZmqWorkerClient
from tests.engine.worker_rig import worker_config
from tests.gateway.workers.test_worker_client import (
    Context,
    Peer,
    Recorder,
    on_both_loops,
)

LONG_S = 600.0


class FarPeer(Peer):
    """A worker's socket on a port of this machine."""

    def __init__(self, context: Context, keys: KeyPair) -> None:
        self._keys = keys
        super().__init__(context, "")

    @property
    def port(self) -> int:
        return self._port

    def _bind(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret_key.encode())
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._port = socket.bind_to_random_port("tcp://127.0.0.1")
        return socket


class Cable(asyncio.Protocol):
    """One end of a connection that is passed on."""

    def __init__(self, line: "Line", other: "Cable | None" = None) -> None:
        self._line = line
        self._other = other
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._line.ends.append(self._transport)
        if self._other is None:
            self._line.connect(self)

    def plug(self, other: "Cable") -> None:
        self._other = other
        for data in self._early:
            other.pass_on(data)

    def data_received(self, data: bytes) -> None:
        self._line.seen += data
        if self._other is None:
            self._early.append(data)
        else:
            self._other.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        if self._transport is not None and not self._line.is_cut:
            self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.close()


class Line:
    """Passes connections on to a port. Cut, it takes what is sent and tells nobody."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []
        self.ends: list[asyncio.Transport] = []
        self.is_cut = False
        self.seen = b""

    def connect(self, near: Cable) -> None:
        self._tasks.append(asyncio.create_task(self._connect(near)))

    async def _connect(self, near: Cable) -> None:
        loop = asyncio.get_running_loop()
        _, far = await loop.create_connection(lambda: Cable(self, near), "127.0.0.1", self._port)
        near.plug(far)

    async def close(self) -> None:
        for end in self.ends:
            end.abort()
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def far(context: Context, folder: Path) -> AsyncIterator[tuple[FarPeer, Line, Recorder]]:
    """A worker and a client that is connected to it over a line."""
    there, here = key_pair(folder / "there"), key_pair(folder / "here")
    peer, heard = FarPeer(context, there), Recorder()
    line = Line(peer.port)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Cable(line), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    address = WorkerAddress("w", f"tcp://127.0.0.1:{port}", there.public_key)
    client = ZmqWorkerClient(context, address, "gateway", LONG_S, keys=here)
    serving = asyncio.create_task(peer.serve())
    client.start(heard)
    try:
        await heard.saw("connected")
        yield peer, line, heard
    finally:
        client.close()
        serving.cancel()
        peer.socket.close(linger=0)
        server.close()
        await line.close()


@on_both_loops
async def test_nothing_is_readable_on_the_way(context: Context, folder: Path) -> None:
    async with far(context, folder) as (_, line, _):
        assert b"CURVE" in line.seen
        assert b"Hello" not in line.seen
        assert b"gateway" not in line.seen


@on_both_loops
async def test_a_cut_link_is_noticed_though_nobody_says_so(context: Context, folder: Path) -> None:
    async with far(context, folder) as (_, line, heard):
        line.is_cut = True
        await heard.saw("lost")
        assert heard.events[-1] == "lost e1: the connection to its machine broke (silence)"
        line.is_cut = False
        await heard.saw("connected", times=2)


def test_a_worker_of_another_machine_needs_this_servers_keys(context: Context) -> None:
    address = WorkerAddress("w", "tcp://127.0.0.1:7", "k" * 40)
    with pytest.raises(ValueError, match="worker w needs this server's keys"):
        ZmqWorkerClient(context, address, "g", LONG_S)


@pytest.mark.parametrize(
    ("listed", "allowed", "said"),
    [
        ("worker", "other", "refuses this server: start it with --server-key '{server}', too"),
        ("other", "server", "did not prove the public_key in polyhost.toml"),
    ],
)
async def test_a_wrong_key_is_said_once_at_both_ends(
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    listed: str,
    allowed: str,
    said: str,
) -> None:
    keys = {name: key_pair(tmp_path / name) for name in ("worker", "server", "other")}
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    config = worker_config(
        str(tmp_path),
        endpoint=endpoint,
        secret_key=keys["worker"].secret_key,
        allowed_keys=[keys[allowed].public_key],
    )
    link = WorkerLink(context, config)
    address = WorkerAddress("w", endpoint, keys[listed].public_key)
    client = ZmqWorkerClient(context, address, "gateway", LONG_S, keys=keys["server"])
    client.start(Recorder())
    wanted = said.format(server=keys["server"].public_key)
    seen: list[int] = []
    failed = client._wire._failed

    def count(event: int) -> None:
        seen.append(event)
        failed(event)

    monkeypatch.setattr(client._wire, "_failed", count)
    try:
        async with asyncio.timeout(20):
            while len(seen) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        client.close()
        link.close(0.0)
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert told.startswith(f"worker=w at {endpoint} {wanted}")
    refused = [record for record in caplog.records if "key refused" in record.getMessage()]
    assert bool(refused) == (allowed == "other")
