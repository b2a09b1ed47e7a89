"""`polyhost workers serve`: keeps this machine's workers alive for servers on other machines.

    server's machine: dispatcher, gateways ==tcp, CURVE==> worker process <-child- this process

The workers are those that a server with these settings would start here (worker_slots.py). They
listen by tcp, one port each, and only servers with an allowed public key get an answer. A worker
that ends is started again, and one that hangs is killed: this process connects to each as a gateway
that asks for nothing. Which models they load, and which requests they run, their server says.

    up    lock of the data folder, key pair, workers
    down  SIGTERM or SIGINT: running requests may go on for shutdown_timeout_s
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import zmq
from prometheus_client import CollectorRegistry

from engine.protocol import Refused, TokenDelta, WorkerStatus
from gateway.http.http_server import listen
from gateway.server.child_process import WORKER_COMMAND, WORKER_STOP_TIMEOUT_S
from gateway.server.local_homes import LocalHomes, slots_here
from gateway.server.process_setup import on_stop_signals, set_up_logging
from gateway.server.worker_launcher import WorkerGuard, remove_host_tier, worker_addresses
from gateway.server.worker_slots import NoSuchWorkers, WorkerSlot
from gateway.settings.settings import Settings
from gateway.settings.worker_settings import MAX_PORT
from gateway.workers.curve_keys import key_pair
from gateway.workers.worker_client import LossCause, ZmqWorkerClient
from registry import locks

logger = logging.getLogger(__name__)

WATCH_S = 0.25


async def serve_workers(
    settings: Settings,
    host: str,
    port: int,
    server_keys: Sequence[str],
    packs_dir: Path,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> None:
    """Run until SIGTERM or SIGINT. The first worker listens on `port` of this machine's address
    `host`, the next on the port after it. `packs_dir` has the packs, by the names that they have in
    the server's folder.

    Raises NoSuchWorkers, LockBusy where a server runs on the data folder, KeyFileError, OSError.
    """
    set_up_logging()
    slots = [
        replace(slot, endpoint=f"tcp://{_in_url(host)}:{port + index}")
        for index, slot in enumerate(await asyncio.to_thread(_own_slots, settings))
    ]
    if port + len(slots) - 1 > MAX_PORT:
        raise NoSuchWorkers(f"{len(slots)} workers need a port each: choose a lower one")
    with locks.hold(settings.data_path / locks.SERVER_LOCK):
        for index in range(len(slots)):
            with listen(host, port + index):
                pass  # It is free: said here, for a worker would say it only after its imports.
        keys = await asyncio.to_thread(key_pair, settings.data_path)
        guard = WorkerGuard(keys.secret_key, [*server_keys, keys.public_key], str(packs_dir))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            home = WorkerHome(settings, slots, guard, context, worker_command)
            print(_tables(slots, keys.public_key), flush=True)
            await home.run()
        finally:
            context.destroy(linger=0)
            remove_host_tier(settings)


class WorkerHome:
    """The workers of this machine, and a connection to each."""

    def __init__(
        self,
        settings: Settings,
        slots: Sequence[WorkerSlot],
        guard: WorkerGuard,
        context: zmq.Context[zmq.Socket[bytes]],
        worker_command: Sequence[str],
    ) -> None:
        self._is_stopping = asyncio.Event()
        self._shutdown_timeout_s = settings.shutdown_timeout_s
        about = settings, slots, worker_command, self._on_exit, CollectorRegistry()
        self._homes = LocalHomes(*about, guard=guard)
        keys = key_pair(settings.data_path)
        silence_s = settings.worker_heartbeat_timeout_s
        self._clients = {
            address.worker_id: ZmqWorkerClient(
                context,
                address._replace(public_key=keys.public_key),
                "home",
                silence_s,
                keys=keys,
            )
            for address in worker_addresses(settings, slots)
        }

    async def run(self) -> None:
        """Keep the workers alive until a signal. Raises OSError."""
        for client in self._clients.values():
            client.start(_Ignoring())
        living = asyncio.create_task(self._homes.run())
        watching = asyncio.create_task(self._watch())
        asked = asyncio.create_task(self._is_stopping.wait())
        try:
            with on_stop_signals(self._is_stopping.set):
                parts = [living, watching, asked]
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            logger.info("stopping")
        finally:
            watching.cancel()
            asked.cancel()
            for client in self._clients.values():
                client.close()
            await self._homes.stop(self._shutdown_timeout_s + WORKER_STOP_TIMEOUT_S)
        for part in done - {asked}:
            part.result()  # Raises what ended it.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for worker_id, client in self._clients.items():
                if client.hangs():
                    self._homes.kill(worker_id)

    def _on_exit(self, worker_id: str, reason: str, cause: LossCause) -> None:
        logger.warning("worker ended worker=%s: %s", worker_id, reason)
        client = self._clients.get(worker_id)
        if client is not None:
            client.lose(f"its process ended: {reason}", cause)


class _Ignoring:
    """Implements WorkerListener for whoever only wants to know that a worker answers."""

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """It answers."""

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """It lives."""

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """None come: nothing is submitted from here."""

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """None come, either."""

    def on_lost(self, worker_id: str, epoch: str, reason: str, cause: LossCause) -> None:
        """Its process is started again where it has ended."""


def _own_slots(settings: Settings) -> list[WorkerSlot]:
    """Raises NoSuchWorkers."""
    if any(spec.endpoint for spec in settings.workers):
        raise NoSuchWorkers(
            "polyhost.toml lists workers of other machines (endpoint): `polyhost workers serve` "
            "takes the settings of this machine; remove them"
        )
    return slots_here(settings)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tables(slots: Sequence[WorkerSlot], public_key: str) -> str:
    """What the server's polyhost.toml needs."""
    tables = [
        f'[[workers]]\nendpoint = "{slot.endpoint}"\npublic_key = "{public_key}"' for slot in slots
    ]
    return "\n\n".join(["# for polyhost.toml of the server:", *tables])
