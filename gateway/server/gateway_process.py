"""One of several gateway processes: `python -m gateway.server.gateway_process NAME CONFIG`.

Stages 1 to 4, 9 and 10, on a listening socket of its own: all of them listen on one port
(SO_REUSEPORT), and the kernel spreads connections evenly over those that do. The fair queue and,
without a Redis, the counts of limits are the dispatcher process' (dispatcher_proxy.py,
cluster/remote_limits.py); the ledger is this process' own, under NAME. Started and ended by
process_group.py. `GatewayParts` is what the gateway of a server of one process is, too
(supervisor.py).

    up    parent, ledger replayed, dispatcher, registry view, ledger recovered, workers, HTTP
    down  not ready -> no new connections, running requests finish -> what is left is aborted
          -> ledger written -> workers and dispatcher let go
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import uvloop

from admin.app import AdminApp
from admin.web.headers import PREFIX
from gateway.auth.directory import Directory
from gateway.cache.cache_handler import cache_socket_path
from gateway.cluster.dispatcher_client import SocketLink
from gateway.cluster.dispatcher_places import DispatcherPlaces, DispatcherWatch
from gateway.cluster.dispatcher_protocol import PROTOCOL_VERSION, Hello
from gateway.cluster.dispatcher_proxy import DispatcherProxy
from gateway.cluster.gateway_lease import Adoption, GatewayLease
from gateway.cluster.process_hub import HubLink
from gateway.cluster.remote_limits import RemoteStore
from gateway.dispatch.dispatcher import TICK_S, Dispatcher
from gateway.http.http_server import HttpServer, listen, running
from gateway.ledger.ledger import Ledger
from gateway.ledger.ledger_recovery import owner_of
from gateway.limits import limit_stores
from gateway.limits.store import LimitStore
from gateway.pipeline.pipeline import Services
from gateway.server.process_parts import Resources, lose, resources
from gateway.server.process_setup import (
    ProcessConfig,
    dispatcher_socket,
    hub_socket,
    on_stop_signals,
    read_config,
    set_up_logging,
    settle,
)
from gateway.server.worker_launcher import EMBEDDER_ID, embedder_connection
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause

logger = logging.getLogger(__name__)

LEDGER_FLUSH_TIMEOUT_S = 10.0


class GatewayParts:
    """One gateway, in a process of its own or beside the dispatcher (supervisor.py): its ledger,
    its view of the registry, its connections to workers, and HTTP."""

    def __init__(
        self,
        name: str,
        made_with: Resources,
        requests: DispatcherProxy,
        store: LimitStore,
        dispatcher: Dispatcher | None = None,
        on_weights: Callable[[dict[str, int]], None] = lambda weights: None,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """`requests`: its way to the dispatcher; `dispatcher`: that, where it is in this process.
        `on_weights`: told the bytes of each ready model's weights. `scrape`: the metrics of all
        processes, where there are several."""
        settings = self._settings = made_with.settings
        self._name = name
        self._registry = made_with.registry
        self._on_weights = on_weights
        self._scrape = scrape
        self.requests = requests
        self.store = store
        self.directory = Directory()
        self.ledger = Ledger(
            made_with.engine,
            settings,
            self.directory.rates,
            requests.ack_usage,
            gateway_id=name,
            on_recovered=lambda posting: self.poll.count_posting(posting),
        )
        owner = owner_of(settings.data_path, name)
        self.poll = made_with.poll(self.directory, store, self._on_models, dispatcher, owner)
        self._clients = made_with.clients(name)
        self.adopt = Adoption(
            self.ledger.adopt,
            self.poll.carry,
            requests.adopt_usage,
            settings.ledger_recovery_wait_s,
        )
        self._embedding = embedder_connection(settings, made_with.context, name)
        self._stop = asyncio.Event()
        self._http: HttpServer | None = None

    async def load(self) -> None:
        """The registry, and what an earlier life left open; its ledger runs."""
        await self.poll.load()
        await self.ledger.recover()
        services = Services(
            settings=self._settings,
            directory=self.directory,
            dispatcher=self.requests,
            ledger=self.ledger,
            metrics_registry=self._registry,
            limit_store=self.store,
            embedding_worker=self._embedding,
            cache_socket=cache_socket_path(self._settings.data_path, self._name),
            owner=owner_of(self._settings.data_path, self._name),
            scrape=self._scrape,
        )
        self._http = HttpServer(services, {PREFIX: AdminApp})

    def connect(self) -> None:
        """Begin to connect to the workers."""
        for client in self._clients.values():
            self.requests.add_worker(client)
        if self._embedding is not None:
            self._embedding.start()

    async def serve(
        self, listener: socket.socket, parts: Sequence["asyncio.Task[None]"] = ()
    ) -> "list[asyncio.Task[None]]":
        """Until it is told to stop, or HTTP or one of the `parts` has ended: these are returned.
        Then running requests have their time to end."""
        assert self._http is not None
        serving = self._http.start(listener)
        asked = asyncio.create_task(self._stop.wait())
        await asyncio.wait([asked, serving, *parts], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        is_told = self._stop.is_set()
        ended = [] if is_told else [task for task in (serving, *parts) if task.done()]
        logger.info("stopping")
        self.requests.begin_drain()
        await self._http.drain(serving, self.requests.abort_all)
        return ended

    async def close(self) -> None:
        """Write the ledger, then let workers and dispatcher go; the last acknowledgements linger a
        moment and get through."""
        await self.ledger.stop(LEDGER_FLUSH_TIMEOUT_S)
        self.requests.close()
        if self._embedding is not None:
            self._embedding.close()

    def stop(self, *, hurry: bool = False) -> None:
        """In order; the second time, or in a `hurry`, running requests are not waited for."""
        if hurry or self._stop.is_set():
            if self._http is not None:
                self._http.force_exit = True
            self.requests.abort_all()
        self._stop.set()

    def worker_ended(self, worker_id: str, reason: str, cause: LossCause) -> None:
        """A worker's process is gone."""
        lose(self._clients, worker_id, reason, cause)
        if worker_id == EMBEDDER_ID and self._embedding is not None:
            self._embedding.lose(f"its process ended: {reason}", cause)

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self.requests.set_catalog(models)
        self._on_weights(weights)
        if self._embedding is not None:
            self._embedding.set_models(models)


class GatewayProcess:
    """One of several: what a gateway has beside its parts, and the order of start and stop."""

    def __init__(self, name: str, made_with: Resources, port: int) -> None:
        settings = self._settings = made_with.settings
        self._port = port
        places = DispatcherPlaces(
            dispatcher_socket(settings),
            settings.dispatcher_address,
            settings.dispatcher_peers,
            made_with.tls(),
        )
        link = self._link = SocketLink(places, settings.dispatcher_timeout_s)
        remote = RemoteStore(link)
        requests = self._requests = DispatcherProxy(
            settings, link, claim_orphan=lambda *finish: self._gateway.ledger.claim(*finish)
        )
        owner = owner_of(settings.data_path, name)  # Other servers have a gateway-0, too.
        link.hello = lambda: Hello(
            PROTOCOL_VERSION,
            owner,
            requests.waiting_specs(),
            requests.running_specs(),
            remote.open_reservations(),
            link.epoch,
            remote.settled(),
        )
        self._hub = HubLink(
            name,
            made_with.registry,
            lambda: requests.ready,
            lambda *ended: self._gateway.worker_ended(*ended),
            self._on_orphaned,
        )
        self._lease: GatewayLease | None = None
        if settings.is_clustered:
            about = (settings.registry_url, owner, settings.server_lost_after_s)
            self._lease = GatewayLease(
                *about, lambda lost: self._gateway.adopt(lost), requests.is_gone
            )
        store = limit_stores.open_store(settings, name) if settings.redis_url else remote
        self._gateway = GatewayParts(name, made_with, requests, store, scrape=self._hub.scrape)

    async def run(self) -> None:
        """Serve until a signal, or until the parent is gone. Raises what ended one of its parts."""
        gateway = self._gateway
        await self._hub.connect(hub_socket(self._settings))
        await gateway.ledger.start()
        async with (
            running(self._link.run(), self._tick(), *self._watches()) as work,
            limit_stores.sharing(gateway.store, self._settings, gateway.poll.poke),
        ):
            await gateway.load()
            gateway.connect()
            leases = [] if self._lease is None else [self._lease.run()]
            async with running(gateway.poll.run(), *leases) as parts:
                with listen(self._settings.host, self._port, shared=True) as listener:
                    ended = await gateway.serve(listener, [*work, *parts])
            await gateway.close()
        if self._lease is not None:
            await self._lease.close()
        self._hub.close()
        for part in ended:
            part.result()  # Raises what ended the process.
        logger.info("stopped")

    def on_signal(self) -> None:
        """The first one stops in order, the second does not wait for requests."""
        self._gateway.stop()

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        """What else goes on where other servers may have the dispatcher."""
        settings = self._settings
        if not settings.is_clustered:
            return []
        return [DispatcherWatch(settings.registry_url, self._link.moved).run()]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._requests.tick()

    def _on_orphaned(self) -> None:
        """Nobody brings the others back: what runs is not waited for, its ledger is written."""
        logger.error("the main process is gone: stopping")
        self._gateway.stop(hurry=True)


async def run(name: str, config: ProcessConfig) -> None:
    """The process' life. Raises what ends it."""
    set_up_logging(name)
    with resources(config.settings, config.workers) as made_with:
        process = GatewayProcess(name, made_with, config.port)
        with on_stop_signals(process.on_signal):
            await process.run()


if __name__ == "__main__":
    _, name_, config_ = sys.argv
    settle()
    uvloop.run(run(name_, read_config(config_)))
