"""The dispatcher as a process: `python -m gateway.server.dispatcher_process NAME CONFIG`.

`DispatcherParts` is what it is made of beside the one gateway, too (supervisor.py). As a process:

    standby --the lock is free--> active        (there is no way back: an active one ends)

Two of them run. The kernel gives the lock (flock) to one, and frees it in the moment in which that
one dies; the other looks every LOOK_S. With other servers (`dispatcher_address`), whoever has its
server's lock is a candidate, and one of them is elected by a lease in the database
(cluster/dispatcher_lease.py). Whoever becomes active takes the next epoch, reads the
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
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import Gauge
from sqlalchemy.exc import SQLAlchemyError

from admin.alerts.alerts import AlertWatch
from gateway.auth.directory import Directory
from gateway.cluster.dispatcher_client import REMOTE_SILENCE_S
from gateway.cluster.dispatcher_lease import DispatcherLease, RowLeads
from gateway.cluster.dispatcher_server import ORPHAN_HOLD_S, DispatcherServer
from gateway.cluster.local_dispatcher import DISPATCHER_ID
from gateway.cluster.operator_questions import QuestionForwarder
from gateway.cluster.process_hub import HubLink, WorkerHomes
from gateway.cluster.ticket_dispatcher import TicketDispatcher
from gateway.dispatch.counter_checkpoint import CounterCheckpoint, LeadFile, LeadStore
from gateway.dispatch.dispatcher import TICK_S
from gateway.dispatch.operator_handler import OperatorHandler
from gateway.dispatch.policy.fair_share import FairShare
from gateway.http.http_server import running
from gateway.ipc import ipc, remote
from gateway.ipc.control_socket import listening, operator_socket
from gateway.ledger.ledger_recovery import owner_of
from gateway.limits.store import MemoryStore
from gateway.metrics.metrics import Metrics
from gateway.metrics.state_metrics import StateCollector
from gateway.protocols import LedgerSnapshot
from gateway.server.process_parts import Resources, lose, resources
from gateway.server.process_setup import (
    ProcessConfig,
    dispatcher_socket,
    hub_socket,
    note_epoch,
    read_config,
    set_up_logging,
    settle,
    take_epoch,
)
from gateway.settings.cluster_settings import split_address
from gateway.state.sweeper import build_sweeper
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause

logger = logging.getLogger(__name__)

LOOK_S = 0.05
WORKERS_LOOK_S = 0.01
WORKERS_WAIT_S = 0.5
"""How long one that becomes active waits for workers: what runs there is then taken in."""
READ_AGAIN_S = (3.0, 12.0)
"""Pauses after which counts are compared with the ledger once more: what was being posted while the
last dispatcher died is in the database by then."""


class DispatcherParts:
    """The dispatcher with all that goes by it, in a process of its own or beside the one gateway
    (supervisor.py): connections, tenants' order on disk, alerts, and what operators ask."""

    def __init__(
        self,
        made_with: Resources,
        dispatcher: TicketDispatcher,
        share: FairShare,
        homes: WorkerHomes,
        directory: Directory,
        checks: Mapping[str, Callable[[], None]],
        tick: Callable[[], None],
        epoch: int,
        leads: LeadStore,
    ) -> None:
        """`epoch`: see process_setup.take_epoch. `share`: the dispatcher's; `leads` keeps it.
        `checks`: see OperatorHandler. `tick`: called every TICK_S."""
        settings = made_with.settings
        self._dispatcher = dispatcher
        self._homes = homes
        self._tick = tick
        self._socket = operator_socket(settings.data_path)
        self.share_file = CounterCheckpoint(leads, share, dispatcher.batch_share)
        self.clients = made_with.clients(DISPATCHER_ID, epoch)
        self._alerts = AlertWatch(made_with.engine, settings.alert_interval_s, made_with.registry)
        self._sweeper = build_sweeper(made_with.engine, settings)
        self.handler = OperatorHandler(
            dispatcher,
            lambda name: directory.find_model(name) is not None,
            settings.worker_labels,
            checks,
        )
        dispatcher.drains.on_restart = homes.restart

    def connect(self) -> None:
        """Begin to connect to the workers."""
        for client in self.clients.values():
            self._dispatcher.add_worker(client)

    def worker_ended(self, worker_id: str, reason: str, cause: LossCause) -> None:
        """A worker's process is gone."""
        lose(self.clients, worker_id, reason, cause)

    @contextlib.asynccontextmanager
    async def running(
        self, *work: Coroutine[Any, Any, None]
    ) -> AsyncIterator[list["asyncio.Task[None]"]]:
        """Answer operators and do all that goes on beside the requests, with this `work`."""
        own = (
            self.share_file.run(),
            self._alerts.run(),
            self._sweeper.run(),
            self._keep_ticking(),
        )
        async with (
            listening(self._socket, self.handler),
            running(*work, *own) as parts,
        ):
            yield parts

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick()
            for worker_id, client in self.clients.items():
                if client.hangs():
                    self._homes.kill(worker_id)


class Active:
    """The active dispatcher of several gateway processes."""

    def __init__(
        self,
        made_with: Resources,
        epoch: int,
        homes: WorkerHomes,
        lease: DispatcherLease | None = None,
        num_gateways: int = 0,
    ) -> None:
        """`lease`: where it was elected among those of several servers; `num_gateways`: how many
        of all of them live."""
        self._lease = lease
        self._tls = made_with.tls()
        settings = self._settings = made_with.settings
        directory, registry = Directory(), made_with.registry
        share = FairShare(settings.fair_share_max_lead_s)
        self._homes = homes
        self.dispatcher = TicketDispatcher(settings, share=share)
        leads: LeadStore = LeadFile(settings.data_path)
        if lease is not None:
            self.dispatcher.may_grant = lease.may_grant
            leads = RowLeads(made_with.engine, epoch)
        silence_s, orphans_wait_s = settings.dispatcher_timeout_s, math.inf
        if lease is not None:
            silence_s = min(silence_s, REMOTE_SILENCE_S)
            orphans_wait_s = settings.server_lost_after_s + 2 * ORPHAN_HOLD_S  # adopted by then
        self._store = MemoryStore()
        self._server = DispatcherServer(
            self.dispatcher,
            self._store,
            epoch,
            silence_s,
            time.monotonic,
            self._look_now,
            num_gateways or settings.gateway_processes,
            orphans_wait_s,
        )
        if lease is not None:
            self._server.on_later = lease.refused
        self._poll = made_with.poll(directory, self._store, self._on_models, self.dispatcher)
        checks = {"limits": self._store.check_integrity}
        about = (made_with, self.dispatcher, share, homes, directory)
        self.parts = DispatcherParts(*about, checks, self._tick, epoch, leads)
        self._server.handler = self.parts.handler
        self._look: asyncio.Task[None] | None = None
        self.dispatcher.add_swap_listener(Metrics(registry).on_swap)
        registry.register(StateCollector(self.dispatcher, _NoLedger(), lambda: 0))
        Gauge(
            "polyhost_dispatcher_epoch",
            "Which dispatcher since the data folder was made; rises when a standby takes over.",
            registry=registry,
        ).set(epoch)

    async def run(self, stop: asyncio.Event) -> None:
        """Dispatch until `stop`, or until another server's dispatcher has taken over."""
        parts = self.parts
        await parts.share_file.load()
        await self._poll.load()
        if self._lease is not None:  # The machine of the last one may be gone with its gateways.
            self._server.hold_open(await self._poll.read_open())
        parts.connect()
        await self._await_workers()
        async with (
            ipc.listening(dispatcher_socket(self._settings), self._server.new_channel),
            self._listening_for_others(),
            parts.running(self._poll.run(), self._read_again(), *self._keeping()) as tasks,
        ):
            logger.info("the dispatcher is running")
            asked = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([asked, *tasks], return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            self._server.close()
        for part in done - {asked}:
            part.result()  # Raises what ended it.
        await parts.share_file.write()
        self.dispatcher.close()

    def _keeping(self) -> list[Coroutine[Any, Any, None]]:
        """Ends when another server's dispatcher has taken over."""
        return [self._lease.lost()] if self._lease is not None else []

    @contextlib.asynccontextmanager
    async def _listening_for_others(self) -> AsyncIterator[None]:
        """For gateways of other servers."""
        if self._tls is None:
            yield
            return
        address = split_address(self._settings.dispatcher_address)
        async with remote.listening(address, self._tls, self._server.new_channel):
            yield

    async def _await_workers(self) -> None:
        clients = self.parts.clients.values()
        for _ in range(round(WORKERS_WAIT_S / WORKERS_LOOK_S)):
            if all(client.state == "connected" for client in clients):
                return
            await asyncio.sleep(WORKERS_LOOK_S)

    def _tick(self) -> None:
        self.dispatcher.tick()
        self._server.tick()

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
        self.dispatcher.set_catalog(models)
        self._homes.set_weights(weights)


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
            yield take_epoch(descriptor)
            return
        yield None
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def elected(
    made_with: Resources, config: ProcessConfig, epoch: int, stop: asyncio.Event
) -> AsyncIterator[tuple[int | None, DispatcherLease | None]]:
    """The epoch, and where there are other servers the lease by which this one's dispatcher is the
    active one; the epoch is the row's then, and not below `epoch`. None: told to stop before."""
    settings = made_with.settings
    if not settings.is_clustered:
        yield epoch, None
        return
    tls = made_with.tls()
    assert tls is not None
    server_id = owner_of(settings.data_path, "").rstrip("/")
    about = settings.registry_url, server_id, settings.dispatcher_address
    note = partial(note_epoch, Path(config.lock))
    with DispatcherLease(*about, on_epoch=note) as lease:
        async with listening(operator_socket(settings.data_path), QuestionForwarder(lease, tls)):
            taken = await lease.take(epoch, stop)
        if taken is None:
            yield None, None
            return
        keeping = asyncio.create_task(lease.keep())
        try:
            yield taken, lease
        finally:
            keeping.cancel()
            await lease.give_up()
        if keeping.done() and not keeping.cancelled():
            keeping.result()  # Raises what nobody foresaw.


async def run(name: str, config: ProcessConfig) -> None:
    """The process' life. Raises what ends it."""
    set_up_logging(name)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    active: list[Active] = []

    def worker_ended(worker_id: str, reason: str, cause: LossCause) -> None:
        for one in active:
            one.parts.worker_ended(worker_id, reason, cause)

    def is_ready() -> bool:
        return any(one.dispatcher.ready for one in active)

    with resources(config.settings, config.workers) as made_with:
        hub = HubLink(name, made_with.registry, is_ready, worker_ended, stop.set)
        await hub.connect(hub_socket(config.settings))
        try:
            await _warm_up(made_with)
            async with my_turn(Path(config.lock), stop) as epoch:
                if epoch is not None:
                    async with elected(made_with, config, epoch, stop) as (epoch, lease):
                        if epoch is not None:
                            about = (name, epoch)
                            logger.info("this dispatcher is active now name=%s epoch=%d", *about)
                            num_gateways = await lease.num_gateways() if lease else 0
                            one = Active(made_with, epoch, hub, lease, num_gateways)
                            active.append(one)
                            await one.run(stop)
        finally:
            hub.close()


async def _warm_up(made_with: Resources) -> None:
    """Read once what an active one reads first: the second time is several times as fast."""
    try:
        await made_with.poll(Directory(), MemoryStore(), lambda models, weights: None).load()
    except SQLAlchemyError as error:
        logger.warning("cannot read the registry database, trying again: %s", error)


if __name__ == "__main__":
    _, name_, config_ = sys.argv
    settle()
    uvloop.run(run(name_, read_config(config_)))
