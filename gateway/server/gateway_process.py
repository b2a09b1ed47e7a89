"""One of several gateway processes: `python -m gateway.server.gateway_process NAME CONFIG`.

Stages 1 to 4, 9 and 10, on a listening socket of its own: all of them listen on one port
(SO_REUSEPORT), and the kernel spreads connections evenly over those that do. The fair queue and,
without a Redis, the counts of limits are the dispatcher process' (dispatcher_proxy.py,
cluster/remote_limits.py); the ledger is this process' own, under NAME. Started and ended by
process_group.py.

    up    parent, ledger replayed, dispatcher, registry view, ledger recovered, workers, HTTP
    down  not ready -> no new connections, running requests finish -> what is left is aborted
          -> ledger written -> workers and dispatcher let go
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop
import zmq
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine

from admin.app import AdminApp
from admin.web.headers import PREFIX
from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.cache.cache_handler import cache_socket_path
from gateway.cluster.dispatcher_client import SocketLink
from gateway.cluster.dispatcher_protocol import PROTOCOL_VERSION, Hello
from gateway.cluster.dispatcher_proxy import DispatcherProxy
from gateway.cluster.process_hub import HubLink
from gateway.cluster.remote_limits import RemoteStore
from gateway.dispatch.dispatcher import TICK_S
from gateway.http.http_server import HttpServer, listen, running
from gateway.ledger.ledger import Ledger
from gateway.ledger.ledger_recovery import owner_of
from gateway.limits import limit_stores
from gateway.limits.store import LimitStore
from gateway.pipeline.pipeline import Services
from gateway.server.process_setup import (
    ProcessConfig,
    dispatcher_socket,
    hub_socket,
    read_config,
    set_up_logging,
    settle,
)
from gateway.server.worker_launcher import EMBEDDER_ID, embedder_connection
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause, ZmqWorkerClient
from registry.session import make_engine

logger = logging.getLogger(__name__)

LEDGER_FLUSH_TIMEOUT_S = 10.0


class GatewayProcess:
    """The parts of one gateway process and the order in which they start and stop."""

    def __init__(
        self,
        name: str,
        config: ProcessConfig,
        engine: Engine,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        settings = self._settings = config.settings
        self._name = name
        self._port = config.port
        self._directory = Directory()
        self._registry = CollectorRegistry()
        self._link = SocketLink(dispatcher_socket(settings), settings.dispatcher_timeout_s)
        self._remote = RemoteStore(self._link)
        self._store: LimitStore = self._remote
        if settings.redis_url:
            self._store = limit_stores.open_store(settings, name)
        self._dispatcher = DispatcherProxy(
            settings,
            self._link,
            claim_orphan=lambda *finish: self._ledger.claim(*finish),
        )
        self._link.hello = lambda: Hello(
            PROTOCOL_VERSION,
            name,
            self._dispatcher.waiting_specs(),
            self._dispatcher.running_specs(),
            self._remote.open_reservations(),
            self._link.epoch,
            self._remote.settled(),
        )
        self._ledger = Ledger(
            engine,
            settings,
            self._directory.rates,
            self._dispatcher.ack_usage,
            gateway_id=name,
            on_recovered=lambda posting: self._poll.count_posting(posting),
        )
        self._poll = RegistryPoll(
            engine,
            settings.data_path,
            self._directory,
            settings.key_cache_poll_s,
            self._on_models,
            lambda request: None,
            self._store,
            takes_requests=False,
            gateway_id=owner_of(settings.data_path, name),
        )
        self._clients = {
            worker_id: ZmqWorkerClient(
                context, worker_id, endpoint, name, settings.worker_heartbeat_timeout_s
            )
            for worker_id, endpoint in config.workers
        }
        self._embedding = embedder_connection(settings, context, name)
        self._stop = asyncio.Event()
        self._hub = HubLink(
            name,
            self._registry,
            lambda: self._dispatcher.ready,
            self._on_worker_ended,
            self._on_orphaned,
        )
        self._http: HttpServer | None = None

    async def run(self) -> None:
        """Serve until a signal, or until the parent is gone."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        await self._hub.connect(hub_socket(self._settings))
        await self._ledger.start()
        async with (
            running(self._link.run(), self._tick()),
            limit_stores.sharing(self._store, self._settings, self._poll.poke),
        ):
            await self._poll.load()
            await self._ledger.recover()
            for client in self._clients.values():
                self._dispatcher.add_worker(client)
            if self._embedding is not None:
                self._embedding.start()
            async with running(self._poll.run()):
                with listen(self._settings.host, self._port, shared=True) as listener:
                    await self._serve(listener)
            await self._ledger.stop(LEDGER_FLUSH_TIMEOUT_S)
            self._dispatcher.close()
            if self._embedding is not None:
                self._embedding.close()
        self._hub.close()
        logger.info("stopped")

    async def _serve(self, listener: socket.socket) -> None:
        services = Services(
            settings=self._settings,
            directory=self._directory,
            dispatcher=self._dispatcher,
            ledger=self._ledger,
            metrics_registry=self._registry,
            limit_store=self._store,
            embedding_worker=self._embedding,
            cache_socket=cache_socket_path(self._settings.data_path, self._name),
            owner=owner_of(self._settings.data_path, self._name),
            scrape=self._hub.scrape,
        )
        http = self._http = HttpServer(services, {PREFIX: AdminApp})
        serving = http.start(listener)
        asked = asyncio.create_task(self._stop.wait())
        await asyncio.wait([asked, serving], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        logger.info("stopping")
        self._dispatcher.begin_drain()
        await http.drain(serving, self._dispatcher.abort_all)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatcher.tick()

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self._dispatcher.set_catalog(models)
        if self._embedding is not None:
            self._embedding.set_models(models)

    def _on_worker_ended(self, worker_id: str, reason: str, cause: LossCause) -> None:
        client = self._clients.get(worker_id)
        if client is not None:
            client.lose(f"its process ended: {reason}", cause)
        if worker_id == EMBEDDER_ID and self._embedding is not None:
            self._embedding.lose(f"its process ended: {reason}", cause)

    def _on_orphaned(self) -> None:
        """Nobody brings the others back: what runs is not waited for, its ledger is written."""
        logger.error("the main process is gone: stopping")
        self._hurry()
        self._stop.set()

    def _on_signal(self) -> None:
        """The first one stops in order, the second does not wait for requests."""
        if self._stop.is_set():
            self._hurry()
        self._stop.set()

    def _hurry(self) -> None:
        if self._http is not None:
            self._http.force_exit = True
        self._dispatcher.abort_all()


async def run(name: str, config: ProcessConfig) -> None:
    """The process' life. Raises what ends it."""
    set_up_logging(name)
    engine = make_engine(config.settings.registry_url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        await GatewayProcess(name, config, engine, context).run()
    finally:
        context.destroy(linger=0)
        engine.dispose()


if __name__ == "__main__":
    _, name_, config_ = sys.argv
    settle()
    uvloop.run(run(name_, read_config(config_)))
