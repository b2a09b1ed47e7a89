"""The dispatcher as a process: `python -m gateway.server.dispatcher_process NAME CONFIG`.

    standby --the lock is free--> active        (there is no way back: an active one ends)

Two of them run. The kernel gives the lock (flock) to one, and frees it in the moment in which that
one dies; the other looks every LOOK_S. Whoever becomes active takes the next epoch, reads the
registry, the counts of limits as the ledger knows them and what tenants were ahead by
(counter_checkpoint.py), connects to the workers, and then listens for gateway processes, which tell
it the rest (dispatcher_protocol.py). A load that was under way is the worker's and goes on: its
statuses say so.

What a change of dispatcher forgets: predictions of what requests use, the decisions and the hour of
residency that were recorded, who was served lately, strikes of models that crashed workers, how
loads were budgeted, and counts by the minute.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import uvloop
import zmq
from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from admin.alerts.alerts import AlertWatch
from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.cluster.dispatcher_server import DispatcherServer
from gateway.cluster.local_dispatcher import DISPATCHER_ID
from gateway.cluster.process_hub import HubLink
from gateway.cluster.ticket_dispatcher import TicketDispatcher
from gateway.dispatch.counter_checkpoint import CounterCheckpoint
from gateway.dispatch.dispatcher import TICK_S
from gateway.dispatch.operator_handler import OperatorHandler
from gateway.dispatch.policy.fair_share import FairShare
from gateway.http.http_server import running
from gateway.ipc import ipc
from gateway.ipc.control_socket import listening, operator_socket
from gateway.limits.store import MemoryStore
from gateway.metrics.metrics import Metrics, StateCollector
from gateway.protocols import LedgerSnapshot
from gateway.server.process_setup import (
    ProcessConfig,
    dispatcher_socket,
    hub_socket,
    read_config,
    set_up_logging,
    settle,
)
from gateway.state.sweeper import build_sweeper
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause, ZmqWorkerClient
from registry.session import make_engine

logger = logging.getLogger(__name__)

LOOK_S = 0.05
WORKERS_LOOK_S = 0.01
WORKERS_WAIT_S = 0.5
"""How long one that becomes active waits for workers: what runs there is then taken in."""
READ_AGAIN_S = (3.0, 12.0)
"""Pauses after which counts are compared with the ledger once more: what was being posted while the
last dispatcher died is in the database by then."""


class Active:
    """The active dispatcher's parts."""

    def __init__(
        self,
        config: ProcessConfig,
        epoch: int,
        engine: Engine,
        context: zmq.Context[zmq.Socket[bytes]],
        registry: CollectorRegistry,
    ) -> None:
        settings = self._settings = config.settings
        self._directory = Directory()
        share = FairShare(settings.fair_share_max_lead_s)
        self._share_file = CounterCheckpoint(settings.data_path, share)
        self._dispatcher = TicketDispatcher(settings, share=share)
        self._store = MemoryStore()
        self._server = DispatcherServer(
            self._dispatcher,
            self._store,
            epoch,
            settings.dispatcher_timeout_s,
            time.monotonic,
            self._look_now,
            settings.gateway_processes,
        )
        self._poll = RegistryPoll(
            engine,
            settings.data_path,
            self._directory,
            settings.key_cache_poll_s,
            self._on_models,
            self._dispatcher.fulfil,
            self._store,
            on_reserved=self._dispatcher.set_reserved_shares,
            on_orders=self._dispatcher.drains.set_orders,
        )
        self.clients = {
            worker_id: ZmqWorkerClient(
                context,
                worker_id,
                endpoint,
                DISPATCHER_ID,
                settings.worker_heartbeat_timeout_s,
                observes=True,
            )
            for worker_id, endpoint in config.workers
        }
        self._alerts = AlertWatch(engine, settings.alert_interval_s, registry)
        self._sweeper = build_sweeper(engine, settings)
        self._look: asyncio.Task[None] | None = None
        self.weights: dict[str, int] = {}
        self.on_weights: Callable[[], None] = lambda: None
        self._dispatcher.drains.on_restart = lambda worker_id: self.on_restart(worker_id)
        self.on_restart: Callable[[str], None] = lambda worker_id: None
        self.on_hangs: Callable[[str], None] = lambda worker_id: None
        self._dispatcher.add_swap_listener(Metrics(registry).on_swap)
        registry.register(StateCollector(self._dispatcher, _NoLedger(), lambda: 0))
        Gauge(
            "polyhost_dispatcher_epoch",
            "Which dispatcher since the data folder was made; rises when a standby takes over.",
            registry=registry,
        ).set(epoch)

    @property
    def ready(self) -> bool:
        """A request could be granted now."""
        return self._dispatcher.ready

    async def run(self, stop: asyncio.Event) -> None:
        """Dispatch until `stop`."""
        settings = self._settings
        await self._share_file.load()
        await self._poll.load()
        for client in self.clients.values():
            self._dispatcher.add_worker(client)
        await self._await_workers()
        handler = OperatorHandler(
            self._dispatcher,
            lambda name: self._directory.find_model(name) is not None,
            settings.worker_labels,
        )
        async with (
            listening(operator_socket(settings.data_path), handler),
            ipc.listening(dispatcher_socket(settings), self._server.new_channel),
            running(
                self._poll.run(),
                self._share_file.run(),
                self._tick(),
                self._read_again(),
                self._alerts.run(),
                self._sweeper.run(),
            ) as parts,
        ):
            logger.info("the dispatcher is running")
            asked = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([asked, *parts], return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            self._server.close()
        for part in done - {asked}:
            part.result()  # Raises what ended it.
        await self._share_file.write()
        self._dispatcher.close()

    async def _await_workers(self) -> None:
        for _ in range(round(WORKERS_WAIT_S / WORKERS_LOOK_S)):
            if all(client.state == "connected" for client in self.clients.values()):
                return
            await asyncio.sleep(WORKERS_LOOK_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatcher.tick()
            self._server.tick()
            for client in self.clients.values():
                if client.hangs():
                    self.on_hangs(client.worker_id)

    async def _read_again(self) -> None:
        for pause_s in READ_AGAIN_S:
            await asyncio.sleep(pause_s)
            if await self._read(again=True):
                self._server.read_again()
        await asyncio.Event().wait()

    async def _read(self, *, again: bool) -> bool:
        try:
            await self._poll.poll(again=again)
        except SQLAlchemyError as error:
            logger.warning("cannot read the registry database, trying again: %s", error)
            return False
        return True

    def _look_now(self) -> None:
        """A gateway process has read of a model that is not known here."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        while self._server.num_held:
            num_behind = self._server.num_behind
            await self._read(again=False)
            self._server.caught_up(num_behind)

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self.weights = weights
        self._dispatcher.set_catalog(models)
        self.on_weights()


class _NoLedger:
    """Implements services.LedgerFigures: each gateway process tells of its own."""

    def snapshot(self) -> LedgerSnapshot:
        """Nothing."""
        return LedgerSnapshot(0, 0.0, 0, 0, 0, 0, 0)


@contextlib.asynccontextmanager
async def my_turn(lock: Path, stop: asyncio.Event) -> AsyncIterator[int | None]:
    """Wait for the lock and hold it; the epoch that comes with it. None: told to stop before."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        while not stop.is_set():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(LOOK_S)
                continue
            text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            epoch = (int(text) if text.isdigit() else 0) + 1
            os.pwrite(descriptor, str(epoch).encode(), 0)
            yield epoch
            return
        yield None
    finally:
        os.close(descriptor)


async def run(name: str, config: ProcessConfig) -> None:
    """The process' life. Raises what ends it."""
    set_up_logging(name)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    registry = CollectorRegistry()
    active: list[Active] = []

    def worker_ended(worker_id: str, reason: str, cause: LossCause) -> None:
        for one in active:
            _lose(one.clients.items(), worker_id, reason, cause)

    hub = HubLink(name, registry, lambda: any(one.ready for one in active), worker_ended, stop.set)
    await hub.connect(hub_socket(config.settings))
    engine = make_engine(config.settings.registry_url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        await _warm_up(config, engine)
        async with my_turn(Path(config.lock), stop) as epoch:
            if epoch is not None:
                logger.info("this dispatcher is active now name=%s epoch=%d", name, epoch)
                one = Active(config, epoch, engine, context, registry)
                one.on_weights = lambda: hub.send_weights(one.weights)
                one.on_restart = hub.restart_worker
                one.on_hangs = hub.kill_worker
                active.append(one)
                await one.run(stop)
    finally:
        context.destroy(linger=0)
        engine.dispose()
        hub.close()


async def _warm_up(config: ProcessConfig, engine: Engine) -> None:
    """Read once what an active one reads first: the second time is several times as fast."""
    settings = config.settings
    for_nobody = RegistryPoll(
        engine,
        settings.data_path,
        Directory(),
        settings.key_cache_poll_s,
        lambda models, weights: None,
        lambda request: None,
        MemoryStore(),
        takes_requests=False,
    )
    try:
        await for_nobody.load()
    except SQLAlchemyError as error:
        logger.warning("cannot read the registry database, trying again: %s", error)


def _lose(
    clients: Iterable[tuple[str, ZmqWorkerClient]], worker_id: str, reason: str, cause: LossCause
) -> None:
    for name, client in clients:
        if name == worker_id:
            client.lose(f"its process ended: {reason}", cause)


if __name__ == "__main__":
    _, name_, config_ = sys.argv
    settle()
    uvloop.run(run(name_, read_config(config_)))
